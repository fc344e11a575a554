"""The boundary of lower precision around a fused node, and how a lowered form goes past it.

A target's kernel takes and gives float16 (or bfloat16), so ``fuse`` puts Casts around it that the unfused graph did not
have. Run without rounding, the lowered form reads what lies before those Casts and writes what lies behind them. A
rounding of the source's own stays: only Casts of the fused node's own site are passed, or, around a node that no fuse
wrote (an exporter's symbolic did), every Cast that its contract asks for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import onnx
from onnx import TensorProto, helper

from deltafuse.graph import Graph

#: metadata of every node that a fuse wrote: the site's name
SITE = "deltafuse.site"
#: operators that move elements of their first input and leave them as they are
LAYOUT = frozenset(
    {"Expand", "Flatten", "Gather", "Identity", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"}
)


@dataclass
class Bypass:
    """What changes around one fused node.

    Attributes:
        node: the fused node, reading unrounded operands and writing float32 results under new names.
        dtypes: element types of its two results.
        before, after: nodes that must come before it and after it.
        replaced: graph node -> its new form, reading an unrounded result.
        idle: graph nodes that the new forms no longer need; whether they die depends on who else reads them.
    """

    node: onnx.NodeProto
    dtypes: tuple[int, int]
    before: list[onnx.NodeProto] = field(default_factory=list[onnx.NodeProto])
    after: list[onnx.NodeProto] = field(default_factory=list[onnx.NodeProto])
    replaced: dict[int, tuple[onnx.NodeProto, ...]] = field(default_factory=dict[int, tuple[onnx.NodeProto, ...]])
    idle: list[int] = field(default_factory=list[int])


def bypass(graph: Graph, index: int, prefix: str, dtypes: tuple[int, int]) -> Bypass:
    """How the fused node `index` is read and written without its boundary.

    Args:
        graph: what the node is part of.
        index: a fused node.
        prefix: start of every new name.
        dtypes: element types of its two results; the first is that of its operands too.
    """
    node = graph.node(index)
    if dtypes[0] not in (TensorProto.FLOAT16, TensorProto.BFLOAT16):
        return Bypass(node, dtypes)
    single = int(TensorProto.FLOAT)
    walk = _Walk(graph, prefix, dtypes[0], site_of(node), Bypass(node, (single, single)))
    node.input[:] = [walk.source(value) for value in graph.node_inputs[index]]
    for position, value in enumerate(graph.node_outputs[index]):
        if not value:
            continue
        name = graph.name(value)
        node.output[position] = f"{prefix}/{position}_single"
        walk.dtype = dtypes[min(position, 1)]
        if walk.results(value, node.output[position]):
            walk.found.after.append(walk.rounded(node.output[position], name))
    return walk.found


def site_of(node: onnx.NodeProto) -> str:
    """The site whose fuse wrote a node, "" where none did."""
    return next((entry.value for entry in node.metadata_props if entry.key == SITE), "")


def dead(graph: Graph, removed: Iterable[int], idle: Iterable[int]) -> set[int]:
    """Which of the `idle` nodes nothing reads once the `removed` ones are gone."""
    gone, outputs = set(removed), set(graph.outputs)
    found: set[int] = set()
    # readers come after what they read, so one pass from the end settles all
    for node in sorted(set(idle), reverse=True):
        values = [value for value in graph.node_outputs[node] if value]
        if outputs.isdisjoint(values) and all(reader in gone for value in values for reader in graph.consumers[value]):
            gone.add(node)
            found.add(node)
    return found


@dataclass
class _Walk:
    """Follows one fused node's operands back and its results on; `dtype` is the boundary's type."""

    graph: Graph
    prefix: str
    dtype: int
    site: str
    found: Bypass
    known: dict[int, str] = field(default_factory=dict[int, str])

    def source(self, value: int) -> str:
        """The name of an operand as it was before it was rounded; its own where it was not."""
        if value not in self.known:
            self.known[value] = self._source(value)
        return self.known[value]

    def _source(self, value: int) -> str:
        node = self.graph.producer[value]
        if node >= 0 and self._rounds(node):
            self.found.idle.append(node)
            name = self.graph.name(self.graph.node_inputs[node][0])
            self._measure(value, name)
            return name
        if node < 0 or not self._moves(node):
            return self.graph.name(value)
        inner = self.graph.node_inputs[node][0]
        name = self.source(inner)
        if name == self.graph.name(inner):
            return self.graph.name(value)
        self.found.idle.append(node)
        copy = self._copy(node, name)
        self.found.before.append(copy)
        return copy.output[0]

    def _measure(self, value: int, name: str) -> None:
        """Takes the shape of a rounded operand (a kernel's sequence length comes from it) from the unrounded one."""
        for reader in self.graph.consumers[value]:
            if self.graph.op[reader] == "Shape" and self._is_ours(reader):
                new = self.graph.node(reader)
                new.input[0] = name
                self.found.replaced[reader] = (new,)

    def results(self, value: int, name: str) -> bool:
        """Lets what converts a result read its unrounded form `name`.

        Returns:
            Whether something needs the rounded result.
        """
        needed = value in self.graph.outputs
        for reader in self.graph.consumers[value]:
            if self._widens(reader):
                new = self.graph.node(reader)
                new.input[0] = name
                self.found.replaced[reader] = (new,)
            elif self._moves(reader) and any(self._casts_behind(reader)):
                self._move(reader, name)
            else:
                needed = True
        return needed

    def _move(self, reader: int, name: str) -> None:
        """Moves the unrounded form too; where some of it is read rounded there will be both."""
        copy, output = self._copy(reader, name), self.graph.node_outputs[reader][0]
        self.found.replaced[reader] = (copy,)
        if self.results(output, copy.output[0]):
            self.found.replaced[reader] = (copy, self.rounded(copy.output[0], self.graph.name(output)))

    def rounded(self, single: str, name: str) -> onnx.NodeProto:
        """The Cast that gives a result its old type under its old name."""
        return helper.make_node("Cast", [single], [name], f"{single}/rounded", to=self.dtype)

    def _casts_behind(self, node: int) -> Iterator[bool]:
        for reader in self.graph.consumers[self.graph.node_outputs[node][0]]:
            if self._moves(reader):
                yield from self._casts_behind(reader)
            else:
                yield self._widens(reader)

    def _rounds(self, node: int) -> bool:
        return self._casts(node) and self.graph.attributes(node)["to"].i == self.dtype

    def _widens(self, node: int) -> bool:
        return self._casts(node) and self.graph.attributes(node)["to"].i != self.dtype

    def _casts(self, node: int) -> bool:
        return self.graph.op[node] == "Cast" and not self.graph.domain[node] and self._is_ours(node)

    def _moves(self, node: int) -> bool:
        return self.graph.op[node] in LAYOUT and not self.graph.domain[node] and self._is_ours(node)

    def _is_ours(self, node: int) -> bool:
        return not self.site or site_of(self.graph.node(node)) == self.site

    def _copy(self, node: int, name: str) -> onnx.NodeProto:
        """A layout operator of the unrounded value."""
        copy = self.graph.node(node)
        copy.input[0] = name
        copy.name = copy.output[0] = f"{self.prefix}/{node}_{copy.op_type}"
        return copy
