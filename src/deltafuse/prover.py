"""Prove that a candidate is the rule, and in which roles; or say why it is not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from deltafuse import region
from deltafuse.bench import Bench, Binding, bindings, open_bench
from deltafuse.bodies import LOOPS
from deltafuse.coverage import alone_fails, free_heads, other_beyond, short_loop
from deltafuse.dims import Dim
from deltafuse.draws import DRAWS, Array
from deltafuse.feeds import search_feeds
from deltafuse.finder import Candidate
from deltafuse.guards import find_guard
from deltafuse.match import Validity
from deltafuse.patterns import Pattern, Recurrence
from deltafuse.probe import backward_slice, cut_model
from deltafuse.readings import Reading, readings
from deltafuse.reasons import TEXTS, Reason
from deltafuse.roles import Assignment, Explained, assignments, explain
from deltafuse.scope import Scope
from deltafuse.shapes import Shapes
from deltafuse.trial import Trial
from deltafuse.validity import find_range
from deltafuse.wire import Model
from deltafuse.worker import Worker

TEXTS.update(
    {
        "not-the-rule": "the subgraph around {anchor} reads like {rule} but no assignment of its inputs ({roots}) "
        "gives its outputs; compare it with the rule's recurrence",
        "not-equal": "the site follows the rule on one draw but not on '{draw}' (relative error {error:.1e}); "
        "it is not the rule",
        "inner-value-used": "the value {value} inside the site is read outside of it; fusing would take it away: "
        "remove that reader or output",
        "not-convex": "something outside the site lies between its outputs and its inputs, so it cannot be one node",
        "decay-shape": "the log decay has the shape {shape}, not one number per token and head: a decay per channel "
        "(Kimi Delta Attention, Gated DeltaNet-2) is another rule",
        "no-output": "nothing outside reads the rule's output",
    }
)

#: Reasons of a site that is the rule but cannot be taken out of its graph.
REFUSALS = frozenset({"inner-value-used", "not-convex", "no-output"})

#: Reasons after which operands lower down are tried.
_UNREAD = frozenset({"not-the-rule", "not-equal", "dims-unknown"})

#: Relative, in double; of 235 proofs seen 224 were below 1e-14.
BAR = 1e-12
#: Operands of the rule: query, key, value, g, beta, state.
_OPERANDS = 6
#: Chains of values behind the rule (casts, layout, the norm that follows) that are looked at.
_CHAIN = 48


@dataclass(frozen=True)
class Proven:
    """A candidate that is the rule.

    Attributes:
        assignment: roles, with layouts and scale; sizes are those of one run.
        out, final_state: value ids (None where nothing reads the state) and their layouts.
        trial: the cut on its bench, to be run again against what is emitted.
    """

    assignment: Assignment
    out: int
    out_layout: str
    final_state: int | None
    final_layout: str
    validity: Validity
    max_error: float
    draws: int
    trial: Trial


@dataclass(frozen=True)
class _Setting:
    model: Model
    kinds: bytearray
    shapes: Shapes
    pattern: Pattern
    worker: Worker
    candidate: Candidate
    reading: Reading
    chains: Mapping[int, Sequence[int]]

    @property
    def roots(self) -> tuple[int, ...]:
        return self.reading.roots


@dataclass(frozen=True)
class _Fit:
    """An assignment that explains a cut's outputs, and the two values the fused node writes."""

    explained: Explained
    out: int
    final: int | None


def prove(
    model: Model, kinds: bytearray, shapes: Shapes, pattern: Pattern, worker: Worker, candidate: Candidate
) -> Proven | Reason:
    """Proves one candidate; every step that fails ends with its reason."""
    chains = region.exits(model.graph, candidate)
    first: Reason | None = None
    for reading in readings(model, kinds, shapes, worker, candidate):
        setting = _Setting(model, kinds, shapes, pattern, worker, candidate, reading, chains)
        outcome = _prove_reading(setting)
        if not isinstance(outcome, Reason):
            return outcome
        first = outcome if first is None else first
        if outcome.code not in _UNREAD:
            break
    return first if first is not None else Reason("no-output")


def _prove_reading(setting: _Setting) -> Proven | Reason:
    bench = _open(setting)
    if isinstance(bench, Reason):
        sizes = tuple(value for value, _ in setting.candidate.sizes)
        guard = _guard(setting, (*setting.roots, *sizes), setting.candidate.frontier)
        return guard if guard is not None and bench.code == "cut-does-not-load" else bench
    outcome = _prove_on(setting, bench)
    if isinstance(outcome, Reason):
        setting.worker.unload(bench.session)
    return outcome


def _open(setting: _Setting) -> Bench | Reason:
    graph, shapes = setting.model.graph, setting.shapes
    sizes = dict(setting.candidate.sizes)
    known: dict[int, tuple[Dim, ...]] = {}
    for value in setting.roots:
        shape = shapes.shape(value)
        if shape is None:
            return Reason("dims-unknown", {"value": graph.name(value)})
        known[value] = shape
    inputs = (*setting.roots, *sizes)
    offered = dict.fromkeys(
        value for chain in setting.chains.values() for value in chain[:_CHAIN] if value not in inputs
    )
    cut = cut_model(setting.model, shapes, inputs, list(offered))
    if isinstance(cut, Reason):
        return cut
    names = {value: graph.name(value) for value in (*inputs, *offered)}
    return open_bench(setting.worker, cut, names, known, sizes)


def _prove_on(setting: _Setting, bench: Bench) -> Proven | Reason:
    """Tries the sizes in turn; the reason is what went wrong at the first size that ran, or at the first at all."""
    gate = setting.roots[0]
    stuck: Reason | None = None
    odd: tuple[Mapping[int, Array], Mapping[int, Array]] | None = None
    for binding in bindings(bench.shapes, bench.sizes, gate):
        feeds = search_feeds(bench, setting.roots, gate, binding.numbers)
        ran = bench.run(feeds, binding.numbers)
        if isinstance(ran, Reason):
            stuck = ran if stuck is None else stuck
            continue
        fit = _search(setting, feeds, ran, setting.pattern.recurrence)
        if isinstance(fit, Reason):
            return fit
        if fit is not None:
            return _conclude(setting, bench, fit, binding)
        odd = (feeds, ran) if odd is None else odd
    if odd is not None:
        guard = _guard(setting, bench.cut.inputs, bench.cut.outputs)
        return guard if guard is not None and guard.code == "piecewise" else _why_not(setting, *odd)
    if stuck is not None:
        return stuck
    return Reason("decay-shape", {"shape": " x ".join(map(str, bench.shapes[gate]))})


def _search(
    setting: _Setting, feeds: Mapping[int, Array], ran: Mapping[int, Array], recurrence: Recurrence
) -> _Fit | Reason | None:
    """The first assignment that explains every reader outside; else why the first that explains the output does not.

    One token from a zero state reads the same with query and key exchanged: only the final state tells them apart.
    """
    refused: Reason | None = None
    for assignment in _assignments(setting, feeds):
        explained = explain(assignment, recurrence, feeds, ran)
        if explained is None:
            continue
        ends = _ends(setting, explained)
        if not isinstance(ends, Reason):
            return _Fit(explained, *ends)
        refused = ends if refused is None else refused
    return refused


def _assignments(setting: _Setting, feeds: Mapping[int, Array]) -> Iterator[Assignment]:
    """Readings of the roots; where there are more than the rule has operands, of those that some value depends on.

    What follows the rule without a weight between (an output gate) brings roots of its own.
    """
    gate, norms = setting.roots[0], setting.reading.norms
    yield from assignments(feeds, gate, norms)
    if len(setting.roots) <= _OPERANDS:
        return
    needed = region.needed_roots(setting.model.graph, setting.candidate.nodes, setting.roots)
    offered = {needed.get(value, frozenset[int]()) for chain in setting.chains.values() for value in chain}
    for roots in sorted(offered, key=lambda found: (-len(found), sorted(found))):
        if len(roots) <= _OPERANDS and gate in roots:
            yield from assignments({value: feeds[value] for value in setting.roots if value in roots}, gate, norms)


def _guard(setting: _Setting, inputs: Sequence[int], ends: Sequence[int]) -> Reason | None:
    """What forbids a proof by draws between the cut's inputs and some of its values."""
    graph = setting.model.graph
    scope = Scope(setting.model, graph, setting.kinds, setting.shapes)
    nodes, _ = backward_slice(graph, inputs, ends)
    sizes = [value for value, dims in setting.candidate.sizes if not all(isinstance(dim, int) for dim in dims)]
    return find_guard(scope, nodes, setting.roots, sizes, setting.reading.exempt)


def _why_not(setting: _Setting, feeds: Mapping[int, Array], ran: Mapping[int, Array]) -> Reason:
    """The neighbour of the rule that fits, or that none does."""
    for code, recurrence in setting.pattern.neighbours.items():
        fit = _search(setting, feeds, ran, recurrence)
        # An inner value may follow a neighbour by chance; its state then does not.
        if isinstance(fit, _Fit) and (fit.final is not None or len(setting.chains) == 1):
            return Reason(code)
    graph = setting.model.graph
    return Reason(
        "not-the-rule",
        {
            "anchor": graph.name(graph.node_outputs[setting.candidate.core[0]][0]),
            "rule": setting.pattern.name,
            "roots": ", ".join(graph.name(value) for value in setting.roots),
        },
    )


def _conclude(setting: _Setting, bench: Bench, fit: _Fit, binding: Binding) -> Proven | Reason:
    explained, out, final = fit.explained, fit.out, fit.final
    guard = _guard(setting, bench.cut.inputs, [value for value in (out, final) if value is not None])
    if guard is not None:
        return guard
    trial = Trial(bench, setting.pattern.recurrence, explained, out, final, binding)
    loops = [node for node in setting.candidate.core if setting.model.graph.op[node] in LOOPS]
    short = short_loop(setting.model.graph, setting.shapes, loops) if binding.tokens is not None else None
    if short is not None:
        return short
    loose = free_heads(setting.model.graph, setting.shapes, explained.assignment)
    if loose is not None:
        return loose
    validity, at = find_range(trial, binding, explained.assignment.sizes["T"])
    other = other_beyond(trial, binding, validity, looping=bool(loops))
    alone = alone_fails(trial, at) if other is None else other
    if alone is not None:
        return alone
    errors = _errors(trial, at)
    if isinstance(errors, Reason):
        return errors
    return Proven(
        explained.assignment,
        out,
        explained.outs[out],
        final,
        "" if final is None else explained.finals[final],
        validity,
        max(errors),
        len(errors),
        replace(trial, binding=at, validity=validity),
    )


def _errors(trial: Trial, at: Binding) -> list[float] | Reason:
    """Relative errors on all draws; sizes that are neither batch nor tokens differ from draw to draw."""
    errors: list[float] = []
    for seed, how in enumerate(DRAWS):
        binding = at.at(at.tokens, at.batch, seed) or at
        error = trial.error(binding, how, seed, full=seed == 0)
        if isinstance(error, Reason) and error.code == "overflows" and seed:
            # exp(a) * exp(-b) overflows where exp(a - b) does not: then plain values overflow too, and others tell.
            error = trial.error(binding, replace(how, scale=1.0), seed)
            if isinstance(error, Reason) and error.code == "overflows":
                continue
        if isinstance(error, Reason):
            return error
        if error > BAR:
            return Reason("not-equal", {"draw": how.name, "error": error})
        errors.append(error)
    return errors


def _ends(setting: _Setting, explained: Explained) -> tuple[int, int | None] | Reason:
    """The values that the fused node writes: the last ones that explain every reader outside."""
    outs: list[set[int]] = []
    finals: list[set[int]] = []
    for value, chain in setting.chains.items():
        as_out = {v for v in chain if v in explained.outs}
        as_final = {v for v in chain if v in explained.finals}
        if as_out:
            outs.append(as_out)
        elif as_final:
            finals.append(as_final)
        else:
            return Reason("inner-value-used", {"value": setting.model.graph.name(value)})
    common, common_final = _common(outs), _common(finals)
    if finals and not common_final:
        return Reason("inner-value-used", {"value": setting.model.graph.name(min(finals[0]))})
    if not common:
        return Reason("no-output")
    latest = setting.model.graph.producer.__getitem__
    return max(common, key=latest), max(common_final, key=latest) if common_final else None


def _common(sets: Sequence[set[int]]) -> set[int]:
    return sets[0].intersection(*sets[1:]) if sets else set()
