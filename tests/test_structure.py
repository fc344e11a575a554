"""Structure of fused nodes: attributes, types on the way of each operand, and who is wired to whom."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import helper

from deltafuse import pipeline
from deltafuse.options import FuseOptions, SilentProgress
from deltafuse.verify import verify
from exports import export
from sabotage import attribute, custom, g_rounded, insert, layers_exchanged, port, scale_off, state_zeroed

pytestmark = pytest.mark.usefixtures("one_worker")

DECODE = "full_decode_ts17"


@pytest.fixture(scope="module")
def fused(tmp_path_factory):
    """Unfused and fused path by fixture name; each fixture is fused once."""
    folder = tmp_path_factory.mktemp("fused")

    def of(name: str, target: str = "ascend-310p") -> tuple[Path, Path]:
        output = folder / f"{name}.{target}.onnx"
        if not output.exists():
            assert pipeline.fuse(FuseOptions(export(name).path, output, target=target), SilentProgress()).exit == 0
        return export(name).path, output

    return of


@pytest.fixture
def patched(fused, tmp_path):
    """The report after a change to the fused file."""

    def of(change, name=DECODE):
        source, output = fused(name)
        model = onnx.load(output)
        change(model.graph)
        onnx.save(model, tmp_path / "patched.onnx")
        return verify(source, tmp_path / "patched.onnx", level="site")

    return of


def faults(report) -> list[tuple[str, str]]:
    return [(node.site, finding.code) for node in report.structure for finding in node.findings]


@pytest.mark.parametrize("target", ["ascend-310p", "ascend-a2", "ort", "onnx"])
@pytest.mark.parametrize("name", ["full_prefill_ts17", "full_prefill_ts17_half", "chunk_dy23_noinit_nofinal"])
def test_a_right_fusion_has_no_faults(fused, name, target):
    report = verify(*fused(name, target), level="site")
    assert (report.exit, faults(report)) == (0, [])
    rules = [site for site in report.sites if "causal_conv" not in site.name]
    assert len(report.structure) == len(rules)
    for node in report.structure:
        assert node.notes == ()
        assert {"query", "key", "value", "beta", "g"} <= {path.port for path in node.operands}


def test_the_way_of_each_operand_is_told(fused):
    node, *_ = verify(*fused(DECODE), level="site").structure
    assert (node.site, node.op) == ("layers.0", "RecurrentGatedDeltaRule")
    paths = {path.port: path for path in node.operands}
    assert paths["state"].ops == ("Transpose", "Cast")
    assert paths["state"].dtypes == ("float32", "float16")
    assert paths["g"].dtypes == ("float32",)
    assert paths["query"].ops[-1] == "Cast"
    assert "ReduceSum" in paths["query"].ops
    assert len(paths["query"].sources) == 1
    assert paths["query"].sources != paths["key"].sources


def test_g_through_half_precision_is_seen_by_the_structure_alone(patched):
    report = patched(g_rounded)
    assert report.exit == 5
    assert [site.verdict for site in report.sites] == ["equal"] * 3
    assert faults(report) == [("layers.0", "structure-rounded")]
    assert "g of layers.0" in report.structure[0].findings[0].text
    assert "through float16" in report.structure[0].findings[0].text


def test_exchanged_layers_are_named_by_the_mathematics_and_by_the_structure(patched):
    report = patched(layers_exchanged)
    assert report.exit == 5
    assert [site.verdict for site in report.sites] == ["differs", "differs", "equal"]
    assert faults(report) == [("layers.0", "structure-wiring"), ("layers.1", "structure-wiring")]
    assert "computed by nodes of layers.1" in report.structure[0].findings[0].text


def test_an_attribute_against_the_profile(patched):
    def change(graph):
        attribute(custom(graph, 1), "dtype").i = 1

    report = patched(change)
    assert report.exit == 5
    assert ("layers.1", "structure-profile") in faults(report)
    assert {site for site, _ in faults(report)} == {"layers.1"}


def test_what_the_record_has_otherwise_is_noted(patched):
    report = patched(scale_off)
    assert [len(node.notes) for node in report.structure] == [1, 0, 0]
    assert "layers.0/gated_delta_rule/out was changed since the fuse" in report.structure[0].notes[0]
    assert faults(report) == []


def test_a_file_without_a_record_has_no_such_notes(fused, tmp_path):
    source, output = fused(DECODE)
    model = onnx.load(output)
    del model.metadata_props[:]
    scale_off(model.graph)
    onnx.save(model, tmp_path / "bare.onnx")
    report = verify(source, tmp_path / "bare.onnx", level="site")
    assert [node.notes for node in report.structure] == [()] * 3


def test_a_constant_operand_has_no_source(patched):
    report = patched(state_zeroed)
    (path,) = [path for path in report.structure[0].operands if path.port == "state"]
    assert path.sources == ()
    assert report.sites[0].verdict == "differs"


def test_a_wider_type_on_the_way_is_no_fault(patched):
    def change(graph):
        node = custom(graph)
        at = port(node, "g")
        double = helper.make_node("Cast", [node.input[at]], ["p_double"], to=onnx.TensorProto.DOUBLE)
        insert(graph, node, double, helper.make_node("Cast", ["p_double"], ["p_back"], to=onnx.TensorProto.FLOAT))
        custom(graph).input[at] = "p_back"

    assert patched(change).exit == 0


def test_people_read_the_faults(fuse, fused, tmp_path):
    source, output = fused(DECODE)
    model = onnx.load(output)
    g_rounded(model.graph)
    onnx.save(model, tmp_path / "patched.onnx")
    done = fuse("verify", source, tmp_path / "patched.onnx", "--level", "site")
    assert done.exit == 5
    assert "structure-rounded: g of layers.0" in done.out
    assert done.out.splitlines()[-1] == "3 of 3 fused sites equal; 1 fault of structure"
