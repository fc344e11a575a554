"""What sizes are made into inside an ordinary expression, by the rule's own list of what is harmless.

An expression is run at four choices of sizes. So what sizes make may only say how data is laid out, as sums of
multiples of the free sizes: a quotient, a bound or a choice may be another one from the next size on.
"""

from __future__ import annotations

from deltafuse.dims import Dim
from deltafuse.expression_guard import Checked
from deltafuse.far_reads import FarReads
from deltafuse.reasons import TEXTS, Reason
from deltafuse.scope import Scope
from deltafuse.size_flow import NUMBERS, SIZE, Flow, FlowKind, Sizes
from deltafuse.size_rules import Follower

TEXTS["expression-size"] = (
    "the size or position that {value} is made with is no sum of multiples of the free sizes ({size}): sizes that were "
    "not tried may give another one, so that nothing can be proven of {rule}; write it without a quotient or a choice"
)


def odd_size(scope: Scope, checked: Checked, rule: str) -> Reason | None:
    """The first node that data passes and that is told something else about sizes, None where there is none.

    Args:
        scope: the main graph.
        checked: the site.
        rule: name of the pattern.
    """
    graph, sizes = scope.graph, Sizes()
    flows: dict[int, Flow] = dict.fromkeys(checked.sizes, SIZE)
    follower = Follower(scope, flows, sizes, FarReads(scope, sizes))
    through = set(checked.nodes)
    for node in checked.cut.nodes:
        if node not in through:
            follower.follow(node)
            continue
        for value in graph.node_inputs[node]:
            flow = flows.get(value)
            contents = follower.numbers(value) if flow is not None and flow.kind == FlowKind.SIZE else None
            if flow is None or flow.kind in NUMBERS - {FlowKind.MASK} or all(map(_is_sum, contents or (None,))):
                continue
            size = "it is not known" if contents is None else ", ".join(map(str, contents))
            made = graph.name(graph.node_outputs[node][0])
            return Reason("expression-size", {"value": made, "size": size, "rule": rule})
    if not sizes.chunks:
        return None
    made = graph.name(next(iter(checked.proposal.outputs.values())))
    return Reason("expression-size", {"value": made, "size": "it is rounded up", "rule": rule})


def _is_sum(size: Dim | None) -> bool:
    """Whether a size is a sum of multiples of products of free sizes."""
    if size is None or isinstance(size, int):
        return size is not None
    return all(isinstance(atom, str) and power == 1 for monomial, _ in size.terms for atom, power in monomial)
