"""Looks at a graph before it is edited: tables of tensors, of nodes, of operator counts.

Any ONNX model; only its main graph is listed. Nothing is run, nothing is proven, no weight is read.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal, TypeAlias

import onnx

from deltafuse.dims import Dim
from deltafuse.dtypes import dtype_name
from deltafuse.errors import UserError
from deltafuse.fused import fused_type
from deltafuse.graph import Graph
from deltafuse.near_names import unmatched
from deltafuse.shapes import Shapes
from deltafuse.tensors import TensorHead
from deltafuse.wire import Model, scan
from deltafuse.wording import number

__all__ = ["Kind", "Listing", "NodeRow", "TensorRow", "listing"]

#: where a tensor comes from; ``unknown`` is read and nothing writes it
Kind: TypeAlias = Literal["input", "initializer", "constant", "node", "unknown"]

#: More tensors than this are not inferred in a graph of more nodes than that: it would take ten seconds, not one.
_MANY_TENSORS, _MANY_NODES = 2_000, 50_000
_NAMES = {"FLOAT": "float32", "DOUBLE": "float64"}
#: bits of an element of the types whose elements share bytes
_PACKED = {"INT4": 4, "UINT4": 4, "FLOAT4E2M1": 4, "INT2": 2, "UINT2": 2}
_CONTROL = frozenset({"If", "Loop", "Scan", "SequenceMap"})


@dataclass(frozen=True)
class TensorRow:
    """One value of the graph.

    Attributes:
        kind: see `Kind`.
        dtype: e.g. ``float32``; None where it is not known.
        shape: a number or the text of a symbolic size for each axis, None for an axis of unknown size; None where not
            even the rank is known.
        bytes: size of its elements; None where a size is not known.
        producer, producer_op: index and operator of the node that writes it, None where none does.
        consumers: how many nodes read it, by their subgraphs included.
        output: whether it is a graph output.
        location: the external data file it lies in, None where it lies in the model.
        offset: where in that file.
    """

    name: str
    kind: Kind
    dtype: str | None
    shape: tuple[int | str | None, ...] | None
    bytes: int | None
    producer: int | None
    producer_op: str | None
    consumers: int
    output: bool
    location: str | None
    offset: int | None


@dataclass(frozen=True)
class NodeRow:
    """One node; `index` counts the file's nodes from 0, an absent input is ""."""

    index: int
    name: str
    op: str
    domain: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    shapes: tuple[tuple[int | str | None, ...] | None, ...] | None = None


@dataclass(frozen=True)
class Listing:
    """What was asked for of a graph; None for what was not.

    Attributes:
        opsets: domain ("" for ai.onnx) -> version.
        node_count: nodes of the main graph.
        tensors: in order of first mention.
        nodes: in the order of the file.
        ops: operator -> count, most frequent first; operators of other domains as ``domain.Operator``.
        notes: what the tables leave out.
    """

    model: str
    producer: str
    ir_version: int
    opsets: dict[str, int]
    node_count: int
    tensors: tuple[TensorRow, ...] | None
    nodes: tuple[NodeRow, ...] | None
    ops: dict[str, int] | None
    notes: tuple[str, ...]


def listing(path: Path, *, tensors: str | None = None, nodes: str | None = None, ops: Sequence[str] = ()) -> Listing:
    """Lists parts of a model's main graph.

    Args:
        path: any ONNX file.
        tensors: regular expression that the names of the tensors to list match somewhere; "" for all, None for none.
        nodes: the same for nodes; one without a name goes by that of its first output.
        ops: operators whose nodes are to be listed, shell-style patterns such as ``Conv`` or ``com.microsoft.*``; a
            name without a domain is of every domain, and of a Custom node its type is a name too.

    Raises:
        UserError: ``bad-regex``; what scanning raises.
    """
    wanted_tensors, wanted_nodes = _regex(tensors), _regex(nodes)
    model = scan(path)
    graph = model.graph
    notes: list[str] = []
    found_tensors = found_nodes = counts = None
    if wanted_tensors is not None:
        found_tensors = _tensors(model, wanted_tensors, notes)
        if not found_tensors and tensors:
            names = [graph.name(value) for value in range(1, len(graph.value_names))]
            notes.append(unmatched("tensor", tensors, names))
    if wanted_nodes is not None or ops:
        found_nodes = _with_shapes(model, tuple(_nodes(graph, wanted_nodes or re.compile(""), ops)), notes)
        named = [_names(graph, row.index) for row in found_nodes]
        counted = Counter(names[0] for names in named)
        exact = {op: 0 for op in ops if not set(op) & set("*?[") and not any(op in names for names in named)}
        counts = dict(counted.most_common()) | exact
        notes += _unknown(graph, ops)
        if nodes and not any(_nodes(graph, re.compile(nodes), ())):
            notes.append(unmatched("node", nodes, [graph.label(node) for node in range(len(graph.op))]))
    held = sum(op in _CONTROL for op in graph.op)
    if held:
        held_in = number(held, "node has subgraphs", "nodes have subgraphs")
        notes.append(f"{held_in} (If, Loop, Scan), whose nodes and tensors are not listed")
    return Listing(
        str(path), model.producer, model.ir_version, dict(model.opset_imports), len(graph.op),
        found_tensors, found_nodes, counts, tuple(notes),
    )  # fmt: skip


def _unknown(graph: Graph, ops: Sequence[str]) -> Iterator[str]:
    """Notes on operators that no node has, with those that may be meant."""
    known = {name for index in range(len(graph.op)) for name in _names(graph, index)} if ops else set[str]()
    for op in ops:
        if not any(fnmatchcase(name, op) for name in known):
            folded = {name.casefold(): name for name in sorted(known)}
            near = [folded[name] for name in difflib.get_close_matches(op.casefold(), folded, 3)]
            yield f"no node has the operator {op}" + (f"; did you mean {' or '.join(near)}?" if near else "")


def title(op: str, domain: str, kind: str = "") -> str:
    """An operator with its domain, ``ai.onnx`` left out, and the type of a Custom node."""
    return f"{domain}.{op}" if domain else f"{op} {kind}" if kind else op


def _regex(text: str | None) -> re.Pattern[str] | None:
    try:
        return None if text is None else re.compile(text)
    except re.error as error:
        raise UserError(
            "bad-regex", f"{text!r} is not a regular expression ({error}): put a backslash before . [ ( * + ?"
        ) from None


def _names(graph: Graph, node: int) -> tuple[str, ...]:
    """What an operator goes by: its title first, then its name alone, then the type of a Custom node."""
    op, domain = graph.op[node], graph.domain[node]
    kind = fused_type(graph.node(node)) if op == "Custom" else ""
    return (title(op, domain, kind or ""), op, *filter(None, (kind,)))


def _nodes(graph: Graph, wanted: re.Pattern[str], ops: Sequence[str]) -> Iterator[NodeRow]:
    known: dict[tuple[str, str], bool] = {}
    for index, key in enumerate(zip(graph.op, graph.domain, strict=True)):
        # The nodes of one operator answer alike; Custom nodes have a type each.
        chosen = None if key[0] == "Custom" else known.get(key)
        if chosen is None:
            chosen = not ops or any(fnmatchcase(name, glob) for name in _names(graph, index) for glob in ops)
            known[key] = chosen
        if not chosen:
            continue
        name = graph.node_name(index)
        outputs = tuple(map(graph.name, graph.node_outputs[index]))
        if wanted.search(name or next(filter(None, outputs), "")):
            yield NodeRow(index, name, *key, tuple(map(graph.name, graph.node_inputs[index])), outputs)


def _with_shapes(model: Model, rows: tuple[NodeRow, ...], notes: list[str]) -> tuple[NodeRow, ...]:
    """Rows with the shapes of their outputs, where that is cheap."""
    graph = model.graph
    if len(rows) > _MANY_TENSORS and len(graph.op) > _MANY_NODES:
        written = number(len(rows), "node writes", "nodes write")
        notes.append(f"shapes of what {written} were not inferred: list fewer with --nodes REGEX")
        return rows
    shapes = Shapes(model)
    known = {row.index: [shapes.shape(value) for value in graph.node_outputs[row.index]] for row in rows}
    return tuple(
        replace(
            row, shapes=tuple(None if one is None else tuple(_size(shapes, d) for d in one) for one in known[row.index])
        )
        for row in rows
    )


def _tensors(model: Model, wanted: re.Pattern[str], notes: list[str]) -> tuple[TensorRow, ...]:
    graph = model.graph
    chosen = [value for value in range(1, len(graph.value_names)) if wanted.search(graph.name(value))]
    shapes = None if len(chosen) > _MANY_TENSORS and len(graph.op) > _MANY_NODES else Shapes(model)
    if shapes is None:
        notes.append(f"shapes of {number(len(chosen), 'tensor')} were not inferred: list fewer with --tensors REGEX")
    inputs, outputs = set(graph.inputs), set(graph.outputs)
    return tuple(_row(graph, value, inputs, outputs, shapes) for value in chosen)


def _row(graph: Graph, value: int, inputs: set[int], outputs: set[int], shapes: Shapes | None) -> TensorRow:
    node = graph.producer[value]
    head = graph.initializers.get(value) or (graph.constant_head(node) if node >= 0 else None)
    kind: Kind = "input" if value in inputs else "unknown" if node < 0 else "node"
    if head is not None:
        kind = "initializer" if value in graph.initializers else "constant"
    dtype, shape = _type(graph, value, head, shapes)
    external = {} if head is None else head.external
    return TensorRow(
        graph.name(value), kind, None if dtype is None else short_dtype(dtype), shape, byte_size(dtype, shape),
        None if node < 0 else node, None if node < 0 else title(graph.op[node], graph.domain[node]),
        len(graph.consumers[value]), value in outputs, external.get("location"),
        head.offset if head is not None and external else None,
    )  # fmt: skip


def _type(
    graph: Graph, value: int, head: TensorHead | None, shapes: Shapes | None
) -> tuple[int | None, tuple[int | str | None, ...] | None]:
    """Element type and shape: what the file says of a constant, what follows from data flow, or what is declared."""
    if head is not None:
        return head.dtype or None, head.dims
    if shapes is not None:
        shape = shapes.shape(value)
        known = None if shape is None else tuple(_size(shapes, dim) for dim in shape)
        return shapes.dtype(value), known
    info = graph.value_info(value)
    if info is None or info.type.WhichOneof("value") != "tensor_type":
        return None, None
    tensor = info.type.tensor_type
    dims = tuple(dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None for dim in tensor.shape.dim)
    return tensor.elem_type or None, dims if tensor.HasField("shape") else None


def _size(shapes: Shapes, dim: Dim) -> int | str | None:
    if isinstance(dim, int):
        return dim
    return str(dim) if shapes.is_known(dim) else None


def short_dtype(dtype: int) -> str:
    """``float32``, ``float64`` for what onnx calls FLOAT and DOUBLE."""
    name = dtype_name(dtype)
    return _NAMES.get(name.upper(), name)


def tensor_text(dtype: int | None, shape: Sequence[Dim | str | None] | None) -> str:
    """``float16 [batch, 32, 128]``, as far as it is known."""
    sizes = "" if shape is None else f"[{', '.join('?' if size is None else str(size) for size in shape)}]"
    return " ".join(filter(None, ["" if not dtype else short_dtype(dtype), sizes]))


def byte_size(dtype: int | None, shape: tuple[int | str | None, ...] | None) -> int | None:
    """Bytes of a tensor, None where type or sizes are not known."""
    if shape is None or dtype is None or dtype not in onnx.helper.get_all_tensor_dtypes():
        return None
    count = 1
    for size in shape:
        if not isinstance(size, int):
            return None
        count *= size
    name = onnx.TensorProto.DataType.Name(dtype)
    if name == "STRING":
        return None
    bits = _PACKED.get(name) or onnx.helper.tensor_dtype_to_np_dtype(dtype).itemsize * 8
    size = (count * bits + 7) // 8
    return size if size < 1 << 63 else None
