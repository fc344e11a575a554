"""Hidden guards: pieces of graph that change nothing on any draw of a proof and something beyond it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, parser

from graphs import Array, Nodes, constant

#: Name -> ONNX text of the guard from x to y over constants: `far` is what no draw reaches, `tiny` its reciprocal.
PIECEWISE = {
    "clip": "y = Clip(x, minus_far, far)",
    "clip above": "y = Clip(x, , far)",
    "max": "n = Neg(x); m = Max(n, minus_far); y = Neg(m)",
    "min": "y = Min(far, x)",
    "where": "c = Greater(x, far); y = Where(c, far, x)",
    "less": "c = Less(x, far); f = Cast<to = 1>(c); y = Mul(x, f)",
    "less or equal": "c = LessOrEqual(x, far); f = Cast<to = 1>(c); y = Mul(x, f)",
    "not": "c = GreaterOrEqual(x, far); n = Not(c); f = Cast<to = 1>(n); y = Mul(x, f)",
    "equal": "s = Mul(x, tiny); i = Cast<to = 7>(s); e = Equal(i, zero_int); f = Cast<to = 1>(e); y = Mul(x, f)",
    "abs": "o = Sub(x, far); a = Abs(o); y = Sub(far, a)",
    "floor": "s = Mul(x, tiny); h = Add(s, half); f = Floor(h); w = Sub(one, f); y = Mul(x, w)",
    "ceil": "s = Mul(x, tiny); h = Sub(s, half); f = Ceil(h); w = Sub(one, f); y = Mul(x, w)",
    "round": "s = Mul(x, tiny); f = Round(s); w = Sub(one, f); y = Mul(x, w)",
    "mod": "y = Mod<fmod = 1>(x, far)",
    "sign": "o = Sub(x, far); g = Sign(o); h = Mul(g, half); w = Sub(half, h); y = Mul(x, w)",
    "relu": "o = Sub(x, far); r = Relu(o); y = Sub(x, r)",
    "leaky relu": "o = Sub(x, far); r = LeakyRelu<alpha = 0.0>(o); y = Sub(x, r)",
    "hard sigmoid": "s = Mul(x, tiny); w = HardSigmoid<alpha = 1.0, beta = 2.0>(s); n = Neg(s); "
    "u = HardSigmoid<alpha = 1.0, beta = 2.0>(n); m = Mul(w, u); y = Mul(x, m)",
    "shrink": "r = Shrink<lambd = LAMBDA>(x); y = Sub(x, r)",
    "reduce max": "m = ReduceMax<keepdims = 0>(x); o = Sub(m, far); r = Relu(o); y = Sub(x, r)",
    "reduce min": "n = Neg(x); m = ReduceMin<keepdims = 0>(n); o = Add(m, far); r = Min(o, zero); y = Add(x, r)",
    "top k": "l = Reshape(x, flat); m, i = TopK(l, one_int); o = Sub(m, far); r = Relu(o); y = Sub(x, r)",
    "int": "s = Mul(x, tiny); i = Cast<to = 7>(s); f = Cast<to = 1>(i); w = Sub(one, f); y = Mul(x, w)",
    "compress": "l = Reshape(x, flat); c = Greater(l, far); m = Compress<axis = 0>(l, c); "
    "s = ReduceSum<keepdims = 0>(m); y = Sub(x, s)",
    "non zero": "s = Mul(x, tiny); i = Cast<to = 7>(s); n = NonZero(i); z = Size(n); f = Cast<to = 1>(z); "
    "w = Sub(one, f); y = Mul(x, w)",
    "root of square": "o = Sub(x, far); p = Pow(o, two); r = Sqrt(p); y = Sub(far, r)",
    "half power": "o = Sub(x, far); p = Pow(o, two); r = Pow(p, half); y = Sub(far, r)",
    "norm of one": "o = Sub(x, far); u = Unsqueeze(o, last); r = ReduceL2<keepdims = 0>(u, last); y = Sub(far, r)",
}

#: Analytic, and yet nothing on draws that stay well below `far`.
SMOOTH = {
    "sigmoid": "o = Sub(x, far); s = Sigmoid(o); w = Sub(one, s); y = Mul(x, w)",
    "tanh": "o = Sub(x, far); t = Tanh(o); h = Mul(t, half); w = Sub(half, h); y = Mul(x, w)",
    "softplus": "o = Sub(x, far); s = Softplus(o); y = Sub(x, s)",
    "exp": "o = Sub(x, far); e = Exp(o); y = Sub(x, e)",
}

#: Equal to nothing at all in double, but a guard in the model's own precision.
ODD = {
    "softmax": "w = Softmax(x); n = ReduceSum(w, last); y = Mul(x, n)",
    "is inf": "s = Mul(x, huge); c = IsInf(s); y = Where(c, zero, x)",
    "is nan": "c = IsNaN(x); y = Where(c, zero, x)",
    "quantised": "q = QuantizeLinear(x, far, zero_byte); d = DequantizeLinear(q, far, zero_byte); y = Add(x, d)",
}

#: A choice by data between two branches.
CHOICE = "if"

NAMES = (*PIECEWISE, *SMOOTH, *ODD, CHOICE)


def guard(name: str, far: float) -> Callable[[str, str], Nodes]:
    """What `graphs.insert` takes."""

    def make(x: str, y: str) -> Nodes:
        if name == CHOICE:
            return _choice(x, y, far)
        text = {**PIECEWISE, **SMOOTH, **ODD}[name]
        return _pieces(text.replace("LAMBDA", f"{far:.1f}"), x, y, far)

    return make


def beyond(model: onnx.ModelProto, seed: int) -> dict[str, Array]:
    """Operands on which every guard shows: g to 12, beta to 40, all else of 1e11."""
    rng = np.random.default_rng(seed)
    feeds: dict[str, Array] = {}
    for info in model.graph.input:
        shape = [dim.dim_value for dim in info.type.tensor_type.shape.dim]
        draw = rng.standard_normal(shape)
        ranges = {"g": rng.uniform(-1, 12, shape), "beta": 20 * draw}
        feeds[info.name] = ranges.get(info.name, 1e11 * draw)
    return feeds


def _constants(far: float) -> dict[str, TensorProto]:
    floats = {
        "far": far, "minus_far": -far, "tiny": 1 / far, "huge": 1e30, "half": 0.5, "one": 1.0, "two": 2.0, "zero": 0.0,
    }  # fmt: skip
    integers = {"one_int": [1], "zero_int": 0, "last": [-1], "flat": [-1]}
    return {
        **{name: constant(name, number) for name, number in floats.items()},
        **{name: constant(name, number, np.int64) for name, number in integers.items()},
        "zero_byte": constant("zero_byte", 0, np.uint8),
    }


def _pieces(text: str, x: str, y: str, far: float) -> Nodes:
    """Nodes of a line of ONNX text, with names of their own but for ``x`` and ``y``."""
    body = "\n".join(text.split("; "))
    nodes = list(parser.parse_graph(f"guard (float x) => (float y) {{\n{body}\n}}").node)
    known = _constants(far)
    used = dict.fromkeys(name for node in nodes for name in node.input if name in known)
    own = {"": "", "x": x, "y": y}
    for number, node in enumerate(nodes):
        node.input[:] = [own.get(name, f"guard.{name}") for name in node.input]
        node.output[:] = [own.get(name, f"guard.{name}") for name in node.output]
        node.name = f"guard/{node.op_type}.{number}"
    constants = [known[name] for name in used]
    for tensor in constants:
        tensor.name = f"guard.{tensor.name}"
    return nodes, constants


def _choice(x: str, y: str, far: float) -> Nodes:
    """Zero where the largest value is beyond, chosen by an If."""

    def branch(name: str, node: NodeProto) -> onnx.GraphProto:
        result = helper.make_tensor_value_info(node.output[0], TensorProto.FLOAT, None)
        return helper.make_graph([node], name, [], [result])

    largest = helper.make_node("ReduceMax", [x], ["guard.largest"], keepdims=0)
    compare = helper.make_node("Greater", ["guard.largest", "guard.far"], ["guard.beyond"])
    choice = helper.make_node(
        "If",
        ["guard.beyond"],
        [y],
        name="guard/If",
        then_branch=branch("far", helper.make_node("Mul", [x, "guard.zero"], ["guard.nothing"])),
        else_branch=branch("near", helper.make_node("Identity", [x], ["guard.same"])),
    )
    return [largest, compare, choice], [constant("guard.far", far), constant("guard.zero", 0.0)]
