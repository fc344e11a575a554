"""Two small models to try things on: what exporters really write, a prefill and a decode step of a tiny Qwen3.5."""

from __future__ import annotations

import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path

from deltafuse.errors import UserError
from deltafuse.files import unwritable

MODELS = Path(__file__).parent / "demo_models"


@dataclass(frozen=True)
class Demo:
    """What was written, and what to try next.

    Attributes:
        files: paths, in the folder that was asked for.
        commands: command lines that work on them as they stand.
    """

    files: tuple[str, ...]
    commands: tuple[str, ...]


def write_demo(folder: Path) -> Demo:
    """Copies the models, with one set of inputs and outputs each, into ``folder``.

    Raises:
        UserError: ``output-exists`` where another file of that name is in the way, ``output`` where the folder cannot
            be made, ``output-not-writable`` where it may not be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError("output", f"cannot make the folder {folder}: {error.strerror}; give another one") from error
    sources = sorted(path for path in MODELS.iterdir() if path.suffix in {".onnx", ".npz"})
    for source in sources:
        target = folder / source.name
        if target.exists() and target.read_bytes() != source.read_bytes():
            raise UserError("output-exists", f"{target} is another file; remove it or give another folder")
    try:
        for source in sources:
            shutil.copyfile(source, folder / source.name)
    except OSError as error:
        raise unwritable(folder, error) from None
    return Demo(tuple(str(folder / source.name) for source in sources), _commands(folder))


def _commands(folder: Path) -> tuple[str, ...]:
    model, fused, back = (
        shlex.quote(str(folder / name)) for name in ("prefill.onnx", "prefill-fused.onnx", "prefill-back.onnx")
    )
    return (
        f"fuse inspect {model}",
        f"fuse {model} -o {fused}",
        f"fuse verify {model} {fused}",
        f"fuse rollback {fused} -o {back}",
        f"cmp {model} {back}",
    )
