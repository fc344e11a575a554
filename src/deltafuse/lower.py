"""``fuse lower``: turns the operators that onnxruntime does not know into plain ONNX, so that a fused file runs.

What is lowered: the Custom nodes of the gated delta rule (see `deltafuse.lowering`), and LinearAttention and
CausalConvWithState, of either domain, where the installed onnxruntime lacks them (see `deltafuse.lowering_attention`
and `deltafuse.lowering_conv`). All else stays byte for byte what it was, but for the rollback record (the lowered file
is not the one it belongs to), in whose place an entry says what the file is, and the opset that came with these two,
where nothing else needs it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import onnx
from onnx import NodeProto, TensorProto

from deltafuse import edits, record
from deltafuse.boundary import Bypass, bypass, dead, site_of
from deltafuse.edits import Changes, Edit, Insertion
from deltafuse.enclosed import Enclosed, fused_bodies
from deltafuse.errors import UserError
from deltafuse.files import check_output
from deltafuse.graph import Graph
from deltafuse.lower_opset import lowered_opsets, opset_notes
from deltafuse.lowered import KEY, is_lowered
from deltafuse.lowering import CHUNK, RECURRENT, fused_type, lower_node, read_call
from deltafuse.lowering_attention import LINEAR_ATTENTION, is_linear_attention, lower_attention, runtime_has
from deltafuse.lowering_conv import CAUSAL_CONV, is_causal_conv, lower_conv, runtime_has_conv
from deltafuse.options import AttentionMode, ExternalData, Progress, SilentProgress
from deltafuse.reasons import Reason
from deltafuse.shapes import Shapes
from deltafuse.wire import Model, scan

__all__ = ["LowerReport", "Lowered", "lower"]

#: ReduceSum takes its axes as an input from here on
_OPSET = 13
_NAMES = (CHUNK.encode(), RECURRENT.encode(), LINEAR_ATTENTION.encode(), CAUSAL_CONV.encode())


@dataclass(frozen=True)
class Lowered:
    """One node that became plain operators.

    Attributes:
        name: of the node; its first result where it has none.
        op: ``ChunkGatedDeltaRule``, ``RecurrentGatedDeltaRule``, ``LinearAttention`` or ``CausalConvWithState``.
        site: the site that a fuse gave it, "" where none did.
    """

    name: str
    op: str
    site: str


@dataclass(frozen=True)
class LowerReport:
    """What was lowered.

    Attributes:
        model, output: the files; output is None where nothing was written.
        rounding: whether operands and results are rounded at the boundary, to float16 as a rule, as the kernels do.
        lowered: the nodes, in the order of the graph.
        nodes_before, nodes_after: nodes of the main graph and of bodies with fused nodes.
        notes: what else is to be known, e.g. nodes that onnxruntime still does not run.
        exit: 0, or 3 where there is nothing to lower.
    """

    model: str
    output: str | None
    rounding: bool
    lowered: tuple[Lowered, ...]
    nodes_before: int
    nodes_after: int
    notes: tuple[str, ...]
    exit: int


def lower(
    fused: Path,
    output: Path,
    *,
    rounding: bool = True,
    linear_attention: AttentionMode = "auto",
    progress: Progress | None = None,
    external_data: ExternalData | None = None,
    allow_outside: bool = False,
) -> LowerReport:
    """Writes a file that onnxruntime runs; any batch, sequence lengths, slots and head counts.

    Args:
        fused: the file to read; never written.
        output: the file to write. External data is left where it is in the same folder, else copied.
        rounding: round to float16 (or bfloat16) where the kernels do. Without it the Casts that a fuse put around them
            are passed too: the file computes in the unfused graph's own precision, which is for telling a wrong
            result from a rounded one.
        linear_attention: lower LinearAttention and CausalConvWithState ``auto``: where the installed onnxruntime lacks
            them, ``always`` (the file goes to another machine) or ``never``.
        progress: told about stages.
        external_data: what becomes of external data, see `deltafuse.options.FuseOptions`.
        allow_outside: see there.

    Raises:
        UserError: what scanning and writing raise; ``custom-malformed``, ``attention-malformed``, ``conv-malformed``,
            ``opset-too-old``, ``dtype-unknown``.
    """
    shown = progress or SilentProgress()
    check_output(output, [fused])
    shown.start("lowering")
    model = scan(fused, allow_outside=allow_outside)
    scopes = _scopes(model)
    chosen = [_chosen(scope, linear_attention) for scope in scopes]
    notes = _notes(model, chosen[0])
    before = sum(len(scope.model.graph.op) - scope.model.graph.outer for scope in scopes)
    if not any(chosen):
        return LowerReport(str(fused), None, rounding, (), before, before, (_NOTHING, *notes), 3)
    _check_opset(model)
    names = _labels(scopes, chosen)
    parts = [_changes(*part, rounding) for part in zip(scopes, chosen, names, strict=True)]
    opsets = lowered_opsets(scopes, chosen)
    changes = [replace(change, opsets=() if index else opsets) for index, (_, change) in enumerate(parts)]
    notes = (*notes, *opset_notes(scopes, chosen, opsets))
    old = model.metadata_parts.get(record.KEY, ())
    cuts = [Edit(part.field, part.end, b"", "", "metadata") for part in old]
    shown.start("writing")
    mark = [] if is_lowered(model) else [edits.append_metadata(model, KEY, "fuse lower")]
    raw = [edit for scope, one in zip(scopes, changes, strict=True) for edit in edits.edits_of(scope.model, one)]
    built = edits.with_sizes(model, [*raw, *cuts, *mark])
    receipt = record.publish(model, built, output, "none", progress=shown.advance, how=external_data)
    new = sum(len(insertion.nodes) for change in changes for insertion in change.inserted)
    after = before + new - sum(len(nodes) for change in changes for _, nodes in change.removed)
    found = tuple(node for lowered, _ in parts for node in lowered)
    return LowerReport(str(fused), str(output), rounding, found, before, after, (*notes, *receipt.notes), 0)


def _scopes(model: Model) -> list[Enclosed]:
    """The main graph in the file's order, and the bodies in it that hold fused nodes."""
    return [Enclosed.main(model), *(one for one in fused_bodies(model) if isinstance(one, Enclosed))]


_NOTHING = (
    "nothing to lower: there is no Custom node of the gated delta rule, and no LinearAttention or CausalConvWithState "
    "that onnxruntime lacks"
)


def _chosen(scope: Enclosed, mode: AttentionMode) -> list[int]:
    """The nodes to lower."""
    graph, known = scope.model.graph, dict[tuple[str, str, int], bool]()
    chosen: list[int] = []
    for index, (op, domain) in enumerate(zip(graph.op, graph.domain, strict=True)):
        if op == "Custom" and fused_type(graph.node(index)):
            chosen.append(index)
        elif mode != "never" and (is_linear_attention(op, domain) or is_causal_conv(op, domain)):
            dtype = next((scope.shapes.dtype(value) for value in graph.node_inputs[index] if value), None)
            key = op, domain, dtype or int(TensorProto.FLOAT)
            if key not in known:
                known[key] = mode == "always" or not _runs(*key)
            chosen += [index] * known[key]
    return chosen


def _runs(op: str, domain: str, dtype: int) -> bool:
    """Whether the installed onnxruntime has an operator that it may lack."""
    return runtime_has_conv(domain, dtype) if op == CAUSAL_CONV else runtime_has(domain, dtype)


def _check_opset(model: Model) -> None:
    opset = model.opset_imports.get("", 0)
    if opset < _OPSET:
        raise UserError(
            "opset-too-old",
            f"{model.path} is of opset {opset} and the plain form needs {_OPSET}: export it again with a newer opset, "
            "or convert it with onnx.version_converter",
        )


def _changes(
    scope: Enclosed, chosen: Sequence[int], names: Sequence[str], rounding: bool
) -> tuple[tuple[Lowered, ...], Changes]:
    graph, shapes = scope.model.graph, scope.shapes
    found: list[Lowered] = []
    inserted: list[Insertion] = []
    removed: list[tuple[str, tuple[int, ...]]] = []
    replaced: set[int] = set()
    idle: list[int] = []
    for index, name in zip(chosen, names, strict=True):
        node = graph.node(index)
        site = site_of(node)
        found.append(Lowered(name, fused_type(node) or node.op_type, site))
        dtypes = _dtypes(shapes, index, node)
        passed = rounding or node.op_type == CAUSAL_CONV
        around = Bypass(node, dtypes) if passed else bypass(graph, index, f"{name}/unrounded", dtypes)
        around.node.name = name
        label = site or name
        inserted.append(Insertion(label, index, (*around.before, *_plain(around, rounding), *around.after)))
        # what two fused nodes share is replaced once
        fresh = {at: nodes for at, nodes in around.replaced.items() if at not in replaced}
        inserted += [Insertion(label, at, nodes) for at, nodes in fresh.items()]
        removed.append((label, (index, *fresh)))
        replaced.update(fresh)
        idle += around.idle
    gone = dead(graph, [node for _, nodes in removed for node in nodes], idle)
    if gone:
        removed.append(("", tuple(sorted(gone))))
    return tuple(found), Changes(tuple(removed), tuple(inserted))


def _labels(scopes: Sequence[Enclosed], chosen: Sequence[Sequence[int]]) -> list[list[str]]:
    """A name of its own for each node: the new ones are named below it, and no body may use a name from around it."""
    pairs = [(scope.model.place, scope.model.graph, some) for scope, some in zip(scopes, chosen, strict=True)]
    count = Counter(graph.node_name(index) for _, graph, some in pairs for index in some)
    return [[_label(place, graph, index, count) for index in some] for place, graph, some in pairs]


def _label(place: str, graph: Graph, index: int, count: Counter[str]) -> str:
    name = graph.node_name(index)
    if name and count[name] == 1:
        return name
    first = next(value for value in graph.node_outputs[index] if value)
    return "/".join(filter(None, (place, graph.name(first))))


def _dtypes(shapes: Shapes, index: int, node: NodeProto) -> tuple[int, int]:
    """Element types of a node's two results; the first is that of its operands too."""
    if fused_type(node):
        call = read_call(node)
        if isinstance(call, Reason):
            raise UserError(call.code, call.text)
        return call.dtype, call.dtype
    graph = shapes.graph
    inputs, outputs = graph.node_inputs[index], (*graph.node_outputs[index], 0)
    dtype = shapes.dtype(inputs[0]) or _declared(graph, outputs[0])
    if dtype is None:
        raise UserError(
            "dtype-unknown",
            f"the element type of {graph.name(inputs[0])}, the first input of {node.name}, is not known: "
            "run onnx shape inference on the model first",
        )
    past = inputs[3] if len(inputs) > 3 and node.op_type == LINEAR_ATTENTION else 0
    return dtype, (shapes.dtype(past) if past else _declared(graph, outputs[1])) or dtype


def _plain(around: Bypass, rounding: bool) -> list[NodeProto]:
    if fused_type(around.node):
        return lower_node(around.node, rounding=rounding)
    if around.node.op_type == CAUSAL_CONV:
        return lower_conv(around.node, around.dtypes[0])
    return lower_attention(around.node, *around.dtypes)


def _declared(graph: Graph, value: int) -> int | None:
    info = graph.value_info(value)
    return None if info is None else info.type.tensor_type.elem_type or None


def _notes(model: Model, chosen: Sequence[int]) -> tuple[str, ...]:
    graph = model.graph
    customs = [index for index, op in enumerate(graph.op) if op == "Custom" and not graph.domain[index]]
    left = [graph.node(index) for index in sorted(set(customs) - set(chosen))]
    notes = [f"onnxruntime does not know the Custom node {_title(node)}: it is left as it is" for node in left]
    notes += [f"left as it is: {reason.text}" for reason in fused_bodies(model) if isinstance(reason, Reason)]
    if any(model.mapped.find(name, *span) >= 0 for name in _NAMES for span in model.functions):
        notes.append("a fused node inside a local function is left as it is: inline functions with onnx.inliner")
    return tuple(notes)


def _title(node: onnx.NodeProto) -> str:
    kinds = [attribute.s.decode() for attribute in node.attribute if attribute.name == "type"]
    return f"{node.name or ', '.join(node.output)} ({', '.join(kinds) or 'no type'})"
