"""Writes ONNX models in encodings that are legal and that Python's protobuf does not write, and makes small models."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import onnx
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from onnx import TensorProto, helper, parser

from deltafuse import edits, wire


@dataclass(frozen=True)
class Form:
    """How to write a message.

    Attributes:
        pad: bytes that a varint (a tag, a length, a number) has in excess.
        packed: repeated numbers as one length-delimited field, where the message's definition leaves them unpacked.
        unpacked: the other way round.
        graph_first: the model's graph before its ir_version; in all other messages the fields in falling order too.
        unknown: fields of unknown numbers, of every wire type, in every message.
        split: submessages that are not repeated are written in two parts.
    """

    pad: int = 0
    packed: bool = False
    unpacked: bool = False
    graph_first: bool = False
    unknown: bool = False
    split: bool = False


FORMS = {
    "packed-dims": Form(packed=True),
    "graph-before-ir-version": Form(graph_first=True),
    "unknown-field": Form(unknown=True),
    "non-minimal-varints": Form(pad=2),
    "split-submessage": Form(split=True),
    "unpacked-numbers": Form(unpacked=True),
    "all-at-once": Form(pad=1, packed=True, graph_first=True, unknown=True, split=True),
}


def encode(message: Message, form: Form) -> bytes:
    """Serialises a message in that form."""
    return b"".join(_fields(message, form))


def varint(value: int, pad: int = 0) -> bytes:
    value &= (1 << 64) - 1
    out = bytearray()
    while True:
        out.append(value & 0x7F | 0x80)
        value >>= 7
        if not value:
            break
    out += b"\x80" * min(pad, 10 - len(out))
    out[-1] &= 0x7F
    return bytes(out)


def _fields(message: Message, form: Form) -> list[bytes]:
    listed = message.ListFields()
    if form.graph_first:
        listed.reverse()
    pieces: list[bytes] = []
    for field, value in listed:
        repeated = hasattr(value, "append") or hasattr(value, "add")
        values = list(value) if repeated else [value]
        numbers = field.type not in (
            FieldDescriptor.TYPE_MESSAGE,
            FieldDescriptor.TYPE_STRING,
            FieldDescriptor.TYPE_BYTES,
        )
        if numbers and repeated and (form.packed or (_packed(field) and not form.unpacked)):
            pieces.append(_length_delimited(field.number, b"".join(_number(field, v, form) for v in values), form))
        elif numbers:
            pieces += [_tag(field.number, _wire(field), form) + _number(field, v, form) for v in values]
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            for v in values:
                pieces += _submessage(field.number, v, form, repeated)
        else:
            raw = [v.encode() if isinstance(v, str) else v for v in values]
            pieces += [_length_delimited(field.number, v, form) for v in raw]
    return [*pieces, _unknown(form)] if form.unknown else pieces


def _submessage(number: int, message: Message, form: Form, repeated: bool) -> list[bytes]:
    parts = _fields(message, form)
    if not form.split or repeated or len(parts) < 2:
        return [_length_delimited(number, b"".join(parts), form)]
    middle = len(parts) // 2
    return [_length_delimited(number, b"".join(half), form) for half in (parts[:middle], parts[middle:])]


def _packed(field: FieldDescriptor) -> bool:
    return bool(field.GetOptions().packed)


def _wire(field: FieldDescriptor) -> int:
    return {FieldDescriptor.TYPE_FLOAT: 5, FieldDescriptor.TYPE_DOUBLE: 1}.get(field.type, 0)


def _number(field: FieldDescriptor, value: float, form: Form) -> bytes:
    if field.type == FieldDescriptor.TYPE_FLOAT:
        return struct.pack("<f", value)
    if field.type == FieldDescriptor.TYPE_DOUBLE:
        return struct.pack("<d", value)
    return varint(int(value), form.pad)


def _tag(number: int, wire_type: int, form: Form) -> bytes:
    # a tag of a known field may take at most five bytes
    return varint(number << 3 | wire_type, min(form.pad, 3))


def _length_delimited(number: int, payload: bytes, form: Form) -> bytes:
    # lengths must fit five bytes too
    return _tag(number, 2, form) + varint(len(payload), min(form.pad, 2)) + payload


def _unknown(form: Form) -> bytes:
    group = _tag(500, 3, form) + _length_delimited(7, b"in a group", form) + _tag(500, 4, form)
    return b"".join(
        [
            _tag(501, 0, form) + varint(300, form.pad),
            _tag(502, 1, form) + b"8 bytes.",
            _tag(503, 5, form) + b"four",
            _length_delimited(504, b"unknown", form),
            group,
        ]
    )


STEP = """
<ir_version: 9, opset_import: ["" : 18, "com.example" : 1], producer_name: "tests", producer_version: "1",
 metadata_props: ["task": "step"]>
step (float[batch, H, K] q, float[batch, H, K] k, float[batch, H, V] v, float[batch, H] g, float[batch, H] beta,
      float[batch, H, K, V] state)
  => (float[batch, H, V] out, float[batch, H, K, V] new_state)
  <float[1] minus = {-1.0}, int64[2] both = {2, 3}, float[batch, H] decay, float[batch, H, 1, 1] decay4,
   float[batch, H, K, V] decayed, float[batch, H, K, 1] k4, float[batch, H, V] memory>
{
  decay = Exp (g)
  decay4 = Unsqueeze (decay, both)
  decayed = Mul (state, decay4)
  last = Constant <value: tensor = int64[1] {-1}> ()
  k4 = Unsqueeze (k, last)
  read = Mul (decayed, k4)
  axis = Constant <value_ints: ints = [-2]> ()
  memory = ReduceSum <keepdims: int = 0> (read, axis)
  error = Sub (v, memory)
  beta3 = Unsqueeze (beta, last)
  delta = Mul (error, beta3)
  delta4 = Unsqueeze (delta, axis)
  write = Mul (k4, delta4)
  new_state = Add (decayed, write)
  half = Constant <value_float: float = 0.5> ()
  scaled = Mul (q, half)
  q4 = Unsqueeze (scaled, last)
  seen = Mul (new_state, q4)
  out = ReduceSum <keepdims: int = 0> (seen, axis)
}
"""


def step_model() -> onnx.ModelProto:
    """One step of the rule, with value_info, names and metadata on its nodes, an external Constant and a subgraph."""
    model = parser.parse_model(STEP)
    for index, node in enumerate(model.graph.node):
        node.name = f"/layers.0/node_{index}"
        node.metadata_props.add(key="scope", value=f"layers.0 {index}")
    model.graph.metadata_props.add(key="graph", value="kept")
    mask = external_tensor("", (4, 4), "step.data", offset=0, length=64)
    model.graph.node.insert(4, helper.make_node("Constant", [], ["mask"], name="mask", value=mask))
    branch = helper.make_graph(
        [helper.make_node("Add", ["decay", "bias"], ["sum"])],
        "branch",
        [],
        [helper.make_tensor_value_info("sum", TensorProto.FLOAT, None)],
        [helper.make_tensor("bias", TensorProto.FLOAT, [1], [0.0])],
    )
    yes = helper.make_node("Constant", [], ["yes"], value=helper.make_tensor("", TensorProto.BOOL, [], [True]))
    choice = helper.make_node("If", ["yes"], ["chosen"], name="choice", then_branch=branch, else_branch=branch)
    model.graph.node.extend([yes, choice])
    model.graph.output.append(helper.make_tensor_value_info("chosen", TensorProto.FLOAT, ["batch", "H"]))
    return model


def external_tensor(
    name: str, dims: tuple[int, ...], location: str, offset: int | None = None, length: int | None = None
) -> TensorProto:
    """A float32 tensor whose data lies in another file."""
    tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=dims, data_location=TensorProto.EXTERNAL)
    entries = {"location": location, "offset": offset, "length": length}
    for key, value in entries.items():
        if value is not None:
            tensor.external_data.add(key=key, value=str(value))
    return tensor


def write(path: Path, model: onnx.ModelProto, form: Form | None = None) -> wire.Model:
    """Writes a model, plainly or in a form, and scans it."""
    path.write_bytes(model.SerializeToString() if form is None else encode(model, form))
    return wire.scan(path)


def edited(path: Path, change: Callable[[onnx.ModelProto], object]) -> None:
    """Changes a file as a user's tool would: load, change, save."""
    model = onnx.load(path, load_external_data=False)
    change(model)
    path.write_bytes(model.SerializeToString())


SITES = ("layers.0", "layers.1")


def random_changes(scanned: wire.Model, rng: random.Random, moves: bool = True) -> edits.Changes:
    """Two sites' worth of nodes out and others in, a node moved, declarations retyped, an opset imported.

    The values that something outside a site reads stay written; the order need not be topological where a node moves.
    """
    graph = scanned.graph
    count, free = len(graph.op), set(range(len(graph.op)))
    removed: list[tuple[str, tuple[int, ...]]] = []
    inserted: list[edits.Insertion] = []
    for site in SITES:
        first = rng.randrange(count)
        nodes = {node for node in range(first, min(count, first + rng.choice([1, 3, 8]))) if rng.random() < 0.9} & free
        free -= nodes
        removed.append((site, tuple(sorted(nodes))))
        kept = [v for node in nodes for v in graph.node_outputs[node] if v and _is_read(graph, v, nodes)]
        inserted.append(_stand_ins(graph, site, min(nodes, default=rng.randrange(count + 1)), kept))
    moved = (
        [(SITES[0], node, rng.randrange(count + 1)) for node in rng.sample(sorted(free), 1)] if moves and free else []
    )
    return edits.Changes(
        tuple(removed),
        tuple(inserted),
        tuple(move for move in moved if move[1] != move[2]),
        tuple((value, _seven(graph, value)) for value in rng.sample(sorted(graph.type_spans), 4)),
        (("com.new", 3),),
    )


def _is_read(graph: wire.Graph, value: int, nodes: set[int]) -> bool:
    return value in graph.outputs or any(reader not in nodes for reader in graph.consumers[value])


def _stand_ins(graph: wire.Graph, site: str, before: int, values: list[int]) -> edits.Insertion:
    one = helper.make_node("Constant", [], [f"{site}/one"], name=f"{site}/one", value_float=1.0)
    others = [helper.make_node("Identity", [f"{site}/one"], [graph.name(v)], name=f"{site}/{v}") for v in values]
    infos = [helper.make_tensor_value_info(f"{site}/one", TensorProto.FLOAT, [])]
    infos += [
        helper.make_tensor_value_info(graph.name(v), TensorProto.FLOAT, [5]) for v in values if v not in graph.outputs
    ]
    return edits.Insertion(site, before, (one, *others), tuple(infos))


def _seven(graph: wire.Graph, value: int) -> onnx.ValueInfoProto:
    info = graph.value_info(value)
    assert info is not None
    for dim in info.type.tensor_type.shape.dim[:1]:
        dim.dim_value = 7
    return info


def changed(model: onnx.ModelProto, scanned: wire.Model, changes: edits.Changes) -> onnx.ModelProto:
    """The same changes made with protobuf's own classes."""
    graph, nodes = scanned.graph, list(model.graph.node)
    slots: dict[int, list[onnx.NodeProto]] = {}
    for insertion in changes.inserted:
        slots.setdefault(insertion.before, []).extend(insertion.nodes)
    for _, node, before in changes.moved:
        slots.setdefault(before, []).append(nodes[node])
    away = {node for _, ids in changes.removed for node in ids}
    out_of_place = away | {node for _, node, _ in changes.moved}
    order: list[onnx.NodeProto] = []
    for index in range(len(nodes) + 1):
        order += slots.get(index, [])
        order += [nodes[index]] if index < len(nodes) and index not in out_of_place else []
    result = onnx.ModelProto()
    result.CopyFrom(model)
    del result.graph.node[:]
    result.graph.node.extend(order)
    written = {name for insertion in changes.inserted for node in insertion.nodes for name in node.output}
    gone = {graph.name(v) for node in away for v in graph.node_outputs[node]} - written
    new = {info.name: info for insertion in changes.inserted for info in insertion.value_info}
    fresh = [info for info in new.values() if not any(info.name == old.name for old in model.graph.value_info)]
    retyped = {graph.name(value): info for value, info in changes.retyped}
    kept = [info for info in model.graph.value_info if info.name not in gone]
    del result.graph.value_info[:]
    result.graph.value_info.extend([new.get(i.name) or retyped.get(i.name) or i for i in kept] + fresh)
    for info in (*result.graph.input, *result.graph.output):
        info.CopyFrom(retyped.get(info.name, info))
    result.opset_import.extend(helper.make_opsetid(domain, version) for domain, version in changes.opsets)
    result.DiscardUnknownFields()
    return result
