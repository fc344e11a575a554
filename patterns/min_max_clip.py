"""A chain of Min, Max and Clip with constant bounds on one value: one Clip.

Such a chain is a lattice polynomial in one variable, and each of these is min(max(x, lo), hi) where lo and hi are what
it gives at minus and plus infinity (Goodstein, "The solution of equations in a lattice", 1967). So two runs determine
it for every x, once the operators are known to be these and the bounds to be constant; that they are is checked, and
the draws check it again: at the bounds, beside them, at infinities and NaN.

Where a bound is a zero, which of +0 and -0 comes out is left open by the standard and differs from kernel to kernel:
that much may change, and nothing else. A site with such a bound says so.
"""

from collections.abc import Iterator, Mapping

import numpy as np
from onnx import TensorProto, helper

from deltafuse.expression_view import View
from deltafuse.expressions import Emission, Example, Expression, Operands, Parameters, Place, Proposal, Trial
from deltafuse.reasons import Reason
from deltafuse.targets.emit import Emitter

_LONGEST = 16
_DRAWS = 6
_OPSET = 11


_ZERO = "a bound is 0: where a zero comes out, its sign may be another than before (kernels differ in it)"
_TEXTS = {
    "clip-per-channel": "the bounds of {value} differ from element to element, a Clip has one of each; leave it as it "
    "is, or give all elements the same bounds in the model",
    "clip-crossed": "the bounds of {value} leave nothing through: it is {low} whatever goes in; swap the bounds in "
    "the model, if that is not meant",
}


class _MinMaxClip(Expression):
    name = "min_max_clip"
    formula = "{y} = min(max({x}, {low}), {high})"
    anchors = frozenset({"Min", "Max", "Clip"})
    operators = dict.fromkeys(("Min", "Max", "Clip"), (0, _LONGEST))
    roles = ("x",)
    outputs = ("y",)
    dtypes = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE})
    exact = True
    texts = _TEXTS
    examples = (
        Example("from below and above", """
            <ir_version: 8, opset_import: ["" : 17]>
            g (float[n, 4] a) => (float[n, 4] b) <float lo = {-1.0}, float hi = {2.0}>
            { m = Max(a, lo) b = Min(hi, m) }"""),
        Example("three in a row, one of them a Clip, double", """
            <ir_version: 8, opset_import: ["" : 13]>
            g (double[n, 4] a) => (double[n, 4] b) <double lo = {-1.0}, double hi = {2.0}, double end = {0.1}>
            { m = Max(a, lo) c = Clip(m, , hi) b = Min(c, end) }"""),
        Example("from above only", """
            <ir_version: 8, opset_import: ["" : 17]>
            g (float[4] a) => (float[4] b) <float one = {1.0}, float[1] two = {0.5}>
            { m = Min(a, one) b = Min(m, two) }"""),
        Example("two data values", """
            <ir_version: 8, opset_import: ["" : 17]>
            g (float[n, 4] a, float[n, 4] c) => (float[n, 4] b) <float hi = {2.0}> { m = Max(a, c) b = Min(hi, m) }""",
                sites=0),
        Example("one operator", """
            <ir_version: 8, opset_import: ["" : 17]>
            g (float[n, 4] a) => (float[n, 4] b) <float hi = {2.0}> { b = Min(hi, a) }""", sites=0),
        Example("bounds crossed", """
            <ir_version: 8, opset_import: ["" : 17]>
            g (float[n, 4] a) => (float[n, 4] b) <float lo = {3.0}, float hi = {2.0}> { m = Max(a, lo) b = Min(m, hi) }
            """, sites=0, reason="clip-crossed"),
        Example("a bound for each channel", """
            <ir_version: 8, opset_import: ["" : 17]>
            g (float[n, 2] a) => (float[n, 2] b) <float[2] lo = {-1.0, -2.0}, float hi = {2.0}>
            { m = Max(a, lo) b = Min(m, hi) }""", sites=0, reason="clip-per-channel"),
        Example("whole numbers", """
            <ir_version: 8, opset_import: ["" : 17]>
            g (int64[n, 4] a) => (int64[n, 4] b) <int64 lo = {-1}, int64 hi = {2}> { m = Max(a, lo) b = Min(m, hi) }""",
                sites=0, reason="expression-dtype"),
        Example("a bound that adds an axis", """
            <ir_version: 8, opset_import: ["" : 17]>
            g (float[4] a) => (float[1, 4] b) <float[1, 1] lo = {-1.0}, float hi = {2.0}>
            { m = Max(a, lo) b = Min(m, hi) }""", sites=0, reason="expression-differs"),
        Example("before there was a Clip with bounds as inputs", """
            <ir_version: 4, opset_import: ["" : 10]>
            g (float[n, 4] a) => (float[n, 4] b) <float lo = {-1.0}, float hi = {2.0}>
            { m = Max(a, lo) b = Min(m, hi) }""", sites=0, reason="expression-opset"),
    )  # fmt: skip

    def propose(self, view: View, anchor: int) -> Iterator[Proposal | Reason]:
        """Chains of two and more through the anchor, the longest first."""
        for region in view.regions(anchor, self.operators):
            if region.weights:
                yield Reason("clip-per-channel", {"value": view.name(region.result)})
            elif len(region.nodes) > 1:
                yield Proposal({"x": region.source}, {"y": region.result})

    def solve(self, trial: Trial) -> Parameters | Reason:
        """What the chain gives at both ends is its bounds."""
        bounds: list[float] = []
        for end in (-np.inf, np.inf):
            found = trial.run({"x": np.full(trial.shapes["x"], end)})
            if isinstance(found, Reason):
                return found
            values = np.unique(found["y"])
            if len(values) > 1:
                return Reason("clip-per-channel", {"value": "the result"})
            bounds.append(float(values[0]))
        low, high = bounds
        return {"low": low, "high": high} if low < high else Reason("clip-crossed", {"value": "it", "low": low})

    def reference(self, operands: Operands, parameters: Parameters) -> Operands:
        """NaN stays NaN."""
        return {"y": np.minimum(np.maximum(operands["x"], parameters["low"]), parameters["high"])}

    def draws(
        self, shapes: Mapping[str, tuple[int, ...]], parameters: Parameters, rng: np.random.Generator
    ) -> Iterator[Operands]:
        """Numbers of every size, the bounds and their neighbours, infinities and NaN."""
        low, high = parameters["low"], parameters["high"]
        finite = [bound for bound in (low, high) if np.isfinite(bound)]
        beside = [np.nextafter(bound, end) for bound in finite for end in (-np.inf, np.inf)]
        pool = np.array([*finite, *beside, *(bound + 1.0 for bound in finite), -np.inf, np.inf, np.nan, 0.0])
        for _ in range(_DRAWS):
            wide = rng.standard_normal(shapes["x"]) * 10.0 ** rng.uniform(-6, 6, shapes["x"])
            yield {"x": np.where(rng.random(shapes["x"]) < 0.5, wide, rng.choice(pool, shapes["x"]))}

    def emit(self, place: Place, emitter: Emitter) -> Emission | Reason:
        """One Clip in the value's own type; infinite bounds are written out: without them infinities do not pass."""
        if place.opset < _OPSET:
            return Reason("expression-opset", {"op": "Clip", "least": _OPSET, "opset": place.opset})
        source, result = place.roles["x"], place.outputs["y"]
        kind = helper.tensor_dtype_to_np_dtype(source.dtype)
        bounds = [emitter.constant(name, np.array(place.parameters[name], kind)) for name in ("low", "high")]
        emitter.node("Clip", "clip", (source.name, *bounds), outputs=(result.name,))
        zeros = (_ZERO,) if 0.0 in (place.parameters["low"], place.parameters["high"]) else ()
        return Emission("Clip", notes=zeros)


PATTERN = _MinMaxClip()
