"""A cut on the bench: bind its symbolic sizes to numbers and run it in double."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import numpy.typing as npt

from deltafuse import layouts
from deltafuse.dims import Dim, evaluate, symbols
from deltafuse.draws import Array
from deltafuse.probe import Cut, to_double
from deltafuse.reasons import TEXTS, Reason
from deltafuse.worker import Session, Worker

TEXTS.update({
    "dims-unknown": "the size of {value} is not known; run onnx shape inference on the model first",
})

#: Token counts tried where the axis is free: few first, then past one chunk of 16, 32, 64, 128.
TOKENS = (5, 3, 17, 33, 67, 100, 130, 200, 300, 520, 2, 1)

_OTHERS = (7, 11, 13, 19, 23, 29, 31, 37)


@dataclass(frozen=True)
class Binding:
    """Numbers for the symbols of a cut's inputs.

    Attributes:
        batch, tokens: what the free axes are bound to, None where an axis is fixed.
        batch_dim, tokens_dim: the symbolic sizes of these axes.
    """

    numbers: Mapping[str, int]
    batch: int | None
    tokens: int | None
    batch_dim: Dim | None
    tokens_dim: Dim | None

    def at(self, tokens: int | None, batch: int | None) -> Binding | None:
        """The same for other sizes; None where the symbols cannot give them."""
        numbers = solve({self.tokens_dim: tokens, self.batch_dim: batch}, tuple(self.numbers))
        return None if numbers is None else replace(self, numbers=numbers, batch=batch, tokens=tokens)


@dataclass(frozen=True)
class Bench:
    """A cut that is loaded in a worker, in double.

    Attributes:
        names: value id of each input and output -> its name.
        shapes: value id of each operand -> its symbolic shape.
        sizes: value id of each shape that the cut reads -> what it holds.
    """

    worker: Worker
    session: Session
    names: Mapping[int, str]
    cut: Cut
    shapes: Mapping[int, tuple[Dim, ...]]
    sizes: Mapping[int, tuple[Dim, ...]]

    def shape(self, value: int, binding: Mapping[str, int]) -> tuple[int, ...]:
        """An operand's shape in numbers."""
        return tuple(evaluate(dim, binding) for dim in self.shapes[value])

    def run(
        self, feeds: Mapping[int, Array], binding: Mapping[str, int], outputs: Sequence[int] | None = None
    ) -> dict[int, Array] | Reason:
        """Runs the cut on its operands; the shapes it reads follow from the binding.

        Args:
            outputs: those wanted; all where None.
        """
        arrays: dict[str, npt.NDArray[np.generic]] = {self.names[value]: array for value, array in feeds.items()}
        for value, dims in self.sizes.items():
            arrays[self.names[value]] = np.array([evaluate(dim, binding) for dim in dims], np.int64)
        wanted = self.cut.outputs if outputs is None else tuple(outputs)
        ran = self.worker.run(self.session, arrays, tuple(self.names[value] for value in wanted))
        return ran if isinstance(ran, Reason) else dict(zip(wanted, cast("tuple[Array, ...]", ran), strict=True))


def open_bench(
    worker: Worker,
    cut: Cut,
    names: Mapping[int, str],
    shapes: Mapping[int, tuple[Dim, ...]],
    sizes: Mapping[int, tuple[Dim, ...]],
) -> Bench | Reason:
    """Loads a cut in double."""
    double = to_double(cut.model)
    if isinstance(double, Reason):
        return double
    session = worker.load(double.SerializeToString())
    return session if isinstance(session, Reason) else Bench(worker, session, names, cut, shapes, sizes)


def bindings(
    shapes: Mapping[int, tuple[Dim, ...]], sizes: Mapping[int, tuple[Dim, ...]], g: int
) -> Iterator[Binding]:
    """Ways to give the symbols numbers: batch 2 before 1, token counts in the order of `TOKENS`.

    Which axis of the log decay is time is not known yet: both readings are tried.
    """
    known = (*shapes.values(), *sizes.values())
    free = sorted({symbol for shape in known for dim in shape for symbol in symbols(dim)})
    seen: set[tuple[tuple[str, int], ...]] = set()
    for layout in layouts.GATES:
        groups = layouts.axes(layout)
        if len(groups) != len(shapes[g]):
            continue
        by_letter = dict(zip(groups, shapes[g], strict=True))
        for tokens in _options(by_letter.get("T"), TOKENS):
            for batch in _options(by_letter.get("B"), (2, 1)):
                numbers = solve({by_letter.get("T"): tokens, by_letter.get("B"): batch}, free)
                key = tuple(sorted(numbers.items())) if numbers is not None else None
                if numbers is None or key is None or key in seen:
                    continue
                seen.add(key)
                yield Binding(numbers, batch, tokens, by_letter.get("B"), by_letter.get("T"))


def _options(dim: Dim | None, choices: Sequence[int]) -> Sequence[int | None]:
    return (None,) if dim is None or isinstance(dim, int) else choices


def solve(wanted: Mapping[Dim | None, int | None], free: Sequence[str]) -> dict[str, int] | None:
    """Numbers for the free symbols at which each dim is what is wanted; None where there are none."""
    numbers: dict[str, int] = {}
    for dim, size in wanted.items():
        if dim is None or isinstance(dim, int) or size is None:
            continue
        unknown = [symbol for symbol in symbols(dim) if symbol not in numbers]
        for symbol in unknown[1:]:
            numbers[symbol] = 1
        found = next((n for n in range(1, 2 * size + 130) if evaluate(dim, {**numbers, **dict.fromkeys(unknown[:1], n)}) == size), None)
        if found is None:
            return None
        numbers.update(dict.fromkeys(unknown[:1], found))
    rest = [symbol for symbol in free if symbol not in numbers]
    numbers.update({symbol: _OTHERS[i % len(_OTHERS)] for i, symbol in enumerate(rest)})
    return numbers


