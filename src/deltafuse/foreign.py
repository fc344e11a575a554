"""Custom nodes of other tools: found, and lowered for a run by a file that says how. ``fuse`` never touches them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import onnx

from deltafuse.edits import Changes, Insertion, apply, build
from deltafuse.errors import UserError
from deltafuse.graph import Graph
from deltafuse.lowering import fused_type
from deltafuse.shapes import Shapes
from deltafuse.user_code import run_file
from deltafuse.wire import scan

__all__ = ["Foreign", "foreign_nodes", "load_lowering", "shipped", "write_lowered"]


@dataclass(frozen=True)
class Foreign:
    """How to run Custom nodes that are none of ours.

    Attributes:
        name: the file, or the name of a shipped one.
        operators: the values of ``type`` that it knows.
        lower: a node and the element types of what it reads, as far as known -> plain operators (opset 13 or later)
            that write what it writes.
    """

    name: str
    operators: frozenset[str]
    lower: Callable[[onnx.NodeProto, Mapping[str, int]], Sequence[onnx.NodeProto]]


def shipped() -> dict[str, Path]:
    """Names of the shipped lowerings -> their files."""
    folder = Path(__file__).parent / "lowerings"
    return {path.stem.replace("_", "-"): path for path in sorted(folder.glob("[!_]*.py"))}


def load_lowering(name: str) -> Foreign:
    """Loads a Python file that defines ``OPERATORS`` and ``lower(node, types)``.

    Args:
        name: path of a file, or the name of a shipped one.

    Raises:
        UserError: ``bad-lowering``.
    """
    path = shipped().get(name, Path(name))
    if not path.is_file():
        known = ", ".join(shipped())
        raise UserError("bad-lowering", f"there is no file {path}: give the path of a Python file, or one of {known}")
    module = run_file(path, "lowering")
    operators: object = getattr(module, "OPERATORS", None)
    lower: object = getattr(module, "lower", None)
    if not operators or isinstance(operators, str) or not callable(lower):
        example = "deltafuse/lowerings/fixed_capacity.py"
        text = f"{path} lacks OPERATORS, a tuple of types, or lower(node, types): see {example}"
        raise UserError("bad-lowering", text)
    call = cast("Callable[[onnx.NodeProto, Mapping[str, int]], Sequence[onnx.NodeProto]]", lower)
    return Foreign(name, frozenset(map(str, cast("Sequence[object]", operators))), call)


def foreign_nodes(graph: Graph) -> Iterator[tuple[int, str]]:
    """Custom nodes of the main graph that are none of ours, and their types."""
    for node, op in enumerate(graph.op):
        if op == "Custom" and not graph.domain[node] and not fused_type(graph.node(node)):
            said = graph.attributes(node).get("type")
            yield node, "" if said is None else said.s.decode(errors="replace")


def write_lowered(source: Path, foreign: Foreign, path: Path) -> bool:
    """Writes a model with its foreign nodes as plain operators; weights outside the file are looked for beside it.

    Returns:
        Whether there were any; else nothing is written.

    Raises:
        UserError: ``bad-lowering``: the file's ``lower`` fails on a node.
    """
    model = scan(source)
    graph = model.graph
    chosen = [node for node, kind in foreign_nodes(graph) if kind in foreign.operators]
    if not chosen:
        return False
    shapes = Shapes(model)
    inserted = tuple(Insertion("", node, tuple(_lowered(shapes, node, foreign))) for node in chosen)
    edits = build(model, Changes((("", tuple(chosen)),), inserted))
    with path.open("wb") as file:
        apply(model.data, edits, file)
    return True


def _lowered(shapes: Shapes, number: int, foreign: Foreign) -> Sequence[onnx.NodeProto]:
    graph = shapes.graph
    node = graph.node(number)
    read = [value for value in graph.node_inputs[number] if value]
    types = {graph.name(value): dtype for value in read if (dtype := shapes.dtype(value)) is not None}
    name = node.name or next(iter(node.output), "")
    try:
        nodes = list(foreign.lower(node, types))
    except Exception as error:
        raise UserError("bad-lowering", f"{foreign.name} cannot lower the node {name}: {error}") from error
    written = {output for new in nodes for output in new.output}
    missing = [output for output in node.output if output and output not in written]
    if missing:
        raise UserError("bad-lowering", f"{foreign.name} lowers the node {name} and does not write {missing[0]}")
    return nodes
