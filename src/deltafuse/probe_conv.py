"""A depthwise convolution over one axis as sums of products: onnxruntime convolves in float32 alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import helper, numpy_helper

_UNPADDED = (b"", b"NOTSET", b"VALID")
_END = 2**31 - 1


@dataclass(frozen=True)
class _Kernel:
    """What the attributes say; `axis` is the spatial axis that the kernel is wide in, counted from 0."""

    rank: int
    axis: int
    width: int
    pads: Sequence[int]
    dilation: int


def plain_convolution(node: onnx.NodeProto, weights: Mapping[str, Sequence[int]] | None = None) -> list[onnx.NodeProto]:
    """Pad, then one Slice and Mul for each tap; a node that is not of this kind is left as it is.

    Taken are convolutions of stride 1 whose kernel is wide in one axis at most. That each channel has its own kernel,
    which only the weight's shape tells, is checked when the model runs: the weight must be [channels, 1, ...].

    Args:
        node: the convolution.
        weights: name -> sizes, for a kernel that the node does not state.
    """
    kernel = None if node.domain else _kernel(node, weights or {})
    return [node] if kernel is None else _taps(node, kernel)


def declared_sizes(graph: onnx.GraphProto) -> dict[str, Sequence[int]]:
    """Sizes of a graph's inputs and initializers, 0 where one is free."""
    given: Iterable[onnx.ValueInfoProto] = graph.input
    sizes = {info.name: [dim.dim_value for dim in info.type.tensor_type.shape.dim] for info in given}
    return {**sizes, **{tensor.name: list(tensor.dims) for tensor in graph.initializer}}


def _kernel(node: onnx.NodeProto, weights: Mapping[str, Sequence[int]]) -> _Kernel | None:
    stated = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    sizes = list(stated.get("kernel_shape", list(weights.get(node.input[1], ()))[2:]))
    rank, wide = len(sizes), [axis for axis, size in enumerate(sizes) if size != 1]
    steps = [*stated.get("strides", [])]
    if not sizes or len(wide) > 1 or 0 in sizes or stated.get("auto_pad", b"") not in _UNPADDED or {*steps} - {1}:
        return None
    axis = wide[0] if wide else rank - 1
    dilation = list(stated.get("dilations", [1] * rank))[axis]
    return _Kernel(rank, axis, sizes[axis], list(stated.get("pads", [0] * 2 * rank)), dilation)


def _taps(node: onnx.NodeProto, kernel: _Kernel) -> list[onnx.NodeProto]:
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

    rank, width, ones = kernel.rank, kernel.width, [1] * kernel.rank
    padded = add("Pad", "padded", (x, number("pads", (0, 0, *kernel.pads[:rank], 0, 0, *kernel.pads[rank:]))))
    taps = add("Reshape", "kernel", (weight, number("kernel_shape", (0, 1, width))))
    spatial, last_axis, column_shape = number("axis", (2 + kernel.axis,)), number("last", (2,)), (-1, *ones)
    terms: list[str] = []
    for tap in range(width):
        last = (tap - width + 1) * kernel.dilation
        ends = number(f"start_{tap}", (tap * kernel.dilation,)), number(f"end_{tap}", (last or _END,))
        part = add("Slice", f"part_{tap}", (padded, *ends, spatial))
        one = number(f"from_{tap}", (tap,)), number(f"to_{tap}", (tap + 1,))
        factor = add("Slice", f"factor_{tap}", (taps, *one, last_axis))
        column = add("Reshape", f"column_{tap}", (factor, number(f"column_shape_{tap}", column_shape)))
        terms.append(add("Mul", f"term_{tap}", (part, column)))
    if bias and bias[0]:
        terms.append(add("Reshape", "bias", (bias[0], number("bias_shape", column_shape))))
    nodes.append(helper.make_node("Sum", terms, [result]))
    return nodes
