"""Candidates that are found while a proof goes on are those that would have been found after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import reduce
from pathlib import Path
from threading import Event
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

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
#: A decay that is 2^-30 less than it is to be.
NEARLY = [
    ("decayed = Mul(state, e2)", "e3 = Mul(e2, more)\n  e4 = Mul(e3, less)\n  decayed = Mul(state, e4)"),
    ("float scale", "float more = {1.000030517578125}, float less = {0.999969482421875}, float scale"),
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


expect = Lookahead.expect


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

    def logged(plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            answer = plain(*given)
            events.append("ran")
            return answer

        return call

    with pytest.MonkeyPatch.context() as patch:
        for way in ("run", "ask"):
            patch.setattr(worker, way, logged(getattr(worker, way)))
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


class Stumbling(Told):
    """A finder that does not take what is defined of the site before as long as that is not proven."""

    def candidate(self, place: Place) -> Candidate | None:
        found = super().candidate(place)
        if place.name == "site.1" and self._shapes.defined:
            raise LookupError(place.name)
        return found


def test_an_error_that_rests_on_what_does_not_hold_is_forgotten(worker: Worker, tmp_path: Path) -> None:
    model = chain(graphs.step(*NEARLY), graphs.step(*NEARLY))
    scanned = graphs.scanned(model, tmp_path)
    kinds, shapes = classify(scanned), Shapes(scanned)
    finder = Stumbling(scanned, kinds, shapes, graphs.pattern())
    finder.events = []
    sites, _ = prove_sites(scanned, kinds, shapes, (graphs.pattern(),), worker, finder, lambda _: None)
    assert sites == run(model, worker, tmp_path, ahead=False)[0]
    assert all(isinstance(site, NoMatch) for site in sites)
    model = chain(graphs.step(), graphs.step())
    scanned = graphs.scanned(model, tmp_path)
    kinds, shapes = classify(scanned), Shapes(scanned)
    finder = Stumbling(scanned, kinds, shapes, graphs.pattern())
    finder.events = []
    with pytest.raises(LookupError):
        prove_sites(scanned, kinds, shapes, (graphs.pattern(),), worker, finder, lambda _: None)


def test_an_interrupt_of_a_proof_does_not_wait_for_the_look_ahead(tmp_path: Path) -> None:
    model = graphs.scanned(beside(graphs.step(), graphs.step()), tmp_path)
    kinds, shapes = classify(model), Shapes(model)
    looking, may_end, ended = Event(), Event(), Event()

    class Slow(Finder):
        def candidate(self, place: Place) -> Candidate | None:
            if place.name == "site.1":
                looking.set()
                assert may_end.wait(60)
                ended.set()
            return super().candidate(place)

    with Worker() as worker, pytest.MonkeyPatch.context() as patch:
        def interrupted(plain: Callable[..., Any]) -> Callable[..., Any]:
            def call(*given: Any) -> Any:
                if looking.is_set():
                    raise KeyboardInterrupt
                return plain(*given)

            return call

        for way in ("run", "ask"):
            patch.setattr(worker, way, interrupted(getattr(worker, way)))
        patch.setattr(Lookahead, "expect", lambda self, *given: (expect(self, *given), looking.wait(60)))
        finder = Slow(model, kinds, shapes, graphs.pattern())
        with pytest.raises(KeyboardInterrupt):
            prove_sites(model, kinds, shapes, (graphs.pattern(),), worker, finder, lambda _: None)
    assert not ended.is_set()
    may_end.set()
    assert ended.wait(60)


def test_an_engine_forgets_the_calls_it_looked_into(tmp_path: Path) -> None:
    step = graphs.step(*FREE)
    inputs, outputs = ([info.name for info in some] for some in (step.graph.input, step.graph.output))
    constants = [helper.make_node("Constant", [], [tensor.name], value=tensor) for tensor in step.graph.initializer]
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("local", 1)]
    function = helper.make_function("local", "Step", inputs, outputs, [*constants, *step.graph.node], imports)
    del step.graph.node[:], step.graph.initializer[:]
    before = helper.make_node("Identity", [inputs[0]], ["given"])
    call = helper.make_node("Step", ["given", *inputs[1:]], outputs, domain="local")
    step.graph.node.extend([before, call])
    whole = helper.make_model(step.graph, functions=[function], opset_imports=imports, ir_version=8)
    for info in whole.graph.output:
        info.ClearField("type")
    model = graphs.scanned(whole, tmp_path)
    shapes = Shapes(model)
    given, out = model.graph.find("given") or 0, model.graph.find("out") or 0
    back = shapes.checkpoint()
    shapes.define(given, (2, 1, 4, 5), TensorProto.FLOAT)
    assert shapes.shape(out) == (2, 1, 4, 3)
    back()
    assert shapes.shape(out) == Shapes(model).shape(out) != (2, 1, 4, 3)


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
