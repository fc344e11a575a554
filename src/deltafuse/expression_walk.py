"""Ways through a graph from one value: up through operators of one data operand, down to what is computed from it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from deltafuse.expression_view import View

#: How many values a walk visits.
_LONGEST = 24


def above(view: View, value: int, operators: Collection[str]) -> list[int]:
    """A value and what it is made of by operators with one data operand, nearest first."""
    path = [value]
    while len(path) < _LONGEST:
        node = view.producer(path[-1])
        data = [source for source in view.inputs(node) if view.is_data(source)] if node >= 0 else []
        if len(data) != 1 or view.op(node) not in operators:
            break
        path.append(data[0])
    return path


def below(
    view: View, values: Iterable[int], operators: Collection[str], allowed: Callable[[int], bool] = lambda node: True
) -> list[int]:
    """What is computed from some values alone by these operators, nearest first.

    Args:
        view: of the graph.
        values: to start from; not in the result.
        operators: op_types.
        allowed: whether a node of these may be passed.
    """
    reached, found, pending = set(values), list[int](), sorted({n for v in values for n in view.consumers(v)})
    while pending and len(found) < _LONGEST:
        node = pending.pop(0)
        data = [value for value in view.inputs(node) if view.is_data(value)]
        if view.op(node) not in operators or not reached.issuperset(data) or not allowed(node):
            continue
        fresh = [value for value in view.outputs(node) if value and value not in reached]
        reached.update(fresh)
        found += fresh
        pending = sorted({*pending, *(reader for value in fresh for reader in view.consumers(value))})
    return found
