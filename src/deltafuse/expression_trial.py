"""A proposed expression on the bench: its roles as arrays, in double, at numbers for its free sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from onnx import helper

from deltafuse.bench import Bench
from deltafuse.dims import Dim, evaluate, symbols
from deltafuse.expressions import FLOATS, Array, Operands, Proposal
from deltafuse.reasons import Reason
from deltafuse.worker import AnyArray

#: Sizes for the free axes, each its own: two ways, and once all twos and all ones.
_SIZES = ((7, 11, 5, 13, 3, 17, 19), (4, 9, 10, 2, 3, 5, 6), (2,), (1,))
#: Integers stay where a double holds them and no arithmetic overflows.
_LARGEST = 100


@dataclass(frozen=True)
class SizedTrial:
    """See `deltafuse.expressions.Trial`.

    Attributes:
        sizes: symbol -> number.
    """

    bench: Bench
    proposal: Proposal
    dims: Mapping[str, tuple[Dim, ...]]
    dtypes: Mapping[str, int]
    sizes: Mapping[str, int]

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of each role in numbers."""
        return {role: tuple(evaluate(dim, self.sizes) for dim in dims) for role, dims in self.dims.items()}

    def run(self, operands: Operands) -> Operands | Reason:
        """The outputs of the cut for some operands."""
        return self.run_fed(self.feeds(operands))

    def feeds(self, operands: Operands) -> Mapping[int, Array]:
        """Value id of each role -> its operand as the cut takes it."""
        given = {value: feed(operands[role], self.dtypes[role]) for role, value in self.proposal.roles.items()}
        return cast("Mapping[int, Array]", given)

    def run_fed(self, feeds: Mapping[int, Array]) -> Operands | Reason:
        """The outputs of the cut for what `feeds` made."""
        outputs = self.proposal.outputs.items()
        found = self.bench.run(feeds, self.sizes, [value for _, value in outputs])
        if isinstance(found, Reason):
            return found
        return {name: np.asarray(found[value], np.float64) for name, value in outputs if value in found}


def feed(array: Array, dtype: int) -> AnyArray:
    """An operand as the model in double takes it: floats as they are, others in their own type."""
    return array if dtype in FLOATS else array.astype(helper.tensor_dtype_to_np_dtype(dtype))


def typed(operands: Operands, dtypes: Mapping[str, int]) -> Operands:
    """Drawn operands as their types hold them: integers rounded, booleans 0 or 1."""
    return {role: array if dtypes[role] in FLOATS else _whole(array, dtypes[role]) for role, array in operands.items()}


def _whole(array: Array, dtype: int) -> Array:
    kind = np.dtype(helper.tensor_dtype_to_np_dtype(dtype))
    if kind == np.bool_:
        return (array > 0).astype(np.float64)
    low = -_LARGEST if kind.kind == "i" else 0
    return np.minimum(np.maximum(np.round(array), low), _LARGEST)


def bindings(shapes: Sequence[tuple[Dim, ...]]) -> Iterator[Mapping[str, int]]:
    """Numbers for the free symbols of some shapes, one way where there are none; ways that leave no elements are not.

    Axes that a declaration tells apart get different sizes, so that one cannot stand for another.
    """
    free = sorted({symbol for shape in shapes for dim in shape for symbol in symbols(dim)})
    seen: list[Mapping[str, int]] = []
    for numbers in _SIZES:
        sizes = {symbol: numbers[index % len(numbers)] for index, symbol in enumerate(free)}
        if sizes not in seen and all(evaluate(dim, sizes) > 0 for shape in shapes for dim in shape):
            seen.append(sizes)
            yield sizes


def empty(found: Operands) -> bool:
    """Whether the nodes gave nothing at these sizes, e.g. a window that is longer than what it slides over.

    onnxruntime's own kernels refuse some of these sizes: nothing can be told of them.
    """
    return any(array.size == 0 for array in found.values())


def difference(found: Operands, wanted: Operands) -> float:
    """Largest difference over the largest finite number of each output; inf where shapes, NaNs or infinities differ."""
    if found.keys() != wanted.keys():
        return float("inf")
    return max(_error(found[name], np.asarray(wanted[name])) for name in wanted)


def _error(found: Array, wanted: Array) -> float:
    if found.shape != wanted.shape:
        return float("inf")
    finite = np.isfinite(wanted)
    if not np.array_equal(found[~finite], wanted[~finite], equal_nan=True) or not np.isfinite(found[finite]).all():
        return float("inf")
    worst = float(np.abs(found[finite] - wanted[finite]).max(initial=0.0))
    scale = float(np.abs(wanted[finite]).max(initial=0.0))
    return 0.0 if worst == 0.0 else worst / scale if scale else float("inf")
