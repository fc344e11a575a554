"""What each value of a graph is: constant, shape, weight or data. One pass in file order.

Weights fence a rule in: they are never read. A float array of two or more axes may be either a weight or a structural
constant (a mask, an identity, a zero state): it is read, at most 1 MiB, and only where an operator that can hold a
structural constant takes it. The zero state of a real model is larger; it has four axes, as hardly a weight has.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import IntEnum

import numpy as np
from onnx import TensorProto

from deltafuse.graph import Graph, TensorHead
from deltafuse.reasons import Reason
from deltafuse.wire import Model, read_tensor


class Kind(IntEnum):
    """Kinds of value; a node's result is the largest kind among its inputs."""

    CONSTANT = 1
    SHAPE = 2
    WEIGHT = 3
    DATA = 4


#: The same as plain numbers: members of an enumeration are slow to look up and to compare.
_CONSTANT, _SHAPE, _DATA = int(Kind.CONSTANT), int(Kind.SHAPE), int(Kind.DATA)
#: A float array that may be a weight or structural: decided by `_Classifier.settle` when a node reads it.
_UNSETTLED = 5

_FLOATS = frozenset({
    TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE,
    TensorProto.FLOAT8E4M3FN, TensorProto.FLOAT8E5M2,
})  # fmt: skip

#: Operators whose float arrays are weights, whatever they hold.
_WEIGHTED = frozenset(
    {"Conv", "ConvTranspose", "Gemm", "Gather", "LSTM", "GRU", "RNN", "MatMulNBits", "DequantizeLinear"}
)

#: Operators whose result is not just the largest kind of their inputs.
_SPECIAL = frozenset({"SequenceEmpty", "CastLike", "Shape", "Size"})

#: Operators that hand an array on: whoever reads their result settles what it is.
_CARRIERS = frozenset({"Transpose", "Reshape", "Cast", "Identity", "Unsqueeze", "Squeeze"})

_LIMIT = 1 << 20
#: The same for arrays of so many axes, which may be zero states: sequences, heads and both head sizes.
_STATE_LIMIT, _STATE_AXES = 1 << 26, 4
#: A mask of one axis has at most this many elements: as many as a chunk has tokens.
_ROW = 256
#: IR version from which an initializer that is an input too is a default that may be overridden.
_OVERRIDES = 4
_INPUT = 11


def classify(model: Model) -> bytearray:
    """Kind of each value of the main graph, by value id; 0 for values that nothing produces."""
    kinds = classify_scope(model, model.graph, dict.fromkeys(model.graph.inputs, Kind.DATA), overridable(model))
    return kinds


def overridable(model: Model) -> frozenset[int]:
    """Initializers that are inputs too: whoever runs the model may give other values (from IR version 4 on).

    Before that every initializer had to be declared as an input, so it says nothing.

    Args:
        model: the file, or a body.

    Returns:
        Value ids.
    """
    if model.ir_version < _OVERRIDES:
        return frozenset()
    declared = {declaration.value for declaration in model.declarations if declaration.number == _INPUT}
    return frozenset(declared & model.graph.initializers.keys())


def sizes_of_data(graph: Graph, kinds: bytearray, ops: Collection[str]) -> frozenset[int]:
    """The results of operators that tell a size (of `ops`: Shape, Size) and read data."""
    return frozenset(
        graph.node_outputs[node][0]
        for node in graph.nodes_with(ops)
        if graph.standard[node] and kinds[graph.node_inputs[node][0]] == _DATA
    )


def classify_scope(model: Model, graph: Graph, given: Mapping[int, int], varying: Collection[int] = ()) -> bytearray:
    """Kind of each value of one scope.

    Args:
        model: whose file the scope is part of.
        graph: the scope.
        given: kinds of its inputs and of what it takes from around it.
        varying: initializers that are only defaults: no constants, though weights stay weights.
    """
    return _Classifier(model, graph).run(given, varying)


class _Classifier:
    def __init__(self, model: Model, graph: Graph) -> None:
        self._model = model
        self._graph = graph
        self._kinds = bytearray(len(graph.value_names))

    def run(self, given: Mapping[int, int], varying: Collection[int]) -> bytearray:
        graph, kinds = self._graph, self._kinds
        for value, kind in given.items():
            kinds[value] = kind
        for value, head in graph.initializers.items():
            kind = _of_tensor(head)
            kinds[value] = Kind.DATA if value in varying and kind == Kind.CONSTANT else kind
            if value in varying and kind == _UNSETTLED:
                kinds[value] = Kind.WEIGHT
        self._constants()
        self._propagate()
        kinds[0] = 0
        return kinds.replace(bytes([_UNSETTLED]), bytes([Kind.WEIGHT]))

    def _constants(self) -> None:
        """Settles the results of all Constant nodes."""
        graph, nodes = self._graph, self._graph.constant_nodes
        numbers = graph.attribute_numbers[0][nodes]
        _, firsts, same = np.unique(np.where(numbers > 0, numbers, -1 - nodes), return_index=True, return_inverse=True)
        kinds = np.array([self._of_constant(node) for node in nodes[firsts].tolist()], np.uint8)[same]
        values, counts = graph.writing.take(nodes)
        np.frombuffer(self._kinds, np.uint8)[values] = np.repeat(kinds, counts)

    def _propagate(self) -> None:
        """Settles each node's results, in file order: a loop over all nodes, so what is frequent comes first."""
        graph, kinds, captures = self._graph, self._kinds, self._graph.captures
        for node, (op, inputs, outputs) in enumerate(
            zip(graph.standard, graph.node_inputs, graph.node_outputs, strict=True)
        ):
            if op == "Constant":
                continue
            # An input that is left out is one; a node before may have left out a result.
            kinds[0], kind, all_known = _CONSTANT, 0, True
            for value in inputs:
                found = kinds[value]
                if found > kind:
                    kind = found
                elif not found:
                    all_known = False
            if op == "Shape" and kind == _DATA:
                kind = _SHAPE
            elif kind == _UNSETTLED or not all_known or not kind or op in _SPECIAL or node in captures:
                kind = self._of_node(node, op)
            for value in outputs:
                kinds[value] = kind

    def _of_constant(self, node: int) -> int:
        head = self._graph.constant_head(node)
        return Kind.CONSTANT if head is None else _of_tensor(head)

    def _of_node(self, node: int, op: str) -> int:
        kinds, graph = self._kinds, self._graph
        inputs = graph.node_inputs[node]
        if op == "SequenceEmpty":
            return Kind.CONSTANT
        if op == "CastLike":
            inputs = inputs[:1]
        if node in graph.captures:
            inputs = (*inputs, *graph.captures[node])
        kind = max([kinds[value] or _DATA for value in inputs], default=_DATA)
        if kind == _UNSETTLED and op not in _CARRIERS:
            for value in inputs:
                if kinds[value] == _UNSETTLED:
                    kinds[value] = self._settle(value, op)
            kind = max(kinds[value] or _DATA for value in inputs)
        if op in ("Shape", "Size") and kind != _CONSTANT:
            return _SHAPE
        return kind

    def _settle(self, value: int, op: str) -> int:
        head = self._source(value)
        if head is None or op in _WEIGHTED or (op == "MatMul" and _oblong(head)):
            return Kind.WEIGHT
        array = read_tensor(self._model, head, _limit(head))
        if isinstance(array, Reason) or not (_mask(array) if _one_axis(head) else _structural(array)):
            return Kind.WEIGHT
        return Kind.CONSTANT

    def _source(self, value: int) -> TensorHead | None:
        graph = self._graph
        while (node := graph.producer[value]) >= 0 and graph.standard[node] in _CARRIERS:
            value = graph.node_inputs[node][0]
        return graph.initializers.get(value) or (graph.constant_head(node) if node >= 0 else None)


def _of_tensor(head: TensorHead) -> int:
    if head.dtype not in _FLOATS:
        return Kind.CONSTANT
    size = int(np.prod(head.dims, dtype=np.int64))
    if size <= 1:
        return Kind.CONSTANT
    large = size > _ROW if _one_axis(head) else size > _limit(head) // 2
    return Kind.WEIGHT if large else _UNSETTLED


def _limit(head: TensorHead) -> int:
    return _STATE_LIMIT if len(head.dims) >= _STATE_AXES else _LIMIT


def _one_axis(head: TensorHead) -> bool:
    return len([d for d in head.dims if d > 1]) < 2 and len(head.dims) < 3


def _oblong(head: TensorHead) -> bool:
    """A matrix that is not square is a weight; a square one may be a mask, one with more axes a zero state."""
    return len(head.dims) == 2 and head.dims[0] != head.dims[1]


def _mask(array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> bool:
    """One axis: a bias or a norm's scale, also where all are equal (freshly made ones are), but for zeros and ones."""
    values = np.asarray(array, np.float64)
    zeros, ones = values == 0.0, values == 1.0
    return bool(zeros.any() and ones.any() and (zeros | ones).all())


def _structural(array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> bool:
    """Masks, identities, zeros: all equal, or two values of which one is 0 or 1; zeros alone where it is large."""
    if array.size and not array.any():
        return True
    if array.nbytes > _LIMIT:
        return False
    values = np.asarray(array, np.float64)
    if not values.size:
        return False
    low, high = float(values.min()), float(values.max())
    of_two = bool(((values == low) | (values == high)).all())
    return of_two and (low == high or bool({low, high} & {0.0, 1.0}))
