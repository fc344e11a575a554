"""What is handed from stage to stage: a proven site, the nodes that replace it, the axes that are pinned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import onnx

from deltafuse.dims import Dim
from deltafuse.reasons import Reason

if TYPE_CHECKING:
    from deltafuse.expression_match import ExpressionMatch
    from deltafuse.held import Held


@dataclass(frozen=True)
class Role:
    """One operand or result of the rule, as a value of the graph.

    Attributes:
        value: value id in the graph.
        name: the tensor's name.
        layout: one letter an axis, merged axes in brackets, in the file's order. B batch, T tokens,
            H heads, D head size (key_dim for query/key, value_dim for value/out), K and V the two axes of a state.
            E.g. ``BTHD``, ``BHTD``, ``BT(HD)``, ``BTH``, ``BHT``, ``BHKV``, ``BHVK``, ``BHD`` (no time axis).
        shape: one `Dim` (int or symbolic) an axis of the value.
        dtype: ``onnx.TensorProto`` element type.
    """

    value: int
    name: str
    layout: str
    shape: tuple[Dim, ...]
    dtype: int


@dataclass(frozen=True)
class Norm:
    """An L2 norm over the head size between a root and the rule, that must be made again on un-repeated heads.

    Attributes:
        kind: ``rsqrt`` for x * rsqrt(sum(x^2) + eps), ``max`` for x / max(||x||, eps).
        eps: value of the constant in the source, e.g. 9.99999997e-07 for a float32 1e-6.
        dtype: element type the source computes the norm in.
        nodes: the source's arithmetic in order, over the last axis (reduce axes are -1, keepdims 1). The input is named
            ``x``, the result ``y``; other names are local and may be renamed.
        initializers: constants that the nodes read, bytes as in the source.
    """

    kind: str
    eps: float
    dtype: int
    nodes: tuple[onnx.NodeProto, ...]
    initializers: tuple[onnx.TensorProto, ...]


@dataclass(frozen=True)
class Dims:
    """Sizes of a site: ints, or symbolic dims of the graph's inputs."""

    batch: Dim
    tokens: Dim
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True)
class Validity:
    """Token counts for which the *unfused* graph is the rule (a traced graph often is for some only).

    Attributes:
        low, high: proven range, both ends included.
        below, above: what happens outside: ``fails``, ``wrong``, or None where nothing lies there or nothing was found.
        tried: every token count that was run, ascending.
    """

    low: int
    high: int
    below: str | None
    above: str | None
    tried: tuple[int, ...]


@dataclass(frozen=True)
class Proof:
    """How equality was shown: relative errors in double over all draws."""

    max_error: float
    draws: int
    shared_with: str | None = None
    emitted_error: float | None = None
    precision: str = "float64"


@dataclass(frozen=True)
class Match:
    """A site that is proven to be the rule.

    Attributes:
        name: ``layers.3`` from the exporter's scopes, or ``site.N``.
        rule: name of the pattern, e.g. ``gated_delta_rule``.
        form: how it was written: ``chunk``, ``recurrent``, ``loop``, ``scan``, ``function``.
        g: None where the rule has no decay; with a layout that has K where it has one per key channel.
        state, final_state: None where the state starts at zero / is not read by anything.
        query_norm, key_norm: the norm between the root and the rule, None where there is none.
        scale: factor on the query, e.g. 1/sqrt(key_dim).
        nodes: every node between the operands and the results (graph node ids, ascending); some may serve others too.
        class_key: equal for sites whose cut graphs and cut inputs are equal: they share one proof.
        sizes: values that hold shapes which the site reads.
        one_sequence: the batch axis is free, but the site is right for a batch of one only.
    """

    name: str
    rule: str
    form: str
    query: Role
    key: Role
    value: Role
    g: Role | None
    beta: Role
    state: Role | None
    out: Role
    final_state: Role | None
    query_norm: Norm | None
    key_norm: Norm | None
    dims: Dims
    scale: float
    valid_tokens: Validity | None
    nodes: Sequence[int] = field(hash=False)
    class_key: bytes
    proof: Proof
    notes: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    one_sequence: bool = False

    @property
    def channel_decay(self) -> bool:
        """Whether the decay has a value per key channel."""
        return self.g is not None and bool(set(self.g.layout) & set("KD"))

    def operands(self) -> tuple[Role, ...]:
        """The roles that are read, without a missing state or decay."""
        roles = (self.query, self.key, self.value, self.g, self.beta, self.state)
        return tuple(role for role in roles if role is not None)

    def results(self) -> tuple[Role, ...]:
        """The roles that are written, without a missing final state."""
        return (self.out,) if self.final_state is None else (self.out, self.final_state)


@dataclass(frozen=True)
class NoMatch:
    """A candidate that is not the rule, or may not be fused, and why.

    Attributes:
        near_miss: True where it is not the rule (the reason says what differs), False where it is and a limit forbids
            it.
    """

    name: str
    reason: Reason
    near_miss: bool
    nodes: int
    match: Match | None = None


@dataclass(frozen=True)
class Plan:
    """The nodes that replace one site, in topological order.

    Every new value and node is named ``<site>/gated_delta_rule/...``; the last nodes write the values of the match's
    ``out`` and ``final_state`` under their old names, so nothing outside changes.

    Attributes:
        op: ``ChunkGatedDeltaRule`` or ``RecurrentGatedDeltaRule``.
        nodes: to insert; constants are Constant nodes among them.
        value_info: declared types of new values (both outputs of the Custom node at least).
        pins: axes that must be one size in the output file: ((value id, axis, size), ...).
        notes: for the report: precision given up, what the target assumes.
    """

    match: Match
    op: str
    nodes: tuple[onnx.NodeProto, ...]
    value_info: tuple[onnx.ValueInfoProto, ...]
    pins: tuple[tuple[int, int, int], ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Pinned:
    """One axis whose declared size was changed: ``input_ids`` axis 0, was ``batch``, now 1.

    Attributes:
        kind: of the value: ``input`` or ``output`` of the graph.
        why: the code that says why, which ``fuse explain`` knows, or the option that asks for it; "" where no site
            asks for it.
    """

    value: str
    axis: int
    was: str
    now: int
    kind: str = "input"
    why: str = ""


@dataclass(frozen=True)
class Looked:
    """One tensor that a site which is no match reads or writes.

    Attributes:
        kind: ``input`` or ``output``.
        number: which of them, from 1.
        name: of the tensor.
        shape: None where not even the rank is known; None for a size that is not.
        dtype: ``onnx.TensorProto`` element type, None where it is not known.
    """

    kind: str
    number: int
    name: str
    shape: tuple[Dim | None, ...] | None
    dtype: int | None


@dataclass(frozen=True)
class SiteReport:
    """One site as the report shows it: see `deltafuse.report` for the JSON keys.

    Attributes:
        rule: of a site of an ordinary expression, where there may be no match to tell it; else "".
        nodes: how many lie from its operands to its results, those that read sizes for them among them: the number
            that stands for the site wherever one does. Some may stay, since others read them.
        emitted: operator -> how many nodes of it stand in the site's place.
        removed: how many go from the file with it: what nothing needs any more, what is there for its nodes alone
            among it. What several sites share goes with the first that needs it.
        inside: the body that it lies in, e.g. ``If_3/then_branch``; "" in the main graph.
        looked: of a site that is no match, what it reads and writes.
        held: of a site that was fused before this run.
    """

    name: str
    status: str
    match: Match | ExpressionMatch | None
    op: str | None = None
    reason: Reason | None = None
    notes: tuple[str, ...] = ()
    nodes: int = 0
    rule: str = ""
    emitted: Mapping[str, int] = field(default_factory=dict[str, int])
    inside: str = ""
    looked: tuple[Looked, ...] = ()
    removed: int = 0
    held: Held | None = None

    @property
    def added(self) -> int:
        """Nodes that come into the file in its place."""
        return sum(self.emitted.values())


@dataclass(frozen=True)
class FuseReport:
    """What a fuse or inspect run found and did.

    Attributes:
        operators: operator -> nodes of it before and after, of the graphs that were searched.
        again: words of the command that finds the same sites again, under the same names.
    """

    model: str
    output: str | None
    target: str
    nodes_before: int
    nodes_after: int
    sites: tuple[SiteReport, ...]
    pinned: tuple[Pinned, ...]
    notes: tuple[str, ...]
    seconds: dict[str, float]
    exit: int
    extracted: tuple[str, ...] = field(default=())
    operators: Mapping[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    again: tuple[str, ...] = ()
