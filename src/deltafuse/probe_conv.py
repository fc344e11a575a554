"""A depthwise convolution over one axis as sums of products: onnxruntime convolves in float32 alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
from onnx import helper, numpy_helper

_DEFAULTS = ((b"", b"NOTSET", b"VALID"), [1])
_END = 2**31 - 1


def plain_convolution(node: onnx.NodeProto) -> list[onnx.NodeProto]:
    """Pad, then one Slice and Mul for each tap; a node that is not of this kind is left as it is.

    Taken are convolutions with a stated kernel of one axis and stride 1. That each channel has its own kernel, which
    only the weight's shape tells, is checked when the model runs: the weight must be [channels, 1, width].
    """
    stated = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    width = list(stated.get("kernel_shape", ()))
    modes, ones = _DEFAULTS
    if (
        node.domain
        or len(width) != 1
        or stated.get("auto_pad", b"") not in modes
        or stated.get("strides", ones) != ones
    ):
        return [node]
    return _taps(node, width[0], list(stated.get("pads", [0, 0])), stated.get("dilations", ones)[0])


def _taps(node: onnx.NodeProto, width: int, pads: Sequence[int], dilation: int) -> list[onnx.NodeProto]:
    x, weight, *bias = node.input
    (result,) = node.output
    nodes: list[onnx.NodeProto] = []

    def add(op: str, what: str, inputs: Sequence[str]) -> str:
        nodes.append(helper.make_node(op, list(inputs), [f"{result}/{what}"]))
        return f"{result}/{what}"

    def number(what: str, values: Sequence[int]) -> str:
        held = numpy_helper.from_array(np.array(values, np.int64))
        nodes.append(helper.make_node("Constant", [], [f"{result}/{what}"], value=held))
        return f"{result}/{what}"

    padded = add("Pad", "padded", (x, number("pads", (0, 0, pads[0], 0, 0, pads[1]))))
    kernel = add("Reshape", "kernel", (weight, number("kernel_shape", (0, 1, width))))
    axis = number("axis", (2,))
    terms: list[str] = []
    for tap in range(width):
        last = (tap - width + 1) * dilation
        ends = number(f"start_{tap}", (tap * dilation,)), number(f"end_{tap}", (last or _END,))
        part = add("Slice", f"part_{tap}", (padded, *ends, axis))
        factor = add(
            "Slice", f"factor_{tap}", (kernel, number(f"from_{tap}", (tap,)), number(f"to_{tap}", (tap + 1,)), axis)
        )
        column = add("Reshape", f"column_{tap}", (factor, number(f"column_shape_{tap}", (-1, 1))))
        terms.append(add("Mul", f"term_{tap}", (part, column)))
    if bias and bias[0]:
        terms.append(add("Reshape", "bias", (bias[0], number("bias_shape", (-1, 1)))))
    nodes.append(helper.make_node("Sum", terms, [result]))
    return nodes
