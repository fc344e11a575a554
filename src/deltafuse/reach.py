"""What the values of one scope depend on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from deltafuse.bodies import LOOPS, Body
from deltafuse.carried import changing, counter, from_data
from deltafuse.graph import Graph
from deltafuse.scope import Scope
from deltafuse.size_flow import GATE, Flow


@dataclass
class Reach:
    """What the values of one scope depend on, as far as a search has come.

    Attributes:
        data: value -> the roots it depends on, one bit each; bit 0 is the log decay.
        powers: values that are exponentials of the log decay, moved and multiplied at most.
        curved: values that depend on an exponential in any way: there is none of an exponential in a rule.
        sized: values that depend on sizes or positions, and not on data, and what they are.
        whole: in a subgraph, data of the scope around that has free axes there.
        moved: how far constants have moved data along free axes, where they have.
    """

    data: dict[int, int]
    powers: set[int] = field(default_factory=set[int])
    curved: set[int] = field(default_factory=set[int])
    sized: dict[int, Flow] = field(default_factory=dict[int, Flow])
    whole: set[int] = field(default_factory=set[int])
    moved: dict[int, int] = field(default_factory=dict[int, int])

    def of(self, values: Sequence[int]) -> int:
        """The roots that some values depend on together."""
        roots = 0
        for value in values:
            roots |= self.data.get(value, 0)
        return roots

    def inside(self, within: Scope, node: int) -> Reach:
        """What is known of the values of a subgraph before its first node.

        Args:
            within: the subgraph.
            node: that has it, in this scope.
        """
        scope, body = within.around, within.body
        assert scope is not None, "a subgraph lies in a scope"
        assert body is not None, "a subgraph takes values from around"
        outer = within.outers()
        data = {value: self.data[around] for value, around in outer.items() if around in self.data}
        whole = {value for value in data if scope.has_free_axes(outer[value], self.whole)}
        carried = from_data(body, data)
        data |= dict.fromkeys(carried, self.of(scope.graph.reads(node)))
        sized = {value: self.sized[around] for value, around in outer.items() if around in self.sized}
        sized |= {value: counter(within, node, value) for value in body.counters}
        return Reach(
            data,
            {value for value, around in outer.items() if around in self.powers},
            {value for value, around in outer.items() if around in self.curved},
            sized | dict.fromkeys(changing(body, data), GATE),
            # What comes from data with free axes may have these after a step.
            whole | carried if whole else whole,
            {value: self.moved[around] for value, around in outer.items() if around in self.moved},
        )

    def leave(self, graph: Graph, node: int, body: Body, inner: Reach, *, sized: bool) -> None:
        """Notes what comes out of a subgraph: data, or what a loop or choice makes of sizes and positions.

        Args:
            graph: this scope.
            node: that has the subgraph.
            body: the subgraph.
            inner: what is known of its values.
            sized: whether a size chose it.
        """
        loops = graph.standard[node] in LOOPS
        roots, first = self.of(graph.reads(node)), 1 if graph.standard[node] == "Loop" else 0
        for value, result in zip(graph.node_outputs[node], body.graph.outputs[first:], strict=False):
            if result in inner.data:
                self.data[value] = roots
            elif sized or loops:
                self.sized[value] = GATE
            elif result in inner.sized:
                flow = inner.sized[result]
                self.sized[value] = flow if self.sized.get(value, flow) == flow else GATE
