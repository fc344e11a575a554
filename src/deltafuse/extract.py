"""``--extract DIR``: each site as stand-alone models, before and after, for Netron and onnxruntime."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import onnx
from onnx import helper

from deltafuse.errors import InternalError
from deltafuse.files import make_folder
from deltafuse.fused import runnable
from deltafuse.graph import Graph
from deltafuse.lowering_attention import is_linear_attention
from deltafuse.match import Match, Plan, Role
from deltafuse.opset import LINEAR_ATTENTION_OPSET, adapt_all
from deltafuse.probe import backward_slice, cut_model
from deltafuse.reasons import Reason
from deltafuse.region import between
from deltafuse.shape_op import Contents
from deltafuse.shapes import Shapes
from deltafuse.wire import Model
from deltafuse.wording import number

#: Highest IR version that the oldest supported onnxruntime reads; node metadata is known from 10 on.
_IR_VERSION = 10


def extract_sites(
    folder: Path, model: Model, kinds: bytearray, shapes: Shapes, plans: Sequence[Plan]
) -> tuple[str, ...]:
    """Writes each planned site as stand-alone models; see `extract_site`."""
    files: list[str] = []
    for plan in plans:
        match = plan.match
        inputs = list(dict.fromkeys(role.value for role in match.operands()))
        results = [role.value for role in match.results()]
        cut = cut_model(model, shapes, inputs, results)
        sizes: list[int] = []
        if isinstance(cut, Reason):
            # Shapes of values of other layers are read.
            sizes = _outside_sizes(model.graph, match, inputs, results)
            cut = cut_model(model, shapes, [*inputs, *sizes], results)
        if isinstance(cut, Reason):
            raise InternalError(f"{match.name} was proven but cannot be cut out: {cut.text}")
        for size in sizes:
            _work_out(cut.model.graph, model.graph.name(size), shapes.contents(size), match.operands())
        cut.model.graph.doc_string = counted(match.name, len(between(model.graph, match, kinds)), cut.model.graph)
        files += map(str, extract_site(folder, plan, cut.model))
    return tuple(files)


def counted(site: str, own: int, graph: onnx.GraphProto) -> str:
    """What a graph has beside the nodes that a site has: a file of its own has to work out what it is given elsewhere.

    Args:
        site: its name.
        own: how many nodes it has.
        graph: in which they are.
    """
    more = len(graph.node) - own
    told = f"{site}: {number(own, 'node')} from its operands to its results"
    if more < 0:
        beside = number(-more, "node that works out sizes", "nodes that work out sizes")
        return f"{told}, without {beside}: inputs here"
    beside = number(more, "node that only works out sizes", "nodes that only work out sizes")
    return f"{told}, and {beside} and constants for them" if more else told


def _outside_sizes(graph: Graph, match: Match, inputs: Sequence[int], results: Sequence[int]) -> list[int]:
    """The sizes that a site reads of values that do not follow from its operands, nor from sizes before them."""
    nodes, loose = backward_slice(graph, inputs, results)
    outside = {value for value in loose if value not in graph.initializers}
    found: list[int] = []
    for node in nodes:
        if not outside.isdisjoint(graph.reads(node)):
            written = [value for value in graph.node_outputs[node] if value]
            found += [value for value in written if value in match.sizes]
            outside.update(value for value in written if value not in match.sizes)
    return found


def _work_out(graph: onnx.GraphProto, name: str, sizes: Contents | None, operands: Sequence[Role]) -> None:
    """Takes the sizes that an input of a cut holds from the operands, where all stand there; it is no input then."""
    if sizes is None or sizes.ndim != 1 or not len(sizes):
        return
    parts: list[str] = []
    nodes: list[onnx.NodeProto] = []
    for place, dim in enumerate(sizes):
        part = f"{name}/size_{place}"
        if isinstance(dim, int):
            nodes.append(_constant(part, dim))
        else:
            found = next(((role, role.shape.index(dim)) for role in operands if dim in role.shape), None)
            if found is None:
                return
            role, axis = found
            nodes += [
                helper.make_node("Shape", [role.name], [f"{part}/shape"]),
                _constant(f"{part}/axis", axis),
                helper.make_node("Gather", [f"{part}/shape", f"{part}/axis"], [part], axis=0),
            ]
        parts.append(part)
    nodes.append(helper.make_node("Concat", parts, [name], axis=0))
    inputs, after = [info for info in graph.input if info.name != name], [*graph.node]
    del graph.input[:], graph.node[:]
    graph.input.extend(inputs)
    graph.node.extend([*nodes, *after])


def _constant(name: str, number: int) -> onnx.NodeProto:
    value = helper.make_tensor(name, onnx.TensorProto.INT64, [1], [number])
    return helper.make_node("Constant", [], [name], value=value)


def extract_site(folder: Path, plan: Plan, before: onnx.ModelProto) -> tuple[Path, ...]:
    """Writes one site into a folder, which is made if need be.

    ``NAME.before.onnx`` holds the nodes that are replaced, ``NAME.after.onnx`` the target's nodes and
    ``NAME.after.lowered.onnx`` the same with the fused node as plain operators, at the target's precision. onnxruntime
    loads the first and the last; the second is for viewers and the target's converter.

    Args:
        folder: where to write.
        plan: the nodes that replace the site.
        before: the cut between the values of the match; its inputs may have no sizes, its outputs no type.

    Returns:
        The files, in that order.
    """
    make_folder(folder)
    stem = re.sub(r"[^\w.-]+", "_", plan.match.name)
    after = _model(plan, *_imported(plan, before))
    lowered = runnable(after, keep=False)
    # What is declared of the fused node's results is declared of the lowered form's results too.
    models = {"before": _typed(before, plan.match), "after": after, "after.lowered": lowered}
    files: list[Path] = []
    for kind, model in models.items():
        path = folder / f"{stem}.{kind}.onnx"
        path.write_bytes(model.SerializeToString())
        files.append(path)
    return tuple(files)


def _imported(
    plan: Plan, before: onnx.ModelProto
) -> tuple[Sequence[onnx.NodeProto], Sequence[onnx.OperatorSetIdProto]]:
    """The plan's nodes, written for the opsets that the fused operator needs, and these opsets."""
    versions = {entry.domain: entry.version for entry in before.opset_import}
    have = versions.get("", 17)
    nodes = plan.nodes
    for node in plan.nodes:
        if is_linear_attention(node.op_type, node.domain):
            least = 1 if node.domain else LINEAR_ATTENTION_OPSET
            versions[node.domain] = max(versions.get(node.domain, 0), least)
    if versions.get("", have) > have:
        raised = adapt_all(plan.nodes, have, versions[""])
        nodes = nodes if isinstance(raised, Reason) else raised
    return nodes, [helper.make_opsetid(domain, version) for domain, version in versions.items()]


def _model(plan: Plan, nodes: Sequence[onnx.NodeProto], opsets: Sequence[onnx.OperatorSetIdProto]) -> onnx.ModelProto:
    match = plan.match
    read = {name for node in nodes for name in node.input}
    operands = (match.query, match.key, match.value, match.g, match.beta, match.state)
    inputs = {role.name: _declare(role) for role in operands if role is not None and role.name in read}
    outputs = [_declare(role) for role in (match.out, match.final_state) if role is not None]
    graph = helper.make_graph(
        nodes,
        match.name,
        list(inputs.values()),
        outputs,
        value_info=plan.value_info,
        doc_string=f"{match.rule}: {plan.op}",
    )
    return helper.make_model(graph, producer_name="deltafuse", opset_imports=opsets, ir_version=_IR_VERSION)


def _typed(before: onnx.ModelProto, match: Match) -> onnx.ModelProto:
    """The cut with the types and sizes that the match knows."""
    model = onnx.ModelProto()
    model.CopyFrom(before)
    roles = (
        match.query, match.key, match.value, match.g, match.beta, match.state, match.out, match.final_state,
    )  # fmt: skip
    declared = {role.name: _declare(role) for role in roles if role is not None}
    for info in (*model.graph.input, *model.graph.output):
        if info.name in declared:
            info.CopyFrom(declared[info.name])
    # Values inside the site that the cut offers as well are of no use on their own.
    kept = [info for info in model.graph.output if info.type.WhichOneof("value") is not None]
    del model.graph.output[:]
    model.graph.output.extend(kept)
    model.graph.name = match.name
    model.producer_name = "deltafuse"
    return model


def _declare(role: Role) -> onnx.ValueInfoProto:
    shape = [size if isinstance(size, int) else str(size) for size in role.shape]
    return helper.make_tensor_value_info(role.name, role.dtype, shape)
