"""One fused node as ``fuse lint`` sees it, and what a finding is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import onnx
from onnx import AttributeProto

from deltafuse.classes import overridable
from deltafuse.dims import Dim
from deltafuse.graph import Graph
from deltafuse.lowering_attention import LINEAR_ATTENTION
from deltafuse.reasons import Reason
from deltafuse.shapes import Shapes
from deltafuse.targets import Profile
from deltafuse.targets.profile import Operator
from deltafuse.tensors import read_tensor
from deltafuse.wire import Model

_KINDS = {value: name for name, value in AttributeProto.AttributeType.items()}


@dataclass(frozen=True)
class Finding:
    """Something that is not as the profile has it.

    Attributes:
        code: stable short name.
        node: name of the node, or its first result.
        part: the attribute, input or output it is about, "" for the node as a whole.
        found, wanted: what is there and what should be.
        fix: what to do.
    """

    code: str
    node: str
    part: str
    found: str
    wanted: str
    fix: str


@dataclass(frozen=True)
class View:
    """A fused node.

    Attributes:
        shapes: sizes and element types of the file's values.
        message: the node.
        name: as it is called in findings.
        attributes: by name.
        operator: the signature it is held against.
        ports: name of an input -> value id; absent inputs are left out.
        results: value ids of the outputs, 0 where one is not named.
        boundary: element type that the operands are to have.
    """

    model: Model
    shapes: Shapes
    profile: Profile
    node: int
    message: onnx.NodeProto
    name: str
    attributes: Mapping[str, AttributeProto]
    operator: Operator
    ports: Mapping[str, int] = field(default_factory=dict[str, int])
    results: tuple[int, ...] = ()
    boundary: int = 0

    @property
    def graph(self) -> Graph:
        """The main graph."""
        return self.model.graph

    def finding(self, code: str, part: str, found: object, wanted: object, fix: str) -> Finding:
        """A finding about this node."""
        return Finding(code, self.name, part, str(found), str(wanted), fix)

    def shape(self, value: int) -> tuple[Dim, ...] | None:
        """Sizes of a value, as far as they are known."""
        return self.shapes.shape(value)

    def array(self, value: int) -> npt.NDArray[np.generic] | None:
        """The data of a constant, None where the value is none: an initializer or a Constant node, a Cast apart.

        An initializer that whoever runs the file may override is none.
        """
        graph = self.graph
        if value in graph.initializers:
            if value in overridable(self.model):
                return None
            found = read_tensor(self.model, graph.initializers[value])
            return None if isinstance(found, Reason) else found
        node = graph.producer[value]
        if node < 0 or graph.domain[node]:
            return None
        if graph.standard[node] in ("Cast", "Identity"):
            return self.array(graph.node_inputs[node][0])
        head = graph.constant_head(node)
        found = None if head is None else read_tensor(self.model, head)
        return None if isinstance(found, Reason) else found

    def integers(self, value: int) -> npt.NDArray[np.int64] | None:
        """As `array`, in one row; None too where the data are no integers."""
        found = self.array(value)
        if found is None or not np.issubdtype(found.dtype, np.integer):
            return None
        return found.astype(np.int64).ravel()


def is_attention(view: View) -> bool:
    """Whether this node is LinearAttention."""
    return view.operator.op == LINEAR_ATTENTION


def kind_name(kind: int) -> str:
    """``INTS`` for 7."""
    return _KINDS.get(kind, str(kind))
