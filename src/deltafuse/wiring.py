"""What a part of a graph is up to names: a hash of its operators, attributes, constants and wiring."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from deltafuse.ragged import Numbers
from deltafuse.reasons import Reason
from deltafuse.tensors import TensorHead, read_tensor
from deltafuse.wire import Model

#: Number of attributes that are compared themselves.
_LONG = -1


@dataclass(frozen=True)
class Wiring:
    """A part of a graph up to names.

    Attributes:
        key: a hash, equal for parts that are equal.
        values: value ids in the order in which the part mentions them, repeats included.
        firsts: the places in `values` where a value is mentioned first.
    """

    key: bytes
    values: Numbers
    firsts: Numbers

    def places(self, values: Sequence[int]) -> Numbers:
        """Where some values are mentioned first: their numbers up to names; -1 for those that are not mentioned."""
        met, firsts = self._sorted
        asked = np.array(values, np.int32)
        found = np.minimum(np.searchsorted(met, asked), len(met) - 1)
        return np.where(met[found] == asked, firsts[found], -1)

    def counterpart(self, value: int, other: Wiring) -> int:
        """The value that is in `other`, an equal part, what `value` is here."""
        return int(other.values[self.places([value])[0]])

    @cached_property
    def _sorted(self) -> tuple[Numbers, Numbers]:
        """The values in ascending order, and where each is mentioned first."""
        met = self.values[self.firsts]
        order = np.argsort(met)
        return met[order], self.firsts[order]


class Wirings:
    """Finds the wiring of parts of one graph.

    Two parts are equal where operators, attributes, the types and contents of constants and the wiring are, what their
    subgraphs read of the scope around included. The number of a value is the place at which it is mentioned first.
    """

    def __init__(self, model: Model) -> None:
        graph = model.graph
        self._model = model
        self._first = np.zeros(len(graph.value_names), np.int32)
        self._is_constant = np.zeros(len(graph.value_names), np.bool_)
        self._is_constant[list(graph.initializers)] = True
        self._begins, self._ends = graph.attribute_spans.wholes()
        self._operators, self._attributes, self._is_long = self._numbered()
        self._holds = np.zeros(len(graph.op), np.bool_)
        self._holds[graph.constant_nodes] = True

    def of(self, roots: Sequence[int], nodes: Sequence[int] | Numbers, ends: Sequence[int]) -> Wiring:
        """The wiring of some nodes between values.

        Args:
            roots: values they start from.
            nodes: node ids, ascending.
            ends: values that are wanted of them.
        """
        graph, chosen = self._model.graph, self._constants_last(np.array(nodes, np.int32))
        (reads, read_counts), (writes, write_counts) = graph.reading.take(chosen), graph.writing.take(chosen)
        # What subgraphs read comes last: their bytes name it, so that equal ones read values of the same names.
        captured = [value for node in self._capturing(chosen) for value in graph.captures[node]]
        # The absent value comes first, so that it is never taken for one that is there.
        outer = (np.array([0, *roots], np.int32), np.array([*ends, *captured], np.int32))
        values = np.concatenate([outer[0], reads, writes, outer[1]])
        places = np.arange(len(values), dtype=np.int32)
        self._first[values[::-1]] = places[::-1]
        wiring = self._first[values]
        firsts = places[wiring == places]
        met = values[firsts]
        parts = [
            *map(np.ndarray.tobytes, (wiring, read_counts, write_counts)),
            *map(np.ndarray.tobytes, (self._operators[chosen], self._attributes[chosen])),
            *pieces(self._long_attributes(chosen[self._is_long[chosen]])),
            *pieces(self._contents(met[self._is_constant[met]].tolist())),
        ]
        return Wiring(hashed(parts), values, firsts)

    def _constants_last(self, nodes: Numbers) -> Numbers:
        """The nodes, with those that only hold a constant behind all others, in the order in which these read them.

        Layers that are equal else share one constant with a layer before them, and have another one of their own.
        """
        graph, held = self._model.graph, self._holds[nodes]
        others, constants = nodes[~held], nodes[held]
        if self._capturing(others):
            read = np.array([value for node in others.tolist() for value in graph.reads(node)], np.int32)
        else:
            read, _ = graph.reading.take(others)
        # One more, for what nothing writes.
        is_own = np.zeros(len(graph.op) + 1, np.bool_)
        is_own[constants] = True
        makers = graph.producers[read]
        makers = makers[is_own[makers]]
        _, firsts = np.unique(makers, return_index=True)
        met = makers[np.sort(firsts)]
        is_own[met] = False
        return np.concatenate([others, met, constants[is_own[constants]]])

    def _capturing(self, nodes: Numbers) -> list[int]:
        """Those of some nodes whose subgraphs read something."""
        captures = self._model.graph.captures
        return [node for node in nodes.tolist() if node in captures] if captures else []

    def _numbered(self) -> tuple[Numbers, Numbers, npt.NDArray[np.bool_]]:
        """For each node a number of its operator and one of its attributes, and whether these are compared themselves.

        Numbers are equal where op_type and domain, or the attributes as they are in the file, are.
        """
        graph = self._model.graph
        operators = graph.op if not any(graph.domain) else list(zip(graph.op, graph.domain, strict=True))
        each = {operator: number for number, operator in enumerate(dict.fromkeys(operators))}
        attributes, texts = graph.attribute_numbers
        elsewhere = [_LONG, *(number for number, text in enumerate(texts, 1) if b"location" in text)]
        is_long = np.isin(attributes, elsewhere)
        numbers = np.fromiter(map(each.__getitem__, operators), np.int32, len(operators))
        return numbers, np.where(is_long, np.int32(_LONG), attributes), is_long

    def _long_attributes(self, nodes: Numbers) -> list[bytes]:
        """The attributes of each node as they are in the file; what a Constant holds where that lies outside of it."""
        graph = self._model.graph
        runs = map(slice, self._begins[nodes].tolist(), self._ends[nodes].tolist())
        found: list[bytes] = list(map(self._model.mapped.__getitem__, runs))
        for place, (node, attributes) in enumerate(zip(nodes.tolist(), found, strict=True)):
            if graph.standard[node] == "Constant" and b"location" in attributes:
                found[place] = _content(self._model, graph.constant_head(node)) or attributes
        return found

    def _contents(self, constants: Sequence[int]) -> list[bytes]:
        """What initializers hold; the name of one that cannot be read."""
        names, heads = self._model.graph.value_names, self._model.graph.initializers
        return [_content(self._model, heads[value]) or b"named " + names[value] for value in constants]


def hashed(parts: Sequence[bytes | memoryview]) -> bytes:
    """A hash of parts, each with its length."""
    digest = hashlib.blake2b()
    for piece in pieces(parts):
        digest.update(piece)
    return digest.digest()


def pieces(parts: Sequence[bytes | memoryview]) -> tuple[bytes, bytes]:
    """The length of each part, and the parts end to end."""
    return np.fromiter(map(len, parts), np.int64, len(parts)).tobytes(), b"".join(parts)


def _content(model: Model, head: TensorHead | None) -> bytes:
    """What a constant holds, b"" where it cannot be read; types that are read as another one are told apart."""
    if head is None:
        return b""
    array = read_tensor(model, head)
    return b"" if isinstance(array, Reason) else f"holds {head.dtype} {array.shape}".encode() + array.tobytes()
