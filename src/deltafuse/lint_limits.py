"""A fused node against the limits of its target's kernels, those that ``fuse`` refuses a site by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from deltafuse.lint_view import Finding, View
from deltafuse.targets.base import Case, TargetOptions


def limit_findings(view: View, sizes: Mapping[str, int]) -> Iterator[Finding]:
    """What is beyond a limit.

    Args:
        view: the node.
        sizes: letter -> size, as far as known: B sequences, T tokens, N and H heads, K and V head sizes.
    """
    lengths = view.operator.port("lengths")
    array = view.integers(view.ports[lengths.name]) if lengths is not None and lengths.name in view.ports else None
    tokens = sizes.get("T") if array is None or not array.size else int(array.max())
    batch = sizes.get("B") if array is None else int(array.size)
    opset = view.model.opset_imports.get("", TargetOptions.opset)
    case = Case(
        batch, tokens, "not fixed", sizes.get("N"), sizes.get("H"), sizes.get("K"), sizes.get("V"),
        per_channel=_per_channel(view, sizes), decays=any(port in view.ports for port in ("g", "gk", "decay")),
        boundary=view.boundary, options=TargetOptions(opset=opset),
    )  # fmt: skip
    for limit in (*view.profile.shared, *view.operator.limits):
        reason = limit.check(case)
        if reason is not None:
            # A user's own limit need not say what to do.
            again = f"fuse the unfused file again: {reason.fix}; " if reason.fix else ""
            yield view.finding(reason.code, "", reason.what, limit.fact, f"{again}see `fuse targets`")


def _per_channel(view: View, sizes: Mapping[str, int]) -> bool:
    """Whether the decay has a value per key channel: in an input of its own, or beside the heads."""
    if "gk" in view.ports or "decay" not in view.ports:
        return "gk" in view.ports
    shape, heads = view.shape(view.ports["decay"]), sizes.get("H")
    return bool(shape) and heads is not None and isinstance(shape[-1], int) and shape[-1] > heads
