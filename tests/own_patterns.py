"""Pattern files as a user would write them, for tests: an ordinary expression, and a convolution with a state."""

from __future__ import annotations

from doc_blocks import blocks

#: 1 / x, without an exponential anywhere.
(RECIPROCAL,) = (block.text for block in blocks("docs/patterns.md", "python") if "PATTERN" in block.text)

#: A causal depthwise convolution: several roles, weights and an optional bias among them, two outputs, an operator that
#: only one target has, and its plain form for proofs.
CAUSAL_CONV = '''"""A causal depthwise convolution that carries its last inputs: CausalConvWithState."""

import numpy as np
from onnx import helper, numpy_helper

from deltafuse.expressions import Emission, Example, Expression, Proposal
from deltafuse.reasons import Reason


class _CausalConv(Expression):
    name = "causal_conv"
    anchors = frozenset({"Conv"})
    operators = {"Concat": (1, 1), "Conv": (1, 1), "Slice": (1, 1)}
    roles = ("x", "past_state", "weight", "bias")
    outputs = ("y", "present_state")
    texts = {"conv-target": "{target} has no operator for a convolution with a state"}
    examples = (Example("none here", ""),)

    def propose(self, view, anchor):
        data, weight, *bias = view.inputs(anchor)
        joined = view.producer(data)
        if joined < 0 or view.op(joined) != "Concat" or len(view.inputs(joined)) != 2:
            return
        past, x = view.inputs(joined)
        slices = [node for node in view.consumers(data) if view.op(node) == "Slice"]
        for node in slices:
            roles = {"x": x, "past_state": past, "weight": weight} | dict(zip(("bias",), bias))
            yield Proposal(roles, {"y": view.outputs(anchor)[0], "present_state": view.outputs(node)[0]})

    def reference(self, operands, parameters):
        x, weight = np.concatenate([operands["past_state"], operands["x"]], -1), operands["weight"]
        width = weight.shape[-1]
        steps = operands["x"].shape[-1]
        y = sum(x[:, :, k : k + steps] * weight[:, 0, k, None] for k in range(width))
        y = y + operands.get("bias", np.zeros(weight.shape[0]))[:, None]
        return {"y": y, "present_state": x[:, :, 1 - width :]}

    def emit(self, place, emitter):
        if place.target_opset is None or place.target_opset[0] != "com.microsoft":
            return Reason("conv-target", {"target": place.target})
        ports = ("x", "weight", "bias", "past_state")
        names = [place.roles[role].name if role in place.roles else "" for role in ports]
        outputs = [place.outputs[name].name for name in self.outputs]
        emitter.node("CausalConvWithState", "conv", names, {"ndim": 1}, outputs, "com.microsoft")
        return Emission("CausalConvWithState", target_opset=True)

    def lower(self, node):
        if node.op_type != "CausalConvWithState":
            return (node,)
        x, weight, bias, past = node.input
        y, state = node.output
        whole = numpy_helper.from_array
        held = [("k", np.array([1 - 4])), ("end", np.array([2**31])), ("axis", np.array([2]))]
        constants = [helper.make_node("Constant", [], [f"{y}/{name}"], value=whole(array)) for name, array in held]
        return (
            *constants,
            helper.make_node("Concat", [past, x], [f"{y}/joined"], axis=-1),
            helper.make_node("Conv", [f"{y}/joined", weight, bias], [y], group=6, kernel_shape=[4]),
            helper.make_node("Slice", [f"{y}/joined", *(f"{y}/{name}" for name, _ in held)], [state]),
        )


PATTERN = _CausalConv()
'''
