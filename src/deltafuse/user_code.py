"""Python files of the user's own: patterns, targets and lowerings. What is wrong there is the user's to mend."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Literal
from zlib import crc32

from deltafuse.errors import DeltafuseError, UserError

__all__ = ["at_fault", "blamed", "guide", "own_file", "run_file", "shipped_folder"]

Kind = Literal["lowering", "pattern", "target"]
#: kind -> code of the error, and what tells how such a file is written.
_KINDS: dict[Kind, tuple[str, str]] = {
    "lowering": ("bad-lowering", "src/deltafuse/lowerings/fixed_capacity.py"),
    "pattern": ("bad-pattern", "docs/patterns.md"),
    "target": ("target-file", "docs/targets.md"),
}
_PREFIX = "deltafuse_"


def shipped_folder() -> Path:
    """Where the shipped patterns lie: beside the package in a checkout, inside it in a wheel."""
    inside = Path(__file__).parent / "_patterns"
    return inside if inside.is_dir() else Path(__file__).parents[2] / "patterns"


def guide(kind: Kind) -> str:
    """Where to read how such a file is written, as the end of a message."""
    return f"see {_KINDS[kind][1]}"


def run_file(path: Path, kind: Kind) -> ModuleType:
    """Runs a file as a module of its own; what it defines can be found under the module's name, as `pickle` does.

    Args:
        path: of the file.
        kind: what it is to define.

    Raises:
        UserError: there is no such file, it is no Python file, it raises, or it ends the program.
    """
    code = _KINDS[kind][0]
    if not path.is_file():
        raise UserError(code, f"there is no {kind} file {path}; check the path")
    name = f"{_PREFIX}{kind}_{path.stem}_{crc32(bytes(path.absolute())):08x}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UserError(code, f"{path} cannot be imported; give a Python file")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        text = f"{path} cannot be imported: {_said(error)}{_line(error, path)}; mend that, {guide(kind)}"
        raise UserError(code, text) from error
    return module


@contextmanager
def blamed() -> Generator[None]:
    """Tells what a file of the user's raises as an error of that file's, with the place.

    Raises:
        UserError: something was raised in such a file, or below a function of it.
    """
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        fault = _fault(error)
        if fault is None:
            raise
        raise fault from error


@contextmanager
def at_fault(file: Path | None, kind: Kind, part: str) -> Generator[None]:
    """Tells what is found wrong with the work of a file of the user's as an error of that file's.

    Args:
        file: of the user's; None where the work is ours, so that the fault is, too.
        kind: of the file.
        part: of the file, e.g. ``emit``.

    Raises:
        UserError: the block raised anything.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        if file is None or (isinstance(error, UserError) and str(file) in str(error)):
            raise
        text = str(error) if isinstance(error, DeltafuseError) else _said(error)
        raise UserError(_KINDS[kind][0], f"{file}, {part}: {text}; mend {part}, {guide(kind)}") from error


def own_file(module: str) -> tuple[Path, Kind] | None:
    """The file of the user's that a module is, None where it is another."""
    file = getattr(sys.modules.get(module), "__file__", None)
    kind: Kind | None = next((kind for kind in _KINDS if module.startswith(f"{_PREFIX}{kind}_")), None)
    if kind is None or not file:
        return None
    ours = (Path(__file__).parent, shipped_folder())
    return None if any(Path(file).is_relative_to(folder) for folder in ours) else (Path(file), kind)


def _fault(error: BaseException) -> UserError | None:
    """What to say of an error that came up in a file of the user's, None where it did not."""
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        found = own_file(str(frame.f_globals.get("__name__", "")))
        if found is not None:
            file, kind = found
            where = f"{file}, line {line}, in {frame.f_code.co_name}"
            return UserError(_KINDS[kind][0], f"{where}: {_said(error)}; mend {frame.f_code.co_name}, {guide(kind)}")
    return None


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def _line(error: BaseException, path: Path) -> str:
    """Where a file itself raised; a syntax error tells its line by itself."""
    lines = [entry.lineno for entry in traceback.extract_tb(error.__traceback__) if entry.filename == str(path)]
    return f" (line {lines[-1]})" if lines else ""
