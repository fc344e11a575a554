"""``fuse doctor`` and ``fuse --version``: what is installed, and how to mend it."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

from conftest import Outcome
from deltafuse import doctor, doctor_targets, targets, versions
from deltafuse.doctor import Check, examine
from deltafuse.worker import Worker

Fuse = Callable[..., Outcome]


def by_name(checks: tuple[Check, ...]) -> dict[str, Check]:
    return {check.name: check for check in checks if check.part in ("environment", "optional")}


def test_here_all_is_fine(fuse: Fuse) -> None:
    done = fuse("doctor", "--json")
    assert (done.exit, done.document["exit"], done.document["error"]) == (0, 0, None)
    checks = {check["name"]: check for check in done.document["checks"] if check["part"] == "environment"}
    for name in ("Python", "numpy", "onnx", "onnxruntime", "worker", "proof", "temporary folder"):
        assert checks[name]["verdict"] == "fine"
    assert checks["numpy"]["found"] == metadata.version("numpy")
    assert "3 sites" in checks["proof"]["found"]
    parts = {check["part"] for check in done.document["checks"]}
    assert parts == {"environment", "optional", *(f"target {name}" for name in targets.names())}
    shown = fuse("doctor")
    assert shown.exit == 0
    assert shown.out.splitlines()[-1].startswith("nothing to mend; ")
    assert "\x1b" not in shown.out


def test_what_is_not_fine_has_a_fix() -> None:
    checks = examine().checks
    assert [check for check in checks if (check.verdict == "fine") != (not check.fix)] == []


def test_a_package_that_is_too_old_or_missing_is_to_be_mended(monkeypatch: pytest.MonkeyPatch, fuse: Fuse) -> None:
    found = {"numpy": "1.25.0", "onnx": None}
    monkeypatch.setattr(doctor, "installed", lambda name: found.get(name, versions.installed(name)))
    report = examine()
    checks = by_name(report.checks)
    assert report.exit == 1
    assert checks["numpy"].verdict == checks["onnx"].verdict == "mend"
    assert "1.26 is the oldest" in checks["numpy"].found
    assert checks["onnx"].found == "not installed"
    assert checks["numpy"].fix == "pip install -U 'numpy>=1.26'"
    # What would need them is not tried.
    assert not {"worker", "proof"} & set(checks)
    assert fuse("doctor").out.splitlines()[-1].startswith("2 to mend; ")


def test_without_its_packages_doctor_still_answers() -> None:
    code = (
        "import sys\nfor name in ('onnx', 'onnxruntime', 'numpy', 'rich'): sys.modules[name] = None\n"
        "from deltafuse import doctor\nfrom deltafuse.versions import installed\n"
        "doctor.installed = lambda name: None if name in ('onnx', 'rich') else installed(name)\n"
        "from deltafuse.cli import main\nsys.exit(main(['doctor']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")
    assert "  mend  rich: not installed\n" in done.stdout


def test_a_worker_that_does_not_start_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(Worker, "_start", fail)
    report = examine("ort")
    checks = by_name(report.checks)
    assert report.exit == 1
    assert checks["worker"].verdict == checks["proof"].verdict == "mend"
    assert "no more processes" in checks["worker"].found
    assert "import onnxruntime" in checks["worker"].fix


def test_a_temporary_folder_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: "/proc/nowhere")
    checks = by_name(examine().checks)
    assert checks["temporary folder"].verdict == "mend"
    assert "TMPDIR" in checks["temporary folder"].fix


def test_a_full_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "ROOM", 1 << 62)
    check = by_name(examine(folder=tmp_path).checks)["current folder"]
    assert (check.verdict, "MB left" in check.found, "free some space" in check.fix) == ("mend", True, True)


def test_blocks_that_cannot_be_shared_may_be_done_without(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for shares, verdict in ((True, "fine"), (False, "lacks")):
        monkeypatch.setattr("deltafuse.copies._reflink", lambda *_, shares=shares: shares)
        assert by_name(examine(folder=tmp_path).checks)["shared blocks"].verdict == verdict
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("asked", "verdict", "code"), [(None, "lacks", 0), ("ort", "mend", 1)])
def test_a_kernel_that_onnxruntime_lacks(
    monkeypatch: pytest.MonkeyPatch, asked: str | None, verdict: str, code: int
) -> None:
    monkeypatch.setattr(doctor_targets, "_ASKED", dict.fromkeys(doctor_targets._ASKED, lambda _: False))
    report = examine(asked)
    found = {check.name: check for check in report.checks if check.part == "target ort"}
    assert report.exit == code
    for op in ("LinearAttention", "CausalConvWithState"):
        assert found[f"com.microsoft {op}"].verdict == verdict
        assert "fuse lower" in found[f"com.microsoft {op}"].fix
    assert {check.part for check in report.checks if check.part.startswith("target")} >= {"target ort"}


def test_a_runtime_that_is_too_old_for_a_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_targets, "installed", lambda name: "1.24.2" if name == "onnxruntime" else None)
    (need, *_) = doctor_targets.needs(targets.get("ort"))
    assert (need.found, need.here) == ("1.24.2, and 1.25.1 is needed", True)
    assert "pip install -U 'onnxruntime>=1.25.1'" in need.fix


def test_what_a_device_needs_is_not_to_be_mended_here() -> None:
    report = examine("ascend-310p")
    found = [check for check in report.checks if check.part == "target ascend-310p"]
    assert (report.exit, [check.verdict for check in found]) == (0, ["lacks"])
    wanted = "install mindspore-lite 2.9 or newer on the device, and the kernels of ascend_300iduo"
    assert found[0].fix.startswith(wanted)


def test_an_unknown_target(fuse: Fuse) -> None:
    done = fuse("doctor", "--target", "abacus", "--json")
    assert (done.exit, done.document["error"]["code"]) == (1, "unknown-target")


def test_the_version_has_what_a_bug_report_needs(fuse: Fuse) -> None:
    lines = fuse("--version").out.splitlines()
    assert [line.split()[0] for line in lines] == ["deltafuse", "onnx", "onnxruntime", "numpy", "python", "platform"]
    assert f"numpy {metadata.version('numpy')}" in lines
    document = fuse("--version", "--json").document
    assert document["versions"]["onnx"] == metadata.version("onnx")
    assert document["version"] == document["versions"]["deltafuse"]


def test_the_version_imports_nothing_heavy() -> None:
    heavy = ("numpy", "onnx", "onnxruntime", "rich")
    code = (
        "import sys\nfrom deltafuse.cli import main\nmain(['--version'])\n"
        f"print([name for name in {heavy!r} if name in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).splitlines()[-1] == "[]"


def test_a_package_that_is_not_there_has_no_version() -> None:
    assert versions.installed("no-such-package-at-all") is None
    assert versions.numbers("1.26.4rc1") == (1, 26, 4)
