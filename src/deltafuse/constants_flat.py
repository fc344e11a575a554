"""All constants of a model, those of its subgraphs too, in one graph with names of their own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from onnx import GraphProto, NodeProto, TensorProto, helper, numpy_helper

from deltafuse.constant_pairs import LOST, Pairs, held, made, unknown
from deltafuse.constant_types import made_type
from deltafuse.scope import SHAPES
from deltafuse.worker import AnyArray

#: Operators that make or move numbers and change none.
EXACT = frozenset({
    "Constant", "ConstantOfShape", "Identity", "Reshape", "Unsqueeze", "Squeeze", "Flatten", "Transpose", "Expand",
    "Tile", "Concat", "Slice", "Gather", "Split",
})  # fmt: skip


class State(IntEnum):
    """What is known of a value: all of it; that no data is in it; nothing. A node's result is the largest of these."""

    WHOLE = 1
    LOOSE = 2
    DATA = 3


@dataclass(frozen=True)
class Held:
    """A value of a scope.

    Attributes:
        name: in the flat graph; "" for data.
        dtype: its element type, 0 where it is not known.
    """

    name: str
    state: State
    dtype: int = 0


_DATA = Held("", State.DATA)


def rounds(node: NodeProto) -> bool:
    """Whether an operator may round its result."""
    return bool(node.domain) or node.op_type not in EXACT


def needed(ordered: Sequence[NodeProto], read: Iterable[str]) -> list[NodeProto]:
    """The nodes behind what is read."""
    wanted, nodes = set(read), list[NodeProto]()
    for node in reversed(ordered):
        if not wanted.isdisjoint(node.output):
            wanted.update(node.input)
            nodes.append(node)
    return nodes[::-1]


@dataclass
class Flat:
    """The graph.

    Attributes:
        leaf: name of a value of the main graph -> what it is, where that follows from sizes; None elsewhere.
        sizes: inputs of the main graph that hold no data.
        nodes: that compute constants, in order.
        loose: those too that make constants in a shape that is not known.
        tensors: what they start from.
        read: constants that something else reads -> their names in the model.
        read_loose: the same of those in a shape that is not known, where data meets them.
        types, sources: element types of all of them, 0 where they are not known; their names in the model.
    """

    leaf: Callable[[str], AnyArray | None]
    sizes: Collection[str]
    nodes: list[NodeProto] = field(default_factory=list[NodeProto])
    loose: list[NodeProto] = field(default_factory=list[NodeProto])
    tensors: list[TensorProto] = field(default_factory=list[TensorProto])
    read: dict[str, str] = field(default_factory=dict[str, str])
    read_loose: dict[str, str] = field(default_factory=dict[str, str])
    types: dict[str, int] = field(default_factory=dict[str, int])
    sources: dict[str, str] = field(default_factory=dict[str, str])

    def walk(self, graph: GraphProto, around: Mapping[str, Held] | None = None) -> dict[str, Held]:
        """Collects the constants of a scope.

        Args:
            graph: the scope.
            around: its inputs, and the values of the scopes around it; None for the main graph.

        Returns:
            The same and its own values.
        """
        known = dict(around or {}) | {"": Held("", State.WHOLE)}
        if around is None:
            types = {info.name: info.type.tensor_type.elem_type for info in graph.input}
            known |= {name: self._given(name, dtype) for name, dtype in types.items()}
        for tensor in graph.initializer:
            known[tensor.name] = self._hold(tensor)
        for node in graph.node:
            found = None if around is not None else self._settled(node, known)
            known.update(self._made(node, known) if found is None else {node.output[0]: found})
        self._note([info.name for info in graph.output], known, loose=around is None)
        return known

    def pairs(self) -> dict[str, Pairs]:
        """The numbers of what is read in a shape that is not known."""
        nodes = needed(self.loose, self.read_loose)
        start = {name for node in nodes for name in node.input}
        found = {tensor.name: held(tensor) for tensor in self.tensors if tensor.name in start}
        for node in nodes:
            given = [found.get(name, LOST) if name else None for name in node.input]
            for name in node.output:
                dtype = self.types.get(name, 0)
                found[name] = made(node, given, dtype, exact=not rounds(node)) if node.op_type else unknown(dtype)
        return found

    def _given(self, name: str, dtype: int) -> Held:
        """An input of the main graph."""
        if name not in self.sizes:
            return Held("", State.DATA, dtype)
        array = self.leaf(name)
        return self._any(dtype) if array is None else self._hold(numpy_helper.from_array(array))

    def _settled(self, node: NodeProto, known: Mapping[str, Held]) -> Held | None:
        """What follows from sizes, and not from constants alone."""
        if len(node.output) != 1 or (node.input and all(known.get(n, _DATA).state == State.WHOLE for n in node.input)):
            return None
        array = None if not node.input else self.leaf(node.output[0])
        return None if array is None else self._hold(numpy_helper.from_array(array))

    def _made(self, node: NodeProto, known: Mapping[str, Held]) -> dict[str, Held]:
        """The values that a node makes."""
        given = [known.get(name, _DATA) for name in node.input]
        inner = bodies(node)
        if inner:
            self._note(node.input, known, loose=False)
            results = self._entered(node, inner, given, known)
            results += [_DATA] * (len(node.output) - len(results))
            return {name: value for name, value in zip(node.output, results, strict=False) if name}
        dtype, op = made_type(node, [value.dtype for value in given]), node
        if node.op_type == "CastLike" and len(given) == _OPERANDS and dtype:
            # Of the other operand only the type is read.
            op, given = helper.make_node("Cast", [node.input[0]], list(node.output), to=dtype), given[:1]
        elif node.op_type in SHAPES and given[0].state != State.WHOLE:
            given = [Held("", State.LOOSE)]
        own = bool(node.input) or (not node.domain and node.op_type == "Constant")
        state = max([value.state for value in given], default=State.WHOLE)
        state = state if own else max(state, State.LOOSE)
        if state != State.WHOLE:
            self._note(node.input, known, loose=state == State.DATA)
        if state == State.DATA:
            return {name: Held("", State.DATA, dtype) for name in node.output if name}
        return self._put(op, given, state, dtype)

    def _put(self, node: NodeProto, given: Sequence[Held], state: State, dtype: int) -> dict[str, Held]:
        copy = NodeProto()
        copy.CopyFrom(node)
        copy.input[:] = [value.name for value in given]
        values = {name: Held(self._fresh(dtype), state, dtype) for name in node.output if name}
        copy.output[:] = [values[name].name if name else "" for name in node.output]
        self.sources.update((value.name, name) for name, value in values.items())
        self.loose.append(copy)
        if state == State.WHOLE:
            self.nodes.append(copy)
        return values

    def _entered(
        self, node: NodeProto, inner: Sequence[GraphProto], given: Sequence[Held], known: Mapping[str, Held]
    ) -> list[Held]:
        """What comes out of the subgraphs of a node."""
        chosen = node.op_type == "If"
        results: list[list[Held]] = []
        for body in inner:
            inputs = self._inputs(node, body, given, known)
            found = self.walk(body, {**known, **inputs})
            results.append([found.get(info.name, _DATA) for info in body.output])
        steers = {"If": given[:1], "Loop": [*given[:_CARRIED], *results[0][:1]], "Scan": []}
        self._meets(steers.get(node.op_type, given))
        if chosen and given[0].state == State.DATA:
            return []
        if chosen:
            return [self._one_of(parts) for parts in zip(*results, strict=False)]
        if node.op_type not in ("Loop", "Scan"):
            return []
        skipped = 1 if node.op_type == "Loop" else 0
        starts = given[1 + skipped :] if skipped else given[: len(given) - _scanned(node)]
        ends = results[0][skipped:]
        carried = [self._one_of([start, end]) for start, end in zip(starts, ends, strict=False)]
        return [*carried, *(self._one_of([end, end]) for end in ends[len(starts) :])]

    def _inputs(
        self, node: NodeProto, body: GraphProto, given: Sequence[Held], known: Mapping[str, Held]
    ) -> dict[str, Held]:
        """What the inputs of a subgraph are."""
        names = [info.name for info in body.input]
        if node.op_type not in ("Loop", "Scan") or len(names) != len(given):
            return dict.fromkeys(names, _DATA)
        first = _CARRIED if node.op_type == "Loop" else 0
        last = len(names) if first else len(names) - _scanned(node)
        inputs = {name: self._any(dtype) for name, dtype in zip(names[:first], _COUNTERS, strict=False)}
        inputs |= {name: self._one_of([value, value]) for name, value in zip(names[last:], given[last:], strict=True)}
        begins = dict(zip(names[first:last], given[first:last], strict=True))
        ends = [info.name for info in body.output][1 if first else 0 :]
        after = dict(zip(begins, ends, strict=False))
        data = _from_data(body, {**known, **inputs, **begins}, after)
        sources = {output: item.input[0] for item in body.node if item.op_type == "Identity" for output in item.output}
        for name, start in begins.items():
            end = after.get(name, "")
            while end in sources:
                end = sources[end]
            changed = start if end == name else self._any(start.dtype)
            inputs[name] = Held("", State.DATA, start.dtype) if name in data else changed
            self._meets([start] if changed != start else [])
        return inputs

    def _any(self, dtype: int) -> Held:
        """Something without data that is not the same in each step."""
        node = NodeProto(output=["any"])
        return self._put(node, [], State.LOOSE, dtype)["any"]

    def _one_of(self, parts: Sequence[Held]) -> Held:
        """Some of what one or the other holds."""
        dtypes = {part.dtype for part in parts}
        dtype = dtypes.pop() if len(dtypes) == 1 else 0
        if any(part.state == State.DATA for part in parts):
            self._meets(parts)
            return Held("", State.DATA, dtype)
        node = NodeProto(op_type="Concat", input=[part.name for part in parts], output=["one"])
        return self._put(node, parts, State.LOOSE, dtype)["one"]

    def _note(self, names: Iterable[str], known: Mapping[str, Held], *, loose: bool = True) -> None:
        for name in names:
            value = known.get(name, _DATA)
            if name and value.state == State.WHOLE:
                self.read[value.name] = name
            elif loose:
                self._meets([value])

    def _meets(self, values: Iterable[Held]) -> None:
        """Notes values of no known shape that data meets, or that say how often something is done."""
        self.read_loose.update({v.name: self.sources[v.name] for v in values if v.state == State.LOOSE})

    def _fresh(self, dtype: int) -> str:
        name = f"c{len(self.types) + 1}"
        self.types[name] = dtype
        return name

    def _hold(self, tensor: TensorProto) -> Held:
        own = TensorProto()
        own.CopyFrom(tensor)
        own.name = self._fresh(tensor.data_type)
        self.tensors.append(own)
        return Held(own.name, State.WHOLE, tensor.data_type)


#: Operands of a CastLike; inputs of a Loop's body that are not carried, and their types.
_OPERANDS, _CARRIED = 2, 2
_COUNTERS = (TensorProto.INT64, TensorProto.BOOL)


def bodies(node: NodeProto) -> list[GraphProto]:
    """The subgraphs of a node."""
    return [body for item in node.attribute for body in ([item.g] if item.HasField("g") else item.graphs)]


def _scanned(node: NodeProto) -> int:
    return next((attribute.i for attribute in node.attribute if attribute.name == "num_scan_inputs"), 0)


def _from_data(body: GraphProto, known: Mapping[str, Held], after: Mapping[str, str]) -> set[str]:
    """The carried values that data is in: in their start, or in what a step makes of them."""
    none = {name for name, value in known.items() if value.state != State.DATA}
    none |= {"", *(tensor.name for tensor in body.initializer)}
    while True:
        free = set(none)
        for node in body.node:
            if node.op_type in SHAPES or _reads(node) <= free:
                free.update(node.output)
        lost = {name for name, end in after.items() if end not in free and name in none}
        if not lost:
            return {name for name in after if name not in none}
        none -= lost


def _reads(node: NodeProto) -> set[str]:
    """All values that a node reads, in its subgraphs too."""
    found = set(node.input)
    for body in bodies(node):
        own = {tensor.name for tensor in body.initializer} | {info.name for info in body.input}
        own.update(name for item in body.node for name in item.output)
        read = {info.name for info in body.output}.union(*map(_reads, body.node))
        found |= read - own
    return found
