"""Identity nodes that only give a value another name: taken out, their readers read the value itself.

An Identity that writes a graph output, reads a graph input, or is read inside the body of a loop or branch stays: there
the name counts.
"""

from collections.abc import Iterator

from onnx import TensorProto

from deltafuse.expression_view import View
from deltafuse.expressions import FLOATS, Emission, Example, Expression, Operands, Parameters, Place, Proposal
from deltafuse.reasons import Reason
from deltafuse.targets.emit import Emitter

_WHOLE = frozenset({TensorProto.INT64, TensorProto.INT32, TensorProto.INT8, TensorProto.UINT8, TensorProto.BOOL})


_OPERATORS = {"Identity": (1, 1)}


_TEXTS = {
    "identity-output": "the Identity that writes {value} stays: that is an output of the graph; leave it, or name the "
    "output after what it copies",
    "identity-input": "the Identity that writes {value} stays: it copies an input of the graph; leave it, or let its "
    "readers read the input",
    "identity-captured": "the Identity that writes {value} stays: the body of a loop or a branch reads it; leave it: "
    "the body names the value that it writes",
}


class _Identity(Expression):
    name = "identity"
    formula = "{y} = {x}"
    anchors = frozenset({"Identity"})
    operators = _OPERATORS
    roles = ("x",)
    outputs = ("y",)
    dtypes = FLOATS | _WHOLE
    exact = True
    texts = _TEXTS
    examples = (
        Example("between two nodes", """
            <ir_version: 8, opset_import: ["" : 17]>
            g (float[n, 4] a) => (float[n, 4] b) { s = Neg(a) i = Identity(s) b = Relu(i) }"""),
        Example("one after the other, several readers", """
            <ir_version: 8, opset_import: ["" : 17]>
            g (float[n, 4] a) => (float[n, 4] b) {
              s = Neg(a) i = Identity(s) j = Identity(i) r = Relu(j) t = Mul(i, j) b = Add(r, t) }""", sites=2),
        Example("of whole numbers", """
            <ir_version: 8, opset_import: ["" : 17]>
            g (int64[n] a) => (int64[n] b) { s = Neg(a) i = Identity(s) b = Abs(i) }"""),
        Example("a graph output", """
            <ir_version: 8, opset_import: ["" : 17]>
            g (float[n, 4] a) => (float[n, 4] b) { s = Neg(a) b = Identity(s) }""", sites=0, reason="identity-output"),
        Example("a graph input", """
            <ir_version: 8, opset_import: ["" : 17]>
            g (float[n, 4] a) => (float[n, 4] b) { i = Identity(a) b = Neg(i) }""", sites=0, reason="identity-input"),
        Example("read by a branch", """
            <ir_version: 8, opset_import: ["" : 17]>
            g (float[n, 4] a, bool c) => (float[n, 4] b) {
              s = Neg(a)
              i = Identity(s)
              b = If (c) <then_branch = yes () => (float[n, 4] u) { u = Abs(i) },
                          else_branch = no () => (float[n, 4] v) { v = Neg(i) }> }""",
                sites=0, reason="identity-captured"),
    )  # fmt: skip

    def propose(self, view: View, anchor: int) -> Iterator[Proposal | Reason]:
        """The node, unless its name counts."""
        (source, *_), (result, *_) = view.inputs(anchor), view.outputs(anchor)
        held = {
            "identity-output": view.is_output(result),
            "identity-input": view.is_input(source),
            "identity-captured": view.is_captured(result),
        }
        reasons = [Reason(code, {"value": view.name(result)}) for code, holds in held.items() if holds]
        yield reasons[0] if reasons else Proposal({"x": source}, {"y": result})

    def reference(self, operands: Operands, parameters: Parameters) -> Operands:
        """The operand."""
        return {"y": operands["x"]}

    def emit(self, place: Place, emitter: Emitter) -> Emission | Reason:
        """Nothing: readers of y read x."""
        return Emission("none", aliases={"y": "x"})


PATTERN = _Identity()
