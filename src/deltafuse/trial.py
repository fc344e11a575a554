"""A proven cut on its bench: equality of its outputs with the rule, at any sizes and on any draw."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Protocol, TypeAlias, cast

import numpy as np

from deltafuse import layouts
from deltafuse.bench import Bench, Binding
from deltafuse.draws import DRAWS, Array, Draw, Operands, draw
from deltafuse.match import Validity
from deltafuse.patterns import Recurrence
from deltafuse.reasons import TEXTS, Reason
from deltafuse.roles import Explained
from deltafuse.rule import project, relative, run_rule
from deltafuse.scalings import Scaling, felt, growth, scaling

TEXTS.update(
    {
        "overflows": "the site's own arithmetic leaves the range of floating point on '{draw}', so that nothing can be "
        "compared; write the decay as exp of differences",
    }
)

#: Tokens that show each step of the rule, the second and later states too.
_FEW = 6
_EARLY_BAR = 1e-10


@dataclass(frozen=True)
class Step:
    """One comparison: sizes, the kind of operands, the seed of the draw.

    Attributes:
        full: compare every column of the value axis, not two random mixtures of them (the rule is linear there).
    """

    binding: Binding
    how: Draw
    seed: int
    full: bool = False

    @property
    def even(self) -> Step:
        """The same with values and state of common size where the columns are to be scaled apart.

        Both scales together would leave the range of double.
        """
        return replace(self, how=replace(self.how, scale=1.0)) if self.how.spread else self


@dataclass(frozen=True)
class Beyond:
    """A question about more tokens than a site is right for: whether it goes on there, see `Trial.goes_on`.

    Attributes:
        binding: sizes with more tokens.
        high: the most tokens that it is right for.
        single: whether it is right for that many only: then the first ones need not be, a factor may follow the size.
    """

    binding: Binding
    high: int
    single: bool


#: What a trial is asked: the error of a step that is even, or whether a site goes on.
Question: TypeAlias = "Step | Beyond"


class Elsewhere(Protocol):
    """Another process that has the trial too."""

    def answer(self, question: Question) -> float | Reason | None:
        """As `Trial.answer`; None where it must be found here."""
        ...

    def foresee(self, questions: Sequence[Question]) -> None:
        """Says what is likely to be asked for next, in this order, in place of what was said before."""
        ...


@dataclass(frozen=True)
class Trial:
    """Equality of the chosen outputs with the rule, at any sizes.

    Attributes:
        binding: sizes the site was proven at.
        validity: token counts the site is right for.
        there: compares in place of this process, see `deltafuse.comparing`.
    """

    bench: Bench
    recurrence: Recurrence
    explained: Explained
    out: int
    final: int | None
    binding: Binding
    validity: Validity | None = None
    there: Elsewhere | None = field(default=None, repr=False, compare=False)

    def few_tokens(self, batch: int | None = 1) -> Binding | None:
        """A batch and as few tokens as still tell emitted nodes apart; None where the symbols allow none."""
        if self.validity is None or self.binding.tokens is None:
            tokens = self.binding.tokens
        else:
            tokens = min(max(self.validity.low, _FEW), self.validity.high)
        return self.binding.at(tokens, None if self.binding.batch is None else batch)

    def error(self, binding: Binding, how: Draw, seed: int, *, full: bool = False) -> float | Reason:
        """Relative error of both outputs on one draw; a Reason where the cut does not run.

        Args:
            binding: sizes to try.
            how: the kind of operands.
            seed: of the draw.
            full: compare every column of the value axis, not two random mixtures of them (the rule is linear there).
        """
        return self.ahead(()).error(Step(binding, how, seed, full))

    def ahead(self, steps: Sequence[Step]) -> Ahead:
        """Makes the comparisons of some steps in turn, or only their draws: each next one while the worker computes."""
        return Ahead(self, steps)

    def foresee(self, questions: Sequence[Question]) -> None:
        """Says what is likely to be asked for next, so that another process may find it ahead of its time."""
        if self.there is not None:
            self.there.foresee([one.even if isinstance(one, Step) else one for one in questions])

    def answer(self, question: Question) -> float | Reason:
        """What a question is answered in this process; whether a site goes on as 1.0 or 0.0."""
        if isinstance(question, Beyond):
            return float(self._goes_on(question))
        drawn = self.draw(question.binding, question.how, question.seed)
        return self.compared(drawn, question)

    def goes_on(self, beyond: Beyond) -> bool:
        """Whether beyond the tokens that a site is right for later ones change a result, and the first are right."""
        found = None if self.there is None else self.there.answer(beyond)
        return self._goes_on(beyond) if found is None or isinstance(found, Reason) else bool(found)

    def _goes_on(self, beyond: Beyond) -> bool:
        operands, _ = self.draw(beyond.binding, DRAWS[0], 1)
        changed = _later_halved(operands, beyond.high)
        first, second = (self.results(beyond.binding, given) for given in (operands, changed))
        if isinstance(first, Reason) or isinstance(second, Reason):
            return False
        reads = any(not _equal(first[value], second[value]) for value in first)
        return reads and (beyond.single or self._early_error(operands, first, beyond.high) <= _EARLY_BAR)

    # What leaves the range of numbers is told by what comes out.
    @np.errstate(all="ignore")
    def compared(
        self, drawn: tuple[Operands, dict[str, int]], step: Step, meanwhile: Callable[[], object] | None = None
    ) -> float | Reason:
        """See `error`; for operands that are drawn already."""
        assignment, how, seed = self.explained.assignment, step.how, step.seed
        operands, sizes = drawn
        scaled = self._scaling(how, sizes)
        mix = None if step.full else np.random.default_rng(seed).standard_normal((sizes["V"], 2))
        wanted: list[tuple[Array, Array]] = []

        def follow_the_rule() -> None:
            unscaled = scaled.of_rule(operands)
            mixed = unscaled if mix is None else project(unscaled, mix)
            wanted.append(run_rule(self.recurrence, mixed, assignment.preparation()))
            if meanwhile is not None:
                meanwhile()

        ran = self.results(step.binding, scaled.of_site(operands), follow_the_rule)
        if isinstance(ran, Reason):
            return ran
        if not all(np.isfinite(array).all() for array in ran.values()):
            return Reason("overflows", {"draw": how.name})
        ((out, final),) = wanted
        grown = growth(how, sizes)
        right = np.ldexp(out * assignment.scale, -grown)
        error = self._compare(
            ran[self.out], self.explained.outs[self.out], "BTHV", sizes, mix, right,
            lambda plain: np.ldexp(scaled.out(plain), -grown),
        )  # fmt: skip
        if self.final is None:
            return error
        layout = self.explained.finals[self.final]
        return max(error, self._compare(ran[self.final], layout, "BHKV", sizes, mix, final, scaled.final))

    def results(
        self, binding: Binding, operands: Operands, meanwhile: Callable[[], object] | None = None
    ) -> dict[int, Array] | Reason:
        """What the cut makes of operands: out and, if there is one, the final state, by value id.

        `meanwhile` is called while the worker computes.
        """
        ends = (self.out,) if self.final is None else (self.out, self.final)
        return self.bench.run(self.explained.assignment.write(operands), binding.numbers, ends, meanwhile)

    def _early_error(self, operands: Operands, ran: Mapping[int, Array], count: int) -> float:
        """Relative error of the first tokens of the output."""
        assignment = self.explained.assignment
        sizes = {**assignment.sizes, "T": operands.value.shape[1], "B": operands.value.shape[0]}
        layout, found = self.explained.outs[self.out], ran[self.out]
        if layouts.fit(layout, found.shape, sizes) is None:
            return float("inf")
        out, _ = run_rule(self.recurrence, operands, assignment.preparation())
        return relative(layouts.unpack(found, layout, "BTHV", sizes)[:, :count], out[:, :count] * assignment.scale)

    def draw(self, binding: Binding, how: Draw, seed: int) -> tuple[Operands, dict[str, int]]:
        """Operands for one draw, and their sizes."""
        assignment = self.explained.assignment
        sizes = dict(assignment.sizes)
        sizes.update({letter: n for letter, n in (("B", binding.batch), ("T", binding.tokens)) if n is not None})
        normed = any(assignment.values[role] in assignment.norms for role in ("query", "key"))
        operands = draw(how, sizes, seed, normed=normed, channels=assignment.channels)
        if assignment.values["query"] == assignment.values["key"]:
            operands = replace(operands, query=operands.key)
        return operands, sizes

    def _scaling(self, how: Draw, sizes: dict[str, int]) -> Scaling:
        assignment = self.explained.assignment
        normed = {role for role in ("query", "key") if assignment.values[role] in assignment.norms}
        found = scaling(how, sizes, normed, felt(self.recurrence, channels=assignment.channels))
        shared = assignment.values["query"] == assignment.values["key"]
        return replace(found, query=found.key) if shared else found

    @staticmethod
    def _compare(
        found: Array,
        layout: str,
        order: str,
        sizes: Mapping[str, int],
        mix: Array | None,
        wanted: Array,
        unscaled: Callable[[Array], Array],
    ) -> float:
        if layouts.fit(layout, found.shape, sizes) is None:
            return float("inf")
        plain = unscaled(layouts.unpack(found, layout, order, sizes))
        return relative(plain if mix is None else plain @ mix, wanted)


class Ahead:
    """Draws of some steps, each made while the worker computes what was drawn before.

    Args:
        trial: what is tried.
        steps: in the order in which they will be asked for; others are drawn when they are.

    What is compared is asked for as `Step.even` says.
    """

    def __init__(self, trial: Trial, steps: Sequence[Step]) -> None:
        self._trial = trial
        self._steps = deque(steps)
        self._ready: tuple[Step, tuple[Operands, dict[str, int]]] | None = None

    def draw(self, step: Step) -> tuple[Operands, dict[str, int]]:
        """The operands of a step, and their sizes."""
        if self._steps and self._steps[0] == step:
            self._steps.popleft()
        ready, self._ready = self._ready, None
        if ready is not None and ready[0] == step:
            return ready[1]
        return self._trial.draw(step.binding, step.how, step.seed)

    def prepare(self) -> None:
        """Draws what comes next."""
        if self._steps:
            step = self._steps[0]
            self._ready = step, self._trial.draw(step.binding, step.how, step.seed)

    def error(self, step: Step) -> float | Reason:
        """As `Trial.error`."""
        even, there = step.even, self._trial.there
        found = None if there is None else there.answer(even)
        return self._trial.compared(self.draw(even), even, self.prepare) if found is None else found


def _equal(first: Array, second: Array) -> bool:
    return bool(np.allclose(first, second, rtol=1e-9, atol=0))


def _later_halved(operands: Operands, high: int) -> Operands:
    """Every operand but the state with its later tokens changed."""
    changed: dict[str, Array] = {}
    for role in fields(operands):
        array = np.array(cast("Array", getattr(operands, role.name)))
        if role.name != "state":
            array[:, high:] *= 0.5
        changed[role.name] = array
    return replace(operands, **changed)
