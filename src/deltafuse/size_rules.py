"""What sizes and positions are made into on their way to data, by a list of what is harmless.

Draws at some sizes say nothing about others: a factor that a size makes, a mask that is drawn by the number 37, a read
that stops at token 2000 agree wherever they are not tried. So sizes may only say how data is laid out, as multiples of
free sizes and of these rounded up to one chunk; and numbers that meet data may only be constants, or masks that compare
positions with each other or with a size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deltafuse.bodies import has_body
from deltafuse.constant_numbers import ConstantNumbers
from deltafuse.far_reads import FarReads
from deltafuse.quasi_linear import LARGEST_CHUNK
from deltafuse.scope import SHAPES
from deltafuse.size_arithmetic import cast_size, compared, counted
from deltafuse.size_flow import (
    COUNTS,
    FARTHEST,
    FLAT,
    GATE,
    MASK,
    NEAREST,
    NUMBERS,
    SIZE,
    TABLE,
    Flow,
    FlowKind,
    farthest,
    joined,
)
from deltafuse.size_values import ENDS, SizedValues

#: Operators that move or repeat the numbers of their first operand; the others say how.
_LAYOUT = frozenset({
    "Reshape", "Transpose", "Unsqueeze", "Squeeze", "Flatten", "Identity", "Expand", "Tile", "Slice", "Gather",
    "GatherND", "Split", "Pad",
})  # fmt: skip
#: Of an operator that data passes: the operands that say how it is laid out, not what is computed with it.
_HOW: Mapping[str, tuple[int, ...]] = {
    "Reshape": (1,), "Expand": (1,), "Tile": (1,), "Slice": (1, 2, 3, 4), "Gather": (1,), "GatherND": (1,),
    "GatherElements": (1,), "Split": (1,), "Pad": (1, 3), "ScatterND": (1,), "ScatterElements": (1,), "Squeeze": (1,),
    "Unsqueeze": (1,), "SequenceAt": (1,), "SequenceInsert": (2,), "SplitToSequence": (1,),
}  # fmt: skip
#: Layout operators that read a part of an operand: from a table of numbers they make a choice.
_READS = frozenset({"Slice", "Gather", "GatherND", "Split", "Tile", "Pad"})
#: Of these, those that are given a shape, not places.
_SHAPED = frozenset({"Reshape", "Expand", "Tile"})
_COMPARES = frozenset({"Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Equal"})
_ELEMENTWISE = _COMPARES | frozenset({
    "Add", "Sub", "Mul", "Div", "Neg", "Abs", "Exp", "Log", "Sqrt", "Pow", "Reciprocal", "Min", "Max", "Clip", "And",
    "Or", "Not", "Xor", "Where", "Cast", "CastLike", "Floor", "Ceil", "Mod", "Sign", "IsInf", "IsNaN",
})  # fmt: skip


@dataclass(frozen=True)
class Follower(SizedValues):
    """Follows sizes and positions through the nodes of one scope.

    Attributes:
        reads: follows the data.
    """

    reads: FarReads

    def follow(self, node: int) -> None:
        """Notes what a node that holds no data makes."""
        graph = self.scope.graph
        found = self._made(node)
        if found is not None:
            self.flows.update(dict.fromkeys(graph.node_outputs[node], found))

    def spoils(self, node: int, held: Sequence[int]) -> bool:
        """Whether what a node does to data may depend on a size or position.

        Args:
            node: that data reaches.
            held: which of its operands are data.
        """
        graph = self.scope.graph
        op, inputs, moved, further = graph.standard[node], graph.node_inputs[node], 0, 0
        how = _HOW.get(op, ())
        for position, value in enumerate(inputs):
            flow = self.flows.get(value)
            if flow is None or position in held:
                continue
            fits = self.lays_out(value) if position in how else flow.kind in NUMBERS
            if not fits:
                return True
            if op not in _SHAPED and (position in how or op == "Concat"):
                moved = max(moved, flow.moved)
            # One constant for each place that is read, or sizes inside a body, of which not all is known.
            inside = op not in _SHAPED and flow.kind == FlowKind.SIZE and self.scope.shapes is None
            if position in how and (inside or (flow.kind in NUMBERS and self.reads.indexes(node))):
                further = max(further, int(min(self._farthest(value), FARTHEST + 1)))
        return max(moved, further) > FARTHEST or self.reads.goes_far(node, held, moved, further)

    def _made(self, node: int) -> Flow | None:
        graph, scope = self.scope.graph, self.scope
        op, outputs, read = graph.standard[node], graph.node_outputs[node], graph.reads(node)
        if op in SHAPES:
            return None if scope.is_settled(outputs[0]) else SIZE
        given = [self.flows.get(value) for value in read]
        if all(flow is None for flow in given):
            return None
        if op == "Where" and self._is_never(read[0]):
            return given[2]
        if GATE in given or (scope.shapes is None and not all(self.lays_out(v) for v in read if self.is_size(v))):
            return GATE
        contents = self.numbers(outputs[0]) if len(outputs) == 1 else None
        if contents is not None:
            if not self.holds(outputs[0], contents):
                return GATE
            return None if all(isinstance(item, int) for item in contents) else SIZE
        if not op or has_body(scope.model, graph, node):
            return GATE
        return self._rule(op, node, given)

    def _is_never(self, value: int) -> bool:
        """Whether sizes are asked for negative ones: exporters look for a -1 in the shape of an Expand."""
        graph, numbers = self.scope.graph, ConstantNumbers(self.scope)
        node = graph.producer[value]
        if node < 0 or graph.standard[node] != "Equal":
            return False
        sizes, wanted = graph.node_inputs[node]
        shape, few = graph.producer[sizes], numbers.of(wanted)
        return shape >= 0 and graph.standard[shape] in SHAPES and few is not None and max(few, default=0.0) < 0.0

    def _rule(self, op: str, node: int, given: Sequence[Flow | None]) -> Flow:
        graph_inputs = self.scope.graph.node_inputs[node]
        if op in _LAYOUT:
            return self._laid_out(op, node, given)
        if op == "Concat":
            tables = [v for v, flow in zip(graph_inputs, given, strict=True) if flow is None and self.is_table(v)]
            found = joined(given, tables=bool(tables))
            return self._farther(found, self.reads.offset(node) + self._beside(found, node))
        if op == "ConstantOfShape":
            return Flow(FlowKind.FLAT, farthest(given)) if self._all_lay_out(node, 0) else GATE
        if op == "Range":
            return self._range(node)
        if op in ("Trilu", "EyeLike"):
            return self._banded(node, given)
        if op in _ELEMENTWISE:
            return self._elementwise(op, node, given)
        return GATE

    def _beside(self, found: Flow, node: int) -> float:
        """By how much more than positions the constants and sizes beside them move what is read at all of these."""
        graph, engine = self.scope.graph, self.scope.engine
        shape = None if engine is None else engine.shape(graph.node_outputs[node][0])
        # A shape may hold any number, and so may coordinates: most of their axes are fixed ones.
        coordinates = shape is not None and len(shape) > 1 and graph.attributes(node)["axis"].i in (-1, len(shape) - 1)
        free = coordinates or found.kind in NUMBERS | {FlowKind.SIZE}
        return 0 if free else max(map(self._farthest, graph.node_inputs[node]))

    def _farthest(self, value: int) -> float:
        """By how much what is read at a value is moved at most."""
        if self.is_size(value):
            graph, node = self.scope.graph, self.scope.graph.producer[value]
            parts = graph.node_inputs[node] if node >= 0 and graph.standard[node] == "Concat" else ()
            return max((self._farthest(part) for part in parts), default=self.moves_inside(value))
        reach = self.reach_of(value)
        return FARTHEST + 1 if reach is None else reach

    def _all_lay_out(self, node: int, first: int) -> bool:
        return all(self.lays_out(value) for value in self.scope.graph.node_inputs[node][first:] if value)

    def _laid_out(self, op: str, node: int, given: Sequence[Flow | None]) -> Flow:
        source = self.scope.graph.node_inputs[node][0]
        if not self._all_lay_out(node, 1):
            return GATE
        follows = op in _READS and any(flow is not None for flow in given[1:])
        if given[0] is not None and given[0].kind != FlowKind.SIZE:
            gate = (follows and given[0].kind == FlowKind.TABLE) or not self._keeps_places(op, node)
            return GATE if gate else self._moved_places(node, given[:1] if op in _SHAPED else given)
        if given[0] is not None:
            return GATE if follows else given[0]
        if not self.is_table(source):
            return FLAT
        return GATE if follows else TABLE

    def _moved_places(self, node: int, given: Sequence[Flow | None]) -> Flow:
        """What the first operand is once its numbers stand elsewhere: as if each had been moved by a constant."""
        first = given[0] or GATE
        filled = self.reach_of(filler) if (filler := self._filler(node)) else 0
        if filled is None:
            return GATE
        moved = sum(flow.moved for flow in given if flow is not None) + self.reads.offset(node) + filled
        return self._farther(Flow(FlowKind.MASK if first.kind == FlowKind.FLAT and moved else first.kind), moved)

    def _filler(self, node: int) -> int:
        """The number that a Pad puts beside positions, 0 where it is none."""
        graph = self.scope.graph
        return graph.node_inputs[node][2] if graph.standard[node] == "Pad" and graph.node_inputs[node][2:] else 0

    @staticmethod
    def _farther(flow: Flow, moved: float) -> Flow:
        """The same moved on; numbers that meet data are not to be moved far."""
        total = flow.moved + moved
        return Flow(flow.kind, int(total)) if total <= (NEAREST if flow.kind in NUMBERS else FARTHEST) else GATE

    def _keeps_places(self, op: str, node: int) -> bool:
        """Whether numbers stay along the axis that they lie along: one that is cut in parts has them far apart."""
        if op not in ("Reshape", "Flatten", "Tile"):
            return True
        engine = self.scope.engine
        (value, *_), (result, *_) = self.scope.graph.node_inputs[node], self.scope.graph.node_outputs[node]
        shapes = [None if engine is None else engine.shape(one) for one in (value, result)]
        if None in shapes:
            return False
        before, after = ([dim for dim in shape or () if dim != 1] for shape in shapes)
        return before == after

    def _range(self, node: int) -> Flow:
        start, _, step = self.scope.graph.node_inputs[node]
        length = None if step in self.flows else self.scope.number(step)
        if not self._all_lay_out(node, 0) or length is None:
            return GATE
        if length != 1:
            apart = 1 < length <= LARGEST_CHUNK and self.rounds_to({int(length)})
            return Flow(FlowKind.INDEX, FARTHEST) if apart else GATE
        moved = self.moved_by(start) if self.is_size(start) else self.reach_of(start)
        if moved is None or moved > FARTHEST:
            return GATE
        moved = int(moved)
        # The number of a sequence is good for reading it, not for being compared.
        return Flow(FlowKind.PLACE, moved) if self._along_tokens(node) else Flow(FlowKind.INDEX, moved)

    def _along_tokens(self, node: int) -> bool:
        """Whether all sizes that a node reads, as far as they are known, are those of tokens."""
        sizes = (size for value in self.scope.graph.node_inputs[node] if value for size in self.numbers(value) or ())
        return all(map(self.sizes.along_tokens, sizes))

    def _banded(self, node: int, given: Sequence[Flow | None]) -> Flow:
        graph = self.scope.graph
        attribute = graph.attributes(node).get("k")
        if attribute is not None and abs(attribute.i) > 1:
            return GATE
        shapes = self.scope.engine
        dims = None if shapes is None else shapes.shape(graph.node_inputs[node][0])
        if not all(map(self.sizes.along_tokens, (dims or ())[-2:])):
            return GATE
        further = [value for value in graph.node_inputs[node][1:] if value]
        if any(value in self.flows or self.scope.number(value) not in ENDS for value in further):
            return GATE
        return MASK if given[0] in (MASK, FLAT) else GATE

    def _elementwise(self, op: str, node: int, given: Sequence[Flow | None]) -> Flow:
        kinds = {flow.kind for flow in given if flow is not None}
        inputs = self.scope.graph.node_inputs[node]
        if kinds <= NUMBERS:
            tables = any(flow is None and self.is_table(v) for v, flow in zip(inputs, given, strict=False) if v)
            found = FlowKind.TABLE if tables or FlowKind.TABLE in kinds else FlowKind.MASK
            return FLAT if found == FlowKind.MASK and kinds == {FlowKind.FLAT} else Flow(found, farthest(given))
        if not kinds <= COUNTS:
            return GATE
        if op in ("Cast", "CastLike"):
            return cast_size(self, node, given)
        if op in _COMPARES:
            return compared(self, node, given)
        return counted(self, op, node, given)
