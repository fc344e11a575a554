"""A causal depthwise convolution, its state and SiLU: one CausalConvWithState.

    u = [s, x]                              s: the k - 1 columns before x, zeros where there are none
    y[t] = bias + sum over i < k of weight[i] * u[t + i]     each channel by itself; SiLU or nothing behind it
    present_state = the last k - 1 columns of u

It stands in front of the rule in Qwen3-Next, Qwen3.5 and Mamba: Conv over padded input or over state and input, sliced
to the tokens; a Mul and a ReduceSum in a decode step. Width, layouts and activation are determined by running the
site. A state of more columns than the convolution reads (transformers carries k) stays computed where it is.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product

import numpy as np
import onnx
from onnx import TensorProto

from deltafuse.causal_windows import BEHIND, MOVES, results_of, sources_of, states_of, window_of
from deltafuse.expression_layouts import fits, ordered
from deltafuse.expression_trial import difference
from deltafuse.expression_view import View
from deltafuse.expressions import (
    Array,
    Emission,
    Example,
    Expression,
    Neighbour,
    Operands,
    Parameters,
    Place,
    Proposal,
    Trial,
)
from deltafuse.lowering_conv import CAUSAL_CONV, is_causal_conv, lower_conv
from deltafuse.reasons import Reason
from deltafuse.targets.causal_conv import LAYOUTS, LEAST_OPSET, ORDER, layout_of, write
from deltafuse.targets.emit import Emitter

_CLOSE = 1e-9


def _window(kernel: Array, joined: Array, tokens: int) -> Array:
    """What each of some tokens sees from its own column on, times the kernel."""
    parts = [joined[..., i : i + tokens] * kernel[:, i, None] for i in range(kernel.shape[1])]
    return np.sum(parts, axis=0)


def _reference(operands: Operands, parameters: Parameters) -> Operands:
    """The convolution; `shift` moves its window, `unpadded` leaves out what zeros or a state are needed for."""
    width, shift = int(parameters["width"]), int(parameters.get("shift", 0))
    taps_first = bool(parameters.get("taps_first"))
    kernel: Array = np.reshape(operands["weight"], (width, -1) if taps_first else (-1, width))
    kernel = np.transpose(kernel) if taps_first else kernel
    x = ordered(operands["x"], layout_of(parameters, "x"), ORDER)
    past = np.zeros((*x.shape[:2], width - 1))
    if "past_state" in operands:
        past = ordered(operands["past_state"], layout_of(parameters, "past_state"), ORDER)
    joined = np.concatenate([past[..., past.shape[-1] - width + 1 :], x], -1)
    room = ((0, 0), (0, 0), (max(0, -shift), max(0, shift)))
    y = _window(kernel, np.pad(joined, room)[..., max(0, shift) :], x.shape[-1])
    y = y + np.reshape(operands["bias"], (-1, 1)) if "bias" in operands else y
    y = y / (1.0 + np.exp(-y)) if parameters.get("silu") else y
    first = width - 1 if parameters.get("unpadded") else -int(parameters.get("columns", 0))
    outputs = {"y": y[..., first:]} | ({"present_state": joined[..., x.shape[-1] :]} if parameters.get("state") else {})
    return {name: ordered(array, ORDER, layout_of(parameters, name)) for name, array in outputs.items()}


def _choices(trial: Trial, found: Operands, roles: Sequence[str], shifts: Sequence[int]) -> Iterator[Parameters]:
    """Parameters that the sizes allow."""
    shapes = dict(trial.dims) | {name: array.shape for name, array in found.items()}
    layouts = [[n for n, layout in enumerate(LAYOUTS) if fits(layout, shapes[role])] for role in roles]
    sizes = [size for size in trial.shapes["weight"] if size != 1]
    if len(sizes) != len(("channels", "width")):
        return
    for taps_first, silu, shift, chosen in product((0, 1), (1, 0), shifts, product(*layouts)):
        given = {f"{role}_layout": float(layout) for role, layout in zip(roles, chosen, strict=True) if layout}
        width = sizes[0] if taps_first else sizes[1]
        base = {"width": width, "silu": silu, "taps_first": taps_first, "shift": shift} | given
        base["state"] = float("present_state" in found)
        axis = LAYOUTS[chosen[roles.index("y")]].find("T")
        columns = found["y"].shape[axis] if axis >= 0 else 1
        for more in ({}, {"columns": columns}):
            yield {name: float(value) for name, value in (base | more).items() if value}


def _solve(trial: Trial, *, shifts: Sequence[int] = (0,), unpadded: bool = False) -> Parameters | Reason:
    """The parameters with which the reference gives what the site gives, on one draw."""
    rng = np.random.default_rng(1)
    operands = {role: rng.standard_normal(shape) for role, shape in trial.shapes.items()}
    found = trial.run(operands)
    if isinstance(found, Reason):
        return found
    roles = [role for role in ("x", "past_state", "y", "present_state") if role in operands or role in found]
    for chosen in _choices(trial, found, roles, shifts):
        parameters = dict(chosen) | ({"unpadded": 1.0} if unpadded else {})
        try:
            wanted = _reference(operands, parameters)
        except ValueError:  # sizes that do not go together
            continue
        if difference(found, wanted) <= _CLOSE:
            return parameters
    return Reason("causal-conv-other")


def _example(name: str, *changes: tuple[str, str], sites: int = 1, reason: str = "") -> Example:
    text = _TEXT
    for old, new in changes:
        text = text.replace(old, new)
    return Example(name, text, sites, reason)


_TEXT = """
<ir_version: 8, opset_import: ["" : 17]>
g (float[n, 2, t] a, float[n, 2, 2] past) => (float[n, 2, t] b, float[n, 2, 2] present)
<float[2, 1, 3] w = {1.0, -2.0, 0.5, 0.25, 3.0, -1.0}, float[2] bias = {0.5, -0.25}, int64[1] from = {-2},
 int64[1] end = {9223372036854775807}, int64[1] axis = {2}>
{
  x = Neg(a)
  u = Concat<axis = -1>(past, x)
  present = Slice(u, from, end, axis)
  c = Conv<group = 2, kernel_shape = [3]>(u, w, bias)
  s = Sigmoid(c)
  y = Mul(c, s)
  b = Neg(y)
}"""
_ALONE = (
    (", float[n, 2, 2] past)", ")"),
    (", float[n, 2, 2] present)", ")"),
    ("present = Slice(u, from, end, axis)", ""),
)
_JOINED = "u = Concat<axis = -1>(past, x)"


_EXAMPLES = (
    _example("over state and input, with SiLU"),
    _example("without SiLU", ("s = Sigmoid(c)", ""), ("y = Mul(c, s)", "y = Abs(c)")),
    _example("a state of more columns stays where it is", ("[n, 2, 2]", "[n, 2, 3]"), ("from = {-2}", "from = {-3}"),
             ("b = Neg(y)", "late = Slice(y, one, end, axis) b = Neg(late)"),
             ("int64[1] axis", "int64[1] one = {1}, int64[1] axis")),
    _example("over zeros and input", *_ALONE, (_JOINED, "u = Pad(x, pads)"),
             ("int64[1] axis", "int64[6] pads = {0, 0, 2, 0, 0, 0}, int64[1] axis")),
    _example("a window around the token", *_ALONE, (_JOINED, "u = Pad(x, pads)"),
             ("int64[1] axis", "int64[6] pads = {0, 0, 1, 0, 0, 1}, int64[1] axis"),
             sites=0, reason="causal-conv-ahead"),
    _example("a window before the token", *_ALONE, (_JOINED, "v = Pad(x, pads) u = Slice(v, zero, last, axis)"),
             ("int64[1] axis", "int64[6] pads = {0, 0, 3, 0, 0, 0}, int64[1] zero = {0}, int64[1] last = {-1}, "
              "int64[1] axis"), sites=0, reason="causal-conv-behind"),
    _example("no state and no zeros", *_ALONE, (_JOINED, "u = Identity(x)"), ("[n, 2, t] b", "[n, 2, q] b"),
             sites=0, reason="causal-conv-unpadded"),
    _example("a dilated kernel", ("kernel_shape", "dilations = [2], kernel_shape"), ("[n, 2, t] b", "[n, 2, q] b"),
             sites=0, reason="causal-conv-dilation"),
    _example("two results for each channel", ("[2, 1, 3] w = {", "[4, 1, 3] w = {1.0, 2.0, 3.0, 4.0, 5.0, 6.0, "),
             ("[2] bias = {", "[4] bias = {1.0, 2.0, "), ("[n, 2, t] b", "[n, 4, t] b"),
             sites=0, reason="causal-conv-groups"),
    _example("double precision", ("float", "double"), sites=0, reason="expression-dtype"),
)  # fmt: skip
_OPERATORS = dict.fromkeys(MOVES | BEHIND, (0, 4)) | {"Conv": (0, 1), "ReduceSum": (0, 1)}
_SIZES = frozenset({
    "Add", "Cast", "Concat", "ConstantOfShape", "Div", "Gather", "Mod", "Mul", "Neg", "Reshape", "Shape", "Slice",
    "Squeeze", "Sub", "Transpose", "Unsqueeze",
})  # fmt: skip
_NEIGHBOURS = {
    "causal-conv-ahead": Neighbour(partial(_solve, shifts=range(1, 9)), _reference),
    "causal-conv-behind": Neighbour(partial(_solve, shifts=range(-1, -9, -1)), _reference),
    "causal-conv-unpadded": Neighbour(partial(_solve, unpadded=True), _reference),
}
_TEXTS = {
    "causal-conv-other": "it is no causal convolution: its window, order or sizes are others; compare it with the "
    "reference in patterns/causal_conv.py",
    "causal-conv-ahead": "the window of {value} reaches beyond the token: the convolution is not causal; pad on the "
    "left alone, if a causal convolution is meant",
    "causal-conv-behind": "the window of {value} ends before the token: CausalConvWithState has the token in it; "
    "shift the window by a token, if a causal convolution is meant",
    "causal-conv-unpadded": "in front of {value} there are neither zeros nor a state: the first tokens have no "
    "result; pad it with zeros on the left or join the state in front, one token less than the kernel is long",
    "causal-conv-groups": "the convolution {value} has {group:# group} for {channels:# channel} and "
    "{results:# result}: CausalConvWithState takes each channel by itself; leave it as a Conv, or give it a group a "
    "channel in the model",
    "causal-conv-stride": "the convolution {value} moves on by {step:# token}: CausalConvWithState by one; leave it "
    "as a Conv, or use stride 1 in the model",
    "causal-conv-dilation": "the taps of {value} are {step:# token} apart: those of CausalConvWithState are "
    "neighbours; leave it as a Conv, or use dilation 1 in the model",
    "causal-conv-auto-pad": "the convolution {value} pads by auto_pad {padding}; write the zeros as pads",
    "causal-conv-target": f"target {{target}} has no {CAUSAL_CONV}; leave this rule out of --rules",
}


class _CausalConv(Expression):
    name = "causal_conv"
    formula = """\
joined = {past_state} before {x}, along the tokens
y_t = sum over i of {weight}_i * joined_(t + i) + {bias}, then SiLU where silu is 1; {y} has them all
{present_state} = the end of joined"""
    operator = CAUSAL_CONV
    anchors = frozenset({"Conv", "ReduceSum"})
    operators = _OPERATORS
    shape_operators = _SIZES
    kept = MOVES
    roles = ("x", "weight", "bias", "past_state")
    outputs = ("y", "present_state")
    dtypes = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16})
    # Input and state may be cast on their way to the convolution.
    one_type = False
    refusals = frozenset({"causal-conv-target"})
    examples = _EXAMPLES
    neighbours = _NEIGHBOURS
    texts = _TEXTS

    def propose(self, view: View, anchor: int) -> Iterator[Proposal | Reason]:
        """Each result, furthest first, with what may be the state and without."""
        window = window_of(view, anchor)
        if window is None or isinstance(window, Reason):
            yield from () if window is None else (window,)
            return
        for source in sources_of(view, window):
            states = states_of(view, window, source)
            for y, bias in results_of(view, window):
                roles = {"x": source.x, "weight": window.weight, "bias": bias, "past_state": source.past}
                given = {role: value for role, value in roles.items() if value}
                for state in (*states, 0):
                    yield Proposal(given, {"y": y} | ({"present_state": state} if state else {}))

    def solve(self, trial: Trial) -> Parameters | Reason:
        """Width, layouts, activation, and how many columns are kept."""
        return _solve(trial)

    def reference(self, operands: Operands, parameters: Parameters) -> Operands:
        """See above."""
        return _reference(operands, parameters)

    def emit(self, place: Place, emitter: Emitter) -> Emission | Reason:
        """One CausalConvWithState, and what brings its operands and results into their layouts."""
        if place.domain is None:
            return Reason("causal-conv-target", {"target": place.target})
        if place.opset < LEAST_OPSET:
            return Reason("expression-opset", {"op": CAUSAL_CONV, "least": LEAST_OPSET, "opset": place.opset})
        return Emission(CAUSAL_CONV, value_info=write(place, emitter), target_opset=True)

    def lower(self, node: onnx.NodeProto) -> Sequence[onnx.NodeProto]:
        """The operator as plain ones."""
        return lower_conv(node) if is_causal_conv(node.op_type, node.domain) else (node,)


PATTERN = _CausalConv()
