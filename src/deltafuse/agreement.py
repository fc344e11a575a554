"""Whether a cut and the rule agree on all draws, the operands of the next drawn while the worker computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from deltafuse.bench import Binding
from deltafuse.draws import CHAIN, DRAWS, FAR, LEAPS, Draw
from deltafuse.reasons import TEXTS, Reason
from deltafuse.trial import Ahead, Step, Trial

TEXTS.update(
    {
        "not-equal": "the site follows the rule on one draw but not on '{draw}' (relative error {error:.1e}): it is "
        "another rule, or its arithmetic loses too many digits; compare it with the rule's recurrence",
        "higher-degree": "on '{draw}' the site leaves the range of floating point where the rule does not: it has a "
        "higher power of an operand than the rule, if only a little of it; take that term out of the model",
    }
)

#: Relative, in double; of 235 proofs seen 224 were below 1e-14.
BAR = 1e-12
#: The same where a decay leaps or tokens are a chain: sums lose digits there, and what is wrong is far larger.
_FAR_BAR = 1e-8
#: Logarithms of a decay that leaves all as it is.
_NONE = (0.0, 0.0)
#: Sequences that a free batch is tried with: a mask can tell the first, the last and those between.
BATCH = 4


def errors_on(trial: Trial, at: Binding) -> list[float] | Reason:
    """Relative errors on all draws; sizes that are neither batch nor tokens differ from draw to draw.

    The first draw has the batch it was found with; every column is compared at few tokens, mixtures of them at many.
    At few tokens a free batch is larger, and one sequence far larger than the next: what they have of each other shows.
    A power of beta that sequences have of each other shows where the draw with large ones has several of them.
    """
    steps = draw_steps(trial, at)
    ahead = trial.ahead([step.even for step in steps])
    errors: list[float] = []
    for number, step in enumerate(steps):
        error = _error(ahead, step)
        if number == 0 and error is None:
            # Without it no column would be compared by itself.
            return Reason("overflows", {"draw": step.how.name})
        if isinstance(error, Reason):
            return error
        if error is not None:
            errors.append(error)
    if len(errors) == 1:
        return Reason("overflows", {"draw": DRAWS[0].name})
    worst = max(errors)
    return errors[1:] if worst <= BAR else Reason("not-equal", {"draw": _draw_of(errors), "error": worst})


def columns_step(trial: Trial, at: Binding) -> Step:
    """The comparison of each column by itself."""
    several = at.batch is not None and at.batch > 1
    few = trial.few_tokens(BATCH if several else at.batch)
    return Step(few or at, replace(DRAWS[0], spread=FAR) if several else DRAWS[0], len(DRAWS), full=True)


def draw_steps(trial: Trial, at: Binding) -> list[Step]:
    """What `errors_on` compares."""
    steps = [columns_step(trial, at)]
    for seed, how in enumerate(DRAWS):
        batch = at.batch if seed == 0 or how.surge or at.batch is None else 1
        steps.append(Step(at.at(at.tokens, batch, seed) or at, how, seed))
    return steps


def far_steps(trial: Trial, at: Binding) -> list[Step]:
    """What `far_fails` compares, the chain last."""
    decays = "g" in trial.explained.assignment.values
    few = trial.few_tokens(at.batch) or at
    leaps = [Step(few, how, seed) for seed, how in enumerate(LEAPS)] if decays else []
    return [*leaps, Step(at, CHAIN if decays else replace(CHAIN, decay=_NONE), 0)]


def far_fails(trial: Trial, at: Binding) -> Reason | None:
    """What the rule does not have and only shows where operands are far from each other: see below, in this order."""
    *leaps, chain = far_steps(trial, at)
    ahead = trial.ahead([step.even for step in (*leaps, chain)])
    fault = _leap_fails(ahead, leaps)
    return _chain_fails(ahead, chain) if fault is None else fault


def _leap_fails(ahead: Ahead, steps: Sequence[Step]) -> Reason | None:
    """A power of the decay that the rule does not have: one large decay makes it larger than all else, or no number."""
    for step in steps:
        error, how = ahead.error(step), step.how
        if isinstance(error, Reason):
            return Reason("higher-degree", {"draw": how.name}) if error.code == "overflows" else error
        if error > _FAR_BAR:
            return Reason("not-equal", {"draw": how.name, "error": error})
    return None


def _chain_fails(ahead: Ahead, step: Step) -> Reason | None:
    """A power of what one token takes of another that is missing: where these are small, so is what is missing."""
    error = ahead.error(step)
    if isinstance(error, Reason) and error.code == "overflows":
        error = ahead.error(replace(step, how=replace(step.how, decay=_NONE)))
    if isinstance(error, Reason):
        return error
    return Reason("not-equal", {"draw": step.how.name, "error": error}) if error > _FAR_BAR else None


def _error(ahead: Ahead, step: Step) -> float | Reason | None:
    """One draw; where it overflows by its decay, the same with plain values; None where these overflow too.

    exp(a) * exp(-b) overflows where exp(a - b) does not: then other draws must tell. What overflows with a mild decay
    is no such product but a term that the rule does not have.
    """

    def with_draw(how: Draw) -> float | Reason:
        return ahead.error(replace(step, how=how))

    error, how = ahead.error(step), step.how
    if not isinstance(error, Reason) or error.code != "overflows":
        return error
    mild = with_draw(how.mild)
    if isinstance(mild, Reason) and mild.code == "overflows" and how.spread:
        return Reason("higher-degree", {"draw": how.name})
    if isinstance(mild, Reason) or mild > BAR:
        return mild
    plain = with_draw(how.plain)
    return None if isinstance(plain, Reason) and plain.code == "overflows" else plain


def _draw_of(errors: Sequence[float]) -> str:
    index = errors.index(max(errors))
    return DRAWS[max(index - 1, 0)].name
