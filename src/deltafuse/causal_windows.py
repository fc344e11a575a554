"""Where a causal convolution could be: its window of weights, what it reads, what it gives. All of it guesses to prove.

A window is a depthwise Conv whose kernel is wide in one axis, or a product with a weight that is summed over the taps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from onnx import helper

from deltafuse.expression_view import View
from deltafuse.expression_walk import above, below
from deltafuse.reasons import Reason

#: Operators that numbers pass unchanged on their way to the window, and that a state is taken out by.
MOVES = frozenset({
    "Cast", "Concat", "Expand", "Identity", "Pad", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze",
})  # fmt: skip
#: Operators behind the window: bias, SiLU in its spellings, changes of layout, the tokens that are kept.
BEHIND = frozenset({
    "Add", "Cast", "Div", "Exp", "Identity", "Mul", "Neg", "Reciprocal", "Reshape", "Sigmoid", "Slice", "Squeeze",
    "Swish", "Transpose", "Unsqueeze", "com.microsoft.QuickGelu",
})  # fmt: skip
#: What writes half a SiLU.
_INNER = frozenset({"Exp", "Neg", "Reciprocal", "Sigmoid"})
_RANK = 3


@dataclass(frozen=True)
class Window:
    """A product of columns with a weight, summed up.

    Attributes:
        data: the columns.
        weight: of one number for each channel and tap.
        bias: added inside, 0 where none is.
        result: what is written.
        channels, width: sizes of the weight.
        slides: whether it moves over the columns; else it is as wide as they are.
    """

    data: int
    weight: int
    bias: int
    result: int
    channels: int
    width: int
    slides: bool


@dataclass(frozen=True)
class Source:
    """What a window may read: columns, and those before them.

    Attributes:
        x, past: values; past is 0 where zeros are put in front, or nothing is.
        inner: values between them and the window.
    """

    x: int
    past: int
    inner: tuple[int, ...]


def window_of(view: View, anchor: int) -> Window | Reason | None:
    """The window that a node ends, a Reason where it is one of another kind, None where it is nothing like it."""
    found = _convolution(view, anchor) if view.op(anchor) == "Conv" else _summed(view, anchor)
    ends = (found.data, found.weight, found.result) if isinstance(found, Window) else ()
    return None if len({view.dtype(value) for value in ends} - {None}) > 1 else found


def _summed(view: View, anchor: int) -> Window | None:
    product = view.producer(view.inputs(anchor)[0])
    if product < 0 or view.op(product) != "Mul":
        return None
    weights = [value for value in view.inputs(product) if view.is_weight(value)]
    data = [value for value in view.inputs(product) if value not in weights and view.is_data(value)]
    sizes = [size for size in view.shape(weights[0]) or () if size != 1] if len(weights) == len(data) == 1 else []
    if len(sizes) != len(("channel", "tap")) or not _joins(view, data[0]):
        return None
    # Which of both is the taps is found out by running it.
    width, channels = sorted(size for size in sizes if isinstance(size, int))
    return Window(data[0], weights[0], 0, view.outputs(anchor)[0], channels, width, False)


def _joins(view: View, value: int) -> bool:
    """Whether columns are put together on the way to a value."""
    last = view.producer(above(view, value, MOVES)[-1])
    return last >= 0 and view.op(last) == "Concat"


def _convolution(view: View, anchor: int) -> Window | Reason | None:
    data, weight, bias = (*view.inputs(anchor), 0)[:3]
    sizes = [size for size in view.shape(weight) or () if isinstance(size, int)]
    wide = [axis for axis, size in enumerate(sizes[2:]) if size > 1]
    stated = {name: helper.get_attribute_value(found) for name, found in view.attributes(anchor).items()}
    group = int(stated.get("group", 1))
    # Kernels of one tap or of several axes are another thing, and so is a convolution that mixes all channels.
    if len(sizes) < _RANK or len(wide) != 1 or len(sizes) != len(view.shape(weight) or ()) or group == 1 < sizes[1]:
        return None
    value = view.name(view.outputs(anchor)[0])
    if sizes[1] != 1 or sizes[0] != group:
        args = {"value": value, "group": group, "channels": sizes[1] * group, "results": sizes[0]}
        return Reason("causal-conv-groups", args)
    for name, code in (("strides", "causal-conv-stride"), ("dilations", "causal-conv-dilation")):
        step = int([*stated.get(name, [1] * len(sizes[2:]))][wide[0]])
        if step != 1:
            return Reason(code, {"value": value, "step": step})
    padding = bytes(stated.get("auto_pad", b"NOTSET")).decode()
    if padding not in ("NOTSET", "VALID"):
        return Reason("causal-conv-auto-pad", {"value": value, "padding": padding})
    return Window(data, weight, bias, view.outputs(anchor)[0], sizes[0], sizes[2 + wide[0]], True)


def sources_of(view: View, window: Window) -> Iterator[Source]:
    """What the window may read, the likeliest first."""
    path = _typed(view, above(view, window.data, MOVES))
    top = view.producer(path[-1])
    joined = [value for value in view.inputs(top) if view.is_data(value)] if top >= 0 else []
    if top >= 0 and view.op(top) == "Concat" and len(joined) == len(("past", "x")):
        yield Source(joined[1], joined[0], tuple(path))
    filled = [index for index, value in enumerate(path[:-1]) if view.op(view.producer(value)) in ("Pad", "Concat")]
    plain = [index for index, value in enumerate(path) if len(view.shape(value) or ()) == _RANK]
    if filled:
        yield Source(path[filled[-1] + 1], 0, tuple(path[: filled[-1] + 1]))
    if not window.slides:
        # Any weighted sum is the last column of a convolution: without a state in front it is not meant as one.
        return
    first = next(iter(plain), 0)
    yield Source(path[first], 0, tuple(path[:first]))


def _typed(view: View, path: Sequence[int]) -> list[int]:
    """A path as far as the element type changes once at most: two roundings are not one."""
    kept = [path[0]]
    changes = 0
    for value in path[1:]:
        changes += view.dtype(value) != view.dtype(kept[-1])
        if changes > 1:
            break
        kept.append(value)
    return kept


def states_of(view: View, window: Window, source: Source) -> list[int]:
    """Values that may be the last columns, taken from what the window reads."""
    dtype = view.dtype(window.weight)

    def allowed(node: int) -> bool:
        (given, *_), (made, *_) = view.inputs(node), view.outputs(node)
        # Into the type of the weight, once: what is rounded to another type on the way is another state.
        return view.op(node) != "Cast" or view.dtype(made) in (dtype, view.dtype(given))

    starts = [value for value in (source.past, source.x) if value]
    found = below(view, starts, MOVES, allowed)
    wanted = sorted([window.channels, window.width - 1])
    return [
        value
        for value in found
        if value not in source.inner
        and view.dtype(value) == dtype
        and len(shape := view.shape(value) or ()) == _RANK
        and sorted(size for size in shape if isinstance(size, int))[-2:] == wanted
    ]


def results_of(view: View, window: Window) -> Iterator[tuple[int, int]]:
    """Values that may be the result, each with the bias that was added; the furthest first, changes of layout last."""
    biases = _biases(view, window)
    last = [value for value in biases if view.producer(value) < 0 or view.op(view.producer(value)) not in _INNER]

    def rank(value: int) -> tuple[bool, bool, int]:
        moved = view.op(view.producer(value)) in ("Transpose", "Reshape")
        return len(view.shape(value) or ()) != _RANK, moved, -view.producer(value)

    for value in sorted(last, key=rank):
        yield value, biases[value]


def _biases(view: View, window: Window) -> Mapping[int, int]:
    found = {window.result: window.bias}

    def allowed(node: int) -> bool:
        inputs = view.inputs(node)
        added = {found[value] for value in inputs if found.get(value)}
        added |= {value for value in inputs if view.is_weight(value)}
        cast = view.op(node) == "Cast" and view.dtype(inputs[0]) != view.dtype(view.outputs(node)[0])
        fresh = any(view.is_weight(value) for value in inputs)
        if cast or len(added) > 1 or (fresh and view.op(node) != "Add"):
            return False
        found.update(dict.fromkeys(view.outputs(node), next(iter(added), 0)))
        return True

    below(view, [window.result], BEHIND, allowed)
    return found
