"""Candidates that are found while a proof goes on are those that would have been found after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import onnx
import pytest

import graphs
from deltafuse.ahead import Lookahead
from deltafuse.classes import classify
from deltafuse.finder import Candidate, Finder, Place
from deltafuse.match import Match, NoMatch
from deltafuse.prover import Outlook
from deltafuse.shapes import Shapes
from deltafuse.sites import Site, prove_sites
from deltafuse.worker import Worker

FREE = [("[1,1,4", "[N,1,4"), ("[1,4,5,3]", "[N,4,5,3]")]
NEARLY = [
    ("decayed = Mul(state, e2)", "e3 = Add(e2, little)\n  decayed = Mul(state, e3)"),
    ("float scale", "float little = {1e-10}, float scale"),
]
NEEDS_A_BATCH = [
    *FREE,
    ("  out = Unsqueeze(o, time)", "  o1 = Expand(o, two)\n  out = Unsqueeze(o1, time)"),
    ("float scale", "int64[3] two = {2,1,1}, float scale"),
]
#: The same but for a clamp that no draw reaches.
GUARDED = [
    ("update = Mul(k1, delta_row)", "kept = Clip(delta_row, , most)\n  update = Mul(k1, kept)"),
    ("float scale", "float most = {1e38}, float scale"),
]


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker() as one:
        yield one


def beside(*parts: onnx.ModelProto) -> onnx.ModelProto:
    """Parts that have nothing to do with each other."""
    named = [onnx.compose.add_prefix(part, f"p{index}.") for index, part in enumerate(parts)]
    return reduce(lambda whole, part: onnx.compose.merge_models(whole, part, io_map=[]), named)


def chain(*parts: onnx.ModelProto) -> onnx.ModelProto:
    """Each part's output is the next one's value."""
    whole: onnx.ModelProto | None = None
    for index, part in enumerate(parts):
        named = onnx.compose.add_prefix(part, f"p{index}.")
        joint = [(f"p{index - 1}.out", f"p{index}.value")]
        whole = named if whole is None else onnx.compose.merge_models(whole, named, io_map=joint)
    assert whole is not None
    return whole


class Told(Finder):
    """A finder that says when it found what."""

    events: list[str]

    def candidate(self, place: Place) -> Candidate | None:
        self.events.append(f"found {place.name}")
        return super().candidate(place)


def run(
    model: onnx.ModelProto, worker: Worker, folder: Path, *, ahead: bool
) -> tuple[tuple[Site, ...], list[Any], list[str]]:
    """The sites, what is then known of all values, and what happened."""
    scanned = graphs.scanned(model, folder)
    kinds, shapes, events = classify(scanned), Shapes(scanned), list[str]()
    finder = Told(scanned, kinds, shapes, graphs.pattern())
    finder.events = events
    with pytest.MonkeyPatch.context() as patch:
        plain = worker.run

        def logged(*given: Any) -> Any:
            answer = plain(*given)
            events.append("ran")
            return answer

        patch.setattr(worker, "run", logged)
        if not ahead:
            patch.setattr(Lookahead, "expect", Outlook.expect)
        sites, _ = prove_sites(scanned, kinds, shapes, (graphs.pattern(),), worker, finder, lambda _: None)
    known = [(shapes.shape(value), shapes.dtype(value)) for value in range(len(scanned.graph.value_names))]
    return sites, [known, shapes.defined, shapes.unions.equations, shapes.conflicts], events


@pytest.mark.parametrize(
    "edits",
    [
        [[], [], []],
        [FREE, FREE, FREE],
        [NEARLY, NEARLY, []],
        [NEARLY, [], NEARLY, []],
        [[], NEARLY, []],
        [[], GUARDED, []],
        [NEEDS_A_BATCH, NEEDS_A_BATCH],
    ],
    ids=["equal", "free-batch", "refused-first", "alternating", "refused-second", "guarded-second", "fails-late"],
)
@pytest.mark.parametrize("joined", [chain, beside])
def test_sites_and_sizes_are_those_of_one_after_the_other(
    joined: Callable[..., onnx.ModelProto], edits: list[list[tuple[str, str]]], worker: Worker, tmp_path: Path
) -> None:
    model = joined(*(graphs.step(*some) for some in edits))
    sites, known, _ = run(model, worker, tmp_path, ahead=True)
    assert (sites, known) == run(model, worker, tmp_path, ahead=False)[:2]
    assert len(sites) == len(edits)


def test_a_site_with_a_guard_is_not_covered_by_the_one_before(worker: Worker, tmp_path: Path) -> None:
    model = beside(*(graphs.step(*some) for some in ([], GUARDED, [])))
    first, second, third = run(model, worker, tmp_path, ahead=True)[0]
    assert isinstance(first, Match)
    assert isinstance(second, NoMatch)
    assert second.reason.code == "piecewise"
    assert isinstance(third, Match)
    assert third.proof.shared_with == first.name


def test_equal_sites_are_found_while_the_first_is_proven(worker: Worker, tmp_path: Path) -> None:
    _, _, events = run(beside(graphs.step(), graphs.step(), graphs.step()), worker, tmp_path, ahead=True)
    assert events.index("found site.2") < max(i for i, event in enumerate(events) if event == "ran")
    assert events.count("found site.2") == 1


def test_what_was_found_for_a_proof_that_fails_is_found_again(worker: Worker, tmp_path: Path) -> None:
    model = chain(graphs.step(*NEARLY), graphs.step(*NEARLY))
    sites, _, events = run(model, worker, tmp_path, ahead=True)
    assert [site.name for site in sites] == ["site.0", "site.1"]
    # once for each reading of the first, and once more
    assert events.count("found site.1") > 1
    assert events.count("found site.0") == 1
    assert isinstance(sites[0], NoMatch)
    assert sites[0].reason.code == "not-equal"


def test_an_engine_goes_back_to_what_it_knew(tmp_path: Path) -> None:
    model = graphs.scanned(graphs.step(*FREE), tmp_path)
    fresh, used = Shapes(model), Shapes(model)
    value = model.graph.find("decayed")
    end = model.graph.find("out")
    assert value is not None
    assert end is not None
    back = used.checkpoint()
    used.define(value, (9, 9, 9, 9), 11)
    batch = used.shape(model.graph.inputs[0])
    assert batch is not None
    used.unions.unite(batch[0], 2, 0)
    assert (used.shape(end), used.dtype(end)) != (fresh.shape(end), fresh.dtype(end))
    back()
    assert (used.shape(end), used.dtype(end)) == (fresh.shape(end), fresh.dtype(end))
    assert (used.defined, used.bindings) == ({}, fresh.bindings)
