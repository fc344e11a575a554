"""Mutants of real exports: whatever is fused means what the mutant means."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnxruntime.capi import onnxruntime_pybind11_state as failures

import graphs
import mutants
from deltafuse.match import FuseReport

#: Equal up to rounding in double; operands go far beyond those of a proof.
SAME = 1e-9
SEEDS = (1, 2, 3)
#: Of values that the names of inputs do not tell.
LARGE = {1: 1e5, 2: 30.0, 3: 1.0}
#: How many times as many mutants as in an everyday run: ``MUTANTS=10 python -m pytest tests/test_mutants.py``, which
#: takes the large exports too.
TIMES = int(os.environ.get("MUTANTS", "1"))
SMALL_BYTES = 60_000

FOLDERS = [Path(__file__).parent / folder for folder in ("fixtures", "zoo")]


@dataclass(frozen=True)
class Source:
    """An export that is fused: its model, its truth, one array for each input, and what is fused of it."""

    model: onnx.ModelProto
    truth: dict[str, Any]
    arrays: dict[str, np.ndarray]
    report: FuseReport
    inside: set[str]


def fused_exports() -> list[Path]:
    """Every export of the project that is fused, large ones in a long run only."""
    paths = sorted(path for folder in FOLDERS for path in folder.glob("*.onnx"))
    matches = [path for path in paths if json.loads(path.with_suffix(".json").read_text())["exit"] == 0]
    return [path for path in matches if TIMES > 1 or path.stat().st_size < SMALL_BYTES]


@pytest.fixture(scope="module", autouse=True)
def _worker() -> Iterator[None]:
    with graphs.one_worker():
        yield


def source(path: Path, folder: Path) -> Source:
    model, out = onnx.load(path), folder / "base.onnx"
    report = graphs.fuse(path, out)
    assert report.exit == 0
    kept = {name for node in onnx.load(out).graph.node for name in node.output}
    # What the fused nodes write keeps its name: its writer in the unfused graph is inside.
    removed = {name for node in model.graph.node for name in node.output} - kept
    truth = json.loads(path.with_suffix(".json").read_text())
    with np.load(path.with_suffix(".npz")) as stored:
        arrays = {name: stored[name] for name in truth["inputs"]}
    return Source(model, truth, arrays, report, removed)


def feeds(source: Source, shapes: Mapping[str, list[int | str]], report: FuseReport, seed: int) -> dict[str, Any]:
    """Operands far outside of what a proof draws, at sizes that differ by the seed where an axis is open."""
    rng = np.random.default_rng(seed)
    valid = [site.match.valid_tokens for site in report.sites if site.match is not None]
    sizes: dict[str, int] = {}
    drawn: dict[str, Any] = {}
    for name, array in source.arrays.items():
        shape = list(array.shape)
        for axis, dim in enumerate(shapes[name]):
            if isinstance(dim, int):
                shape[axis] = dim
            elif array.dtype.kind == "f":
                symbol = source.truth["dynamic_axes"].get(name, {}).get(str(axis), str(dim))
                other = {1: shape[axis], 2: 1, 3: shape[axis] + 13}[seed]
                bounds = [v for v in valid if v is not None and symbol == "tokens"]
                other = max([other, *(v.low for v in bounds if v.below)])
                other = min([other, *(v.high for v in bounds if v.above)])
                shape[axis] = sizes.setdefault(symbol, other)
        if array.dtype.kind == "f":
            drawn[name] = graphs.wide(name, shape, rng, LARGE[seed])
        else:
            drawn[name] = array[tuple(slice(size) for size in shape)]
    return drawn


def shapes(session: Any) -> dict[str, list[int | str]]:
    return {one.name: one.shape for one in session.get_inputs()}


def runnable(base: Source, seed: int) -> Iterator[tuple[str, onnx.ModelProto]]:
    """Mutants that onnxruntime runs and that compute something else than their source."""
    unfused = graphs.double(base.model)
    given = feeds(base, shapes(unfused), base.report, SEEDS[0])
    for done, mutant in mutants.mutants(base.model, seed, base.inside, given):
        try:
            session = graphs.double(mutant)
            with np.errstate(all="ignore"):
                differs = max(
                    graphs.difference(unfused, session, feeds(base, shapes(unfused), base.report, s)) for s in SEEDS[:2]
                )
        except (failures.Fail, failures.InvalidArgument, failures.InvalidGraph, failures.RuntimeException):
            continue
        except (failures.NotImplemented, ValueError):
            continue
        if differs > SAME:
            yield done, mutant


def outcome(base: Source, mutant: onnx.ModelProto, folder: Path) -> tuple[int, float]:
    """Exit code of the fuse, and how far what was fused is from the mutant."""
    out = folder / "out.onnx"
    report = graphs.fuse(graphs.save(mutant, folder), out)
    if report.exit:
        assert not out.exists()
        return report.exit, 0.0
    fused, unfused = graphs.lowered_double(onnx.load(out), report), graphs.double(mutant)
    out.unlink()
    worst = 0.0
    for seed in SEEDS:
        given = feeds(base, shapes(fused), report, seed)
        worst = max(worst, graphs.difference(fused, unfused, given))
    return report.exit, worst


def wrong(base: Source, count: int, seed: int, folder: Path) -> tuple[list[str], Counter[int]]:
    """What was fused and differs, and the exit codes of all."""
    bad: list[str] = []
    exits: Counter[int] = Counter()
    for done, mutant in islice(runnable(base, seed), count):
        code, worst = outcome(base, mutant, folder)
        exits[code] += 1
        if not worst < SAME:
            bad.append(f"{done}: {worst:.1e}")
    return bad, exits


@pytest.mark.timeout(600 * TIMES)
@pytest.mark.parametrize(("name", "count", "seed"), [("rec_ts17_T4_noinit", 50, 11), ("chunk_dy18", 30, 13)])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_mutant_is_refused_or_fused_as_what_it_is(name: str, count: int, seed: int, tmp_path: Path) -> None:
    count *= TIMES
    bad, exits = wrong(source(FOLDERS[0] / f"{name}.onnx", tmp_path), count, seed, tmp_path)
    assert bad == []
    # Most are another rule; some (another scale, another eps, another layout in front) are the rule still.
    assert exits[3] + exits[4] > count // 2
    assert exits[0] >= 2
    assert sum(exits.values()) == count


@pytest.mark.timeout(600 * TIMES)
@pytest.mark.parametrize("path", fused_exports(), ids=lambda path: path.stem)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_mutants_of_every_export(path: Path, tmp_path: Path) -> None:
    count = 2 * TIMES
    bad, exits = wrong(source(path, tmp_path), count, 17, tmp_path)
    assert bad == []
    assert sum(exits.values()) == count
