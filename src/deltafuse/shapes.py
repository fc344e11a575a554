"""Symbolic shapes, element types and small contents of values, worked out when they are asked for."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

from deltafuse.bodies import is_call, scan_call
from deltafuse.dims import Dim, Expr, is_clamped, substitute, symbols, weight
from deltafuse.graph import Graph
from deltafuse.shape_names import Names
from deltafuse.shape_op import MAX_ELEMENTS, Contents, Op, Outputs, PartialShape, Rule, paired
from deltafuse.shape_rules import CONTENTS_RULES, DTYPE_RULES, SHAPE_RULES, rule_key
from deltafuse.shape_rules_arithmetic import apply
from deltafuse.shape_rules_contents import read_small
from deltafuse.shape_rules_control import CALL_RULES, attribute_span, declared_dtype, declared_shape
from deltafuse.shape_unions import Conflict, Unions
from deltafuse.tensors import TensorHead
from deltafuse.wire import Model, scan_body

_SHAPE, _CONTENTS, _DTYPE = range(3)
_TABLES: tuple[dict[str, Rule[Any]], ...] = (SHAPE_RULES, CONTENTS_RULES, DTYPE_RULES)

#: Expressions heavier than this become unknown: they grow without end in graphs that loop over sizes.
_MAX_WEIGHT = 64


class Shapes:
    """Shapes of one scope's values, by data flow, with what the file declares where that ends.

    A question visits the backward slice that its answer needs and nothing else; answers are kept. A size that nothing
    tells is a symbol of its own, named after the value and axis (``hidden[2]``).

    Attributes:
        unions: which sizes are equal, by every node that was visited so far.
        names: which symbols are the file's, and where made up ones come from.
        defined: what `define` was told.
    """

    def __init__(self, model: Model, sizes: Mapping[str, int] | None = None, graph: Graph | None = None) -> None:
        """Starts with nothing known.

        Args:
            model: the scanned file.
            sizes: symbol -> number, put in wherever the file declares the symbol.
            graph: a subgraph of the model instead of its main graph.
        """
        self.graph = model.graph if graph is None else graph
        self.defined: dict[int, tuple[tuple[Dim | None, ...] | None, int | None]] = {}
        self._sizes: Mapping[str, int] = {} if sizes is None else sizes
        self.model = model
        self._shapes: dict[int, tuple[Dim, ...] | None] = {0: None}
        self._contents: dict[int, Contents | None] = {0: None}
        self._dtypes: dict[int, int | None] = {0: None}
        self._memo = (self._shapes, self._contents, self._dtypes)
        self._constants: dict[int, Contents | None] = {}  # one for all engines over a graph, see `again`
        self._called: dict[int, Shapes] = {}
        self.names = Names(self._sizes)
        self.unions = Unions(self.names.rank)
        for value in self.graph.inputs:
            self._declare_input(value)

    def shape(self, value: int) -> tuple[Dim, ...] | None:
        """One `Dim` an axis in canonical symbols, or None where not even the rank is known."""
        if value not in self._shapes:
            self._resolve(value, _SHAPE)
        return self.known_shape(value)

    def contents(self, value: int) -> Contents | None:
        """Elements of a small integer, boolean or scalar tensor: int, bool, float, `Expr`, None for unknown ones."""
        if value not in self._contents:
            self._resolve(value, _CONTENTS)
        return self.known_contents(value)

    def dtype(self, value: int) -> int | None:
        """``onnx.TensorProto`` element type, None where it is not known."""
        self._resolve(value, _DTYPE)
        return self._dtypes[value]

    def define(
        self, value: int, shape: PartialShape | None, dtype: int | None, contents: Contents | None = None
    ) -> None:
        """States shape and element type of a value: what lies before it is not looked at.

        What was worked out already stays as it is, so define values before asking for what depends on them.
        """
        self.defined[value] = (None if shape is None else tuple(shape), dtype)
        self._shapes[value] = None if shape is None else self._named(value, shape, is_input=False)
        self._dtypes[value] = dtype
        self._contents[value] = contents

    def again(self, sizes: Mapping[str, int]) -> Shapes:
        """A new engine over the same file and the same defined values, with numbers for some symbols."""
        fresh = Shapes(self.model, sizes)
        if fresh.graph is self.graph:
            fresh._constants = self._constants
        for value, (shape, dtype) in self.defined.items():
            fresh.define(value, shape, dtype)
        return fresh

    def checkpoint(self) -> Callable[[], None]:
        """Notes what is known; the result is to be called to go back to that."""
        tables: tuple[dict[int, Any], ...] = (*self._memo, self.defined, self._called)
        kept, known = copy.deepcopy((self.names, self.unions)), [cast("dict[int, Any]", {**table}) for table in tables]

        def back() -> None:
            self.names, self.unions = kept
            for table, entries in zip(tables, known, strict=True):
                table.clear()
                table.update(entries)

        return back

    def body(self, node: int, name: str) -> Shapes | None:
        """An engine for the subgraph in attribute `name` of a node; what it reads from outside is defined already."""
        span = attribute_span(self.graph, node, name)
        if span is None:
            return None
        inner = Shapes(self.model, self._sizes, scan_body(self.model, span))
        graph = inner.graph
        read = [value for value, node in enumerate(graph.producer) if node < 0 and value not in graph.inputs]
        around = {value: self.graph.find(graph.name(value)) for value in read if value not in graph.initializers}
        return self._inside(inner, [(outer, value) for value, outer in around.items() if outer])

    def _inside(self, inner: Shapes, given: Iterable[tuple[int, int]]) -> Shapes:
        inner.names = self.names.copy()
        inner.unions = self.unions.copy(inner.names.rank)
        for outer, value in given:
            inner.define(value, self.known_shape(outer), self.known_dtype(outer), self.known_contents(outer))
        return inner

    def call(self, node: int) -> Shapes:
        """An engine for the function that a node calls, with what it is given defined already."""
        if node not in self._called:
            inner = Shapes(scan_call(self.model, self.graph, node), self._sizes)
            given = zip(self.graph.node_inputs[node], inner.graph.inputs, strict=False)
            self._called[node] = self._inside(inner, given)
        return self._called[node]

    def declared(self, value: int) -> list[Dim | None] | None:
        """The dims that the file states for a value, with the given sizes put in; None where it states no rank."""
        shape = declared_shape(self.graph.value_info(value))
        if shape is None or not self._sizes:
            return shape
        return [None if dim is None else substitute(dim, self._sizes) for dim in shape]

    def find(self, dim: Dim) -> Dim:
        """`dim` in canonical symbols."""
        return self.unions.find(dim)

    def classes(self) -> dict[str, set[str]]:
        """Canonical symbol -> every symbol of its class, for classes of two and more."""
        return self.unions.classes()

    @property
    def bindings(self) -> dict[str, int]:
        """Canonical symbol -> the size that data flow demands of it."""
        return {name: next(iter(sizes)) for name, sizes in self.unions.demands.items()}

    @property
    def conflicts(self) -> list[Conflict]:
        """Contradictions found so far."""
        return self.unions.conflicts

    def is_known(self, dim: Dim) -> bool:
        """Whether `dim` rests on numbers and declared symbols alone."""
        return isinstance(dim, int) or not any(self.names.is_made_up(self.unions.root(name)) for name in symbols(dim))

    def is_input_dim(self, dim: Dim) -> bool:
        """Whether `dim` rests on sizes of graph inputs alone."""
        return all(self.names.is_input(self.unions.root(name)) for name in symbols(dim))

    def known_shape(self, value: int) -> tuple[Dim, ...] | None:
        """What is known by now, for rules."""
        shape = self._shapes.get(value)
        return tuple(map(self.unions.find, shape)) if shape and self.unions.renames else shape

    def known_contents(self, value: int) -> Contents | None:
        """What is known by now, for rules."""
        contents = self._contents.get(value)
        if contents is None or not self.unions.renames:
            return contents
        return apply(self._find_item, contents)

    def _find_item(self, item: object) -> object:
        return self.unions.find(item) if isinstance(item, Expr) else item

    def known_dtype(self, value: int) -> int | None:
        """What is known by now, for rules."""
        return self._dtypes.get(value)

    def _declare_input(self, value: int) -> None:
        shape = self.declared(value)
        self.names.add_inputs(dim for dim in shape or () if dim is not None)
        self._shapes[value] = None if shape is None else self._named(value, shape, is_input=True)
        self._dtypes[value] = declared_dtype(self.graph.value_info(value))
        self._contents[value] = None

    def _named(self, value: int, shape: PartialShape, *, is_input: bool) -> tuple[Dim, ...]:
        """`shape` with the given sizes put in, and a made up symbol for each axis that is open."""
        name = self.graph.name(value)
        made = [self.names.make(value, i, name, is_input) if dim is None else dim for i, dim in enumerate(shape)]
        return tuple(substitute(dim, self._sizes) for dim in made)

    def _resolve(self, value: int, kind: int) -> None:
        """Settles one question and all that it rests on, with a stack of its own: graphs are deeper than Python's."""
        memo, producer, opened = self._memo, self.graph.producer, set[tuple[int, int]]()
        stack: list[tuple[int, int, Rule[Any] | None]] = [(value, kind, None)]
        while stack:
            value, kind, rule = stack.pop()
            if value in memo[kind]:
                continue
            needs: Sequence[tuple[int, int, None]] = ()
            if rule is None and (rule := self._rule(value, kind)) is not None and (value, kind) not in opened:
                needs = self._needs(rule, producer[value])
            if needs:
                opened.add((value, kind))
                stack += [(value, kind, rule), *needs]
            else:
                self._settle(rule, value, kind)  # all it needs is settled, or the graph has a cycle

    def _rule(self, value: int, kind: int) -> Rule[Any] | None:
        graph, node = self.graph, self.graph.producer[value]
        if node < 0 or value in graph.initializers:
            return None
        domain = graph.domain[node]
        if self.model.functions and is_call(self.model, graph, node):
            return CALL_RULES[kind]
        return _TABLES[kind].get(rule_key(graph.op[node], domain) if domain else graph.standard[node])

    def _needs(self, rule: Rule[Any], node: int) -> list[tuple[int, int, None]]:
        """What must be settled before, and is not."""
        graph, found = self.graph, list[tuple[int, int, None]]()
        inputs, count = graph.node_inputs[node], len(graph.node_inputs[node])
        for wanted, positions in rule.needs:
            known, asked = self._memo[wanted], range(count) if positions is None else positions
            found += [(inputs[i], wanted, None) for i in asked if i < count and inputs[i] not in known]
        for captured in graph.captures.get(node, ()) if graph.captures else ():
            found += [(captured, wanted, None) for wanted in range(3) if captured not in self._memo[wanted]]
        return found

    def _settle(self, rule: Rule[Any] | None, value: int, kind: int) -> None:
        memo, graph, node = cast("dict[int, Any]", self._memo[kind]), self.graph, self.graph.producer[value]
        if rule is None and (head := self._head(value)) is not None:
            memo[value] = self._constant(head, value) if kind == _CONTENTS else (head.dims, None, head.dtype)[kind]
            return
        found = None if rule is None else self._run(rule, node)
        found = tuple(found.shapes) if isinstance(found, Outputs) else (found,) if kind == _SHAPE else found
        for output, one in paired(value, (value,) if node < 0 else graph.node_outputs[node], found, memo):
            if kind == _SHAPE:
                memo[output] = self._finish(output, one)
            elif kind == _CONTENTS:
                memo[output] = one if one is not None and one.size <= MAX_ELEMENTS else None
            else:
                memo[output] = declared_dtype(graph.value_info(output)) if one is None else one

    def _constant(self, head: TensorHead, value: int) -> Contents | None:
        if value not in self._constants:
            self._constants[value] = read_small(self.model, head)
        return self._constants[value]

    def _head(self, value: int) -> TensorHead | None:
        head, node = self.graph.initializers.get(value), self.graph.producer[value]
        return self.graph.constant_head(node) if head is None and node >= 0 else head

    def _run(self, rule: Rule[Any], node: int) -> Any:
        try:
            return rule.run(Op(self, node))
        except (ArithmeticError, LookupError, ValueError):  # a graph that onnxruntime would refuse
            return None

    def _finish(self, value: int, shape: PartialShape | None) -> tuple[Dim, ...] | None:
        declared = self.declared(value) if value in self.graph.type_spans else None
        if shape is None:
            shape, declared = declared, None
        if shape is None:
            return None
        if declared is not None and len(declared) != len(shape):
            self.conflicts.append(Conflict(self.graph.producer[value], len(shape), len(declared)))
            declared = None
        if declared is None:
            pairs = enumerate(shape)
            return tuple([dim if isinstance(dim, int) else self._choose(value, i, dim, None) for i, dim in pairs])
        return tuple(self._choose(value, i, *pair) for i, pair in enumerate(zip(shape, declared, strict=True)))

    def _choose(self, value: int, axis: int, dim: Dim | None, stated: Dim | None) -> Dim:
        """One size of what a rule yields and what the file says; the rule is right unless it knows nothing."""
        if dim is None or (not isinstance(dim, int) and weight(dim) > _MAX_WEIGHT):
            return self.names.make(value, axis, self.graph.name(value), False) if stated is None else stated
        if stated is None or dim == stated:
            return dim
        node = self.graph.producer[value]
        if not self.is_known(dim) or (is_clamped(dim) and not is_clamped(stated) and self.is_input_dim(stated)):
            self.unions.unite(dim, stated, node)
            return stated
        if isinstance(dim, int) and isinstance(stated, int):
            self.conflicts.append(Conflict(node, dim, stated))
        return dim
