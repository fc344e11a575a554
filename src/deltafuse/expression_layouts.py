"""Layouts of operands that an expression may have: axes by letter, brought into one order and back.

A layout is a letter an axis, e.g. ``BTC``; ``1`` is an axis of size one that means nothing. A letter of the wanted
layout that is not there is an axis of size one, too.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from deltafuse.dims import Dim
from deltafuse.expressions import Array
from deltafuse.targets.emit import Emitter


def fits(layout: str, dims: Sequence[Dim]) -> bool:
    """Whether a shape has as many axes, and size one where that is meant."""
    return len(layout) == len(dims) and all(dim == 1 for letter, dim in zip(layout, dims, strict=True) if letter == "1")


def ordered(array: Array, layout: str, wanted: str) -> Array:
    """An array of a layout in another one; both may have unit axes, and lack letters of which there is one."""
    kept, gone, left, fresh = _steps(layout, wanted)
    plain: Array = np.squeeze(array, tuple(gone))
    moved: Array = np.transpose(plain, [left.index(letter) for letter in kept])
    return np.expand_dims(moved, tuple(fresh))


def _steps(layout: str, wanted: str) -> tuple[list[str], list[int], list[str], list[int]]:
    """Letters in the wanted order, axes to take out, letters then left, axes to put in."""
    kept = [letter for letter in wanted if letter != "1" and letter in layout]
    gone = [index for index, letter in enumerate(layout) if letter not in kept]
    left = [letter for letter in layout if letter in kept]
    fresh = [index for index, letter in enumerate(wanted) if letter not in kept]
    return kept, gone, left, fresh


def emit_ordered(emitter: Emitter, what: str, value: str, layout: str, wanted: str, output: str | None = None) -> str:
    """The nodes that do as `ordered`, under the name `output` where there is one: Squeeze, Transpose, Unsqueeze."""
    kept, gone, left, fresh = _steps(layout, wanted)
    steps: list[tuple[str, list[int]]] = [("Squeeze", gone)] if gone else []
    steps += [("Transpose", [left.index(letter) for letter in kept])] if left != kept else []
    steps += [("Unsqueeze", fresh)] if fresh else []
    for number, (op, axes) in enumerate(steps):
        names = (output,) if output is not None and number == len(steps) - 1 else None
        label = f"{what}/{op.lower()}"
        if op == "Transpose":
            value = emitter.node(op, label, (value,), {"perm": axes}, names)
        else:
            held = emitter.constant(f"axes_{'_'.join(map(str, axes))}", np.array(axes, np.int64))
            value = emitter.node(op, label, (value, held), None, names)
    return value
