"""CausalConvWithState against its operator's documentation: inputs it needs, sizes that follow, activation, opset."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from onnx import AttributeProto

from deltafuse.lint_attention import opset_findings
from deltafuse.lint_view import Finding, View
from deltafuse.lowering_conv import ACTIVATIONS, CAUSAL_CONV
from deltafuse.wording import number


def is_conv(view: View) -> bool:
    """Whether this node is CausalConvWithState."""
    return view.operator.op == CAUSAL_CONV


def conv_findings(view: View, sizes: Mapping[str, int]) -> Iterator[Finding]:
    """What the signature alone does not say.

    Args:
        view: the node.
        sizes: by the letters of the ports: C channels, K the kernel's width, S columns of the state.
    """
    yield from opset_findings(view)
    attribute = view.attributes.get("activation")
    activation = "none" if attribute is None else attribute.s.decode(errors="replace")
    if attribute is not None and attribute.type == AttributeProto.STRING and activation not in ACTIVATIONS:
        wanted = " or ".join(ACTIVATIONS)
        yield view.finding("activation", "activation", activation, wanted, f"set activation to {wanted}")
    for name in (port.name for port in view.operator.inputs if not port.optional):
        if name not in view.ports:
            yield view.finding("input-missing", name, "not fed", "fed", f"feed {name}")
    weight = view.shape(view.ports["weight"]) if "weight" in view.ports else None
    if weight is not None and len(weight) == len("C1K") and weight[1] != 1:
        found, fix = " x ".join(map(str, weight)), "give each channel a kernel of its own: [channels, 1, width]"
        yield view.finding("input-shape", "weight", found, "channels x 1 x width", fix)
    if "K" in sizes and sizes.get("S", sizes["K"] - 1) != sizes["K"] - 1:
        fix = "feed the columns before the input alone: one less than the kernel is wide"
        found, wanted = number(sizes["S"], "column"), number(sizes["K"] - 1, "column")
        yield view.finding("input-shape", "past_state", found, wanted, fix)
