"""What is worked out ahead of the last proofs is what would be worked out after them, or is not taken."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest

import graphs
from deltafuse import ahead, drafting, targets
from deltafuse.forecast import Forecast
from deltafuse.match import FuseReport, Plan
from deltafuse.opset import LINEAR_ATTENTION_OPSET
from deltafuse.targets.base import TargetOptions
from hand_match import Site, match
from test_ahead import FREE, NEARLY, NEEDS_A_BATCH, beside

FIXTURES = Path(__file__).parent / "fixtures"


class AtOnce:
    """Looks at all that follows before the proof goes on."""

    def __init__(self, steps: Iterator[object]) -> None:
        deque(steps, 0)

    def stop(self) -> None:
        """Nothing goes on any more."""

    drop = stop


@pytest.fixture
def outlines(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of plans of each outline that is made."""
    made: list[int] = []
    plain = drafting.outline

    def counted(*given: Any) -> Any:
        made.append(sum(map(len, given[2])))
        return plain(*given)

    monkeypatch.setattr(drafting, "outline", counted)
    monkeypatch.setattr(ahead, "Background", AtOnce)
    return made
#: What is refused before anything is drawn.
FAINT = [
    ("decayed = Mul(state, e2)", "e3 = Add(e2, little)\n  decayed = Mul(state, e3)"),
    ("float scale", "float little = {1e-10}, float scale"),
]


def fused(model: onnx.ModelProto, folder: Path, *, looks: bool) -> tuple[FuseReport, bytes]:
    source, output = graphs.save(model, folder), folder / "fused.onnx"
    output.unlink(missing_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        if not looks:
            patch.setattr(Forecast, "look", lambda *_: None)
            patch.setattr(Forecast, "draw_up", lambda *_: None)
        report = graphs.fuse(source, output, keep_going=True)
    return replace(report, seconds={}), output.read_bytes() if output.exists() else b""


@pytest.mark.parametrize(
    ("parts", "made", "without"),
    [
        ([[], []], [2], [2]),
        ([FREE, FREE], [2], [2]),
        # The first of two classes is proven when the second is looked at.
        ([[], FREE], [2], [2]),
        # A site that follows and is another one ends the look.
        ([[], FAINT], [1], [1]),
        ([NEARLY, []], [1], [1]),
        # One that is refused by its draws alone is taken for a site as long as they go on, once for each reading.
        ([[], NEARLY], [2, 2, 1], [1]),
        # What was likely does not hold.
        ([NEEDS_A_BATCH, NEEDS_A_BATCH], [2, 0], [0]),
    ],
    ids=["equal", "free-batch", "two-classes", "refused-second", "refused-first", "refused-late", "fails-late"],
)
def test_an_outline_that_was_made_ahead_is_that_of_the_proven_plans(
    parts: Sequence[Sequence[tuple[str, str]]],
    made: list[int],
    without: list[int],
    outlines: list[int],
    tmp_path: Path,
) -> None:
    model = beside(*(graphs.step(*edits) for edits in parts))
    ahead_of_time = fused(model, tmp_path, looks=True)
    assert outlines == made
    assert ahead_of_time == fused(model, tmp_path, looks=False)
    assert outlines == [*made, *without]


@pytest.mark.parametrize("name", ["full_prefill_transformers", "full_decode_transformers"])
def test_exports_are_outlined_once(name: str, outlines: list[int], tmp_path: Path) -> None:
    model = onnx.load(FIXTURES / f"{name}.onnx")
    ahead_of_time = fused(model, tmp_path, looks=True)
    assert outlines == [len(ahead_of_time[0].sites)]
    assert ahead_of_time == fused(model, tmp_path, looks=False)


@pytest.mark.parametrize("target", ["ascend-310p", "ascend-a2", "onnx", "ort"])
@pytest.mark.parametrize("tokens", [1, 12, "T"])
@pytest.mark.parametrize("batch", [1, "B"])
@pytest.mark.parametrize("pin", [True, False])
def test_a_plan_of_a_likely_site_has_all_but_what_is_written(
    target: str, tokens: int | str, batch: int | str, pin: bool
) -> None:
    site = match(Site(tokens=tokens, batch=batch))
    options = TargetOptions(pin=pin, opset=LINEAR_ATTENTION_OPSET)
    likely, plan = (targets.get(target).plan(site, options, likely=ahead) for ahead in (True, False))
    if isinstance(plan, Plan):
        assert likely == Plan(site, plan.op, (), (), plan.pins)
        assert plan.nodes
    else:
        assert likely == plan


@pytest.mark.parametrize("name", ["outline", "edits_of"])
def test_what_cannot_be_made_ahead_is_made_in_earnest(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wanted = fused(beside(graphs.step()), tmp_path, looks=False)
    made, calls = getattr(drafting, name), list[int]()

    def fails_once(*given: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise LookupError("not yet")
        return made(*given)

    monkeypatch.setattr(drafting, name, fails_once)
    monkeypatch.setattr(Forecast, "look", lambda *_: None)
    model = graphs.save(beside(graphs.step()), tmp_path)
    report = graphs.fuse(model, tmp_path / "fused.onnx", keep_going=True)
    assert (replace(report, seconds={}), (tmp_path / "fused.onnx").read_bytes()) == wanted
    assert len(calls) == 2


def test_edits_that_were_made_ahead_are_not_made_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made, calls = drafting.edits_of, list[int]()
    monkeypatch.setattr(drafting, "edits_of", lambda *given: calls.append(1) or made(*given))
    source = graphs.save(beside(graphs.step(), graphs.step()), tmp_path)
    assert graphs.fuse(source, tmp_path / "fused.onnx").exit == 0
    assert len(calls) == 1
    # Nothing is going to be written.
    graphs.fuse(source, None, dry_run=True)
    assert len(calls) == 1
