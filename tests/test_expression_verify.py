"""`fuse verify` on files with ordinary expressions: each site is run again, and a copy that is gone is seen through."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import graphs
from deltafuse.verify import VerifyReport, verify
from test_expressions import RULES, mixed


@pytest.fixture(scope="module", autouse=True)
def _worker() -> Iterator[None]:
    with graphs.one_worker():
        yield


def verified(model: Path, fused: Path, level: str = "site") -> VerifyReport:
    return verify(model, fused, level=level)


def edited(fused: Path, change: Callable[[onnx.ModelProto], None]) -> Path:
    model = onnx.load(fused)
    change(model)
    path = fused.with_name("edited.onnx")
    onnx.save(model, path)
    return path


def node(model: onnx.ModelProto, op: str) -> onnx.NodeProto:
    return next(node for node in model.graph.node if node.op_type == op)


def test_ordinary_sites_are_equal_and_the_whole_models_too(tmp_path: Path) -> None:
    model, fused = mixed(tmp_path), tmp_path / "fused.onnx"
    graphs.fuse(model, fused, rules=RULES[1:])
    report = verified(model, fused, "all")
    assert report.exit == 0
    names = [(site.name, site.verdict) for site in report.sites]
    assert names == [("layer_norm.0, min_max_clip.0", "equal"), ("copy i", "equal")]
    assert report.sites[0].draws >= 5
    assert report.sites[0].error < 1e-12
    assert [output.verdict for output in report.network.outputs] == ["passes", "passes"]


@pytest.mark.parametrize("rule", RULES[1:])
def test_each_is_equal_alone(rule: str, tmp_path: Path) -> None:
    model, fused = mixed(tmp_path), tmp_path / "fused.onnx"
    graphs.fuse(model, fused, rules=(rule,))
    report = verified(model, fused)
    assert (report.exit, len(report.sites), report.findings) == (0, 1, ())


def test_beside_a_fused_operator_it_is_part_of_its_region(tmp_path: Path) -> None:
    model, fused = mixed(tmp_path), tmp_path / "fused.onnx"
    graphs.fuse(model, fused, rules=RULES)
    report = verified(model, fused)
    assert report.exit == 0
    assert {name for site in report.sites for name in site.name.split(", ")} == {
        "site.0", "layer_norm.0", "min_max_clip.0", "copy i",
    }  # fmt: skip


def other_bound(model: onnx.ModelProto) -> None:
    bound = next(n for n in model.graph.node if n.output[0] == node(model, "Clip").input[2])
    bound.attribute[0].t.CopyFrom(numpy_helper.from_array(np.float32(0.500001)))


def other_eps(model: onnx.ModelProto) -> None:
    (eps,) = [a for a in node(model, "LayerNormalization").attribute if a.name == "epsilon"]
    eps.f *= 1.0001


def other_axis(model: onnx.ModelProto) -> None:
    (axis,) = [a for a in node(model, "LayerNormalization").attribute if a.name == "axis"]
    axis.i = -2


def without_scale(model: onnx.ModelProto) -> None:
    norm = node(model, "LayerNormalization")
    norm.input[1] = "ones"
    model.graph.initializer.append(numpy_helper.from_array(np.ones(3, np.float32), "ones"))


@pytest.mark.parametrize("change", [other_bound, other_eps])
def test_an_edit_of_what_was_written_is_found(change: Callable[[onnx.ModelProto], None], tmp_path: Path) -> None:
    model, fused = mixed(tmp_path), tmp_path / "fused.onnx"
    graphs.fuse(model, fused, rules=RULES[1:])
    report = verified(model, edited(fused, change))
    assert report.exit == 5
    assert [site.reason.code for site in report.sites if site.reason] == ["expression-site-differs"]


@pytest.mark.parametrize("change", [other_axis, without_scale])
def test_so_is_one_that_needs_other_values(change: Callable[[onnx.ModelProto], None], tmp_path: Path) -> None:
    model, fused = mixed(tmp_path), tmp_path / "fused.onnx"
    graphs.fuse(model, fused, rules=RULES[1:])
    assert verified(model, edited(fused, change)).exit == 5


def test_a_reader_of_a_copy_that_reads_something_else_is_found(tmp_path: Path) -> None:
    model, fused = mixed(tmp_path), tmp_path / "fused.onnx"
    graphs.fuse(model, fused, rules=("identity",))

    def misread(changed: onnx.ModelProto) -> None:
        node(changed, "Max").input[0] = "n"

    report = verified(model, edited(fused, misread))
    assert report.exit == 5
    assert [finding.code for finding in report.findings] == ["changed-outside"]


def test_a_node_that_nobody_marked_is_no_site(tmp_path: Path) -> None:
    model, fused = mixed(tmp_path), tmp_path / "fused.onnx"
    graphs.fuse(model, fused, rules=("layer_norm",))

    def unmark(changed: onnx.ModelProto) -> None:
        del node(changed, "LayerNormalization").metadata_props[:]

    report = verified(model, edited(fused, unmark))
    assert [finding.code for finding in report.findings] == ["changed-outside"]
