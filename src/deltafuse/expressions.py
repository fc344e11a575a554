"""Patterns for ordinary expressions: what such a pattern file defines, and what it is handed.

A pattern of this kind says where its expression could be (`Expression.propose`), what it computes
(`Expression.reference`) and what to write in its place (`Expression.emit`). It proves nothing: whatever it proposes is
cut out and run, and only what agrees with the reference, and consists of the pattern's own operators, is a match. So a
proposal may be a guess.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto

from deltafuse.dims import Dim
from deltafuse.match import Role
from deltafuse.reasons import Reason

if TYPE_CHECKING:
    from deltafuse.expression_view import View
    from deltafuse.targets.emit import Emitter

Array = npt.NDArray[np.float64]
#: An array for each role, or for each output.
Operands = Mapping[str, Array]
#: What `Expression.solve` found: e.g. ``{"axis": -1, "eps": 1e-05}``.
Parameters = Mapping[str, float]

FLOATS = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE})
#: Scales that the default draws have: what a small constant is added to must be felt, and what a large one is, too.
SCALES = (1.0, 1e-2, 1e-4, 1e4)


@dataclass(frozen=True)
class Proposal:
    """A part of the graph that may be the expression.

    Attributes:
        roles: name of each role -> value id; a role that is missing there is left out.
        outputs: the same for the results.
    """

    roles: Mapping[str, int]
    outputs: Mapping[str, int]


@dataclass(frozen=True)
class Place:
    """A site that is to be written anew.

    Attributes:
        roles, outputs: by name, as values of the graph.
        parameters: what was solved.
        opset: version of the ai.onnx operators that the file imports.
        target: name of the profile that is fused for.
        target_opset: domain and version that the target's own operators need, None where they need none.
        domain: of the target's operator that the pattern names, None where it names none or the target has none.
        boundaries: element types that the target's operators take, the preferred one first; empty for any.
    """

    roles: Mapping[str, Role]
    outputs: Mapping[str, Role]
    parameters: Parameters
    opset: int
    target: str
    target_opset: tuple[str, int] | None = None
    domain: str | None = None
    boundaries: tuple[int, ...] = ()

    def boundary(self, dtype: int) -> int:
        """The element type for operands that the model has in some type."""
        return dtype if dtype in self.boundaries else next(iter(self.boundaries), dtype)


@dataclass(frozen=True)
class Emission:
    """What to write in place of a site, beside the nodes that the emitter was given.

    Attributes:
        op: the operator in the site's place, as the report shows it.
        aliases: name of an output -> name of the role whose value it is: its readers read that instead.
        value_info: declared types of new values.
        target_opset: whether the nodes need the opset import that the target names.
        notes: for the report.
    """

    op: str
    aliases: Mapping[str, str] = field(default_factory=dict[str, str])
    value_info: tuple[onnx.ValueInfoProto, ...] = ()
    target_opset: bool = False
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Example:
    """A small model that the pattern's tests run.

    Attributes:
        name: what is shown.
        text: the model in ONNX text.
        sites: how many sites are fused in it.
        reason: code of the reason that a site of it is left with, "" where there is none.
    """

    name: str
    text: str
    sites: int = 1
    reason: str = ""


class Trial(Protocol):
    """A proposal that can be run, in double, at one choice of sizes."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of each role that there is, in numbers."""
        ...

    @property
    def dims(self) -> Mapping[str, tuple[Dim, ...]]:
        """The same as the graph has them: symbolic where they are free."""
        ...

    @property
    def dtypes(self) -> Mapping[str, int]:
        """Element type of each role in the source."""
        ...

    def run(self, operands: Operands) -> Operands | Reason:
        """The outputs for some operands; the cut as it is in the file."""
        ...


@dataclass(frozen=True)
class Neighbour:
    """Another expression that is often meant or made by mistake; see `Expression.solve` and `Expression.reference`."""

    solve: Callable[[Trial], Parameters | Reason]
    reference: Callable[[Operands, Parameters], Operands]


class Expression(ABC):
    """A pattern for an ordinary expression; a file sets ``PATTERN`` to an instance of its own subclass.

    Attributes:
        name: the pattern's name; prefix of the names of its sites.
        default: whether it is looked for without being named by ``--rules``.
        operator: what it becomes, where only some targets have that: it is looked for by default on those
            (`deltafuse.targets.profile.Profile.others`).
        anchors: op_types that the search starts from.
        operators: op_type -> how many of them (least, most) a site may have that data passes through. An operator of
            another domain is called ``domain.op_type``. Nodes on constants alone may be any.
        shape_operators: op_types that may compute sizes inside a site.
        kept: op_types that may stay where something outside reads what they write, and are computed beside the site.
        roles: names of what the expression reads, weights too.
        outputs: names of what it gives.
        dtypes: element types that roles and outputs may have.
        one_type: whether they must all have the same.
        exact: whether the result must be equal, the sign of a zero apart; else to 1e-12 of its largest number, in
            double.
        neighbours: reason code -> what the site is instead, to be told to the user.
        texts: reason code -> text, for all codes that the file uses.
        refusals: codes of its own that mean "it is the expression, but may not be replaced".
        examples: small models that must and must not match.
        formula: the expression as text, for people; ``{role}``, ``{output}`` and ``{parameter}`` stand for what a site
            calls them. "" for none.
    """

    name: str
    anchors: frozenset[str]
    operators: Mapping[str, tuple[int, int]]
    roles: tuple[str, ...]
    outputs: tuple[str, ...]
    examples: tuple[Example, ...]
    default: bool = False
    operator: str = ""
    shape_operators: frozenset[str] = frozenset()
    kept: frozenset[str] = frozenset()
    dtypes: frozenset[int] = FLOATS
    one_type: bool = True
    exact: bool = False
    neighbours: Mapping[str, Neighbour] = {}
    texts: Mapping[str, str] = {}
    refusals: frozenset[str] = frozenset()
    formula: str = ""

    @abstractmethod
    def propose(self, view: View, anchor: int) -> Iterator[Proposal | Reason]:
        """Where the expression could be around an anchor, the likeliest first; a Reason to tell why not."""

    @abstractmethod
    def reference(self, operands: Operands, parameters: Parameters) -> Operands:
        """The expression itself in float64, by the names of the outputs."""

    @abstractmethod
    def emit(self, place: Place, emitter: Emitter) -> Emission | Reason:
        """Writes the nodes that replace a site into the emitter; they write the outputs under their old names."""

    def solve(self, trial: Trial) -> Parameters | Reason:
        """Determines what the reference needs to know, by running the site; none by default."""
        return {}

    def draws(
        self, shapes: Mapping[str, tuple[int, ...]], parameters: Parameters, rng: np.random.Generator
    ) -> Iterator[Operands]:
        """Operands to compare on: normal at several scales, and once away from zero; other numbers where need be."""
        for scale in SCALES:
            yield {role: rng.standard_normal(shape) * scale for role, shape in shapes.items()}
        yield {role: rng.standard_normal(shape) + 3.0 for role, shape in shapes.items()}

    def lower(self, node: onnx.NodeProto) -> Sequence[onnx.NodeProto]:
        """An emitted node as plain operators, where onnxruntime has no double kernel for it; itself by default."""
        return (node,)
