"""A cut on the bench: bind its symbolic sizes to numbers and run it in double."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, cast

import numpy as np

from deltafuse import layouts
from deltafuse.dims import Dim, evaluate, symbols
from deltafuse.draws import Array
from deltafuse.probe import Cut, to_double
from deltafuse.reasons import TEXTS, Reason
from deltafuse.subexpressions import without_repeats
from deltafuse.worker import AnyArray, Session, Worker

TEXTS.update(
    {
        "dims-unknown": "the size of {value} is not known; run onnx shape inference on the model first",
        "operand-too-large": "{value} is declared with {axes:# axis} and {size:# element}, at most {limit} are drawn "
        "for a proof; declare the sizes it has, or leave the axes dynamic",
    }
)

#: Token counts tried where the axis is free: few first, one (a decode step), then past one chunk of 16, 32, 64, 128.
TOKENS = (5, 1, 3, 17, 33, 67, 100, 130, 200, 300, 520, 2)

#: What numpy takes, and a gigabyte of numbers in double.
_MOST_AXES, _MOST_ELEMENTS = 64, 1 << 27
_OTHERS = (7, 11, 13, 19, 23, 29, 31, 37)


@dataclass(frozen=True)
class Binding:
    """Numbers for the symbols of a cut's inputs.

    Attributes:
        batch, tokens: what the free axes are bound to, None where an axis is fixed.
        batch_dims, tokens_dims: the symbolic sizes of these axes; exporters may give each operand its own.
    """

    numbers: Mapping[str, int]
    batch: int | None
    tokens: int | None
    batch_dims: tuple[Dim, ...]
    tokens_dims: tuple[Dim, ...]

    def at(self, tokens: int | None, batch: int | None, shift: int = 0) -> Binding | None:
        """The same for other sizes; None where the symbols cannot give them.

        Args:
            tokens: how many tokens are wanted.
            batch: which batch is wanted.
            shift: gives the symbols that are neither other numbers.
        """
        numbers = _numbers(self.tokens_dims, tokens, self.batch_dims, batch, tuple(self.numbers), shift)
        return None if numbers is None else replace(self, numbers=numbers, batch=batch, tokens=tokens)


class Runner(Protocol):
    """What runs sessions: a worker, or the process that has them."""

    def run(
        self,
        session: Session,
        feeds: Mapping[str, AnyArray],
        outputs: tuple[str, ...] | None = None,
        meanwhile: Callable[[], object] | None = None,
    ) -> tuple[AnyArray, ...] | Reason:
        """As `deltafuse.worker.Worker.run`."""
        ...


@dataclass(frozen=True)
class Bench:
    """A cut that is loaded in a worker, in double.

    Attributes:
        names: value id of each input and output -> its name.
        shapes: value id of each operand -> its symbolic shape.
        sizes: value id of each shape that the cut reads -> what it holds.
    """

    worker: Runner
    session: Session
    names: Mapping[int, str]
    cut: Cut
    shapes: Mapping[int, tuple[Dim, ...]]
    sizes: Mapping[int, tuple[Dim, ...]]

    def shape(self, value: int, binding: Mapping[str, int]) -> tuple[int, ...]:
        """An operand's shape in numbers."""
        return tuple(evaluate(dim, binding) for dim in self.shapes[value])

    def run(
        self,
        feeds: Mapping[int, Array],
        binding: Mapping[str, int],
        outputs: Sequence[int] | None = None,
        meanwhile: Callable[[], object] | None = None,
    ) -> dict[int, Array] | Reason:
        """Runs the cut on its operands; the shapes it reads follow from the binding, operands not given are ones.

        Args:
            feeds: value id of each operand -> its array.
            binding: numbers for the symbols.
            outputs: those wanted; all where None.
            meanwhile: is called while the worker computes.
        """
        # Arithmetic on an array without axes leaves a plain number.
        arrays: dict[str, AnyArray] = {self.names[value]: np.asarray(array) for value, array in feeds.items()}
        for value in self.shapes.keys() - feeds.keys():
            arrays[self.names[value]] = np.ones(self.shape(value, binding))
        # Hundreds are read, few of them different.
        known: dict[tuple[Dim, ...], AnyArray] = {}
        for value, dims in self.sizes.items():
            if dims not in known:
                known[dims] = np.array([evaluate(dim, binding) for dim in dims], np.int64)
            arrays[self.names[value]] = known[dims]
        wanted = self.cut.outputs if outputs is None else tuple(outputs)
        ran = self.worker.run(self.session, arrays, tuple(self.names[value] for value in wanted), meanwhile)
        if isinstance(ran, Reason):
            return ran
        # Sequences of tensors are no result of a rule.
        pairs = zip(wanted, cast("tuple[object, ...]", ran), strict=True)
        return {value: cast("Array", array) for value, array in pairs if isinstance(array, np.ndarray)}


def open_bench(
    worker: Worker,
    cut: Cut,
    names: Mapping[int, str],
    shapes: Mapping[int, tuple[Dim, ...]],
    sizes: Mapping[int, tuple[Dim, ...]],
    meanwhile: Callable[[], object] | None = None,
) -> Bench | Reason:
    """Loads a cut in double.

    Args:
        worker: that loads it.
        cut: what is loaded.
        names: value id of each input and output -> its name.
        shapes: value id of each operand -> its symbolic shape.
        sizes: value id of each shape that the cut reads -> what it holds.
        meanwhile: is called while the worker loads.

    Returns:
        The reason where that cannot be: ``operand-too-large``, what `to_double` and the worker say.
    """
    for value, shape in shapes.items():
        size = math.prod(dim for dim in shape if isinstance(dim, int))
        if len(shape) > _MOST_AXES or size > _MOST_ELEMENTS:
            said = {"value": names[value], "axes": len(shape), "size": f"{min(size, 1 << 63):.3g}"}
            return Reason("operand-too-large", said | {"limit": _MOST_ELEMENTS})
    double = to_double(without_repeats(cut.model, _same(names, sizes)))
    if isinstance(double, Reason):
        return double
    session = worker.load(double.SerializeToString(), meanwhile)
    return session if isinstance(session, Reason) else Bench(worker, session, names, cut, shapes, sizes)


def _same(names: Mapping[int, str], sizes: Mapping[int, tuple[Dim, ...]]) -> dict[str, str]:
    """Names of shapes that hold what an earlier one holds -> the name of that one."""
    firsts: dict[tuple[Dim, ...], str] = {}
    pairs = [(names[value], firsts.setdefault(dims, names[value])) for value, dims in sizes.items()]
    return {name: first for name, first in pairs if name != first}


def bindings(
    shapes: Mapping[int, tuple[Dim, ...]],
    sizes: Mapping[int, tuple[Dim, ...]],
    gate: int,
    gates: Sequence[str] = layouts.GATES,
) -> Iterator[Binding]:
    """Ways to give the symbols numbers: batch 2 before 1, token counts in the order of `TOKENS`.

    Which axis of the gate is time is not known yet: all its layouts are tried, and the other operands are taken to
    have batch and time where it has them.
    """
    known = (*shapes.values(), *sizes.values())
    free = sorted({symbol for shape in known for dim in shape for symbol in symbols(dim)})
    seen: set[tuple[tuple[str, int], ...]] = set()
    for layout in gates:
        groups = layouts.axes(layout)
        if len(groups) != len(shapes[gate]):
            continue
        tokens_dims, batch_dims = (_dims_at(shapes, gate, groups, letter) for letter in "TB")
        for tokens in TOKENS if tokens_dims else (None,):
            for batch in (2, 1) if batch_dims else (None,):
                numbers = _numbers(tokens_dims, tokens, batch_dims, batch, free)
                if numbers is None or tuple(sorted(numbers.items())) in seen:
                    continue
                seen.add(tuple(sorted(numbers.items())))
                yield Binding(numbers, batch, tokens, batch_dims, tokens_dims)


def rebound(bench: Bench, gate: int, layout: str, sizes: Mapping[str, int], binding: Binding) -> Binding:
    """A binding whose free axes are those of the layout that the gate turned out to have.

    Args:
        bench: knows the operands' sizes.
        gate: the log decay, or beta of a rule without one.
        layout: of the gate.
        sizes: letter -> size, in the run that told the layout.
        binding: of that run, perhaps made for another layout.
    """
    groups = layouts.axes(layout)
    tokens_dims, batch_dims = (_dims_at(bench.shapes, gate, groups, letter) for letter in "TB")
    if (tokens_dims, batch_dims) == (binding.tokens_dims, binding.batch_dims):
        return binding
    tokens, batch = (sizes[letter] if dims else None for letter, dims in (("T", tokens_dims), ("B", batch_dims)))
    free = tuple(binding.numbers)
    numbers = _numbers(tokens_dims, tokens, batch_dims, batch, free)
    return binding if numbers is None else Binding(numbers, batch, tokens, batch_dims, tokens_dims)


def _dims_at(shapes: Mapping[int, tuple[Dim, ...]], gate: int, groups: Sequence[str], letter: str) -> tuple[Dim, ...]:
    """The free sizes of one axis, in every operand that has it; none where the gate's is fixed.

    What a size of the gate decides too (batch times tokens, in an operand that has other axes) is not asked for.
    """
    if letter not in groups:
        return ()
    axis = groups.index(letter)
    own = shapes[gate][axis]
    if isinstance(own, int):
        return ()
    decided = frozenset[str]().union(*map(symbols, shapes[gate]))
    others = [shape[axis] for value, shape in shapes.items() if value != gate and len(shape) > axis]
    return tuple(dict.fromkeys([own, *(dim for dim in others if symbols(dim) and decided.isdisjoint(symbols(dim)))]))


def _numbers(
    tokens_dims: Sequence[Dim],
    tokens: int | None,
    batch_dims: Sequence[Dim],
    batch: int | None,
    free: Sequence[str],
    shift: int = 0,
) -> dict[str, int] | None:
    """Numbers for the free symbols at which these dims have these sizes; None where there are none."""
    wanted = [*((dim, tokens) for dim in tokens_dims), *((dim, batch) for dim in batch_dims)]
    return solve([(dim, size) for dim, size in wanted if size is not None], free, shift)


def solve(wanted: Iterable[tuple[Dim, int]], free: Sequence[str], shift: int = 0) -> dict[str, int] | None:
    """Numbers for the free symbols at which each dim has its size; None where there are none."""
    numbers: dict[str, int] = {}
    for dim, size in wanted:
        unknown = [symbol for symbol in symbols(dim) if symbol not in numbers]
        numbers.update(dict.fromkeys(unknown[1:], 1))
        found = _invert(dim, size, numbers, unknown[:1])
        if found is None:
            return None
        numbers.update(found)
    rest = [symbol for symbol in free if symbol not in numbers]
    return numbers | {symbol: _OTHERS[(i + shift) % len(_OTHERS)] for i, symbol in enumerate(rest)}


def _invert(dim: Dim, size: int, numbers: Mapping[str, int], unknown: Sequence[str]) -> dict[str, int] | None:
    """The number for one symbol at which a dim has a size; {} where none is needed."""
    for guess in (size, *range(1, 2 * size + 130)):
        trial = dict.fromkeys(unknown, guess)
        if evaluate(dim, {**numbers, **trial}) == size:
            return trial
        if not unknown:
            return None
    return None
