"""What plans do to the file beside their sites."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest

import graphs
from deltafuse import pipeline
from deltafuse.reasons import Reason

#: Another number of heads, so that the second site has a proof of its own.
OTHER = [("[1,1,4", "[N,1,6"), ("[1,4,5,3]", "[N,6,5,3]")]
FREE = [("[1,1,4", "[N,1,4"), ("[1,4,5,3]", "[N,4,5,3]")]


@pytest.fixture(scope="module", autouse=True)
def _worker() -> Iterator[None]:
    with graphs.one_worker():
        yield


def two(folder: Path) -> Path:
    parts = [onnx.compose.add_prefix(graphs.step(*edits), prefix) for edits, prefix in ((FREE, "a."), (OTHER, "b."))]
    model = onnx.compose.merge_models(*parts, io_map=[])
    for info in (*model.graph.input, *model.graph.output):
        info.type.tensor_type.shape.dim[0].dim_param = info.name[0]
    return graphs.save(model, folder)


@pytest.mark.parametrize("refused", [0, 1])
def test_what_is_refused_once_its_nodes_are_tried_does_nothing_to_the_file(
    refused: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, out, without = two(tmp_path), tmp_path / "out.onnx", tmp_path / "without.onnx"
    skipped = graphs.fuse(path, without, skip_sites=(f"site.{refused}",), record="none")
    tried = pipeline.prove_emitted

    def trying(plan: Any, *given: Any) -> float | Reason:
        if plan.match.name == f"site.{refused}":
            return Reason("other-at-size", {"batch": 1, "tokens": 1, "draw": "slow decay"})
        return tried(plan, *given)

    monkeypatch.setattr(pipeline, "prove_emitted", trying)
    report = graphs.fuse(path, out, keep_going=True, record="none")
    assert [site.status for site in report.sites] == ["refused" if index == refused else "fused" for index in (0, 1)]
    assert graphs.codes(report)[refused] == "other-at-size"
    assert out.read_bytes() == without.read_bytes()
    assert report.pinned == skipped.pinned
    assert {pinned.was for pinned in report.pinned} == {"ba"[refused]}
    assert report.nodes_after == skipped.nodes_after
