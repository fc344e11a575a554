"""Real exports whose weights lie in other files: fused, rolled back, loaded, saved again, in any folder."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, numpy_helper

from conftest import Outcome
from deltafuse import copies
from deltafuse.errors import UserError
from deltafuse.record import publish
from deltafuse.wire import scan
from exports import export

Fuse = Callable[..., Outcome]
SOURCE = export("full_decode_ts17")
FILES = ("weights.data", "sub/more.data", "sub/deeper/last.data")


def spread(folder: Path, name: str = "model.onnx", scale: float = 1.0) -> Path:
    """The export in a folder of its own, its weights in three files: with offset and length, without length, alone."""
    model = onnx.load(SOURCE.path)
    contents = {file: bytearray() for file in FILES}
    weights = [tensor for tensor in model.graph.initializer if len(tensor.raw_data) >= 64]
    assert len(weights) > len(FILES)
    for index, tensor in enumerate(weights):
        array = numpy_helper.to_array(tensor)
        raw = (array * array.dtype.type(scale)).tobytes()
        file = FILES[min(index, 2) if index < 3 else 0]
        at = contents[file]
        at += bytes(-len(at) % 4096)
        entries = {"location": file}
        if file != FILES[2]:  # neither offset nor length: the whole file
            entries["offset"] = str(len(at))
        if file == FILES[0]:
            entries["length"] = str(len(raw))
        at += raw
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in entries.items():
            tensor.external_data.add(key=key, value=value)
    for file, content in contents.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(content)
    (folder / name).write_bytes(model.SerializeToString())
    return folder / name


def digests(folder: Path) -> dict[str, str]:
    """Path below a folder -> sha256, of every file."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def loads(path: Path) -> None:
    """Both readers take a file and its data."""
    model = onnx.load(path)
    assert not any(tensor.data_location == TensorProto.EXTERNAL for tensor in model.graph.initializer)
    if not any(node.op_type == "Custom" for node in model.graph.node):
        ort.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, SOURCE.inputs)


@pytest.mark.parametrize("place", ["same folder", "another folder", "below the folder"])
def test_original_and_output_load_wherever_it_is_written(fuse: Fuse, tmp_path: Path, place: str) -> None:
    source = spread(tmp_path / "in")
    before = digests(tmp_path / "in")
    folder = {"same folder": source.parent, "another folder": tmp_path / "out"}.get(place, source.parent / "out")
    folder.mkdir(exist_ok=True)
    for output in (folder / name for name in ("fused.onnx", "lowered.onnx", "back.onnx")):
        command = {"lowered.onnx": ["lower"], "back.onnx": ["rollback"]}.get(output.name, [])
        assert fuse(*command, folder / "fused.onnx" if command else source, "-o", output).exit == 0
        loads(output)
    loads(source)
    assert (folder / "back.onnx").read_bytes() == source.read_bytes()
    after = digests(tmp_path / "in")
    assert {name: after[name] for name in before} == before
    assert all(path.stat().st_nlink == 1 and not path.is_symlink() for path in tmp_path.rglob("*") if path.is_file())
    assert {name: digests(folder)[name] for name in FILES} == {name: before[name] for name in FILES}


@pytest.mark.parametrize("place", ["in", "out"])
def test_saving_the_output_again_leaves_the_weights_of_the_original(fuse: Fuse, tmp_path: Path, place: str) -> None:
    source = spread(tmp_path / "in")
    before = digests(tmp_path / "in")
    (tmp_path / "out").mkdir(exist_ok=True)
    output = tmp_path / place / "fused.onnx"
    assert fuse(source, "-o", output).exit == 0
    onnx.save(onnx.load(output, load_external_data=False), output)
    name = FILES[0] if place == "out" else "saved.data"
    onnx.save(onnx.load(output), output, save_as_external_data=True, location=name, size_threshold=0)
    loads(output)
    after = digests(tmp_path / "in")
    assert {name: after[name] for name in before} == before
    loads(source)


def test_running_twice_writes_the_same_and_nothing_more(fuse: Fuse, tmp_path: Path) -> None:
    source = spread(tmp_path / "in")
    (tmp_path / "out").mkdir()
    command = (source, "-o", tmp_path / "out" / "fused.onnx")
    assert fuse(*command).exit == 0
    first = digests(tmp_path / "out")
    assert fuse(*command).exit == 0
    assert digests(tmp_path / "out") == first
    assert set(first) == {"fused.onnx", *FILES}


def test_two_models_in_one_folder_do_not_overwrite_each_other(fuse: Fuse, tmp_path: Path) -> None:
    one, other = spread(tmp_path / "one"), spread(tmp_path / "other", scale=2.0)
    for path in (*one.parent.rglob("*"), *other.parent.rglob("*")):
        os.utime(path, (1e9, 1e9))  # as an archive restores them
    (tmp_path / "out").mkdir()
    assert fuse(one, "-o", tmp_path / "out" / "one.onnx").exit == 0
    before = digests(tmp_path / "out")
    error = fuse(other, "-o", tmp_path / "out" / "other.onnx", "--json").document["error"]
    assert error["code"] == "external-data-differs"
    assert "a folder of its own" in error["text"]
    assert digests(tmp_path / "out") == before


@pytest.mark.parametrize("location", ["{absolute}", "../weights.data", "link.data", "linked/weights.data"])
def test_data_outside_the_folder_is_refused_unless_it_is_allowed(fuse: Fuse, tmp_path: Path, location: str) -> None:
    source = spread(tmp_path / "in")
    data = tmp_path / "weights.data"
    (tmp_path / "in" / FILES[0]).rename(data)
    (tmp_path / "in" / "link.data").symlink_to(data)
    (tmp_path / "in" / "linked").symlink_to(tmp_path)
    location = location.format(absolute=data)
    model = onnx.load(source, load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            entry.value = location if entry.value == FILES[0] else entry.value
    source.write_bytes(model.SerializeToString())
    for command in (["inspect"], []):
        given = [*command, source, *([] if command else ["-o", source.parent / "fused.onnx"])]
        error = fuse(*given, "--json").document["error"]
        assert error["code"] == "outside-folder"
        assert "--allow-outside" in error["text"]
        assert not (source.parent / "fused.onnx").exists()
        assert fuse(*given, "--allow-outside").exit == 0
    back = source.parent / "back.onnx"
    for command, output in (("rollback", back), ("lower", source.parent / "lowered.onnx")):
        given = [command, source.parent / "fused.onnx", "-o", output, "--json"]
        assert fuse(*given).document["error"]["code"] == "outside-folder"
        assert fuse(*given, "--allow-outside").exit == 0
    assert back.read_bytes() == source.read_bytes()


def test_ways_to_bring_the_data_along(fuse: Fuse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = spread(tmp_path / "in")
    (tmp_path / "out").mkdir()
    output = tmp_path / "out" / "fused.onnx"
    error = fuse(source, "-o", output, "--external-data", "keep", "--json").document["error"]
    assert error["code"] == "external-data-elsewhere"
    assert "--external-data copy" in error["text"]
    shared: list[int] = []
    monkeypatch.setattr(copies, "_reflink", lambda *_: bool(shared.append(1)))
    error = fuse(source, "-o", output, "--external-data", "reflink", "--json").document["error"]
    assert error["code"] == "no-reflink"
    assert list((tmp_path / "out").rglob("*.*")) == []
    assert len(shared) == 1
    assert fuse(source, "-o", output, "--external-data", "copy").exit == 0
    assert len(shared) == 1
    for way in ("keep", "reflink"):  # it is there now
        assert fuse(source, "-o", output, "--external-data", way).exit == 0
        assert fuse(source, "-o", source.parent / "fused.onnx", "--external-data", way).exit == 0
    loads(output)


def test_blocks_are_shared_where_the_file_system_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's call is stood for, since few file systems have it: what it fills is not copied once more."""

    def clone(reader: int, writer: int) -> bool:
        os.pwrite(writer, os.pread(reader, 1 << 20, 0), 0)
        return True

    monkeypatch.setattr(copies, "_reflink", clone)
    monkeypatch.setattr(copies, "_copy_range", lambda *_: pytest.fail("copied"))
    (tmp_path / "a").write_bytes(b"weights")
    copies.copy_file(tmp_path / "a", tmp_path / "b", "reflink")
    assert (tmp_path / "b").read_bytes() == b"weights"


@pytest.mark.parametrize("link", ["hard", "symbolic"])
def test_a_link_in_place_of_the_data_is_refused(fuse: Fuse, tmp_path: Path, link: str) -> None:
    source = spread(tmp_path / "in")
    (tmp_path / "out").mkdir()
    target = tmp_path / "out" / FILES[0]
    (target.hardlink_to if link == "hard" else target.symlink_to)(source.parent / FILES[0])
    error = fuse(source, "-o", tmp_path / "out" / "fused.onnx", "--json").document["error"]
    assert error["code"] == "external-data-linked"
    assert "remove it" in error["text"]


def test_an_output_that_is_the_data_is_refused(fuse: Fuse, tmp_path: Path) -> None:
    source = spread(tmp_path / "in")
    before = digests(tmp_path)
    (tmp_path / "out").mkdir()
    for folder in (tmp_path / "in", tmp_path / "out"):
        error = fuse(source, "-o", folder / FILES[0], "--json").document["error"]
        assert error["code"] == "output-is-data"
    assert digests(tmp_path) == before


def test_a_read_only_folder_is_read_and_not_written() -> None:
    """The kernel itself refuses; root gives up its rights for the moment."""
    place = Path(tempfile.mkdtemp())
    try:
        source = spread(place / "in")
        (place / "out").mkdir()
        folders = [place / "in", *(path for path in (place / "in").rglob("*") if path.is_dir())]
        for folder, mode in ((place, 0o755), (place / "out", 0o777), *((folder, 0o555) for folder in folders)):
            folder.chmod(mode)
        root = os.geteuid() == 0
        if root:
            os.seteuid(65534)
        try:
            receipt = publish(scan(source), [], place / "out" / "fused.onnx", "sidecar")
            with pytest.raises(UserError, match="give a folder you may write to") as caught:
                publish(scan(source), [], place / "in" / "fused.onnx")
        finally:
            if root:
                os.seteuid(0)
        assert caught.value.code == "output-not-writable"
        assert [path.relative_to(place / "out").as_posix() for path in receipt.copied] == list(FILES)
        loads(place / "out" / "fused.onnx")
        for folder in folders:
            folder.chmod(0o755)
    finally:
        shutil.rmtree(place)


def test_another_file_system(fuse: Fuse, tmp_path: Path) -> None:
    source = spread(tmp_path / "in")
    other = Path("/dev/shm")
    if not os.access(other, os.W_OK) or other.stat().st_dev == tmp_path.stat().st_dev:
        other = tmp_path  # no second one here: the copy is tested all the same
    folder = other / f"deltafuse-test-{os.getpid()}"
    folder.mkdir()
    try:
        assert fuse(source, "-o", folder / "fused.onnx").exit == 0
        assert fuse("rollback", folder / "fused.onnx", "-o", tmp_path / "in" / "back.onnx").exit == 0
        assert (tmp_path / "in" / "back.onnx").read_bytes() == source.read_bytes()
        loads(folder / "fused.onnx")
    finally:
        for path in sorted(folder.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        folder.rmdir()


def test_800_gigabytes_make_no_difference(tmp_path: Path) -> None:
    source = spread(tmp_path / "in")
    (tmp_path / "out").mkdir()
    code = (
        "import sys, time; from deltafuse.cli import main\n"
        "begin, code = time.monotonic(), main(sys.argv[1:])\n"
        "peak = next(line for line in open('/proc/self/status') if line.startswith('VmHWM')).split()[1]\n"
        "print(code, time.monotonic() - begin, int(peak) // 1024)"
    )

    def run(*arguments: object) -> tuple[float, float]:
        command = [sys.executable, "-c", code, *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        status, seconds, megabytes = done.stdout.splitlines()[-1].split()
        assert status == "0", done.stderr
        return float(seconds), float(megabytes)

    plain = run(source, "-o", tmp_path / "in" / "fused.onnx")
    os.truncate(tmp_path / "in" / FILES[0], 800 << 30)
    for folder in ("in", "out"):
        begin = time.monotonic()
        for command in ([], ["lower"], ["rollback"]):
            given = tmp_path / folder / "fused.onnx" if command else source
            found = run(*command, given, "-o", tmp_path / folder / f"{'-'.join(['to', *command])}.onnx"
                        if command else tmp_path / folder / "fused.onnx")  # fmt: skip
            assert found[0] < plain[0] + 10
            assert found[1] < plain[1] + 100
        assert time.monotonic() - begin < 60
    assert (tmp_path / "out" / FILES[0]).stat().st_size == 800 << 30
    assert (tmp_path / "out" / FILES[0]).stat().st_blocks * 512 < 100 << 20
