"""Structure of fused nodes: attributes, types on the way of each operand, and who is wired to whom."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

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

    def of(change, name=DECODE, target="ascend-310p"):
        source, output = fused(name, target)
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
    assert len(report.structure) == len(report.sites)
    for node in report.structure:
        assert node.notes == ()
        ports = {"x", "weight"} if node.op == "CausalConvWithState" else {"query", "key", "value", "beta", "g"}
        assert ports <= {path.port for path in node.operands}


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


def writer(graph, op, site=""):
    return next(node for node in graph.node if node.op_type == op and site in node.name)


def behind(graph, node, output, *ops):
    """Puts operators behind a result, each with its attributes; what they write keeps the result's name."""
    value, name, marks = f"{output}/raw", node.output[output], node.metadata_props
    made = []
    node.output[output] = value
    for number, (op, others, attributes) in enumerate(ops):
        last = name if number == len(ops) - 1 else f"{name}/{number}"
        made.append(helper.make_node(op, [value, *others], [last], f"{name}/{op}_{number}", **attributes))
        made[-1].metadata_props.extend(marks)
        value = last
    for offset, new in enumerate(made, list(graph.node).index(node) + 1):
        graph.node.insert(offset, new)


def before(graph, node, place, *ops):
    """The same in front of an operand."""
    made = []
    value = node.input[place]
    for number, (op, others, attributes) in enumerate(ops):
        name = f"{node.name}/{place}/{op}_{number}"
        made.append(helper.make_node(op, [value, *others], [name], name, **attributes))
        made[-1].metadata_props.extend(node.metadata_props)
        value = name
    insert(graph, node, *made)
    next(one for one in graph.node if one.output == node.output).input[place] = value


def through(narrow):
    return ("Cast", [], {"to": narrow}), ("Cast", [], {"to": onnx.TensorProto.FLOAT})


def site_of(op):
    return "layers.0" if op == "LinearAttention" else "layers.0.causal_conv"


HALF, BRAIN, TINY = (getattr(onnx.TensorProto, name) for name in ("FLOAT16", "BFLOAT16", "FLOAT8E4M3FN"))


@pytest.mark.parametrize(("narrow", "said"), [(HALF, "float16"), (BRAIN, "bfloat16"), (TINY, "float8e4m3fn")])
@pytest.mark.parametrize(("op", "output"), [("LinearAttention", 0), ("LinearAttention", 1), ("CausalConvWithState", 0)])
def test_a_result_that_is_rounded_on_its_way_is_seen(patched, op, output, narrow, said):
    def change(graph):
        node = writer(graph, op, "layers.0")
        behind(graph, node, output, *through(narrow))

    report = patched(change, target="ort")
    assert report.exit == 5
    ((site, found),) = [(node.site, finding) for node in report.structure for finding in node.findings]
    assert found.code == "structure-rounded"
    assert site == site_of(op)
    assert f"goes through {said} on its way from float32 to float32" in found.text


@pytest.mark.parametrize("place", [0, 3])
def test_an_operand_of_a_convolution_that_is_rounded_on_its_way_is_seen(patched, place):
    report = patched(lambda g: before(g, writer(g, "CausalConvWithState"), place, *through(HALF)), target="ort")
    assert report.exit == 5
    assert faults(report) == [("layers.0.causal_conv", "structure-rounded")]


def test_a_result_through_a_wider_type_is_no_fault(patched):
    wider = ("Cast", [], {"to": onnx.TensorProto.DOUBLE}), ("Cast", [], {"to": onnx.TensorProto.FLOAT})
    report = patched(lambda graph: behind(graph, writer(graph, "LinearAttention"), 0, *wider), target="ort")
    assert (report.exit, faults(report)) == (0, [])


def held(graph, dtype, *numbers):
    for number, value in enumerate(numbers):
        graph.initializer.append(numpy_helper.from_array(np.asarray(value, dtype), f"bound/{number}"))
    return [f"bound/{number}" for number in range(len(numbers))]


GUARDS = {
    "normalised query": ("query", "Clip", np.float16, (-0.9, 0.9)),
    "g above zero": ("g", "Min", np.float32, (0,)),
    "g far below zero": ("g", "Max", np.float32, (-60,)),
    "beta": ("beta", "Clip", np.float16, (-1.9, 2.1)),
    "state": ("state", "Clip", np.float16, (-2e4, 2e4)),
    "value": ("value", "Min", np.float16, (200,)),
}


@pytest.mark.parametrize("guard", GUARDS)
def test_a_guard_of_an_operand_that_no_draw_reaches_is_seen(patched, guard):
    operand, op, dtype, bounds = GUARDS[guard]

    def change(graph):
        node = custom(graph)
        before(graph, node, port(node, operand), (op, held(graph, dtype, *bounds), {}))

    report = patched(change)
    assert report.exit == 5
    assert faults(report) == [("layers.0", "structure-stranger")]
    assert f"/{op}_0 ({op}) stands between layers.0/gated_delta_rule" in report.structure[0].findings[0].text


@pytest.mark.parametrize(("op", "output"), [("LinearAttention", 0), ("LinearAttention", 1), ("CausalConvWithState", 0)])
def test_a_guard_of_a_result_is_seen(patched, op, output):
    def change(graph):
        behind(graph, writer(graph, op, "layers.0"), output, ("Clip", held(graph, np.float32, -1e30, 1e30), {}))

    report = patched(change, target="ort")
    assert report.exit == 5
    assert faults(report) == [(site_of(op), "structure-stranger")]


@pytest.mark.parametrize("name", ["chunk_dy23_norm_outside__halfinside", "steps_gates__function"])
def test_what_the_source_has_of_its_own_is_no_fault(name, tmp_path):
    """A norm in half precision; a gate that is inlined of a function."""
    source, output = Path(__file__).parent / "zoo" / f"{name}.onnx", tmp_path / "fused.onnx"
    assert pipeline.fuse(FuseOptions(source, output, target="ort"), SilentProgress()).exit == 0
    report = verify(source, output, level="site")
    assert (report.exit, faults(report)) == (0, [])


def test_a_guard_in_front_of_the_norm_is_seen(patched):
    def change(graph):
        node = next(node for node in graph.node if node.name.startswith("layers.0/") and "query/l2norm" in node.name
                    and node.op_type != "Constant")  # fmt: skip
        before(graph, node, 0, ("Min", held(graph, np.float32, 1e30), {}))

    report = patched(change)
    assert (report.exit, faults(report)) == (5, [("layers.0", "structure-stranger")])
    assert "(Min)" in report.structure[0].findings[0].text


def test_a_zero_state_that_is_made_of_data_is_no_stranger(fused):
    report = verify(*fused("rec_ts17_T4_noinit"), level="site")
    assert (report.exit, faults(report)) == (0, [])
    (state,) = [path for path in report.structure[0].operands if path.port == "state"]
    assert "Mul" in state.ops


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
