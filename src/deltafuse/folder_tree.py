"""A folder of exported models: what lies in it, and a new folder beside it that appears whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from deltafuse.copies import copy_file
from deltafuse.errors import UserError
from deltafuse.files import unwritable
from deltafuse.turns import workspace

_T = TypeVar("_T")
_SUFFIX = ".onnx"


@dataclass(frozen=True)
class Tree:
    """What lies below a folder.

    Attributes:
        root: the folder.
        models: ONNX files, by their path below `root`, with forward slashes, sorted.
        others: all other files, external data among them.
    """

    root: Path
    models: tuple[str, ...]
    others: tuple[str, ...]


@dataclass(frozen=True)
class Stage:
    """A folder that is being filled, and the name it is to have."""

    path: Path
    output: Path

    def publish(self) -> None:
        """Gives the folder its name."""
        if self.output.is_dir():
            self.output.rmdir()
        os.replace(self.path, self.output)


def read_tree(root: Path) -> Tree:
    """Lists the files below a folder.

    Raises:
        UserError: ``no-models``: there is no ONNX file; ``folder-link``: a folder below is a link; ``not-a-file``: a
            pipe, say, or a link that leads nowhere.
    """
    models: list[str] = []
    others: list[str] = []
    for folder, folders, files in os.walk(root):
        for name in folders:
            if (Path(folder) / name).is_symlink():
                raise UserError("folder-link", f"{Path(folder) / name} is a link to a folder: put a copy in its place")
        for name in files:
            if not (Path(folder) / name).is_file():
                raise UserError("not-a-file", f"{Path(folder) / name} is no file that can be copied: take it away")
            path = (Path(folder) / name).relative_to(root).as_posix()
            (models if path.endswith(_SUFFIX) else others).append(path)
    if not models:
        raise UserError("no-models", f"there is no {_SUFFIX} file in {root} or below: give the folder of an export")
    return Tree(root, tuple(sorted(models)), tuple(sorted(others)))


def check_output_folder(source: Path, output: Path) -> None:
    """Raises where `output` cannot become a folder made from `source`.

    Raises:
        UserError: ``output-is-input``: it is the source, or one of both lies in the other; ``output-not-empty``,
            ``output-not-a-folder``, ``output-folder-missing``, ``output-not-writable``.
    """
    inner, outer = output.resolve(), source.resolve()
    if inner.is_relative_to(outer) or outer.is_relative_to(inner):
        raise UserError("output-is-input", f"{output} and {source} hold each other: give a folder elsewhere")
    if output.is_symlink() or (output.exists() and not output.is_dir()):
        raise UserError("output-not-a-folder", f"{output} is no folder, and {source} is one: give a new folder")
    if output.is_dir() and any(output.iterdir()):
        raise UserError("output-not-empty", f"{output} is not empty: give a new folder, or empty it first")
    parent = output.absolute().parent
    if not parent.is_dir():
        raise UserError("output-folder-missing", f"the folder {parent} does not exist: create it (mkdir -p {parent})")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise unwritable(output, PermissionError(13, os.strerror(13)))


@contextmanager
def staged(source: Path, output: Path) -> Generator[Stage, None, None]:
    """A folder beside `output` to fill; it is gone when the block ends, unless it was published.

    Raises:
        UserError: see `check_output_folder`.
    """
    check_output_folder(source, output)
    with workspace(output.absolute().parent, output.absolute().name) as work:
        path = work / "new"
        path.mkdir()
        yield Stage(path, output)


def place(root: Path, name: str) -> Path:
    """The path of a file below a folder, its own folder made if need be."""
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def copy_rest(tree: Tree, names: Iterable[str], target: Path) -> None:
    """Copies files byte for byte that do not stand at the target yet."""
    for name in names:
        if not (target / name).exists():
            copy_file(tree.root / name, target / name)


def named(name: str, run: Callable[[], _T]) -> _T:
    """Runs something for one model; what the user can mend is said with the model's name.

    Raises:
        UserError: as `run` does.
    """
    try:
        return run()
    except UserError as error:
        raise error if name in str(error) else UserError(error.code, f"{name}: {error}") from None
