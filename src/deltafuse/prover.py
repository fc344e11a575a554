"""Prove that a candidate is the rule, and in which roles; or say why it is not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from deltafuse import region
from deltafuse.agreement import columns_step, draw_steps, errors_on, far_fails, far_steps
from deltafuse.bench import Bench, Binding, bindings, rebound
from deltafuse.bodies import LOOPS
from deltafuse.comparing import there_too
from deltafuse.counts import smallest_running
from deltafuse.coverage import alone_fails, beyond, free_heads, other_beyond, short_loop, spread_inside, tied
from deltafuse.cuts import open_cut
from deltafuse.draws import Array
from deltafuse.feeds import Fed, search_feeds
from deltafuse.finder import Candidate
from deltafuse.hidden import find_guard_between, open_sizes
from deltafuse.match import Validity
from deltafuse.neighbours import why_not
from deltafuse.patterns import Pattern
from deltafuse.probe import backward_slice
from deltafuse.readings import readings
from deltafuse.reasons import TEXTS, Reason
from deltafuse.roles import Assignment, gate_layouts
from deltafuse.roots import overridable
from deltafuse.search import Fit, Screens, Setting, search
from deltafuse.shapes import Shapes
from deltafuse.size_choices import end_steps, ends_fail, turn_steps, turns, turns_fail
from deltafuse.trial import Trial
from deltafuse.validity import find_range, range_steps
from deltafuse.wire import Model
from deltafuse.worker import Worker

TEXTS.update(
    {
        "not-convex": "something outside the site lies between its outputs and its inputs, so it cannot be one node; "
        "feed the site nothing that is computed from its own results",
        "further-operand": "the result {value} depends on {operand} too, which is no operand of {rule}; "
        "let it act on the operands in front of the site, or take it out of the model",
        "decay-shape": "the gate has the shape {shape}, not one number per {wanted}: the gate of another rule; give "
        "it one number per {wanted}, or leave the site as it is",
    }
)

#: Reasons of a site that is the rule but cannot be taken out of its graph.
REFUSALS = frozenset({"inner-value-used", "not-convex", "no-output", "output-in-parts"})

_WANTED = {"head": "token and head", "channel": "token, head and key channel", "none": "token and head"}
#: Reasons after which operands lower down are tried.
_UNREAD = frozenset({"not-the-rule", "not-equal", "higher-degree", "dims-unknown"})


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


class Outlook:
    """Is told what a proof will give if it holds, while it is still going on; here it takes no notice."""

    def expect(self, likely: Proven, pattern: Pattern) -> None:
        """The rule was found, and nothing more is asked of the graph; validity and error are those of the first run."""

    def retract(self) -> None:
        """What was expected does not hold."""

    def measured(self, done: int, of: int) -> None:
        """It is not the rule: so many steps are done of those that tell what it is instead."""


def prove(
    model: Model,
    kinds: bytearray,
    shapes: Shapes,
    pattern: Pattern,
    worker: Worker,
    candidate: Candidate,
    outlook: Outlook | None = None,
) -> Proven | Reason:
    """Proves one candidate; every step that fails ends with its reason."""
    outlook = Outlook() if outlook is None else outlook
    chains = region.exits(model.graph, candidate)
    first: Reason | None = None
    for reading in readings(model, kinds, shapes, worker, candidate, pattern.decay):
        setting = Setting(model, kinds, shapes, pattern, worker, candidate, reading, chains, first=first is None)
        outcome = _prove_reading(setting, outlook)
        if not isinstance(outcome, Reason):
            return outcome
        first = outcome if first is None else first
        if outcome.code not in _UNREAD:
            break
    if first is None:
        return Reason("no-output")
    given = overridable(model.graph, candidate.roots)
    return given if first.code == "not-the-rule" and given is not None else first


def _prove_reading(setting: Setting, outlook: Outlook) -> Proven | Reason:
    bench = open_cut(setting)
    if isinstance(bench, Reason) and bench.code == "cut-does-not-load":
        sizes = tuple(value for value, _ in setting.candidate.sizes)
        guard = find_guard_between(setting, (*setting.roots, *sizes), setting.candidate.frontier)
        # What does not run may lie behind the rule: then all else is the rule still.
        before = open_cut(setting, known_operators=True)
        outcome = bench if isinstance(before, Reason) else _prove_cut(setting, before, outlook)
        return guard if guard is not None and isinstance(outcome, Reason) else outcome
    return bench if isinstance(bench, Reason) else _prove_cut(setting, bench, outlook)


def _prove_cut(setting: Setting, bench: Bench, outlook: Outlook) -> Proven | Reason:
    outcome = _prove_on(setting, bench, outlook)
    if isinstance(outcome, Reason):
        outlook.retract()
        setting.worker.unload(bench.session)
    return outcome


def _prove_on(setting: Setting, bench: Bench, outlook: Outlook) -> Proven | Reason:
    """Tries the sizes in turn; the reason is what went wrong at the first size that ran, or at the first at all."""
    gate = setting.roots[0]
    stuck: Reason | None = None
    odd: _Odd | None = None
    runs: list[tuple[Binding, bool]] = []
    usual = bindings(bench.shapes, bench.sizes, gate, gate_layouts(setting.pattern.decay))
    fed = Fed(bench, setting.roots, setting.pattern.decay, usual)
    for binding in chain(fed, _smallest_running(setting, bench, runs)):
        tried = _attempt(setting, bench, binding, fed)
        if isinstance(tried, Fit):
            assignment = tried.explained.assignment
            layout = next(assignment.layouts[role] for role, value in assignment.values.items() if value == gate)
            return _conclude(setting, bench, tried, rebound(bench, gate, layout, assignment.sizes, binding), outlook)
        if isinstance(tried, Reason) and tried.code != "cut-does-not-run":
            return tried
        runs.append((binding, isinstance(tried, _Odd)))
        odd = tried if odd is None and isinstance(tried, _Odd) else odd
        stuck = tried if stuck is None and isinstance(tried, Reason) else stuck
    if odd is not None:
        guard = find_guard_between(setting, bench.cut.inputs, bench.cut.outputs)
        piecewise = guard is not None and guard.code == "piecewise"
        return guard if guard is not None and piecewise else why_not(setting, odd.feeds, odd.ran, outlook.measured)
    if stuck is not None:
        return stuck
    shape = " x ".join(map(str, bench.shapes[gate]))
    return Reason("decay-shape", {"shape": shape, "wanted": _WANTED[setting.pattern.decay]})


@dataclass(frozen=True)
class _Odd:
    """A run that the rule does not explain."""

    feeds: Mapping[int, Array]
    ran: Mapping[int, Array]


def _attempt(setting: Setting, bench: Bench, binding: Binding, fed: Fed) -> Fit | _Odd | Reason:
    feeds = fed.of(binding)

    def meanwhile() -> None:
        setting.know_sizes()
        if not setting.worker.has_answered():
            fed.prepare()

    ran = bench.run(feeds, binding.numbers, None, meanwhile)
    if isinstance(ran, Reason):
        return ran
    fit = search(setting, Screens(setting, feeds, ran), setting.pattern.recurrence)
    return _Odd(feeds, ran) if fit is None else fit


def _smallest_running(setting: Setting, bench: Bench, runs: Sequence[tuple[Binding, bool]]) -> Iterator[Binding]:
    """The smallest token count that runs, where none of the usual ones was right; a loop runs for any or for none."""
    free = [binding for binding, _ in runs if binding.tokens is not None]
    if not free or any(setting.model.graph.standard[node] in LOOPS for node in setting.candidate.core):
        return
    start = free[0]

    def does(tokens: int) -> bool:
        binding = start.at(tokens, start.batch)
        if binding is None:
            return False
        feeds = search_feeds(bench, setting.roots, binding.numbers, setting.pattern.decay)
        return not isinstance(bench.run(feeds, binding.numbers), Reason)

    tokens = smallest_running({b.tokens or 0: ran for b, ran in runs if b.batch == start.batch}, does)
    found = start.at(tokens, start.batch) if tokens else None
    if found is not None:
        yield found


def _conclude(setting: Setting, bench: Bench, fit: Fit, binding: Binding, outlook: Outlook) -> Proven | Reason:
    """Everything that is asked of the graph first, then what only runs tell."""
    explained, out, final = fit.explained, fit.out, fit.final
    graph, shapes = setting.model.graph, setting.shapes
    loose = free_heads(graph, shapes, explained.assignment)
    loose = spread_inside(setting.model, shapes, explained.assignment, binding) if loose is None else loose
    if loose is not None:
        return loose
    ends = [value for value in (out, final) if value is not None]
    needed = {root for value in ends for root in setting.needed.get(value, ())}
    further = needed - set(explained.assignment.values.values())
    if further:
        args = {"value": graph.name(out), "operand": graph.name(min(further)), "rule": setting.pattern.name}
        return Reason("further-operand", args)
    trial = there_too(setting.worker, Trial(bench, setting.pattern.recurrence, explained, out, final, binding))
    # What takes most memory comes first, while what runs beside it takes little.
    trial.foresee([columns_step(trial, binding), *range_steps(binding)])
    sizes = open_sizes(setting, trial)
    if isinstance(sizes, Reason):
        return sizes
    loops = [node for node in setting.candidate.core if graph.standard[node] in LOOPS]
    short = short_loop(setting.model, setting.kinds, shapes, loops) if binding.tokens is not None else None
    if short is not None:
        return short
    choices = turns(graph, shapes, backward_slice(graph, bench.cut.inputs, ends)[0])
    likely = _likely(trial)
    outlook.expect(likely, setting.pattern)
    validity, at = find_range(trial, binding, explained.assignment.sizes["T"])
    more = beyond(binding, validity) if validity.above == "wrong" and binding.tokens is not None else None
    trial.foresee([
        *([] if more is None else [more]), *end_steps(binding, validity, sizes),
        *turn_steps(binding, validity, choices, sizes), *draw_steps(trial, at), *far_steps(trial, at),
    ])  # fmt: skip
    for fault in (
        tied(at),
        other_beyond(trial, binding, validity, looping=bool(loops)),
        ends_fail(trial, binding, validity, sizes),
        turns_fail(trial, binding, validity, choices, sizes),
    ):
        if fault is not None:
            return fault
    errors = errors_on(trial, at)
    # All draws but two are those of one sequence: where they agree, and are not too large to tell, so does it.
    alone = alone_fails(trial, at) if isinstance(errors, Reason) or len(errors) <= 2 else None
    if alone is not None:
        return alone
    if isinstance(errors, Reason):
        return errors
    far = far_fails(trial, at)
    if far is not None:
        return far
    proven = replace(trial, binding=at, validity=validity)
    return replace(likely, validity=validity, max_error=max(errors), draws=len(errors), trial=proven)


def _likely(trial: Trial) -> Proven:
    """What will be proven of a site if all further runs agree with the rule too."""
    explained, out, final = trial.explained, trial.out, trial.final
    tokens = explained.assignment.sizes["T"]
    first = Validity(tokens, tokens, None, None, (tokens,))
    layouts = (explained.outs[out], "" if final is None else explained.finals[final])
    return Proven(explained.assignment, out, layouts[0], final, layouts[1], first, 0.0, 0, trial)
