"""Which sites are one and the same up to names: a hash of a candidate's cut, made with whole arrays."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from deltafuse.dims import Dim
from deltafuse.finder import Candidate
from deltafuse.ragged import Numbers
from deltafuse.reasons import Reason
from deltafuse.shapes import Shapes
from deltafuse.tensors import TensorHead, read_tensor
from deltafuse.wire import Model


@dataclass(frozen=True)
class Signature:
    """What a candidate's cut is up to names.

    Attributes:
        key: a hash, equal for cuts and cut inputs that are equal.
        values: value ids in the order in which the cut mentions them, repeats included.
    """

    key: bytes
    values: Numbers

    @cached_property
    def _places(self) -> dict[int, int]:
        places: dict[int, int] = {}
        for place, value in enumerate(self.values.tolist()):
            places.setdefault(value, place)
        return places

    def counterpart(self, value: int, other: Signature) -> int:
        """The value that is in `other`, which has the same key, what `value` is here."""
        return int(other.values[self._places[value]])


class Signer:
    """Signs the candidates of one model.

    Two cuts are equal where operators, attributes, the contents of constants and the wiring are, and where their
    inputs agree in rank, dims and type. The number of a value is the place at which it is mentioned first.
    """

    def __init__(self, model: Model, shapes: Shapes) -> None:
        graph = model.graph
        self._model = model
        self._shapes = shapes
        self._first = np.zeros(len(graph.value_names), np.int32)
        self._is_constant = np.zeros(len(graph.value_names), np.bool_)
        self._is_constant[list(graph.initializers)] = True
        self._begins, self._ends = graph.attribute_spans.wholes()

    def sign(self, candidate: Candidate) -> Signature:
        """The signature of a candidate."""
        graph, nodes = self._model.graph, np.array(candidate.nodes, np.int32)
        (reads, read_counts), (writes, write_counts) = graph.reading.take(nodes), graph.writing.take(nodes)
        ends = (np.array([0, *candidate.roots], np.int32), np.array(candidate.frontier, np.int32))
        # The absent value comes first, so that it is never taken for one that is there.
        values = np.concatenate([ends[0], reads, writes, ends[1]])
        places = np.arange(len(values), dtype=np.int32)
        self._first[values[::-1]] = places[::-1]
        wiring = self._first[values]
        met = values[wiring == places]
        parts = [
            *map(np.ndarray.tobytes, (wiring, read_counts, write_counts)),
            *(_joined(column[node] for node in candidate.nodes) for column in (graph.op, graph.domain)),
            *_pieces(self._attributes(candidate)),
            *_pieces(self._roots(candidate)),
            *_pieces(self._contents(candidate, met)),
        ]
        digest = hashlib.blake2b()
        for part in _pieces(parts):
            digest.update(part)
        return Signature(digest.digest(), values)

    def _attributes(self, candidate: Candidate) -> list[bytes | memoryview]:
        """The attributes of each node as they are in the file; what a Constant holds where that lies outside of it."""
        graph, nodes = self._model.graph, np.array(candidate.nodes, np.int32)
        runs = map(slice, self._begins[nodes].tolist(), self._ends[nodes].tolist())
        found: list[bytes | memoryview] = list(map(graph.data.__getitem__, runs))
        if b"location" in b"".join(found):
            for place, (node, attributes) in enumerate(zip(candidate.nodes, found, strict=True)):
                if graph.op[node] == "Constant" and b"location" in bytes(attributes):
                    found[place] = _content(self._model, graph.constant_head(node)) or attributes
        return found

    def _roots(self, candidate: Candidate) -> list[bytes]:
        shapes = self._shapes
        return [b"%d" % (shapes.dtype(value) or 0) + _text(shapes.shape(value) or ()) for value in candidate.roots]

    def _contents(self, candidate: Candidate, met: Numbers) -> list[bytes]:
        """What constants outside of nodes hold, and the sizes that come from outside, in the order of mention."""
        sizes, graph = dict(candidate.sizes), self._model.graph
        held = self._is_constant[met] | np.isin(met, np.array(list(sizes), np.int32))
        values: list[int] = met[held].tolist()
        found: list[bytes] = []
        for value in values:
            if value in sizes:
                found.append(_text(sizes[value]))
                continue
            found.append(_content(self._model, graph.initializers[value]) or graph.value_names[value])
        return found


@lru_cache(maxsize=1024)
def _text(dims: tuple[Dim, ...]) -> bytes:
    # sites have hundreds of shapes and few different ones
    return str([*map(str, dims)]).encode()


def _joined(texts: Iterable[str]) -> bytes:
    return " ".join(texts).encode()


def _pieces(parts: Sequence[bytes | memoryview]) -> tuple[bytes, bytes]:
    """The parts end to end, and where each ends."""
    return np.fromiter(map(len, parts), np.int64, len(parts)).tobytes(), b"".join(parts)


def _content(model: Model, head: TensorHead | None) -> bytes:
    """What a constant holds, b"" where it cannot be read."""
    if head is None:
        return b""
    array = read_tensor(model, head)
    return b"" if isinstance(array, Reason) else f"{array.dtype}{array.shape}".encode() + array.tobytes()
