"""What becomes of which site: one target and operator for all, or for each what a plan file says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from deltafuse import targets
from deltafuse.errors import UserError
from deltafuse.expression_match import ExpressionPlan
from deltafuse.options import FuseOptions
from deltafuse.splice import AnyPlan
from deltafuse.targets import Profile
from deltafuse.targets.base import target_options

__all__ = ["Choice", "Chosen"]


@dataclass(frozen=True)
class Choice:
    """What a plan file says of a site that is not skipped.

    Attributes:
        target: whose operators it becomes.
        op: name of the operator, None for the first that is legal.
    """

    target: Profile
    op: str | None = None


@dataclass(frozen=True)
class Chosen:
    """The options of a run, and of each site.

    Attributes:
        options: for all sites.
        target: where nothing else is said of a site.
        sites: what a plan file says, by name; empty where there is none.
    """

    options: FuseOptions
    target: Profile
    sites: Mapping[str, Choice] = field(default_factory=dict[str, Choice])

    def __post_init__(self) -> None:
        """Refuses targets that no one device runs in one file, and options that a target does not take.

        Raises:
            UserError: ``plan-targets``, ``option``.
        """
        names: dict[str, list[str]] = {}
        for name, choice in self.sites.items():
            names.setdefault(choice.target.runtime or choice.target.name, []).append(f"{name} for {choice.target.name}")
        if len(names) > 1:
            some = " and ".join(found[0] for found in names.values())
            text = f"the plan takes {some}: no device runs both; give all sites one target, or targets ort and onnx"
            raise UserError("plan-targets", text)
        for target in [choice.target for choice in self.sites.values()] or [self.target]:
            target.check(target_options(self.options))

    @property
    def ordinary(self) -> tuple[str, ...]:
        """Operators of the targets that stand for ordinary expressions."""
        profiles = {choice.target.name: choice.target for choice in self.sites.values()} or {"": self.target}
        return tuple(dict.fromkeys(op for profile in profiles.values() for op in profile.ordinary))

    @property
    def control_flow(self) -> bool:
        """Whether what runs the file takes If, Loop and Scan."""
        profiles = [choice.target for choice in self.sites.values()] or [self.target]
        return all(profile.control_flow for profile in profiles)

    @property
    def title(self) -> str:
        """The target or targets, as the report shows them."""
        names = sorted({choice.target.name for choice in self.sites.values()})
        return ", ".join(names) or self.options.target

    @property
    def notes(self) -> tuple[str, ...]:
        """That the target of a plan's options is that of no site, which one who edited it there did not mean."""
        if not self.sites or self.target.name in {choice.target.name for choice in self.sites.values()}:
            return ()
        text = f"the plan's options name target {self.target.name}, but each site names its own, which counts"
        return (f"{text}: {self.title}; change it at the sites, or set it to null there to take that of the options",)

    def target_of(self, site: str) -> Profile:
        """Whose operators a site becomes."""
        return self.sites[site].target if site in self.sites else self.target

    def options_of(self, site: str) -> FuseOptions:
        """The options for one site: with the operator that the plan names.

        Raises:
            UserError: ``plan-op``: the target has no such operator.
        """
        choice = self.sites.get(site)
        if choice is None or choice.op is None:
            return self.options
        shorts = {name: one.short for one in choice.target.operators for name in (one.op, one.short) if name}
        if choice.op not in shorts:
            known = ", ".join(dict.fromkeys(one.op for one in choice.target.operators))
            text = f"{site}: target {choice.target.name} has no operator {choice.op!r}; give one of {known}, or null"
            raise UserError("plan-op", text)
        # A target's only operator has no short name and needs no force.
        return replace(self.options, op=shorts[choice.op] or None)

    def check(self, plans: Iterable[ExpressionPlan]) -> None:
        """Raises where an ordinary expression becomes another operator than the plan file names.

        Raises:
            UserError: ``plan-op``.
        """
        for plan in plans:
            name = plan.match.name
            choice = self.sites.get(name)
            if choice is not None and choice.op not in (None, plan.op):
                text = f"{name}: the site can become {plan.op} and no {choice.op!r}; give that name, or null"
                raise UserError("plan-op", text)

    def opset_of(self, plan: AnyPlan) -> tuple[str, int] | None:
        """Domain and least version that a plan's nodes need, None where the file's own will do."""
        # An ordinary expression is written in the operators that the file has, or says what it needs.
        return plan.target_opset if isinstance(plan, ExpressionPlan) else self.target_of(plan.match.name).opset


def of_options(options: FuseOptions) -> Chosen:
    """Without a plan file.

    Raises:
        UserError: ``unknown-target``, ``target-file``, ``option``.
    """
    return Chosen(options, targets.get(options.target))
