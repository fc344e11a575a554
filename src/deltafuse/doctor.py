"""``fuse doctor``: whether what is installed does what fuse and its targets need, and how to mend what does not.

Packages are looked for by their metadata before anything is imported that needs them.
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from deltafuse.errors import UserError
from deltafuse.reasons import Reason
from deltafuse.versions import installed, numbers
from deltafuse.wording import number

__all__ = ["Check", "DoctorReport", "examine"]

#: ``mend``: something that was asked for does not work; ``lacks``: something that may be done without.
Verdict = Literal["fine", "lacks", "mend"]
#: Packages of the extras, and the extra that each comes with.
OPTIONAL = {"torch": "torch", "onnxscript": "torch", "transformers": "dev", "netron": "netron"}
#: Bytes that temporary files need at least.
ROOM = 100_000_000
_REQUIREMENT = re.compile(r"([A-Za-z0-9_.-]+)\s*>=\s*([0-9.]+)")


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes:
        part: ``environment``, ``optional`` or ``target NAME``.
        name: what was looked at.
        found: what there is.
        fix: what to do, "" where nothing is.
    """

    part: str
    name: str
    verdict: Verdict
    found: str
    fix: str = ""


@dataclass(frozen=True)
class DoctorReport:
    """All checks; exit 1 where one has something to mend."""

    checks: tuple[Check, ...]
    exit: int


def examine(target: str | None = None, folder: Path | None = None) -> DoctorReport:
    """Looks at everything.

    Args:
        target: what this target lacks is to be mended; what others lack may be done without.
        folder: where outputs are to be written; the current one where None.

    Raises:
        UserError: ``unknown-target``.
    """
    checks = [_python(), *_packages(), *_folders(folder or Path.cwd())]
    if not any(check.verdict == "mend" for check in checks):
        # Only now can what needs these packages be imported.
        of_targets = list(_targets(target))
        checks += [*_works(), *of_targets]
    checks += _optional()
    return DoctorReport(tuple(checks), int(any(check.verdict == "mend" for check in checks)))


def _python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    least = _least_python()
    if numbers(version) >= numbers(least):
        return Check("environment", "Python", "fine", version)
    return Check("environment", "Python", "mend", version, f"use Python {least} or newer")


def _least_python() -> str:
    try:
        return (metadata.metadata("deltafuse")["Requires-Python"] or "").lstrip(">=") or "3.10"
    except (metadata.PackageNotFoundError, KeyError):
        return "3.10"


def _packages() -> Iterator[Check]:
    for name, least in _required():
        version = installed(name)
        fix = f"pip install -U '{name}>={least}'"
        if version is None:
            yield Check("environment", name, "mend", "not installed", fix)
        elif numbers(version) < numbers(least):
            yield Check("environment", name, "mend", f"{version}, and {least} is the oldest that is supported", fix)
        else:
            yield Check("environment", name, "fine", version)


def _required() -> list[tuple[str, str]]:
    """Name and least version of each package that is not optional."""
    try:
        lines = metadata.requires("deltafuse") or []
    except metadata.PackageNotFoundError:
        return []
    found = [_REQUIREMENT.match(line) for line in lines if "extra ==" not in line]
    return [(match[1], match[2]) for match in found if match is not None]


def _folders(folder: Path) -> Iterator[Check]:
    for name, place, fix in (
        ("temporary folder", Path(tempfile.gettempdir()), "set TMPDIR to a folder that you may write to"),
        ("current folder", folder, "write into another folder, or change its permissions"),
    ):
        yield _writable(name, place, fix)
    yield _reflinks(folder)


def _writable(name: str, place: Path, fix: str) -> Check:
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"x")
            file.flush()
        free = shutil.disk_usage(place).free
    except OSError as error:
        return Check("environment", name, "mend", f"{place} cannot be written ({error.strerror})", fix)
    if free < ROOM:
        found = f"{place} has {free // 1_000_000} MB left"
        return Check("environment", name, "mend", found, f"free some space, or {fix}")
    return Check("environment", name, "fine", f"{place}, {free / 1e9:.1f} GB free")


def _reflinks(folder: Path) -> Check:
    from deltafuse.copies import copy_file

    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".deltafuse-") as place:
            first = Path(place) / "first"
            first.write_bytes(b"x")
            copy_file(first, Path(place) / "second", "reflink")
    except (OSError, UserError):
        shares = False
    else:
        shares = True
    if shares:
        return Check("environment", "shared blocks", "fine", "the file system copies weights without room of their own")
    fix = "write outputs into the model's folder, where weights are not copied at all, or use btrfs or XFS"
    return Check("environment", "shared blocks", "lacks", "weights that are copied take as much room again", fix)


def _works() -> Iterator[Check]:
    """A worker, then one proof of a model that ships."""
    from deltafuse import pipeline
    from deltafuse.demo import MODELS
    from deltafuse.options import FuseOptions, SilentProgress

    yield _tried("worker", _worker_runs, "run `python -c 'import onnxruntime'` to see whether onnxruntime itself loads")

    def proves() -> str:
        report = pipeline.inspect(FuseOptions(MODELS / "decode.onnx", timeout=60.0), SilentProgress())
        proven = sum(site.status == "match" for site in report.sites)
        if report.exit or not proven:
            reasons = [site.reason.what for site in report.sites if site.reason is not None]
            raise RuntimeError(reasons[0] if reasons else "no site was found")
        return f"{number(proven, 'site')} of the demo model"

    yield _tried("proof", proves, "update onnxruntime and numpy; report it with this output if it stays")


def _worker_runs() -> str:
    import numpy as np
    from onnx import TensorProto, helper

    from deltafuse.worker import Worker

    ends = [helper.make_tensor_value_info(name, TensorProto.DOUBLE, [2]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "neg", ends[:1], ends[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    with Worker(30.0) as worker:
        session = worker.load(model.SerializeToString())
        ran = session if isinstance(session, Reason) else worker.run(session, {"x": np.ones(2)})
    if isinstance(ran, Reason):
        raise RuntimeError(ran.what)  # noqa: TRY004 - not a matter of types
    if not np.array_equal(ran[0], -np.ones(2)):
        raise RuntimeError("it computed something else")
    return "a child process runs onnxruntime"


def _tried(name: str, does: Callable[[], str], fix: str) -> Check:
    begin = time.perf_counter()
    try:
        found = does()
    except Exception as error:  # whatever is wrong with the environment is the answer
        return Check("environment", name, "mend", f"failed: {type(error).__name__}: {error}", fix)
    return Check("environment", name, "fine", f"{found}, {time.perf_counter() - begin:.1f} s")


def _targets(target: str | None) -> Iterator[Check]:
    from deltafuse import targets
    from deltafuse.doctor_targets import needs

    for name in targets.names() if target is None else (target,):
        for need in needs(targets.get(name)):
            missing: Verdict = "mend" if target is not None and need.here else "lacks"
            yield Check(f"target {name}", need.name, missing if need.fix else "fine", need.found, need.fix)


def _optional() -> Iterator[Check]:
    for name, extra in OPTIONAL.items():
        version = installed(name)
        fix = "" if version else f"pip install 'deltafuse[{extra}]', if you want it"
        yield Check("optional", name, "fine" if version else "lacks", version or "not installed", fix)
