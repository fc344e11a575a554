"""What is handed from stage to stage for ordinary expressions: a proven site, and what replaces it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import onnx

from deltafuse.match import Proof, Role


@dataclass(frozen=True)
class ExpressionMatch:
    """A site that is proven to be the expression of a pattern.

    Attributes:
        name: by the layer it is in, e.g. ``layers.3.layer_norm``; the pattern's name and a number elsewhere.
        rule: name of the pattern.
        roles, outputs: by the pattern's names.
        parameters: what was solved, e.g. ``{"axis": -1, "eps": 1e-05}``.
        nodes: nodes between roles and outputs that data passes through and that go, ascending.
        class_key: equal for sites that share one proof.
    """

    name: str
    rule: str
    roles: Mapping[str, Role]
    outputs: Mapping[str, Role]
    parameters: Mapping[str, float]
    nodes: tuple[int, ...]
    class_key: bytes
    proof: Proof
    notes: tuple[str, ...] = ()
    form: str = "expression"

    def operands(self) -> tuple[Role, ...]:
        """The roles that are read."""
        return tuple(self.roles.values())

    def results(self) -> tuple[Role, ...]:
        """The outputs."""
        return tuple(self.outputs.values())


@dataclass(frozen=True)
class ExpressionPlan:
    """The nodes that replace one site, in topological order.

    Attributes:
        op: the operator in the site's place.
        nodes: to insert; they write the outputs under their old names. None where all outputs are aliases.
        value_info: declared types of new values.
        aliases: name of an output that nothing writes any more -> name of the value its readers read instead.
        target_opset: domain and version that the file must import for the target's operators, None where none of
            them is written.
        file: of the user's that says what is emitted; None where the pattern is a shipped one.
    """

    match: ExpressionMatch
    op: str
    nodes: tuple[onnx.NodeProto, ...]
    value_info: tuple[onnx.ValueInfoProto, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict[str, str])
    target_opset: tuple[str, int] | None = None
    notes: tuple[str, ...] = ()
    pins: tuple[tuple[int, int, int], ...] = ()
    file: Path | None = None
