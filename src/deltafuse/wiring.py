"""What a part of a graph is up to names: a hash of its operators, attributes, constants and wiring."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import numpy as np

from deltafuse.ragged import Numbers
from deltafuse.reasons import Reason
from deltafuse.tensors import TensorHead, read_tensor
from deltafuse.wire import Model


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
        self._holds = np.zeros(len(graph.op), np.bool_)
        self._holds[[node for node in graph.nodes_with(["Constant"]) if graph.standard[node]]] = True

    def of(self, roots: Sequence[int], nodes: Sequence[int], ends: Sequence[int]) -> Wiring:
        """The wiring of some nodes between values.

        Args:
            roots: values they start from.
            nodes: node ids, ascending.
            ends: values that are wanted of them.
        """
        graph, chosen = self._model.graph, self._constants_last(np.array(nodes, np.int32))
        nodes = cast("list[int]", chosen.tolist())
        (reads, read_counts), (writes, write_counts) = graph.reading.take(chosen), graph.writing.take(chosen)
        # What subgraphs read comes last: their bytes name it, so that equal ones read values of the same names.
        captured = [value for node in nodes if node in graph.captures for value in graph.captures[node]]
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
            *_texts([graph.op[node] for node in nodes]),
            *_texts([graph.domain[node] for node in nodes]),
            *pieces(self._attributes(nodes, chosen)),
            *pieces(self._contents(met[self._is_constant[met]].tolist())),
        ]
        return Wiring(hashed(parts), values, firsts)

    def _constants_last(self, nodes: Numbers) -> Numbers:
        """The nodes, with those that only hold a constant behind all others, in the order in which these read them.

        Layers that are equal else share one constant with a layer before them, and have another one of their own.
        """
        graph, held = self._model.graph, self._holds[nodes]
        others, constants = nodes[~held], nodes[held]
        if graph.captures.keys().isdisjoint(nodes.tolist()):
            read, _ = graph.reading.take(others)
        else:
            read = np.array([value for node in others.tolist() for value in graph.reads(node)], np.int32)
        makers = graph.producers[read]
        makers = makers[(makers >= 0) & self._holds[makers]]
        own = dict.fromkeys(constants.tolist())
        first = dict.fromkeys(node for node in makers.tolist() if node in own)
        return np.concatenate([others, np.array([*first, *(node for node in own if node not in first)], nodes.dtype)])

    def _attributes(self, nodes: Sequence[int], chosen: Numbers) -> list[bytes | memoryview]:
        """The attributes of each node as they are in the file; what a Constant holds where that lies outside of it."""
        graph = self._model.graph
        runs = map(slice, self._begins[chosen].tolist(), self._ends[chosen].tolist())
        found: list[bytes | memoryview] = list(map(self._model.mapped.__getitem__, runs))
        if b"location" in b"".join(found):
            for place, (node, attributes) in enumerate(zip(nodes, found, strict=True)):
                if graph.standard[node] == "Constant" and b"location" in bytes(attributes):
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


def _texts(texts: Sequence[str]) -> tuple[bytes, bytes]:
    """The length of each text, and the texts end to end."""
    return np.fromiter(map(len, texts), np.int32, len(texts)).tobytes(), "".join(texts).encode()


def _content(model: Model, head: TensorHead | None) -> bytes:
    """What a constant holds, b"" where it cannot be read; types that are read as another one are told apart."""
    if head is None:
        return b""
    array = read_tensor(model, head)
    return b"" if isinstance(array, Reason) else f"holds {head.dtype} {array.shape}".encode() + array.tobytes()
