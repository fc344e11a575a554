"""Layer normalisation written out: one LayerNormalization (opset 17).

    d = x - mean(x)        mean over the last axes
    y = d / sqrt(mean(d^2) + eps) * scale + bias

Source: Ba, Kiros, Hinton, "Layer Normalization", 2016. The variance is that of the numbers themselves (divided by their
count), and eps stands inside the root. Axes and eps are determined by running the site; scale and bias may be missing.
"""

import math
from collections.abc import Iterator
from functools import partial
from itertools import permutations

import numpy as np
from onnx import TensorProto, helper

from deltafuse.expression_view import Region, View
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
from deltafuse.reasons import Reason
from deltafuse.targets.emit import Emitter

_OPSET = 17
#: So small that eps is all there is below the root.
_TINY = 1e-12
#: How far the eps of single elements, or its attribute, which is a float32, may be from the one that is meant.
_CLOSE = 1e-9
_ROUNDED = 1e-12


def _axes(parameters: Parameters) -> tuple[int, ...]:
    return tuple(range(int(parameters["axis"]), 0))


def _scaled(y: Array, operands: Operands) -> Operands:
    return {"y": y * operands.get("scale", np.ones(())) + operands.get("bias", np.zeros(()))}


def _reference(operands: Operands, parameters: Parameters, *, lost: int = 0, outside: bool = False) -> Operands:
    """The norm; `lost` is taken from the count that the variance is divided by, `outside` puts eps behind the root."""
    axes = _axes(parameters)
    d = operands["x"] - operands["x"].mean(axes, keepdims=True)
    count = math.prod(d.shape[axis] for axis in axes)
    variance: Array = (d * d).sum(axes, keepdims=True) / (count - lost)
    eps = parameters["eps"]
    return _scaled(d / (np.sqrt(variance) + eps if outside else np.sqrt(variance + eps)), operands)


def _measure(trial: Trial, *, outside: bool = False) -> Parameters | Reason:
    """The axes and eps with which the site is a norm on numbers so small that eps is all there is."""
    rng = np.random.default_rng(1)
    plain = {"x": rng.standard_normal(trial.shapes["x"]) * _TINY}
    plain |= {role: np.full(trial.shapes[role], float(role == "scale")) for role in trial.shapes if role != "x"}
    found = trial.run(plain)
    if isinstance(found, Reason):
        return found
    for axis in range(-1, -plain["x"].ndim - 1, -1):
        axes = tuple(range(axis, 0))
        d = plain["x"] - plain["x"].mean(axes, keepdims=True)
        if d.shape != found["y"].shape or not d.any():
            continue
        with np.errstate(all="ignore"):
            root = d / found["y"]
            square = (d * d).mean(axes, keepdims=True)
            eps = root - np.sqrt(square) if outside else root * root - square
        middle = float(np.median(eps))
        if 0 < middle < np.inf and bool(np.all(np.abs(eps - middle) <= _CLOSE * middle)):
            return {"axis": axis, "eps": middle}
    return Reason("layer-norm-axes")


def _is_norm(trial: Trial, parameters: Parameters) -> bool:
    """Whether the site is a norm at all, as far as one run tells: the reasons that follow say that it is."""
    rng = np.random.default_rng(2)
    operands = {role: rng.standard_normal(shape) for role, shape in trial.shapes.items()}
    found, wanted = trial.run(operands), _reference(operands, parameters)["y"]
    if isinstance(found, Reason) or found["y"].shape != wanted.shape:
        return False
    return bool(np.abs(found["y"] - wanted).max() <= _CLOSE * np.abs(wanted).max())


def _parts(region: Region) -> Iterator[tuple[str, ...]]:
    """What the weights of a part can be."""
    if len(region.weights) <= len(("scale", "bias")):
        yield from permutations(("scale", "bias"), len(region.weights))


def _unbiased(operands: Operands, parameters: Parameters) -> Operands:
    return _reference(operands, parameters, lost=1)


def _outside(operands: Operands, parameters: Parameters) -> Operands:
    return _reference(operands, parameters, outside=True)


#: A norm in opset 17 over 6 numbers, and places that the examples change.
_TEXT = """
<ir_version: 8, opset_import: ["" : 17]>
g (float[n, 3, 6] a) => (float[n, 3, 6] b)
<float[6] s = {1.0, 2.0, 3.0, -1.0, 0.5, 0.1}, float[6] t = {0.0, 0.1, 0.2, 0.3, -0.4, 0.5}, float eps = {0.00001},
 float two = {2.0}>
{
  x = Neg(a) m = ReduceMean<axes = [-1]>(x) d = Sub(x, m) p = Pow(d, two) v = ReduceMean<axes = [-1]>(p)
  e = Add(v, eps) r = Sqrt(e) q = Div(d, r) w = Mul(q, s) b = Add(w, t)
}"""
_AXES = "axes = [-1]"
_PLAIN = ("w = Mul(q, s) b = Add(w, t)", "b = Relu(q)")
_ROWS = "float[3, 1] s = {1.0, 2.0, 3.0}"


def _example(name: str, *changes: tuple[str, str], sites: int = 0, reason: str = "") -> Example:
    text = _TEXT
    for old, new in changes:
        text = text.replace(old, new)
    return Example(name, text, sites, reason)


_EXAMPLES = (
    _example("with scale and bias", sites=1),
    _example("the square by Mul, the quotient by Reciprocal", ("Pow(d, two)", "Mul(d, d)"),
             ("q = Div(d, r)", "o = Reciprocal(r) q = Mul(o, d)"), sites=1),
    _example("the difference taken twice", ("p = Pow(d, two)", "c = Sub(x, m) p = Pow(c, two)"), sites=1),
    _example("opset 18, axes as an input", ('"" : 17', '"" : 18'), ("float two", "int64[1] last = {-1}, float two"),
             (f"<{_AXES}>(x)", "(x, last)"), (f"<{_AXES}>(p)", "(p, last)"), sites=1),
    _example("over two axes", (_AXES, "axes = [1, 2]"), _PLAIN, sites=1),
    _example("without scale and bias", _PLAIN, sites=1),
    _example("a scale alone", ("Add(w, t)", "Relu(w)"), sites=1),
    _example("a bias alone", ("w = Mul(q, s) b = Add(w, t)", "b = Add(q, t)"), sites=1),
    _example("a scale for each row stays behind", ("float[6] s = {1.0, 2.0, 3.0, -1.0, 0.5, 0.1}", _ROWS), sites=1),
    _example("half precision, what comes before is an Add", ("float", "float16"), ("x = Neg(a)", "x = Add(a, s)"),
             ("{1.0, 2.0, 3.0, -1.0, 0.5, 0.1}", "{1, 2, 3, 4, 5, 6}"),
             ("{0.0, 0.1, 0.2, 0.3, -0.4, 0.5}", "{9, 8, 7, 6, 5, 4}"), ("{0.00001}", "{1100}"),
             ("{2.0}", "{16384}"), sites=1),
    _example("over another axis", (_AXES, "axes = [1]"), reason="layer-norm-axes"),
    _example("over the last axis, but the variance over all", ("v = ReduceMean<axes = [-1]>", "v = ReduceMean"),
             reason="layer-norm-axes"),
    _example("a scale for each row, the size not known", ("float[6] s = {1.0, 2.0, 3.0, -1.0, 0.5, 0.1}", _ROWS),
             ("Add(w, t)", "Relu(w)"), ("float[n, 3, 6]", "float[n, 3, k]"), reason="layer-norm-scale"),
    _example("eps behind the root", ("e = Add(v, eps) r = Sqrt(e)", "e = Sqrt(v) r = Add(e, eps)"),
             reason="layer-norm-eps-outside"),
    _example("the variance of a sample", ("float two", "float six = {6.0}, float five = {5.0}, float two"),
             ("e = Add(v, eps)", "u = Mul(v, six) h = Div(u, five) e = Add(h, eps)"), reason="layer-norm-unbiased"),
    _example("the root mean square alone", ("d = Sub(x, m)", "d = Neg(x)")),
    _example("an inner value that is read outside", ("b)", "b, float[n, 3, 1] r)"), reason="inner-value-used"),
    _example("double precision", ("float", "double"), reason="expression-dtype"),
    _example("before there was a LayerNormalization", ('"" : 17', '"" : 16'), reason="expression-opset"),
    _example("without scale, the size not known", _PLAIN, ("float[n, 3, 6]", "float[n, 3, k]"),
             reason="layer-norm-size"),
)  # fmt: skip


_OPERATORS = {
    "ReduceMean": (2, 2), "Sub": (1, 2), "Pow": (0, 1), "Mul": (0, 3), "Add": (1, 2), "Sqrt": (0, 1), "Div": (0, 2),
    "Reciprocal": (0, 1)
}  # fmt: skip


_NEIGHBOURS = {
    "layer-norm-unbiased": Neighbour(_measure, _unbiased),
    "layer-norm-eps-outside": Neighbour(partial(_measure, outside=True), _outside),
}


_TEXTS = {
    "layer-norm-axes": "it normalises nothing over its last axes: mean and variance are over other axes, or it is no "
    "norm; compare it with the reference in patterns/layer_norm.py",
    "layer-norm-scale": "scale or bias is not of the size of the axes that are normalised: LayerNormalization has no "
    "other; give them the size of those axes, or leave the norm as it is",
    "layer-norm-size": "the size of the axes that are normalised is not known, or is one; declare it",
    "layer-norm-eps": "the epsilon {eps:.9g} is no float32, which the attribute of LayerNormalization is; use an "
    "epsilon that float32 holds",
    "layer-norm-unbiased": "the variance of {value} is divided by one less than the count: "
    "LayerNormalization divides by the count; use unbiased=False in the model",
    "layer-norm-eps-outside": "epsilon is added behind the root for {value}, not inside it as in LayerNormalization; "
    "add epsilon to the variance in the model, or leave the norm as it is",
}


class _LayerNorm(Expression):
    name = "layer_norm"
    formula = "{y} = ({x} - mean({x})) / sqrt(var({x}) + {eps}) * {scale} + {bias}, over axes from {axis} on"
    anchors = frozenset({"ReduceMean"})
    operators = _OPERATORS
    roles = ("x", "scale", "bias")
    outputs = ("y",)
    # LayerNormalization computes its statistics in float32 or bfloat16: it has no double.
    dtypes = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16})
    refusals = frozenset({"layer-norm-size", "layer-norm-scale", "layer-norm-eps"})
    examples = _EXAMPLES
    neighbours = _NEIGHBOURS
    texts = _TEXTS

    def propose(self, view: View, anchor: int) -> Iterator[Proposal | Reason]:
        """Each part with one value in and one out, its weights as scale, bias or both."""
        for region in view.regions(anchor, self.operators):
            for names in _parts(region):
                weights = zip(names, region.weights, strict=True)
                yield Proposal({"x": region.source} | dict(weights), {"y": region.result})

    def solve(self, trial: Trial) -> Parameters | Reason:
        """Axes and eps, by execution."""
        found = _measure(trial)
        if isinstance(found, Reason) or not _is_norm(trial, found):
            return found if isinstance(found, Reason) else Reason("layer-norm-axes")
        dims = trial.dims["x"][int(found["axis"]) :]
        if any(trial.dims[role] != dims for role in ("scale", "bias") if role in trial.dims):
            return Reason("layer-norm-scale")
        if "scale" not in trial.dims and not all(isinstance(dim, int) for dim in dims):
            return Reason("layer-norm-size")
        stored = float(np.float32(found["eps"]))
        if abs(stored - found["eps"]) > _ROUNDED * stored:
            return Reason("layer-norm-eps", {"eps": found["eps"]})
        return {"axis": found["axis"], "eps": stored}

    def reference(self, operands: Operands, parameters: Parameters) -> Operands:
        """See above."""
        return _reference(operands, parameters)

    def emit(self, place: Place, emitter: Emitter) -> Emission | Reason:
        """One LayerNormalization; a missing scale is ones."""
        if place.opset < _OPSET:
            return Reason("expression-opset", {"op": "LayerNormalization", "least": _OPSET, "opset": place.opset})
        x, axis = place.roles["x"], int(place.parameters["axis"])
        inputs = [x.name]
        if "scale" in place.roles:
            inputs.append(place.roles["scale"].name)
        else:
            sizes = [size for size in x.shape[axis:] if isinstance(size, int)]
            inputs.append(emitter.constant("scale", np.ones(sizes, helper.tensor_dtype_to_np_dtype(x.dtype))))
        inputs += [place.roles["bias"].name] if "bias" in place.roles else []
        attributes = {"axis": axis, "epsilon": place.parameters["eps"]}
        emitter.node("LayerNormalization", "layer_norm", inputs, attributes, (place.outputs["y"].name,))
        return Emission("LayerNormalization")


PATTERN = _LayerNorm()
