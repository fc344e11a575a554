"""A cut on the bench: bind its symbolic sizes to numbers and run it in double."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from onnx import helper

from deltafuse import layouts
from deltafuse.dims import Dim, evaluate, symbols
from deltafuse.draws import Array
from deltafuse.probe import Cut, to_double
from deltafuse.probe_double import FLOATS
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
        shapes: value id of each input -> its symbolic shape.
        dtypes: value id of each input -> element type in the source.
    """

    worker: Worker
    session: Session
    names: Mapping[int, str]
    cut: Cut
    shapes: Mapping[int, tuple[Dim, ...]]
    dtypes: Mapping[int, int]

    def sizes(self, value: int, binding: Mapping[str, int]) -> tuple[int, ...]:
        """An input's shape in numbers."""
        return tuple(evaluate(dim, binding) for dim in self.shapes[value])

    def run(self, feeds: Mapping[int, Array], binding: Mapping[str, int]) -> dict[int, Array] | Reason:
        """Runs the cut; inputs that are not fed (only their shape counts) are zeros."""
        arrays = {
            self.names[value]: feeds[value] if value in feeds else self._blank(value, binding) for value in self.cut.inputs
        }
        ran = self.worker.run(self.session, arrays)
        if isinstance(ran, Reason):
            return ran
        return dict(zip(self.cut.outputs, ran, strict=True))

    def _blank(self, value: int, binding: Mapping[str, int]) -> Array:
        dtype = np.float64 if self.dtypes[value] in FLOATS else helper.tensor_dtype_to_np_dtype(self.dtypes[value])
        return np.zeros(self.sizes(value, binding), dtype)


def open_bench(
    worker: Worker, cut: Cut, names: Mapping[int, str], shapes: Mapping[int, tuple[Dim, ...]], dtypes: Mapping[int, int]
) -> Bench | Reason:
    """Loads a cut in double."""
    double = to_double(cut.model)
    if isinstance(double, Reason):
        return double
    session = worker.load(double.SerializeToString())
    if isinstance(session, Reason):
        return session
    return Bench(worker, session, names, cut, shapes, dtypes)


def bindings(shapes: Mapping[int, tuple[Dim, ...]], g: int) -> Iterator[Binding]:
    """Ways to give the symbols numbers: batch 2 before 1, token counts in the order of `TOKENS`.

    Which axis of the log decay is time is not known yet: both readings are tried.
    """
    free = sorted({symbol for shape in shapes.values() for dim in shape for symbol in symbols(dim)})
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


