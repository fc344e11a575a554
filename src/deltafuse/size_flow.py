"""Kinds of values that sizes and positions are made into."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from deltafuse.dims import Dim, straightened, substitute, symbol, symbol_name, symbols
from deltafuse.quasi_linear import apart, chunked


class FlowKind(Enum):
    """What a value that holds no data, and is not the same for all sizes, is.

    Attributes:
        SIZE: whole numbers made of free sizes.
        PLACE: the number of a position in each element.
        SPAN: the difference of two positions.
        INDEX: what else is made of positions by whole numbers: good for reading at, not for comparing.
        MASK: made of comparisons of positions and of constants: few different numbers.
        FLAT: one constant whatever the sizes are, in a shape that follows them.
        TABLE: the same with several constants: not to be read at a place that a size says.
        GATE: anything else, such as a choice by a size.
    """

    SIZE = auto()
    PLACE = auto()
    SPAN = auto()
    INDEX = auto()
    MASK = auto()
    FLAT = auto()
    TABLE = auto()
    GATE = auto()


@dataclass(frozen=True)
class Flow:
    """FlowKind of a value; for positions, by how much constants have moved them at most."""

    kind: FlowKind
    moved: int = 0


SIZE, PLACE, SPAN, INDEX, MASK, FLAT, TABLE, GATE = (Flow(kind) for kind in FlowKind)


@dataclass
class Sizes:
    """What is known of the sizes of one site.

    Attributes:
        same: symbols that stand for the same size as another one.
        chunks: sizes of chunks that sizes are rounded up to; with two of them nothing is known.
        masks: whether positions are compared.
        tokens: symbols of the token axis, None where it is not known yet.
        others: symbols of operands that are neither tokens nor batch.
        valid: least and greatest token count that the site is right for, where it is asked about these alone.
        farthest: how far constants move data along free axes at most.
    """

    same: Mapping[str, Dim] = field(default_factory=dict[str, Dim])
    chunks: set[int] = field(default_factory=set[int])
    masks: bool = False
    tokens: frozenset[str] | None = None
    others: frozenset[str] = frozenset()
    valid: tuple[int, int] | None = None
    farthest: int = 0
    _known: dict[Dim, int] = field(default_factory=dict[Dim, int])

    def chunk(self, dim: Dim) -> int:
        """What a size is rounded up to, see `quasi_linear.chunked`."""
        if isinstance(dim, int):
            return 1
        if dim not in self._known:
            # A size that is neither batch nor tokens is tried at a few numbers only: nothing may follow it.
            ours = self.others.isdisjoint(symbols(dim))
            self._known[dim] = chunked(substitute(dim, self.same)) if ours else 0
        return self._known[dim]

    def is_steady_where_valid(self, dim: Dim) -> bool:
        """Whether a size is what `chunk` knows, where the tokens are as many as the site is asked about."""
        if self.valid is None:
            return False
        dim = substitute(dim, self.same)
        for name in symbols(dim) & (self.tokens or frozenset()):
            dim = straightened(dim, name, *self.valid)
        return self.chunk(dim) != 0

    def apart(self, dim: Dim) -> float:
        """By how much a size is apart from a multiple of the tokens, see `quasi_linear.apart`."""
        dim = substitute(dim, self.same)
        free = symbols(dim)
        if self.tokens is None and len(free) > 1:
            # Which of them is the tokens' is asked again once that is known.
            return 0
        return apart(dim, free if self.tokens is None else self.tokens)

    def along_tokens(self, dim: Dim) -> bool:
        """Whether a size is one of tokens alone: places along it are tried, those along any other one are not."""
        return self.tokens is None or self.tokens.issuperset(symbols(dim))

    def goes_with_batch(self, dim: Dim) -> bool:
        """Whether a size grows as the batch does: what is right for two batches then is for any."""
        if isinstance(dim, int) or self.tokens is None:
            return False
        own = self.tokens | self.others
        powers = ([power for atom, power in m if isinstance(atom, str) and atom not in own] for m, _ in dim.terms)
        return all(found == [1] for found in powers)


#: Kinds that may meet data, and those that count.
NUMBERS = frozenset({FlowKind.MASK, FlowKind.FLAT, FlowKind.TABLE})
COUNTS = frozenset({FlowKind.SIZE, FlowKind.PLACE, FlowKind.SPAN, FlowKind.INDEX})
#: Most that constants may move a position by: proofs have more tokens than that.
FARTHEST = 128
#: The same for what is compared: two masks that are moved farther may meet at one single size.
NEAREST = 1


def sizes_along(
    tokens: Sequence[Dim], batch: Sequence[Dim], free: Iterable[str], valid: tuple[int, int] | None = None
) -> Sizes:
    """What is known of a site's sizes once its axes are.

    Args:
        tokens: free sizes of the token axis, which are all the same.
        batch: the same of the batch axis.
        free: all symbols that its operands have.
        valid: see `Sizes`.
    """
    along = frozenset(name for dim in tokens for name in symbols(dim))
    across = frozenset(name for dim in batch for name in symbols(dim))
    same = {**one_symbol(tokens), **one_symbol(batch)}
    return Sizes(same, tokens=along - across, others=frozenset(free) - along - across, valid=valid)


def one_symbol(dims: Sequence[Dim]) -> dict[str, Dim]:
    """For sizes that are one and the same: what each further symbol of them stands for."""
    names = [name for dim in dims if (name := symbol_name(dim)) is not None]
    return {name: symbol(names[0]) for name in names[1:] if name != names[0]}


def farthest(given: Sequence[Flow | None]) -> int:
    """By how much constants have moved any of some values."""
    return max((flow.moved for flow in given if flow is not None), default=0)


def joined(given: Sequence[Flow | None], *, tables: bool) -> Flow:
    """What several values put together are.

    Args:
        given: kinds of those that are not the same for all sizes.
        tables: whether among the others one has different numbers in it.
    """
    kinds = {flow.kind for flow in given if flow is not None}
    if kinds <= NUMBERS:
        if tables or FlowKind.TABLE in kinds:
            return Flow(FlowKind.TABLE, farthest(given))
        return FLAT if kinds == {FlowKind.FLAT} and None not in given else Flow(FlowKind.MASK, farthest(given))
    if kinds == {FlowKind.SIZE}:
        return Flow(FlowKind.SIZE, farthest(given))
    return Flow(FlowKind.INDEX, farthest(given)) if kinds <= COUNTS | {FlowKind.FLAT, FlowKind.TABLE} else GATE
