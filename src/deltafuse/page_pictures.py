"""The pictures of a page, before and after, each kept once however many sites look like it.

A site keeps the names of its nodes only where they are not those of the first site of its kind with another layer's
number: thousands of names for each of thousands of sites would be most of the page.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx

from deltafuse.classes import Kind
from deltafuse.evidence import Evidence
from deltafuse.fused import kernel
from deltafuse.graph import Graph
from deltafuse.page_nodes import attribute_texts, node_title
from deltafuse.picture import DRAWN, Part, Picture, draw
from deltafuse.probing import tensor_text, title

__all__ = ["Pictures"]

Document = dict[str, Any]

#: Characters of names that a page holds beside those of the first site of each kind.
_ROOM = 8_000_000
_NUMBERED = re.compile(r"(.*[._])(\d+)")


@dataclass(frozen=True)
class _First:
    """The first site that looks like this, and what its nodes are called."""

    picture: int
    site: str
    names: Sequence[str]


@dataclass(frozen=True)
class _Scene:
    """What is to be drawn: all nodes of a site, of which some are parts of the picture.

    Attributes:
        ops: operator of each node.
        parts: by number of the node.
        ends: operands and results.
        name: what a node is called, given its number and what it would be called in the first site's way.
        detail: what else to tell of a box, given the number of its first node.
    """

    ops: Sequence[str]
    parts: Mapping[int, Part]
    ends: Sequence[Part]
    name: Callable[[int, str], str]
    detail: Callable[[int], str]


@dataclass
class Pictures:
    """The pictures of one model.

    Attributes:
        evidence: what is drawn.
        most: boxes of one picture at most.
        documents: what the page needs of each picture.
    """

    evidence: Evidence
    most: int = DRAWN
    documents: list[Document] = field(default_factory=list[Document])
    _known: dict[str, _First] = field(default_factory=dict[str, _First])
    _used: int = 0

    def before(
        self, site: str, nodes: Sequence[int], operands: Mapping[str, int], results: Mapping[str, int]
    ) -> Document:
        """A site as the exporter wrote it.

        Args:
            site: its name.
            nodes: of the graph.
            operands: role -> value.
            results: the same of what is computed.

        Returns:
            The number of the picture, and what its nodes are called here.
        """
        graph, kinds = self.evidence.model.graph, self.evidence.kinds
        ops = [title(graph.op[node], graph.domain[node]) for node in nodes]
        parts = {
            index: Part(ops[index], graph.reads(node), tuple(filter(None, graph.node_outputs[node])))
            for index, node in enumerate(nodes)
            if any(kinds[value] == Kind.DATA for value in graph.node_outputs[node] if value)
        }
        ends = _ends(operands, results)
        return self._put(site, _Scene(
            ops, parts, ends, lambda i, expected: _name(graph, nodes[i], expected), lambda i: self._detail(nodes[i]),
        ))  # fmt: skip

    def after(
        self,
        site: str,
        op: str,
        nodes: Sequence[onnx.NodeProto],
        operands: Mapping[str, str],
        results: Mapping[str, str],
    ) -> Document:
        """A site as it is written for the target.

        Args:
            site: its name.
            op: the operator in its place.
            nodes: what is written.
            operands: role -> tensor.
            results: the same of what is computed.
        """
        constant = _constants(nodes)
        parts = {
            index: Part(node_title(node), tuple(node.input), tuple(node.output), _kind(node, op))
            for index, node in enumerate(nodes)
            if not constant.issuperset(node.output)
        }
        read = {value for node in nodes for value in node.input}
        ends = _ends({role: value for role, value in operands.items() if value in read}, results)
        return self._put(site, _Scene(
            [node_title(node) for node in nodes], parts, ends,
            lambda i, _: nodes[i].name or nodes[i].output[0],
            lambda i: "; ".join(f"{name} = {text}" for name, text in attribute_texts(nodes[i]).items()),
        ))  # fmt: skip

    def _put(self, site: str, scene: _Scene) -> Document:
        """Keeps a picture unless there is one like it, and gives its number."""
        picture = draw([*scene.parts.values(), *scene.ends], self.most)
        boxes = [-1] * len(scene.ops)
        for index, box in zip(scene.parts, picture.box_of, strict=False):
            boxes[index] = box
        document = _document(picture, scene.ops, boxes)
        key = json.dumps(document)
        if key in self._known:
            return self._again(site, scene, self._known[key])
        first = {box: index for index, box in reversed([*enumerate(boxes)]) if box >= 0}
        details = [scene.detail(first[box]) if box in first else "" for box in range(len(picture.boxes))]
        names = [scene.name(index, "") for index in range(len(scene.ops))]
        self._known[key] = _First(len(self.documents), site, names)
        self.documents.append({**document, "details": details, "names": names, "site": site})
        return {"picture": len(self.documents) - 1}

    def _again(self, site: str, scene: _Scene, first: _First) -> Document:
        """A picture that is there, and how its names become this site's."""
        swap = _swap(first.site, site)
        renamed = _renamer(swap)
        others: dict[int, str] = {}
        for index, name in enumerate(first.names):
            expected = renamed(name)
            own = scene.name(index, expected)
            if own != expected:
                others[index] = own
        size = sum(map(len, others.values()))
        document: Document = {"picture": first.picture} | ({"swap": swap} if swap else {})
        if self._used + size > _ROOM:
            return {"picture": first.picture, "foreign": True}
        self._used += size
        return document | ({"names": others} if others else {})

    def _detail(self, node: int) -> str:
        """What the first node of a box writes, and its attributes."""
        graph, shapes = self.evidence.model.graph, self.evidence.shapes
        value = graph.node_outputs[node][0]
        written = tensor_text(shapes.dtype(value), shapes.known_shape(value))
        texts = attribute_texts(graph.node(node))
        return "; ".join([*([written] if written else []), *(f"{name} = {text}" for name, text in texts.items())])


def _document(picture: Picture, ops: Sequence[str], boxes: Sequence[int]) -> Document:
    table = list(dict.fromkeys(ops))
    place = {op: index for index, op in enumerate(table)}
    return {
        "boxes": picture.boxes,
        "edges": picture.edges,
        "table": table,
        "ops": [place[op] for op in ops],
        "box_of": boxes,
    }


def _ends(operands: Mapping[str, object], results: Mapping[str, object]) -> list[Part]:
    """One box for each value; query and key may be one."""
    roles: dict[tuple[str, object], list[str]] = {}
    for kind, ports in (("operand", operands), ("result", results)):
        for role, value in ports.items():
            roles.setdefault((kind, value), []).append(role)
    return [
        Part(", ".join(names), () if kind == "operand" else (value,), (value,) if kind == "operand" else (), kind)
        for (kind, value), names in roles.items()
    ]


def _constants(nodes: Sequence[onnx.NodeProto]) -> set[str]:
    """What is computed from Constant nodes alone."""
    found: set[str] = set()
    for node in nodes:
        if found.issuperset(node.input):
            found.update(node.output)
    return found


def _kind(node: onnx.NodeProto, op: str) -> str:
    if kernel(node) or node.op_type == op:
        return "fused"
    return "cast" if node.op_type == "Cast" else "node"


def _name(graph: Graph, node: int, expected: str) -> str:
    """What a node is called; quick where that is what it is expected to be called."""
    if expected:
        text = expected.encode()
        start, end = graph.spans[node]
        # Field 3 of a node is its name.
        if len(text) < 128 and b"\x1a" + bytes([len(text)]) + text in bytes(graph.data[start:end]):
            return expected
    return graph.label(node)


def _swap(first: str, site: str) -> list[str] | None:
    """What to put in the place of what, to make names of one site those of another: ``layers.0``, ``layers.3``."""
    old, new = _NUMBERED.fullmatch(first), _NUMBERED.fullmatch(site)
    return [first, site] if old and new and old[1] == new[1] and first != site else None


def _renamer(swap: Sequence[str] | None) -> Callable[[str], str]:
    if swap is None:
        return lambda name: name
    pattern = re.compile(re.escape(swap[0]) + r"(?!\d)")
    return lambda name: pattern.sub(lambda _: swap[1], name)
