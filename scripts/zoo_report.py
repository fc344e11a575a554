"""Fuses every model of a folder and holds the outcome against what is known of it.

    python scripts/zoo_report.py DIR [--only GLOB] [--target NAME] [--json]

The folder has NAME.onnx, NAME.json (`expect`: match, no-match, either, match-...; `n_sites`) and NAME.npz (inputs by
name, expected outputs out0, out1, ...; further sizes in NAME.alt*.npz). A model is right where what was fused still
gives the expected outputs, all sites of a `match` are fused or refused for a limit, and nothing of a `no-match` is
fused that changes a result. Exit 1 where one is not. What onnxruntime runs itself (`ort`, `onnx`) is run as it is, the
nodes of other targets are turned into plain operators.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from rich.console import Console
from rich.table import Table

from deltafuse import pipeline, targets
from deltafuse.errors import DeltafuseError
from deltafuse.lowering import lower_model
from deltafuse.match import FuseReport
from deltafuse.options import DEFAULT_TARGET, FuseOptions, SilentProgress
from deltafuse.rollback import rollback

COSINE, NRMSE = 0.9999, 0.005


@dataclass(frozen=True)
class Row:
    """One model: what was expected, what was found, whether that is right."""

    name: str
    expect: str
    sites: int
    exit: int
    found: str
    codes: str
    cosine: float
    nrmse: float
    rollback: bool
    seconds: float
    right: bool


def judge(path: Path, folder: Path, target: str = DEFAULT_TARGET) -> Row:
    """Fuses one model into a folder and compares."""
    truth = json.loads(path.with_suffix(".json").read_text())
    fused = folder / path.name
    begin = time.perf_counter()
    try:
        report = pipeline.fuse(FuseOptions(path, fused, target=target), SilentProgress())
    except DeltafuseError as error:
        return Row(path.stem, truth["expect"], truth["n_sites"], 2, "error", str(error), 0, 0, False, 0, right=False)
    seconds = time.perf_counter() - begin
    codes = ", ".join(sorted({site.reason.code for site in report.sites if site.reason is not None}))
    found = ", ".join(f"{n} {s}" for s, n in _count(report).items())
    cosine, nrmse, back = 1.0, 0.0, True
    if report.exit == 0:
        cosine, nrmse = compare(path, fused, lower=targets.get(target).runtime != "onnxruntime")
        restored = folder / f"back-{path.name}"
        rollback(fused, restored)
        back = restored.read_bytes() == path.read_bytes()
    right = back and cosine >= COSINE and nrmse <= NRMSE and _as_expected(truth, report)
    return Row(
        path.stem, truth["expect"], truth["n_sites"], report.exit, found, codes, cosine, nrmse, back, seconds, right
    )


def _count(report: FuseReport) -> dict[str, int]:
    counts: dict[str, int] = {}
    for site in report.sites:
        counts[site.status] = counts.get(site.status, 0) + 1
    return counts


def _as_expected(truth: dict[str, object], report: FuseReport) -> bool:
    """Sites fused, or refused for a limit; a `no-match` may be fused where its results stay (they were compared)."""
    if not str(truth["expect"]).startswith("match"):
        return True
    # Ordinary expressions beside the rule are not counted in the truth.
    taken = [site.name for site in report.sites if not site.rule and site.status in ("fused", "refused")]
    return len(taken) == truth["n_sites"]


def compare(original: Path, fused: Path, *, lower: bool = True) -> tuple[float, float]:
    """Lowest cosine and highest NRMSE of the fused model's outputs over all sets of inputs."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    model = lower_model(onnx.load(str(fused))).SerializeToString() if lower else str(fused)
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    cosine, nrmse = 1.0, 0.0
    for data in sorted(original.parent.glob(f"{original.stem}.npz")) + sorted(
        original.parent.glob(f"{original.stem}.alt*.npz")
    ):
        with np.load(data) as arrays:
            feeds = {i.name: _cut(arrays[i.name], i.shape) for i in session.get_inputs()}
            for index, result in enumerate(session.run(None, feeds)):
                wanted = _cut(arrays[f"out{index}"], result.shape)
                pair = _measure(result.astype(np.float64).ravel(), wanted.astype(np.float64).ravel())
                cosine, nrmse = min(cosine, pair[0]), max(nrmse, pair[1])
    return cosine, nrmse


def _cut(array: np.ndarray, shape: list[object] | tuple[int, ...]) -> np.ndarray:
    """The leading part of an array on axes that were pinned to fewer."""
    return array[tuple(slice(size) if isinstance(size, int) else slice(None) for size in shape)]


def _measure(found: np.ndarray, wanted: np.ndarray) -> tuple[float, float]:
    if not wanted.any():
        return (1.0, 0.0) if not found.any() else (0.0, 1.0)
    cosine = float(found @ wanted / (np.linalg.norm(found) * np.linalg.norm(wanted) + 1e-300))
    return cosine, float(np.sqrt(np.mean((found - wanted) ** 2)) / (wanted.std() + 1e-300))


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="*", help="names to take, e.g. 'chunk_*'")
    parser.add_argument("--target", default=DEFAULT_TARGET, help="whom to fuse for (default: %(default)s)")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    paths = [path for path in sorted(given.folder.glob("*.onnx")) if fnmatchcase(path.stem, given.only)]
    with tempfile.TemporaryDirectory() as folder:
        rows = [judge(path, Path(folder), given.target) for path in paths if path.with_suffix(".json").exists()]
    if given.json:
        sys.stdout.write(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    else:
        _print(rows)
    return int(not all(row.right for row in rows))


def _print(rows: list[Row]) -> None:
    table = Table("model", "expect", "sites", "exit", "found", "reasons", "cosine", "nrmse", "s", "")
    for row in rows:
        mark = "" if row.right else "WRONG"
        cosine, nrmse = (f"{row.cosine:.6f}", f"{row.nrmse:.1e}") if row.exit == 0 else ("", "")
        cells = (row.name, row.expect, str(row.sites), str(row.exit), row.found, row.codes, cosine, nrmse)
        table.add_row(*cells, f"{row.seconds:.1f}", mark)
    console = Console(width=None if sys.stdout.isatty() else 200)
    console.print(table)
    right = sum(row.right for row in rows)
    console.print(f"{right} of {len(rows)} as expected, {sum(row.seconds for row in rows):.0f} s")


if __name__ == "__main__":
    sys.exit(main())
