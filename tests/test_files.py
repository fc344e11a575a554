"""Writing files: all or nothing."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from deltafuse.errors import UserError
from deltafuse.files import atomic, check_output


def _code(call: Callable[[], object]) -> str:
    with pytest.raises(UserError) as caught:
        call()
    return caught.value.code


def _write(output: Path, content: bytes = b"new", inputs: tuple[Path, ...] = ()) -> None:
    with atomic(output, inputs) as file:
        file.write(content)


def test_writes_and_leaves_nothing_else(tmp_path: Path) -> None:
    _write(tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out").read_bytes() == b"new"


def test_permissions_are_those_of_any_new_file(tmp_path: Path) -> None:
    _write(tmp_path / "out")
    (tmp_path / "other").touch()
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_replaces_an_older_file(tmp_path: Path) -> None:
    (tmp_path / "out").write_bytes(b"old, and longer")
    _write(tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == b"new"


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_failure_leaves_what_was_there(tmp_path: Path, error: type[BaseException]) -> None:
    def fail() -> None:
        with atomic(tmp_path / "out") as file:
            file.write(b"half")
            raise error

    (tmp_path / "out").write_bytes(b"old")
    with pytest.raises(error):
        fail()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out").read_bytes() == b"old"


def test_never_over_the_input(tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.write_bytes(b"original")
    (tmp_path / "symbolic").symlink_to(source)
    (tmp_path / "hard").hardlink_to(source)
    (tmp_path / "folder").mkdir()
    for output in (source, tmp_path / "symbolic", tmp_path / "hard", tmp_path / "folder" / ".." / "in"):
        assert _code(lambda output=output: _write(output, inputs=(source,))) == "output-is-input"
    assert source.read_bytes() == b"original"


def test_folders_are_no_output(tmp_path: Path) -> None:
    assert _code(lambda: _write(tmp_path)) == "output-is-folder"


def test_missing_folder_says_how_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"mkdir -p {tmp_path / 'absent'}") as caught:
        check_output(tmp_path / "absent" / "out")
    assert caught.value.code == "output-folder-missing"


def test_folder_that_may_not_be_written(tmp_path: Path) -> None:
    """The kernel itself refuses; root gives up its rights for the moment."""
    folder = tmp_path / "closed"
    folder.mkdir()
    folder.chmod(0o500)
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        assert _code(lambda: _write(folder / "out")) == "output-not-writable"
    finally:
        if root:
            os.seteuid(0)
    assert list(folder.iterdir()) == []


def test_read_only_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "open", refuse)
    assert _code(lambda: _write(tmp_path / "out")) == "output-not-writable"


def test_full_disk(tmp_path: Path) -> None:
    def fill() -> None:
        with atomic(tmp_path / "out"):
            raise OSError(errno.ENOSPC, "No space left on device")

    assert _code(fill) == "disk-full"
    assert list(tmp_path.iterdir()) == []
