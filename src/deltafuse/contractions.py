"""Axes along which operators add up."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from deltafuse.dims import Dim
from deltafuse.scope import Scope

#: Products that are added up along an axis.
CONTRACTIONS = frozenset({"MatMul", "Gemm", "Einsum", "FusedMatMul", "TransposeMatMul"})


def contracted(scope: Scope, op: str, node: int) -> bool:
    """Whether a sum or product goes along an axis whose size is free, or is not known.

    Args:
        scope: where it is.
        op: what the node computes.
        node: a contraction, a reduction, a running sum or an inverse.
    """
    inputs = scope.graph.node_inputs[node]
    shapes = [None if scope.engine is None else scope.engine.shape(value) for value in inputs]
    if None in shapes[: 2 if op in CONTRACTIONS else 1]:
        return True
    known = [shape or () for shape in shapes]
    if op == "MatMul":
        return not all(isinstance(dim, int) for dim in known[0][-1:])
    if op == "Einsum":
        return _einsum(scope, node, known)
    if op in CONTRACTIONS or op == "Inverse":
        return not all(isinstance(dim, int) for dim in known[0][-2:])
    axes = _axes(scope, op, node)
    dims = known[0] if axes is None else [known[0][axis] for axis in axes if -len(known[0]) <= axis < len(known[0])]
    return not all(isinstance(dim, int) for dim in dims)


def _einsum(scope: Scope, node: int, shapes: Sequence[Sequence[Dim]]) -> bool:
    equation = scope.graph.attributes(node)["equation"].s.decode()
    if "->" not in equation:
        return True
    pairs = zip(summed_axes(equation), shapes, strict=False)
    dims = [shape[axis] for axes, shape in pairs for axis in axes if -len(shape) <= axis < len(shape)]
    return not all(isinstance(dim, int) for dim in dims)


def summed_axes(equation: str) -> list[list[int]]:
    """Of each operand of an Einsum the axes that its result has not, counted from the end behind dots."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    kept = set(right) if arrow else {letter for letter in left if left.count(letter) == 1}
    found: list[list[int]] = []
    for term in left.split(","):
        head, _, tail = term.partition("...")
        places = [*enumerate(head), *((axis - len(tail), letter) for axis, letter in enumerate(tail))]
        found.append([axis for axis, letter in places if letter not in kept])
    return found


def _axes(scope: Scope, op: str, node: int) -> Iterable[int] | None:
    """The axes of a reduction or running sum, None where they are all or not known."""
    graph = scope.graph
    given = graph.attributes(node).get("axes")
    if given is not None:
        return tuple(given.ints)
    second = graph.node_inputs[node][1:2]
    array = scope.constant(second[0]) if second and second[0] else None
    return None if array is None else [int(axis) for axis in array.ravel().tolist()]
