"""Builds the few nodes that replace a site: by onnx-graphsurgeon, but for those of a norm, which are the source's."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import metadata
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto

from deltafuse.match import Match, Norm, Role
from deltafuse.targets.layout import Move, Sizes, moves

Array = npt.NDArray[np.generic]
Attribute = int | float | str | list[int] | list[str]


@cache
def version() -> str:
    """Version of this package, ``unknown`` where it runs without being installed."""
    try:
        return metadata.version("deltafuse")
    except metadata.PackageNotFoundError:
        return "unknown"


class Emitter:
    """Collects the nodes of one site in topological order; lives as long as one call of `Target.plan`.

    Args:
        prefix: start of every new name, e.g. ``layers.3/gated_delta_rule``.
        properties: metadata of every emitted node.
        sources: letter -> (value, axis) that has its size, for sizes that are not known before the model runs.
    """

    def __init__(
        self, prefix: str, properties: Mapping[str, str], sources: Mapping[str, tuple[str, int]] | None = None
    ) -> None:
        # graphsurgeon has no types: `Any` stops here.
        self._gs: Any = importlib.import_module("onnx_graphsurgeon")
        self._prefix = prefix
        self._properties = dict(properties)
        self._sources = dict(sources or {})
        self._sizes: dict[str, str] = {}
        self._variables: dict[str, Any] = {}
        self._constants: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self._nodes: list[Any] = []

    def name(self, what: str) -> str:
        """The full name of a new node or value."""
        return f"{self._prefix}/{what}"

    def node(
        self,
        op_type: str,
        what: str,
        inputs: Sequence[str],
        attributes: Mapping[str, Attribute] | None = None,
        outputs: Sequence[str] | None = None,
        domain: str = "",
    ) -> str:
        """Adds a node; returns its first output, named as the node unless `outputs` says otherwise."""
        names = [self.name(what)] if outputs is None else list(outputs)
        self._nodes.append(
            self._gs.Node(
                op=op_type,
                name=self.name(what),
                attrs=dict(attributes or {}),
                inputs=[self._variable(name) for name in inputs],
                outputs=[self._variable(name) for name in names],
                domain=domain or None,
            )
        )
        return names[0]

    def constant(self, what: str, array: Array) -> str:
        """A Constant node; equal constants of one site are one node."""
        key = (f"{array.dtype}", array.shape, array.tobytes())
        if key not in self._constants:
            value = {"value": self._gs.Constant("", array)}
            self._constants[key] = self.node("Constant", what, (), cast("Mapping[str, Attribute]", value))
        return self._constants[key]

    def size(self, letter: str) -> str:
        """The size of an axis, int64 [1], computed when the model runs."""
        if letter not in self._sizes:
            value, axis = self._sources[letter]
            index = self.constant(f"size/{axis}", np.array([axis], np.int64))
            shape = self.node("Shape", f"size_{letter}/shape", (value,))
            self._sizes[letter] = self.node("Gather", f"size_{letter}", (shape, index), {"axis": 0})
        return self._sizes[letter]

    def cast(self, what: str, value: str, have: int, want: int) -> str:
        """A Cast, unless the type is right already."""
        return value if have == want else self.node("Cast", what, (value,), {"to": want})

    def moved(self, what: str, value: str, steps: Sequence[Move], last: str | None = None) -> str:
        """A value in another layout, under the name `last` where there is one and a step to write it."""
        for index, step in enumerate(steps):
            value = self._move(what, value, step, last if index == len(steps) - 1 else None)
        return value

    def normalised(self, what: str, value: str, norm: Norm) -> str:
        """A value of type ``norm.dtype`` after the source's norm: same operators, order, constants."""
        local = {"x": value, "": ""}
        fresh = [*(tensor.name for tensor in norm.initializers), *(name for node in norm.nodes for name in node.output)]
        local.update({name: self.name(f"{what}/{name}") for name in fresh if name})
        for tensor in norm.initializers:
            self._nodes.append(_constant_node(local[tensor.name], tensor))
        for index, node in enumerate(norm.nodes):
            self._nodes.append(_renamed(node, self.name(f"{what}/{node.op_type}_{index}"), local))
        return local["y"]

    def finish(self) -> tuple[onnx.NodeProto, ...]:
        """All nodes, with metadata."""
        built = [node for node in self._nodes if not isinstance(node, onnx.NodeProto)]
        exported = iter(self._gs.export_onnx(self._gs.Graph(nodes=built)).graph.node)
        result: list[onnx.NodeProto] = [
            node if isinstance(node, onnx.NodeProto) else next(exported) for node in self._nodes
        ]
        for node in result:
            annotate(node, self._properties)
        return tuple(result)

    def _move(self, what: str, value: str, move: Move, output: str | None) -> str:
        outputs = None if output is None else (output,)
        if move.op == "Transpose":
            permutation = [axis for axis in move.values if isinstance(axis, int)]
            return self.node("Transpose", f"{what}/transpose", (value,), {"perm": permutation}, outputs)
        text = "x".join("n" if size == -1 else str(size) for size in move.values)
        shape = self._shape(what, text, move.values)
        # The shape is in the name: a change of layout may reshape twice, before a Transpose and after it.
        return self.node("Reshape", f"{what}/reshape_{text}", (value, shape), None, outputs)

    def _shape(self, what: str, text: str, values: Sequence[int | str]) -> str:
        numbers = [value for value in values if isinstance(value, int)]
        if len(numbers) == len(values):
            return self.constant(f"shape_{text}", np.array(numbers, np.int64))
        parts = [
            self.size(value) if isinstance(value, str) else self.constant(f"shape_{value}", np.array([value], np.int64))
            for value in values
        ]
        return self.node("Concat", f"{what}/shape_{text}", parts, {"axis": 0})

    def _variable(self, name: str) -> Any:
        return self._variables.setdefault(name, self._gs.Variable(name))


def annotate(node: onnx.NodeProto, properties: Mapping[str, str]) -> None:
    """Adds metadata to a node (graphsurgeon has no place for it)."""
    for key, value in properties.items():
        node.metadata_props.add(key=key, value=value)


def properties(match: Match) -> dict[str, str]:
    """Metadata of every node that a fuse writes."""
    return {"deltafuse.site": match.name, "deltafuse.rule": match.rule, "deltafuse.version": version()}


def custom_properties(match: Match) -> dict[str, str]:
    """Further metadata of the fused node itself."""
    found = {"deltafuse.form": match.form, "deltafuse.scope": match.out.name.rpartition("/")[0] or match.name}
    if match.valid_tokens is not None:
        found["deltafuse.valid_tokens"] = f"{match.valid_tokens.low}..{match.valid_tokens.high}"
    return found


def operand(emitter: Emitter, what: str, role: Role, target: str, sizes: Sizes, norm: Norm | None, dtype: int) -> str:
    """A role as the kernel reads it: layout first, then the norm in the source's type, then the kernel's type."""
    value = emitter.moved(what, role.name, moves(role.layout, target, sizes))
    have = role.dtype
    if norm is not None:
        value = emitter.cast(f"{what}/cast_to_norm", value, have, norm.dtype)
        value, have = emitter.normalised(f"{what}/l2norm", value, norm), norm.dtype
    return emitter.cast(f"{what}/cast", value, have, dtype)


def result(emitter: Emitter, what: str, value: str, role: Role, source: str, sizes: Sizes, dtype: int) -> None:
    """Writes a kernel's result in the role's layout and type under the role's old name."""
    steps = moves(source, role.layout, sizes)
    if role.dtype != dtype:
        value = emitter.moved(what, value, steps)
        emitter.node("Cast", f"{what}/cast", (value,), {"to": role.dtype}, (role.name,))
    elif steps:
        emitter.moved(what, value, steps, role.name)
    else:
        # Nothing to convert. The kernel's result keeps a name of its own all the same: its type is declared under that
        # name, and the file may declare the old one already.
        emitter.node("Identity", f"{what}/identity", (value,), None, (role.name,))


def _constant_node(name: str, tensor: TensorProto) -> onnx.NodeProto:
    copy = TensorProto()
    copy.CopyFrom(tensor)
    copy.name = ""
    node = onnx.NodeProto(op_type="Constant", name=name, output=[name])
    node.attribute.append(onnx.helper.make_attribute("value", copy))
    return node


def _renamed(node: onnx.NodeProto, name: str, names: Mapping[str, str]) -> onnx.NodeProto:
    result = onnx.NodeProto()
    result.CopyFrom(node)
    result.name = name
    result.input[:] = [names[value] for value in node.input]
    result.output[:] = [names.get(value, value) for value in node.output]
    del result.metadata_props[:]
    return result
