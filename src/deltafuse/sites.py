"""All sites of a model: find the candidates, prove each distinct one once, hand out matches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from deltafuse import layouts, prover, region
from deltafuse.ahead import Lookahead, Seen
from deltafuse.anchors import contracts_data
from deltafuse.bodies import is_call
from deltafuse.buried import buried, deeper
from deltafuse.dims import Dim
from deltafuse.finder import Candidate, Finder
from deltafuse.match import Dims, Match, NoMatch, Proof, Role
from deltafuse.parted import parts_of
from deltafuse.patterns import Pattern
from deltafuse.prover import Outlook, Proven, prove
from deltafuse.reasons import Reason
from deltafuse.shapes import Shapes
from deltafuse.softmax import scores_inside
from deltafuse.trial import Trial
from deltafuse.wire import Model
from deltafuse.worker import Worker

Site = Match | NoMatch

#: Reason of a candidate whose gate has the shape of another rule's.
_OTHER_SHAPE = "decay-shape"
#: Reasons that do not say what a candidate is instead.
_UNTOLD = frozenset({_OTHER_SHAPE, "not-the-rule", "activation-inside"})


def prove_sites(
    model: Model,
    kinds: bytearray,
    shapes: Shapes,
    rules: Sequence[Pattern],
    worker: Worker,
    finder: Finder,
    advance: Callable[[Candidate], None],
    foresee: Callable[[Sequence[Site]], object] | None = None,
    measured: Callable[[int, int], object] | None = None,
) -> tuple[tuple[Site, ...], dict[bytes, Trial]]:
    """Proves candidates in order; sites whose cuts and cut inputs are equal share one proof.

    A candidate is the first of some rules that it is proven to be. Each output of a proven site is told to `shapes`,
    so that the sizes behind it are known for the next site. `advance` is told what is proven next, `foresee` what all
    sites are likely to be, `measured` how far it is known what one is that is not the rule.

    Returns:
        The sites, and by class key the trial that each class was proven with.
    """
    trials: dict[bytes, Trial] = {}
    known: dict[bytes, tuple[Proven | Reason, Pattern, Seen[Site]]] = {}
    sites: list[Site] = []
    seen: set[int] = set()

    def settle(outcome: Proven | Reason, rule: Pattern, first: Seen[Site], own: Seen[Site]) -> Site:
        candidate = own.candidate
        if own is not first:
            outcome = _carry(outcome, lambda value: first.signature.counterpart(value, own.signature))
        site = _site(model, kinds, shapes, rule, candidate, outcome, own.signature.key)
        if isinstance(site, Match):
            _define(shapes, site)
        return site

    def follow(likely: Sequence[Site]) -> None:
        if foresee is not None:
            foresee([*sites, *likely])

    ahead = Lookahead(finder, shapes, settle, follow, measured)
    for own in ahead:
        advance(own.candidate)
        seen.update(own.candidate.core)
        key = own.signature.key
        if key not in known:
            with ahead:
                outcome, rule = _prove(model, kinds, shapes, rules, worker, own.candidate, ahead)
            known[key] = (outcome, rule, own)
            if not isinstance(outcome, Reason):
                trials[key] = outcome.trial
        outcome, rule, first = known[key]
        site = settle(outcome, rule, first, own) if own.likely is None else own.likely
        sites.append(_proven(site, outcome, None if own is first else first.candidate.name))
    sites += [
        NoMatch(f"inside.{node}", reason, near_miss=True, nodes=1)
        for node, reason in buried(model, kinds, rules[0], seen)
    ]
    return tuple(sites), trials


def _proven(site: Site, outcome: Proven | Reason, shared: str | None) -> Site:
    """A site with what came of its proof, or of that of a site with the same signature."""
    if isinstance(site, NoMatch) or isinstance(outcome, Reason):
        return site
    proof = Proof(outcome.max_error, outcome.draws, shared)
    return replace(site, valid_tokens=outcome.validity, proof=proof, one_sequence=outcome.trial.binding.batch == 1)


def _prove(
    model: Model,
    kinds: bytearray,
    shapes: Shapes,
    rules: Sequence[Pattern],
    worker: Worker,
    candidate: Candidate,
    outlook: Outlook,
) -> tuple[Proven | Reason, Pattern]:
    """The first rule that a candidate is; else the first that its gate has the shape for, and why it is not."""
    refused: tuple[Reason, Pattern] | None = None
    for rule in rules:
        outcome = prove(model, kinds, shapes, rule, worker, candidate, outlook)
        if not isinstance(outcome, Reason):
            return outcome, rule
        if refused is None or refused[0].code == _OTHER_SHAPE:
            refused = outcome, rule
        if outcome.code not in (_OTHER_SHAPE, "not-the-rule"):
            break
    assert refused is not None, "there is at least one rule"
    reason, rule = refused
    if reason.code == "not-the-rule":
        found = deeper(model, kinds, rule, candidate.core)
        parts = parts_of(model, kinds, shapes, rule, worker, candidate) if found is None else None
        found = parts.reason if parts is not None else found
        reason = reason if found is None else found
    if reason.code in _UNTOLD:
        scores = scores_inside(shapes, candidate, rule)
        reason = reason if scores is None else replace(scores, nearest=reason.nearest)
    return reason, rule


def _carry(outcome: Proven | Reason, to: Callable[[int], int]) -> Proven | Reason:
    """What was proven of one site, in the values of another with the same signature."""
    if isinstance(outcome, Reason):
        return outcome
    assignment = outcome.assignment
    moved = replace(
        assignment,
        values={role: to(value) for role, value in assignment.values.items()},
        norms={to(value): norm for value, norm in assignment.norms.items()},
    )
    final = None if outcome.final_state is None else to(outcome.final_state)
    return replace(outcome, assignment=moved, out=to(outcome.out), final_state=final)


def _site(
    model: Model,
    kinds: bytearray,
    shapes: Shapes,
    pattern: Pattern,
    candidate: Candidate,
    outcome: Proven | Reason,
    key: bytes,
) -> Site:
    if isinstance(outcome, Reason):
        return _none(model, candidate, outcome, near_miss=outcome.code not in prover.REFUSALS)
    roots = tuple(outcome.assignment.values.values())
    if not region.convex(model.graph, roots, outcome.out, outcome.final_state):
        return _none(model, candidate, Reason("not-convex"))
    match = _match(model, kinds, shapes, pattern, candidate, outcome, key)
    untyped = [role.name for role in (*match.operands(), *match.results()) if not role.dtype]
    if untyped:
        return _none(model, candidate, Reason("cut-type-unknown", {"value": untyped[0]}))
    return match


def _none(model: Model, candidate: Candidate, reason: Reason, *, near_miss: bool = False) -> NoMatch:
    nodes = len(region.looked_at(model.graph, candidate))
    return NoMatch(candidate.name, reason, near_miss=near_miss, nodes=nodes)


def _match(
    model: Model,
    kinds: bytearray,
    shapes: Shapes,
    pattern: Pattern,
    candidate: Candidate,
    proven: Proven,
    key: bytes,
) -> Match:
    graph, assignment = model.graph, proven.assignment
    dims = _dims(shapes, proven)

    def named(value: int, layout: str, shape: tuple[Dim, ...]) -> Role:
        return Role(value, graph.name(value), layouts.public(layout), shape, shapes.dtype(value) or 0)

    def role(name: str) -> Role:
        value = assignment.values[name]
        return named(value, assignment.layouts[name], shapes.shape(value) or ())

    def result(value: int, layout: str) -> Role:
        return named(value, layout, _shape_of(layout, dims))

    final = None if proven.final_state is None else result(proven.final_state, proven.final_layout)
    return Match(
        name=candidate.name,
        rule=pattern.name,
        form=_form(model, kinds, candidate, dims.tokens, decays="g" in assignment.values),
        query=role("query"),
        key=role("key"),
        value=role("value"),
        g=role("g") if "g" in assignment.values else None,
        beta=role("beta"),
        state=role("state") if "state" in assignment.values else None,
        out=result(proven.out, proven.out_layout),
        final_state=final,
        query_norm=assignment.norms.get(assignment.values["query"]),
        key_norm=assignment.norms.get(assignment.values["key"]),
        dims=dims,
        scale=assignment.scale,
        valid_tokens=proven.validity,
        nodes=candidate.nodes,
        class_key=key,
        proof=Proof(proven.max_error, proven.draws),
        sizes=tuple(value for value, _ in candidate.sizes),
        one_sequence=proven.trial.binding.batch == 1,
    )


def _dims(shapes: Shapes, proven: Proven) -> Dims:
    assignment = proven.assignment
    sizes = assignment.sizes
    by_letter: dict[str, Dim] = {"B": 1, "T": 1}
    for role in ("beta", "value"):
        groups = layouts.axes(assignment.layouts[role])
        shape = shapes.shape(assignment.values[role]) or ()
        by_letter.update({group: dim for group, dim in zip(groups, shape, strict=True) if group in ("B", "T")})
    return Dims(by_letter["B"], by_letter["T"], sizes["N"], sizes["H"], sizes["K"], sizes["V"])


def _shape_of(layout: str, dims: Dims) -> tuple[Dim, ...]:
    by_letter: dict[str, Dim] = {
        "B": dims.batch, "T": dims.tokens, "H": dims.value_heads, "K": dims.key_dim, "V": dims.value_dim,
    }  # fmt: skip
    shape: list[Dim] = []
    for group in layouts.axes(layout):
        size: Dim = 1
        for letter in group:
            size = size * by_letter[letter]
        shape.append(size)
    return tuple(shape)


def _define(shapes: Shapes, match: Match) -> None:
    for role in (match.out, match.final_state):
        if role is not None:
            shapes.define(role.value, role.shape, role.dtype)


def _form(model: Model, kinds: bytearray, candidate: Candidate, tokens: Dim, *, decays: bool) -> str:
    """Chunk rules add up the log decay along tokens; recurrent ones take it token by token.

    Without a decay the contractions tell: a recurrent rule has two a token, three where the update is one.
    """
    graph = model.graph
    if any(is_call(model, graph, node) for node in candidate.core):
        return "function"
    ops = {graph.standard[node] for node in candidate.nodes}
    if ops & {"CumSum", "Trilu"}:
        return "chunk"
    loop = next((op.lower() for op in ("Loop", "Scan") if op in ops), "")
    if loop or decays:
        return loop or "recurrent"
    count = sum(contracts_data(graph, kinds, node) for node in candidate.nodes)
    # The first state may be zero: then nothing is read from it.
    steps = {each * tokens - least for each in (2, 3) for least in (0, 1)} if isinstance(tokens, int) else set[int]()
    return "recurrent" if count in steps else "chunk"
