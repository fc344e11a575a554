"""Which sites are one and the same up to names: their cuts are, and so are the shapes of their inputs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from deltafuse.dims import Dim
from deltafuse.finder import Candidate
from deltafuse.shapes import Shapes
from deltafuse.wiring import Wiring, hashed


@dataclass(frozen=True)
class Signature:
    """What a candidate's cut is up to names.

    Attributes:
        key: a hash, equal for candidates whose wirings are equal, and whose cut inputs agree in rank, dims and type.
        wiring: of the cut.
    """

    key: bytes
    wiring: Wiring

    def counterpart(self, value: int, other: Signature) -> int:
        """The value that is in `other`, which has the same key, what `value` is here."""
        return self.wiring.counterpart(value, other.wiring)


def sign(shapes: Shapes, candidate: Candidate) -> Signature:
    """The signature of a candidate."""
    wiring = candidate.wiring
    roots = [b"%d" % (shapes.dtype(value) or 0) + _shape_text(shapes.shape(value)) for value in candidate.roots]
    places = wiring.places([value for value, _ in candidate.sizes]).tobytes()
    sizes = [dims_text(dims) for _, dims in candidate.sizes]
    return Signature(hashed([wiring.key, *roots, b"sizes", places, *sizes]), wiring)


def _shape_text(shape: tuple[Dim, ...] | None) -> bytes:
    return b"unknown" if shape is None else dims_text(shape)


@lru_cache(maxsize=1024)
def dims_text(dims: tuple[Dim, ...]) -> bytes:
    """A shape as text: sites have hundreds of them, and few different ones."""
    return str([*map(str, dims)]).encode()
