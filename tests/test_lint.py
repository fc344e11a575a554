"""``fuse lint``: seeded faults of the contracts, one test each, and nothing on good files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import AttributeProto, TensorProto, helper, numpy_helper

from deltafuse import targets
from deltafuse.fused import kernel
from deltafuse.lint import LintReport, lint
from deltafuse.match import Plan
from deltafuse.options import FuseOptions, SilentProgress
from deltafuse.pipeline import fuse as fuse_model
from deltafuse.targets import TargetOptions
from exports import export
from hand_match import FLOAT, HALF, Site, l2norm, match

pytestmark = pytest.mark.usefixtures("one_worker")

CHUNK = Site(tokens=20, batch=1, norm=l2norm(FLOAT))
DECODE = Site(tokens=3, batch=1)
Edit = Callable[[onnx.ModelProto, onnx.NodeProto], None]


def model_of(target: str, site: Site, **options) -> onnx.ModelProto:
    """A file with the nodes of one site and nothing else."""
    profile, roles = targets.get(target), match(site)
    plan = profile.plan(roles, TargetOptions(**options))
    assert isinstance(plan, Plan)
    declared = {
        role.name: helper.make_tensor_value_info(
            role.name, role.dtype, [size if isinstance(size, int) else str(size) for size in role.shape]
        )
        for role in (*roles.operands(), *roles.results())
    }
    graph = helper.make_graph(
        plan.nodes,
        "g",
        [declared[role.name] for role in roles.operands()],
        [declared[role.name] for role in roles.results()],
        value_info=plan.value_info,
    )
    domain, version = profile.opset or ("", 17)
    opsets = [helper.make_opsetid("", version if not domain else 17)]
    opsets += [helper.make_opsetid(domain, version)] if domain else []
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def lint_edited(tmp_path: Path, target: str, site: Site, edit: Edit, **options) -> LintReport:
    model = model_of(target, site, **options)
    (node,) = (node for node in model.graph.node if kernel(node))
    edit(model, node)
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    return lint(path, target)


def set_attribute(name: str, value: object) -> Edit:
    def edit(_: onnx.ModelProto, node: onnx.NodeProto) -> None:
        kept = [attribute for attribute in node.attribute if attribute.name != name]
        del node.attribute[:]
        node.attribute.extend(kept)
        if value is not None:
            node.attribute.append(helper.make_attribute(name, value))

    return edit


def feed(port: int, array: np.ndarray) -> Edit:
    """A constant in place of an input."""

    def edit(model: onnx.ModelProto, node: onnx.NodeProto) -> None:
        model.graph.initializer.append(numpy_helper.from_array(array, "fed"))
        node.input[port] = "fed"

    return edit


def convert(port: int, op: str, **attributes: object) -> Edit:
    """A node between an input and the fused node."""

    def edit(model: onnx.ModelProto, node: onnx.NodeProto) -> None:
        new = helper.make_node(op, [node.input[port]], ["converted"], "converter", **attributes)
        node.input[port] = "converted"
        model.graph.node.insert(list(model.graph.node).index(node), new)

    return edit


def declare(index: int, dtype: int, shape: list[int]) -> Edit:
    def edit(model: onnx.ModelProto, node: onnx.NodeProto) -> None:
        (info,) = (info for info in model.graph.value_info if info.name == node.output[index])
        info.CopyFrom(helper.make_tensor_value_info(info.name, dtype, shape))

    return edit


def without_input(port: int) -> Edit:
    """An input that is not fed, and its index."""

    def edit(_: onnx.ModelProto, node: onnx.NodeProto) -> None:
        (index,) = (attribute for attribute in node.attribute if attribute.name == "input_index")
        del index.ints[port]
        del node.input[port]

    return edit


def of_all(*edits: Edit) -> Edit:
    def edit(model: onnx.ModelProto, node: onnx.NodeProto) -> None:
        for one in edits:
            one(model, node)

    return edit


def renamed(old: str, new: str, attribute: str) -> Edit:
    def edit(_: onnx.ModelProto, node: onnx.NodeProto) -> None:
        (found,) = (one for one in node.attribute if one.name == attribute)
        found.strings[:] = [new.encode() if text == old.encode() else text for text in found.strings]

    return edit


def again(name: str) -> Edit:
    """An attribute that is there twice."""

    def edit(_: onnx.ModelProto, node: onnx.NodeProto) -> None:
        node.attribute.append(next(attribute for attribute in node.attribute if attribute.name == name))

    return edit


def empty(port: int) -> Edit:
    """An input that has no name, and keeps its index."""

    def edit(_: onnx.ModelProto, node: onnx.NodeProto) -> None:
        node.input[port] = ""

    return edit


def without_result(_: onnx.ModelProto, node: onnx.NodeProto) -> None:
    node.output[0] = ""


def one_input_more(_: onnx.ModelProto, node: onnx.NodeProto) -> None:
    node.input.append(node.input[0])


def shape_text(text: str) -> tuple[Site, Edit, str, str]:
    return DECODE, set_attribute("outputs_shape", text), "outputs-shape", "outputs_shape"


def fed_by_nothing(_: onnx.ModelProto, node: onnx.NodeProto) -> None:
    node.input[1] = "no such value"


def share_state(model: onnx.ModelProto, node: onnx.NodeProto) -> None:
    model.graph.node.append(helper.make_node("Identity", [node.input[4]], ["seen"], "reader"))


def give_state_out(model: onnx.ModelProto, node: onnx.NodeProto) -> None:
    model.graph.output.append(helper.make_tensor_value_info(node.input[4], HALF, None))


def state_from_input(model: onnx.ModelProto, node: onnx.NodeProto) -> None:
    model.graph.input.append(helper.make_tensor_value_info("raw", HALF, [1, 4, 32, 16]))
    node.input[4] = "raw"


def state_of_view(model: onnx.ModelProto, node: onnx.NodeProto) -> None:
    model.graph.input.append(helper.make_tensor_value_info("raw", HALF, [4, 32, 16]))
    model.graph.initializer.append(numpy_helper.from_array(np.array([1, 4, 32, 16]), "shape"))
    node.input[4] = "view"
    model.graph.node.insert(0, helper.make_node("Reshape", ["raw", "shape"], ["view"], "viewer"))


def through(op: str, **attributes: object) -> Edit:
    """The state behind one more node, and another reader of what that node reads."""

    def edit(model: onnx.ModelProto, node: onnx.NodeProto) -> None:
        read, at = node.input[4], list(model.graph.node).index(node)
        shape = ["as_it_is"] if op == "Reshape" else []
        model.graph.initializer.append(numpy_helper.from_array(np.array([0, 0, 0, 0]), "as_it_is"))
        model.graph.node.insert(at, helper.make_node(op, [read, *shape], ["state_view"], "viewer", **attributes))
        model.graph.node.append(helper.make_node("Neg", [read], ["seen"], "reader"))
        node.input[4] = "state_view"

    return edit


def state_from_filled(model: onnx.ModelProto, node: onnx.NodeProto) -> None:
    model.graph.initializer.append(numpy_helper.from_array(np.array([1, 4, 32, 16]), "shape"))
    fill = numpy_helper.from_array(np.zeros(1, np.float16))
    model.graph.node.insert(0, helper.make_node("ConstantOfShape", ["shape"], ["filled"], "fill", value=fill))
    node.input[4] = "filled"


def overridable(port: int) -> Edit:
    """A constant that is an input of the graph, too: a default."""

    def edit(model: onnx.ModelProto, node: onnx.NodeProto) -> None:
        constant = next(one for one in model.graph.node if list(one.output) == [node.input[port]])
        tensor = constant.attribute[0].t
        feed(port, numpy_helper.to_array(tensor))(model, node)
        model.graph.input.append(helper.make_tensor_value_info("fed", tensor.data_type, list(tensor.dims)))

    return edit


def computed(port: int) -> Edit:
    """An int32 input that is computed from data."""

    def edit(model: onnx.ModelProto, node: onnx.NodeProto) -> None:
        old = node.input[port]
        node.input[port] = "sum"
        at = list(model.graph.node).index(node)
        beta = node.input[3]
        for new in (
            helper.make_node("Shape", [beta], ["of_beta"], "s"),
            helper.make_node("Cast", ["of_beta"], ["as_int"], "c", to=TensorProto.INT32),
            helper.make_node("ReduceMin", ["as_int"], ["least"], "r", keepdims=0),
            helper.make_node("Add", [old, "least"], ["sum"], "a"),
        ):
            model.graph.node.insert(at, new)
            at += 1

    return edit


def feed_both_gates(model: onnx.ModelProto, node: onnx.NodeProto) -> None:
    gk = numpy_helper.from_array(np.zeros((3, 4, 1), np.float32), "gk")
    model.graph.initializer.append(gk)
    node.input.insert(8, "gk")
    (index,) = (attribute for attribute in node.attribute if attribute.name == "input_index")
    index.ints.insert(8, 8)


def in_domain(_: onnx.ModelProto, node: onnx.NodeProto) -> None:
    node.domain = "ascend"


def control_flow(op: str) -> Edit:
    def edit(model: onnx.ModelProto, _: onnx.NodeProto) -> None:
        body = helper.make_graph(
            [helper.make_node("Constant", [], ["b"], value_float=1.0)],
            "b",
            [],
            [helper.make_tensor_value_info("b", FLOAT, [])],
        )
        model.graph.initializer.append(numpy_helper.from_array(np.array(True), "yes"))
        if op == "Scan":
            item = helper.make_tensor_value_info("item", TensorProto.BOOL, [])
            result = helper.make_tensor_value_info("b", TensorProto.BOOL, [])
            body = helper.make_graph([helper.make_node("Identity", ["item"], ["b"])], "b", [item], [result])
            model.graph.initializer.append(numpy_helper.from_array(np.array([True]), "some"))
            scan = helper.make_node("Scan", ["some"], ["chosen"], "flow", body=body, num_scan_inputs=1)
            model.graph.node.append(scan)
            return
        names = {"If": ("then_branch", "else_branch"), "Loop": ("body",)}[op]
        inputs = ["yes"] if op == "If" else ["", "yes"]
        model.graph.node.append(helper.make_node(op, inputs, ["chosen"], "flow", **dict.fromkeys(names, body)))

    return edit


def in_function(model: onnx.ModelProto, node: onnx.NodeProto) -> None:
    """An If in a function that another one calls."""
    control_flow("If")(model, node)
    flow = model.graph.node.pop()
    flow.input[0] = "c"
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("local", 1)]
    call = helper.make_node("inner", ["c"], ["chosen"], "call", domain="local")
    for name, body in (("inner", flow), ("outer", call)):
        model.functions.append(helper.make_function("local", name, ["c"], ["chosen"], [body], opsets))
    model.opset_import.append(opsets[1])
    model.graph.node.append(helper.make_node("outer", ["yes"], ["chosen"], "called", domain="local"))


#: What the reference exporter feeds.
FED = (
    "query", "key", "value", "beta", "g", "state", "lengths", "slots", "accepted",
)  # fmt: skip
SLOTS = np.zeros(3, np.int32)
NAMES = ["query", "key", "value", "beta", "initial_state", "actual_seq_lengths", "g"]

#: what was broken -> (target, site, edit, code, the part that is named)
CUSTOM_FAULTS: dict[str, tuple[Site, Edit, str, str]] = {
    "scale_value is missing": (CHUNK, set_attribute("scale_value", None), "attribute-missing", "scale_value"),
    "type is missing": (CHUNK, set_attribute("type", None), "attribute-missing", "type"),
    "an unknown attribute": (CHUNK, set_attribute("chunk", 64), "attribute-extra", "chunk"),
    "chunk_size of the older signature": (CHUNK, set_attribute("chunk_size", 64), "attribute-extra", "chunk_size"),
    "scale_value is an int": (CHUNK, set_attribute("scale_value", 1), "attribute-kind", "scale_value"),
    "dtype is text": (CHUNK, set_attribute("dtype", "float16"), "attribute-kind", "dtype"),
    "another type": (CHUNK, set_attribute("type", "ChunkGatedDeltaRuleV2"), "unknown-type", "type"),
    "type in small letters": (CHUNK, set_attribute("type", "chunkgateddeltarule"), "unknown-type", "type"),
    "type misspelt": (CHUNK, set_attribute("type", "ChunkGatedDetlaRule"), "unknown-type", "type"),
    "beta and value exchanged in input_names": (
        CHUNK,
        set_attribute("input_names", ["query", "key", "beta", "value", *NAMES[4:]]),
        "attribute-order",
        "input_names",
    ),
    "a misspelt input name": (CHUNK, renamed("beta", "betas", "input_names"), "attribute-value", "input_names"),
    "output names exchanged": (
        CHUNK,
        set_attribute("output_names", ["final_state", "out"]),
        "attribute-order",
        "output_names",
    ),
    "a required input named optional": (
        CHUNK,
        set_attribute("optional_input_names", ["g", "beta"]),
        "attribute-value",
        "optional_input_names",
    ),
    "output_num is 1": (CHUNK, set_attribute("output_num", 1), "output-count", "output_num"),
    "input_index counts inputs": (DECODE, set_attribute("input_index", list(range(8))), "input-index", "input_index"),
    "input_index names the unfed gk": (
        DECODE,
        set_attribute("input_index", list(range(9))),
        "input-dtype",
        "gk",
    ),
    "input_index goes beyond the names": (
        CHUNK,
        set_attribute("input_index", [0, 1, 2, 3, 4, 5, 7]),
        "input-index",
        "input_index",
    ),
    "a required input is not fed": (CHUNK, without_input(5), "input-missing", "actual_seq_lengths"),
    "nothing writes an input": (CHUNK, fed_by_nothing, "input-unwritten", "key"),
    "dtype says float32": (CHUNK, set_attribute("dtype", 1), "dtype", "dtype"),
    "output_types says float32": (DECODE, set_attribute("output_types", [43, 43]), "output-types", "output_types"),
    "output_types are ONNX's": (DECODE, set_attribute("output_types", [10, 10]), "output-types", "output_types"),
    "outputs_shape without ranks": (
        DECODE,
        set_attribute("outputs_shape", "-1,4,32,-1,4,32,16,"),
        "outputs-shape",
        "outputs_shape",
    ),
    "outputs_shape with the state transposed": (
        DECODE,
        set_attribute("outputs_shape", "3,-1,4,32,4,-1,4,16,32,"),
        "outputs-shape",
        "outputs_shape",
    ),
    "outputs_shape without its last comma": (
        DECODE,
        set_attribute("outputs_shape", "3,-1,4,32,4,-1,4,32,16"),
        "outputs-shape",
        "outputs_shape",
    ),
    "outputs_shape with two signs": (
        DECODE,
        set_attribute("outputs_shape", "3,--1,4,32,4,-1,4,32,16,"),
        "outputs-shape",
        "outputs_shape",
    ),
    "outputs_shape with a number that is no digit": (
        DECODE,
        set_attribute("outputs_shape", "3,\u00b2,4,32,4,-1,4,32,16,"),
        "outputs-shape",
        "outputs_shape",
    ),
    "outputs_shape of other tokens": shape_text("3,7,4,32,4,5,4,32,16,"),
    "outputs_shape of tokens below zero": shape_text("3,-7,4,32,4,-1,4,32,16,"),
    "outputs_shape of no tokens": shape_text("3,0,4,32,4,-1,4,32,16,"),
    "outputs_shape with spaces": shape_text("3, -1, 4,32,4,-1,4,32,16,"),
    "outputs_shape with more commas": shape_text("3,-1,4,32,4,-1,4,32,16,,,"),
    "an attribute is there twice": (DECODE, again("scale_value"), "attribute-twice", "scale_value"),
    "type is there twice": (DECODE, again("type"), "attribute-twice", "type"),
    "a required input has no name": (DECODE, empty(3), "input-missing", "beta"),
    "an optional input has an index and no name": (DECODE, empty(7), "input-missing", "g"),
    "a result has no name": (DECODE, without_result, "output-count", "out"),
    "accepted tokens of two sequences": (
        DECODE,
        feed(8, np.array([1, 1], np.int32)),
        "accepted",
        "num_accepted_tokens",
    ),
    "lengths have two axes": (DECODE, feed(5, np.array([[3]], np.int32)), "input-rank", "actual_seq_lengths"),
    "lengths are no numbers": (DECODE, feed(5, np.array([np.nan], np.float32)), "input-dtype", "actual_seq_lengths"),
    "there are no lengths": (DECODE, feed(5, np.zeros(0, np.int32)), "lengths", "actual_seq_lengths"),
    "scale_value is zero": (CHUNK, set_attribute("scale_value", 0.0), "scale", "scale_value"),
    "scale_value is no number": (CHUNK, set_attribute("scale_value", float("nan")), "scale", "scale_value"),
    "query is float32": (CHUNK, convert(0, "Cast", to=FLOAT), "input-dtype", "query"),
    "the state is float32": (CHUNK, convert(4, "Cast", to=FLOAT), "input-dtype", "initial_state"),
    "g is float16": (CHUNK, convert(6, "Cast", to=HALF), "input-dtype", "g"),
    "lengths are int64": (CHUNK, convert(5, "Cast", to=TensorProto.INT64), "input-dtype", "actual_seq_lengths"),
    "query keeps its batch axis": (
        CHUNK,
        feed(0, np.zeros((1, 20, 2, 16), np.float16)),
        "input-rank",
        "query",
    ),
    "the state is not transposed": (
        CHUNK,
        convert(4, "Transpose", perm=[0, 1, 3, 2]),
        "input-shape",
        "initial_state",
    ),
    "key has the heads of value": (CHUNK, feed(1, np.zeros((20, 4, 16), np.float16)), "input-shape", "key"),
    "beta has one head too many": (CHUNK, feed(3, np.zeros((20, 5), np.float16)), "input-shape", "beta"),
    "a result is declared float32": (CHUNK, declare(0, FLOAT, [20, 4, 32]), "declared-type", "out"),
    "the state is declared float32": (DECODE, declare(1, FLOAT, [1, 4, 32, 16]), "declared-type", "state"),
    "a result is declared too wide": (CHUNK, declare(0, HALF, [20, 4, 64]), "declared-shape", "out"),
    "the state is declared untransposed": (CHUNK, declare(1, HALF, [1, 4, 16, 32]), "declared-shape", "final_state"),
    "slot indices are computed": (DECODE, computed(6), "not-constant", "ssm_state_indices"),
    "lengths are computed": (DECODE, computed(5), "not-constant", "actual_seq_lengths"),
    "lengths do not add up": (DECODE, feed(5, np.array([2], np.int32)), "lengths", "actual_seq_lengths"),
    "one slot index a sequence": (DECODE, feed(6, SLOTS[:1]), "input-shape", "ssm_state_indices"),
    "a slot beyond the state": (DECODE, feed(6, np.array([0, 0, 1], np.int32)), "slots", "ssm_state_indices"),
    "more tokens accepted than there are": (
        DECODE,
        feed(8, np.array([4], np.int32)),
        "accepted",
        "num_accepted_tokens",
    ),
    "no token accepted": (DECODE, feed(8, np.array([0], np.int32)), "accepted", "num_accepted_tokens"),
    "nine tokens": (DECODE, feed(5, np.array([9], np.int32)), "rgdr-tokens", ""),
    "something else reads the state": (DECODE, share_state, "state-shared", "state"),
    "the state is a graph output": (DECODE, give_state_out, "state-shared", "state"),
    "the state is a graph input": (DECODE, state_from_input, "state-not-fresh", "state"),
    "the state is a view of a graph input": (DECODE, state_of_view, "state-not-fresh", "state"),
    "the state is a constant": (
        DECODE,
        feed(4, np.zeros((1, 4, 32, 16), np.float16)),
        "state-not-fresh",
        "state",
    ),
    "a view of the state is read by others": (DECODE, through("Identity"), "state-shared", "state"),
    "the state in the same sizes is read by others": (DECODE, through("Reshape"), "state-shared", "state"),
    "the state behind a Cast to its own type": (DECODE, through("Cast", to=HALF), "state-shared", "state"),
    "the state is a graph input behind such a Cast": (
        DECODE,
        of_all(state_from_input, convert(4, "Cast", to=HALF)),
        "state-not-fresh",
        "state",
    ),
    "the state is filled from constants": (DECODE, state_from_filled, "state-not-fresh", "state"),
    "lengths are a default": (DECODE, overridable(5), "not-constant", "actual_seq_lengths"),
    "slot indices are a default": (DECODE, overridable(6), "not-constant", "ssm_state_indices"),
    "g and a gk of one number a head": (DECODE, feed_both_gates, "gk-scalar", "gk"),
    "a domain": (CHUNK, in_domain, "domain", "domain"),
    "an If is left": (CHUNK, control_flow("If"), "control-flow", ""),
    "a Scan is left": (CHUNK, control_flow("Scan"), "control-flow", ""),
    "an If is left in a function": (CHUNK, in_function, "control-flow", ""),
    "a Loop is left": (CHUNK, control_flow("Loop"), "control-flow", ""),
}


@pytest.mark.parametrize("fault", CUSTOM_FAULTS)
def test_a_fault_of_a_custom_node_is_found(fault, tmp_path):
    site, edit, code, part = CUSTOM_FAULTS[fault]
    report = lint_edited(tmp_path, "ascend-310p", site, edit)
    found = {(finding.code, finding.part) for finding in report.findings}
    assert (code, part) in found
    assert_mendable(report)


def assert_mendable(report: LintReport) -> None:
    """Each finding says where it is, what is there, what should be and what to do."""
    assert report.exit == 5
    for finding in report.findings:
        assert finding.node
        assert finding.found
        assert finding.wanted
        assert finding.fix


CUSTOM = {"ChunkGatedDeltaRule": CHUNK, "RecurrentGatedDeltaRule": DECODE}
OPERATORS = {one.op: one for one in targets.get("ascend-310p").operators if len(one.inputs) in (7, 10)}
RULES = [(op, rule.name) for op in CUSTOM for rule in OPERATORS[op].attributes]
PORTS = [(op, place) for op in CUSTOM for place, _ in enumerate(OPERATORS[op].fed(FED))]


@pytest.mark.parametrize(("op", "name"), RULES)
def test_each_attribute_that_is_absent_or_of_another_kind_is_found(op, name, tmp_path):
    (rule,) = (rule for rule in OPERATORS[op].attributes if rule.name == name)
    report = lint_edited(tmp_path, "ascend-310p", CUSTOM[op], set_attribute(name, None))
    assert {("attribute-missing", name)} == {(f.code, f.part) for f in report.findings if f.part == name}
    assert_mendable(report)
    other = [1.5] if rule.kind != AttributeProto.FLOATS else "1.5"
    report = lint_edited(tmp_path, "ascend-310p", CUSTOM[op], set_attribute(name, other))
    assert ("attribute-kind", name) in {(f.code, f.part) for f in report.findings}
    assert_mendable(report)


@pytest.mark.parametrize(("op", "place"), PORTS)
def test_each_input_of_another_type_is_found(op, place, tmp_path):
    operator = OPERATORS[op]
    port = operator.inputs[operator.fed(FED)[place]]
    wrong = TensorProto.INT64 if TensorProto.INT32 in port.dtypes else TensorProto.DOUBLE
    report = lint_edited(tmp_path, "ascend-310p", CUSTOM[op], convert(place, "Cast", to=wrong))
    assert ("input-dtype", port.name) in {(f.code, f.part) for f in report.findings}
    assert_mendable(report)


# Files that an export-time symbolic writes: torch's graph.op("Custom", ...), attributes in alphabetical order, nothing
# declared of the results, one constant for lengths and accepted tokens, a Cast to float16 of what is float16.


def exported(op: str, sizes: dict[str, int]) -> onnx.ModelProto:
    tokens, batch = sizes["T"], sizes["B"]
    shapes = {
        "query": (HALF, [tokens, sizes["N"], sizes["K"]]),
        "key": (HALF, [tokens, sizes["N"], sizes["K"]]),
        "value": (HALF, [tokens, sizes["H"], sizes["V"]]),
        "beta": (HALF, [tokens, sizes["H"]]),
        "past": (FLOAT, [batch, sizes["H"], sizes["K"], sizes["V"]]),
        "g": (FLOAT, [tokens, sizes["H"]]),
    }
    operator = next(one for one in targets.get("ascend-310p").operators if one.op == op)
    lengths = np.full(batch, tokens // batch, np.int32)
    nodes = [
        helper.make_node("Cast", ["value"], ["value_half"], "value_cast", to=HALF),
        helper.make_node("Transpose", ["past"], ["turned"], "turn", perm=[0, 1, 3, 2]),
        helper.make_node("Cast", ["turned"], ["state"], "state_cast", to=HALF),
        helper.make_node("Constant", [], ["lengths"], "lengths", value=numpy_helper.from_array(lengths)),
        helper.make_node("Constant", [], ["one"], "one", value=numpy_helper.from_array(np.ones(batch, np.int32))),
    ]
    slots = numpy_helper.from_array(np.repeat(np.arange(batch, dtype=np.int32), lengths))
    nodes.append(helper.make_node("Constant", [], ["slots"], "slots", value=slots))
    accepted = "lengths" if tokens == batch else "one"
    feeds = {"value": "value_half", "lengths": "lengths", "slots": "slots", "accepted": accepted, "state": "state"}
    inputs = [feeds.get(operator.inputs[port].role, operator.inputs[port].role) for port in operator.fed(FED)]
    attributes = {rule.name: rule.value for rule in operator.attributes}
    attributes |= {"input_index": list(operator.fed(FED)), "scale_value": sizes["K"] ** -0.5, "dtype": HALF}
    if "output_types" in attributes:
        shape = f"3,-1,{sizes['H']},{sizes['V']},4,-1,{sizes['H']},{sizes['V']},{sizes['K']},"
        attributes |= {"output_types": [42, 42], "outputs_shape": shape}
    node = helper.make_node("Custom", inputs, ["out", "final"], "/layers.0/Custom")
    node.attribute.extend(helper.make_attribute(name, attributes[name]) for name in sorted(attributes))
    graph = helper.make_graph(
        [*nodes, node],
        "exported",
        [helper.make_tensor_value_info(name, *shape) for name, shape in shapes.items()],
        [helper.make_tensor_value_info(name, HALF, None) for name in ("out", "final")],
    )
    # what is declared is declared of the graph's outputs behind a Cast
    del graph.output[:]
    graph.node.append(helper.make_node("Cast", ["out"], ["result"], "result_cast", to=FLOAT))
    graph.output.append(helper.make_tensor_value_info("result", FLOAT, None))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 14)], ir_version=8)


SIZES = {"T": 1, "B": 1, "N": 16, "H": 32, "K": 128, "V": 128}


@pytest.mark.parametrize(
    ("op", "sizes"),
    [
        ("RecurrentGatedDeltaRule", SIZES),
        ("RecurrentGatedDeltaRule", {**SIZES, "T": 8}),
        ("RecurrentGatedDeltaRule", {**SIZES, "T": 4, "B": 2}),
        ("ChunkGatedDeltaRule", {**SIZES, "T": 100}),
        ("ChunkGatedDeltaRule", {**SIZES, "T": 64, "B": 2, "K": 80, "V": 72}),
    ],
)
def test_what_an_exporter_writes_has_notes_and_no_findings(op, sizes, tmp_path):
    path = tmp_path / "model.onnx"
    onnx.save(exported(op, sizes), path)
    report = lint(path)
    assert report.findings == ()
    assert [note.code for note in report.notes] == ["no-value-info"]
    assert (report.targets, report.nodes, report.exit) == (("ascend-310p",), 1, 0)


@pytest.mark.parametrize(
    ("op", "sizes", "code"),
    [
        ("ChunkGatedDeltaRule", {**SIZES, "K": 144}, "head-size"),
        ("ChunkGatedDeltaRule", {**SIZES, "N": 3, "H": 4}, "head-ratio"),
        ("ChunkGatedDeltaRule", {**SIZES, "N": 8, "H": 4}, "head-ratio"),
        ("RecurrentGatedDeltaRule", {**SIZES, "T": 9}, "rgdr-tokens"),
        ("RecurrentGatedDeltaRule", {**SIZES, "K": 24}, "rgdr-head-size"),
        ("RecurrentGatedDeltaRule", {**SIZES, "V": 40}, "rgdr-head-size"),
        ("RecurrentGatedDeltaRule", {**SIZES, "T": 2, "B": 2, "N": 2, "H": 4}, "rgdr-batch-heads"),
    ],
)
def test_sizes_beyond_a_kernels_limits_are_found(op, sizes, code, tmp_path):
    path = tmp_path / "model.onnx"
    onnx.save(exported(op, sizes), path)
    report = lint(path, "ascend-310p")
    found = {finding.code: finding for finding in report.findings}
    assert code in found
    assert_mendable(report)
    # What is the matter and what to do are told apart.
    assert "; " not in found[code].found
    assert found[code].fix.startswith("fuse the unfused file again: ")


# LinearAttention.

ATTENTION_FAULTS: dict[str, tuple[str, Edit, str, str]] = {
    "no head count": ("ort", set_attribute("q_num_heads", None), "attribute-missing", "q_num_heads"),
    "scale is an int": ("ort", set_attribute("scale", 1), "attribute-kind", "scale"),
    "scale is negative": ("ort", set_attribute("scale", -1.0), "scale", "scale"),
    "an unknown attribute": ("onnx", set_attribute("state_window", 2), "attribute-extra", "state_window"),
    "a window of the state": ("ort", set_attribute("state_window", 2), "attribute-value", "state_window"),
    "an unknown rule": ("ort", set_attribute("update_rule", "delta_gated"), "update-rule", "update_rule"),
    "no head at all": ("ort", set_attribute("kv_num_heads", 0), "heads", "q_num_heads"),
    "fewer query heads than states": ("onnx", set_attribute("q_num_heads", 2), "heads", "q_num_heads"),
    "heads that no group shares": ("ort", set_attribute("q_num_heads", 3), "heads", "q_num_heads"),
    "a width that heads do not divide": ("ort", set_attribute("q_num_heads", 12), "width", "query"),
    "query is float16": ("ort", convert(1, "Cast", to=HALF), "input-dtype", "key"),
    "beta is float16": ("ort", convert(5, "Cast", to=HALF), "input-dtype", "beta"),
    "decay of another width": ("ort", feed(4, np.zeros((1, 20, 3), np.float32)), "width", "decay"),
    "beta of another width": ("ort", feed(5, np.zeros((1, 20, 2), np.float32)), "width", "beta"),
    "four axes": ("ort", feed(2, np.zeros((1, 20, 4, 32), np.float32)), "input-rank", "value"),
    "the state is transposed": ("ort", convert(3, "Transpose", perm=[0, 1, 3, 2]), "input-shape", "past_state"),
    "a result is declared float16": ("ort", declare(0, HALF, [1, 20, 128]), "declared-type", "output"),
    "a result is declared too wide": ("ort", declare(1, FLOAT, [1, 4, 32, 16]), "declared-shape", "present_state"),
}


def drop_state_output(_: onnx.ModelProto, node: onnx.NodeProto) -> None:
    del node.output[1]


def drop_decay(_: onnx.ModelProto, node: onnx.NodeProto) -> None:
    node.input[4] = ""


def drop_import(domain: str, version: int) -> Edit:
    def edit(model: onnx.ModelProto, _: onnx.NodeProto) -> None:
        kept = [entry for entry in model.opset_import if entry.domain != domain]
        del model.opset_import[:]
        model.opset_import.extend(kept)
        if version:
            model.opset_import.append(helper.make_opsetid(domain, version))

    return edit


ATTENTION_FAULTS |= {
    "a domain that does not have it": ("ort", in_domain, "domain", "domain"),
    "the first result has no name": ("ort", without_result, "output-count", "output"),
    "a seventh input": ("ort", one_input_more, "input-extra", ""),
    "an attribute is there twice": ("ort", again("scale"), "attribute-twice", "scale"),
    "a decay that the rule does not have": ("ort", set_attribute("update_rule", "delta"), "input-extra", "decay"),
    "a gate that the rule does not have": ("ort", set_attribute("update_rule", "linear"), "input-extra", "beta"),
    "chunks of less than one token": ("ort", set_attribute("chunk_size", -5), "attribute-value", "chunk_size"),
    "one result": ("onnx", drop_state_output, "output-count", "present_state"),
    "no decay": ("ort", drop_decay, "input-missing", "decay"),
    "no import of the domain": ("ort", drop_import("com.microsoft", 0), "opset", "com.microsoft"),
    "an opset that lacks the operator": ("onnx", drop_import("", 26), "opset", "ai.onnx"),
}


@pytest.mark.parametrize("fault", ATTENTION_FAULTS)
def test_a_fault_of_linear_attention_is_found(fault, tmp_path):
    target, edit, code, part = ATTENTION_FAULTS[fault]
    report = lint_edited(tmp_path, target, Site(tokens=20, batch=1), edit)
    assert (code, part) in {(finding.code, finding.part) for finding in report.findings}
    assert_mendable(report)


def test_there_are_faults_enough():
    # One test each: those of the tables, whose names differ.
    assert len(CUSTOM_FAULTS) >= 50
    assert len(ATTENTION_FAULTS) >= 20
    assert {entry[2] for entry in CUSTOM_FAULTS.values()} >= {
        "attribute-missing", "attribute-extra", "attribute-kind", "attribute-order", "attribute-value", "input-index",
        "output-count", "input-dtype", "dtype", "output-types", "outputs-shape", "declared-type", "not-constant",
        "rgdr-tokens", "state-shared", "state-not-fresh", "control-flow",
    }  # fmt: skip


# Good files.


@pytest.mark.parametrize("site", [CHUNK, DECODE, Site(), Site(tokens=2, batch=1, state_layout=None, dtype=HALF)])
@pytest.mark.parametrize("target", ["ascend-310p", "ascend-a2", "ort", "onnx"])
def test_what_fuse_writes_has_neither_findings_nor_notes(target, site, tmp_path):
    report = lint_edited(tmp_path, target, site, lambda model, node: None)
    assert (report.findings, report.notes, report.exit) == ((), (), 0)
    assert report.nodes == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [("scale", None), ("scale", 0.0), ("update_rule", None), ("chunk_size", 64), ("state_window", 0)],
)
def test_what_linear_attention_may_have_or_lack_is_good(name, value, tmp_path):
    assert lint_edited(tmp_path, "ort", CHUNK, set_attribute(name, value)).findings == ()


def held_in_function(model: onnx.ModelProto, domain: str) -> None:
    """The fused node as the body of a local function, which is called in its place."""
    (node,) = (node for node in model.graph.node if kernel(node))
    inputs, outputs = [name for name in node.input if name], list(node.output)
    held, opsets = onnx.NodeProto(), list(model.opset_import)
    held.CopyFrom(node)
    model.functions.append(helper.make_function(domain, "Layer", inputs, outputs, [held], opsets))
    model.opset_import.append(helper.make_opsetid(domain, 1))
    node.CopyFrom(helper.make_node("Layer", inputs, outputs, "call", domain=domain))


@pytest.mark.parametrize("target", ["ascend-310p", "ort"])
def test_a_fused_node_in_a_local_function_is_noted(target, tmp_path, fuse):
    model = model_of(target, CHUNK)
    held_in_function(model, "local")
    onnx.save(model, tmp_path / "model.onnx")
    outcome = fuse("lint", tmp_path / "model.onnx", "--json")
    assert (outcome.exit, outcome.document["nodes"], outcome.document["findings"]) == (3, 0, [])
    assert [note["code"] for note in outcome.document["notes"]] == ["in-function"]
    said = fuse("lint", tmp_path / "model.onnx").out
    assert "in the local function Layer, which is not looked into; inline it with onnx.inliner" in said
    assert "give the file that fuse wrote" not in said
    (tmp_path / "inlined.onnx").write_bytes(onnx.inliner.inline_local_functions(model).SerializeToString())
    assert (lint(tmp_path / "inlined.onnx").nodes, lint(tmp_path / "inlined.onnx").findings) == (1, ())


def test_a_function_of_another_domain_is_whatever_its_body_says(tmp_path):
    model = model_of("ort", CHUNK)
    (node,) = (node for node in model.graph.node if kernel(node))
    node.domain = "pkg.layers"
    onnx.save(model, tmp_path / "model.onnx")
    assert [finding.code for finding in lint(tmp_path / "model.onnx").findings] == ["domain"]
    opsets = [helper.make_opsetid("", 17)]
    body = [helper.make_node("Identity", [node.input[at]], [name]) for at, name in ((2, "o"), (3, "s"))]
    inputs = [name for name in node.input if name]
    function = helper.make_function("pkg.layers", "LinearAttention", inputs, ["o", "s"], body, opsets)
    model.functions.append(function)
    model.opset_import.append(helper.make_opsetid("pkg.layers", 1))
    onnx.save(model, tmp_path / "model.onnx")
    assert (lint(tmp_path / "model.onnx").exit, lint(tmp_path / "model.onnx").findings) == (3, ())


def test_the_older_signature_is_known(tmp_path):
    report = lint_edited(tmp_path, "ascend-310p", CHUNK, lambda model, node: None, signature="8-input")
    assert report.findings == ()


@pytest.mark.parametrize(
    ("fixture", "target"),
    [("full_decode_ts17_half", "ascend-310p"), ("full_prefill_ts17", "ort"), ("full_prefill_ts17", "onnx")],
)
def test_whole_fused_models_are_good(fixture, target, tmp_path, fuse):
    fused = tmp_path / "fused.onnx"
    assert fuse_model(FuseOptions(export(fixture).path, fused, target=target), SilentProgress()).exit == 0
    outcome = fuse("lint", fused, "--json")
    assert (outcome.exit, outcome.document["targets"], outcome.document["findings"]) == (0, [target], [])
    # The convolutions in front of the rule are looked over, too, where the target has an operator for them.
    assert outcome.document["nodes"] == (3 if target == "ascend-310p" else 6)
    assert fuse("lint", fused, "--target", target).out.endswith("no findings, 0 notes\n")


def test_tokens_of_outputs_shape_may_be_written_out(tmp_path):
    edit = set_attribute("outputs_shape", "3,3,4,32,4,1,4,32,16,")
    assert lint_edited(tmp_path, "ascend-310p", DECODE, edit).findings == ()


@pytest.mark.parametrize(
    ("op_type", "domain", "says"),
    [
        ("custom", "", "write the op_type Custom"),
        ("Costum", "", "write the op_type Custom"),
        ("ChunkGatedDeltaRule", "", "write the op_type Custom, with the attribute type set to ChunkGatedDeltaRule"),
        ("ChunkGatedDeltaRules", "ai.onnx", "with the attribute type set to ChunkGatedDeltaRule"),
    ],
)
def test_a_misspelt_op_type_is_told_with_what_it_is_meant_for(op_type, domain, says, tmp_path):
    model = model_of("ascend-310p", CHUNK)
    (node,) = (node for node in model.graph.node if kernel(node))
    node.op_type, node.domain = op_type, domain
    onnx.save(model, tmp_path / "model.onnx")
    report = lint(tmp_path / "model.onnx")
    assert (report.nodes, report.exit, report.targets) == (0, 5, ("ascend-310p",))
    (finding,) = report.findings
    assert (finding.code, finding.part, finding.found, finding.wanted) == ("op-type", "op_type", op_type, "Custom")
    assert says in finding.fix


def test_a_misspelt_type_is_told_with_the_nearest_name(tmp_path):
    (finding,) = lint_edited(tmp_path, "ascend-310p", CHUNK, set_attribute("type", "ChunkGatedDetlaRule")).findings
    assert (finding.wanted, finding.fix) == ("ChunkGatedDeltaRule", "write ChunkGatedDeltaRule")


def test_a_custom_node_of_someone_else_is_left_alone(tmp_path):
    model = model_of("ascend-310p", CHUNK)
    node = helper.make_node("Custom", ["past_state"], ["other"], "other")
    node.attribute.append(helper.make_attribute("type", "IncreFlashAttention"))
    model.graph.node.append(node)
    onnx.save(model, tmp_path / "model.onnx")
    assert lint(tmp_path / "model.onnx").findings == ()


# The folder and the command.


def test_two_graphs_with_one_external_data_name(tmp_path):
    for stem in ("prefill", "decode"):
        model = model_of("ascend-310p", CHUNK)
        model.graph.initializer.append(numpy_helper.from_array(np.ones((64, 64), np.float32), "weight"))
        onnx.save_model(
            model, tmp_path / f"{stem}.onnx", save_as_external_data=True, location="weights.bin", size_threshold=0
        )
    (finding,) = lint(tmp_path / "prefill.onnx").findings
    assert (finding.code, finding.node, finding.part) == ("shared-data", "decode.onnx", "external_data")
    other = tmp_path / "decode"
    other.mkdir()
    (tmp_path / "decode.onnx").rename(other / "decode.onnx")
    assert lint(tmp_path / "prefill.onnx").findings == ()


def test_the_command_prints_findings_and_exits_with_5(tmp_path, fuse):
    path = tmp_path / "model.onnx"
    model = model_of("ascend-310p", CHUNK)
    (node,) = (node for node in model.graph.node if kernel(node))
    set_attribute("output_num", 1)(model, node)
    onnx.save(model, path)
    outcome = fuse("lint", path, "--json")
    assert outcome.exit == outcome.document["exit"] == 5
    (finding,) = outcome.document["findings"][:1]
    assert set(finding) == {"code", "node", "part", "found", "wanted", "fix"}
    shown = fuse("lint", path)
    assert shown.exit == 5
    assert "output_num" in shown.out
    assert "found 1; wanted 2" in shown.out


def test_a_file_without_fused_nodes(fuse):
    outcome = fuse("lint", export("chunk_dy18").path, "--json")
    assert (outcome.exit, outcome.document["nodes"], outcome.document["findings"]) == (3, 0, [])


def test_control_flow_is_a_fault_of_a_file_without_fused_nodes_for_a_target_that_is_named(fuse):
    path = export("loop_in_place").path
    outcome = fuse("lint", path, "--json")
    assert (outcome.exit, outcome.document["nodes"], outcome.document["findings"]) == (3, 0, [])
    outcome = fuse("lint", path, "--target", "ascend-a2", "--json")
    assert (outcome.exit, [one["code"] for one in outcome.document["findings"]]) == (5, ["control-flow"])
    assert fuse("lint", path, "--target", "ort").exit == 3


def test_an_unknown_target(fuse):
    outcome = fuse("lint", export("chunk_dy18").path, "--target", "ascend-999", "--json")
    assert (outcome.exit, outcome.document["error"]["code"]) == (1, "unknown-target")
