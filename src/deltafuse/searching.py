"""All sites of a file: those of the main graph, and those inside the bodies of If, Loop and Scan."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from deltafuse import outcome, patterns, region
from deltafuse.clock import Clock
from deltafuse.enclosed import Enclosed, enter, held_bodies, mentions
from deltafuse.expression_sites import ExpressionSites, find_expressions
from deltafuse.expressions import Expression
from deltafuse.finder import Candidate, Finder
from deltafuse.lowered import written_by_lower
from deltafuse.match import Looked, Match, NoMatch, SiteReport
from deltafuse.options import Progress
from deltafuse.patterns import Pattern
from deltafuse.probe import Worker
from deltafuse.reasons import Reason
from deltafuse.sites import Site, prove_sites
from deltafuse.trial import Trial
from deltafuse.wiring import Wirings

#: How a site is named that is only seen: what may be a rule in the body of node N.
_SEEN = "inside."
#: That something is there which may be a rule, the vaguest last.
_INSIDE = ("inside-call", "inside-unproven", "inside-body")


_STAGE = "finding and proving"


@dataclass(frozen=True)
class Searched:
    """One graph, and what was found in it.

    Attributes:
        scope: in topological order.
        sites: that are to be told.
        trials: what each class of sites was proven with.
        anchors: how many operators of each kind were looked at as a possible start of a rule; empty where none was
            looked for.
        expressions: sites of ordinary expressions.
        candidates: what was looked at, by the site's name.
        about: name of a site that is no match -> nodes with bodies that it is about.
        inner: bodies that were searched too.
    """

    scope: Enclosed
    sites: tuple[Site, ...]
    trials: Mapping[bytes, Trial]
    anchors: Mapping[str, int]
    expressions: ExpressionSites
    candidates: Mapping[str, Candidate]
    about: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, "tuple[int, ...]"])
    inner: tuple[Searched, ...] = ()

    @property
    def names(self) -> list[str]:
        """Of the sites in this graph alone."""
        return [site.name for site in (*self.sites, *self.expressions.sites)]

    def told(self, reports: Iterable[SiteReport]) -> Iterator[SiteReport]:
        """Reports of its sites with where they lie: the body, the nodes of a match, the ends of what is none."""
        known: dict[tuple[str, bytes], int] = {}
        for report in reports:
            match, inside = report.match, self.scope.model.place
            if match is None:
                yield replace(report, inside=inside, looked=self._looked(report.name))
                continue
            alike = (match.rule, match.class_key)
            if alike not in known:
                known[alike] = len(region.between(self.scope.model.graph, match, self.scope.kinds))
            yield replace(report, inside=inside, nodes=known[alike])

    def _looked(self, name: str) -> tuple[Looked, ...]:
        """What a candidate reads and writes; () where there is none of that name."""
        candidate, graph, shapes = self.candidates.get(name), self.scope.model.graph, self.scope.shapes
        ends = () if candidate is None else (("input", candidate.roots), ("output", candidate.frontier))
        return tuple(
            Looked(what, number, graph.name(value), shapes.shape(value), shapes.dtype(value))
            for what, values in ends
            for number, value in enumerate(values, 1)
        )

    def all(self) -> Iterator[Searched]:
        """This graph and all bodies in it."""
        yield self
        for body in self.inner:
            yield from body.all()

    def proves(self) -> bool:
        """Whether anything in it or in one of its bodies is a rule, or an expression, be it one that must stay."""
        rules = any(isinstance(site, Match) or not site.near_miss for site in self.sites)
        ordinary = any(not isinstance(site.outcome, Reason) for site in self.expressions.sites)
        return rules or ordinary or any(body.proves() for body in self.inner)


class _Proofs:
    """Shows how far one search is: what counts as done is what is proven.

    Attributes:
        candidates: whose proofs began.
    """

    def __init__(self, progress: Progress, finder: Finder) -> None:
        self.candidates: list[Candidate] = []
        self._progress = progress
        self._finder = finder

    def begin(self, candidate: Candidate) -> None:
        """This one is proven next."""
        self.candidates.append(candidate)
        self._show()

    def end(self) -> None:
        """All are proven, or are no rule."""
        self._progress.advance(len(self._finder.places), len(self._finder.places))

    def measured(self, done: int, of: int) -> None:
        """It is no rule, and what it is instead takes a while."""
        if not done:
            self._progress.start(f"measuring what {self.candidates[-1].name} is instead")
        self._progress.advance(done, of)
        if done == of:
            self._progress.start(_STAGE)
            self._show()

    def _show(self) -> None:
        self._progress.advance(len(self.candidates) - 1, len(self._finder.places))
        self._progress.note(self.candidates[-1].name)


@dataclass(frozen=True)
class Search:
    """What is looked for, and with what.

    Attributes:
        rules: recurrences and ordinary expressions.
        clock: told about stages.
        worker: runs the cuts.
        foresee: is told of the sites that are likely to be all in a main graph, while the last of them are proven.
    """

    rules: Sequence[Pattern | Expression]
    clock: Clock
    worker: Worker
    foresee: Callable[[Enclosed, Sequence[Site]], None] | None = None

    @property
    def recurrences(self) -> list[Pattern]:
        """The rules that are no ordinary expressions."""
        return [rule for rule in self.rules if not isinstance(rule, Expression)]

    @property
    def ordinary(self) -> list[Expression]:
        """The ordinary expressions."""
        return [rule for rule in self.rules if isinstance(rule, Expression)]

    def graph(self, scope: Enclosed, names: Collection[str] = ()) -> Searched:
        """Searches one graph, without its bodies.

        Args:
            scope: the graph.
            names: of sites in other graphs of the file.
        """
        model, kinds, shapes = scope.model, scope.kinds, scope.shapes
        sites: list[Site] = []
        trials: dict[bytes, Trial] = {}
        candidates: list[Candidate] = []
        anchors: dict[str, int] = {}
        wirings: Wirings | None = None
        for family in patterns.families(self.recurrences):
            with self.clock.stage(_STAGE):
                finder = Finder(model, kinds, shapes, family[0], tuple(candidates), names, wirings)
                wirings = finder.wirings
                proofs = _Proofs(self.clock.progress, finder)

                def foresee(likely: Sequence[Site], before: Sequence[Site] = tuple(sites)) -> None:
                    if self.foresee is not None and not (model.place or self.ordinary):
                        self.foresee(scope, [*before, *likely])

                more, proven = prove_sites(
                    model, kinds, shapes, family, self.worker, finder, proofs.begin, foresee, proofs.measured
                )
                proofs.end()
                candidates += proofs.candidates
                if not sites:
                    anchors[finder.anchors_are] = finder.anchors_seen()
            sites += outcome.worth_telling(more, family, sites, inside=bool(model.place))
            trials.update(proven)
        with self.clock.stage(_STAGE):
            matches = [site for site in sites if self.ordinary and isinstance(site, Match)]
            taken = {node for match in matches for node in region.between(model.graph, match, kinds)}
            expressions = find_expressions(
                model, kinds, shapes, self.ordinary, taken, self.worker, self.clock.progress, names
            )
        sites = [site for site in sites if not _lowered(scope, site, candidates)]
        anchors_of = {op for rule in self.recurrences if rule.decay != "none" for op in rule.anchors}
        about = _about(scope, candidates, sites, anchors_of)
        named = {candidate.name: candidate for candidate in candidates}
        return Searched(scope, tuple(sites), trials, anchors, expressions, named, about)

    def bodies(self, found: Searched, names: Collection[str] = ()) -> Searched:
        """Searches the bodies of a graph that was searched too, as graphs of their own.

        What is told of a node as a whole gives way to what is proven inside it. A Loop that is a rule is not entered.

        Args:
            found: the graph.
            names: of sites in other graphs of the file.
        """
        scope, sites, inner = found.scope, list(found.sites), list[Searched]()
        known = [*names, *found.names]
        for node in self._likely(found):
            bodies = enter(scope, node)
            told = {name for name, nodes in found.about.items() if node in nodes}
            if isinstance(bodies, Reason):
                sites = [_unfit(site, bodies) if site.name in told else site for site in sites]
                continue
            results: list[Searched] = []
            for body in bodies:
                results.append(self.bodies(self.graph(body, known), known))
                known += [name for one in results[-1].all() for name in one.names]
            if not any(one.proves() for one in results):
                # What is not the rule as a whole and not inside is told by the reason that says more.
                within = [site for deep in results for one in deep.all() for site in one.sites]
                if any(site.name in told and not _vague(site) for site in sites):
                    continue
                if all(map(_vague, within)):
                    said = _inside(within)
                    sites = [_unfit(site, said) if said is not None and site.name in told else site for site in sites]
                    continue
            sites = [site for site in sites if site.name not in told]
            inner += results
        # Whoever searches here has a target for it already.
        return replace(found, sites=tuple(map(_searched, sites)), inner=tuple(inner))

    def _likely(self, found: Searched) -> list[int]:
        """Nodes whose bodies may hold a rule or an expression, and that are part of no match."""
        model, holders = found.scope.model, held_bodies(found.scope.model.graph)
        matches = [site for site in found.sites if holders and isinstance(site, Match)]
        taken = {node for match in matches for node in region.between(model.graph, match, found.scope.kinds)}
        words = {op for rule in self.recurrences for op in (*rule.anchors, *rule.contractions)}
        words |= {op.rpartition(".")[2] for rule in self.ordinary for op in rule.anchors}
        words |= {name for _, name in model.local_functions} if model.functions else set()
        return [node for node in holders if node not in taken and mentions(model, node, words)]


def _about(
    scope: Enclosed, candidates: Sequence[Candidate], sites: Sequence[Site], anchors: Collection[str]
) -> dict[str, tuple[int, ...]]:
    """The nodes with bodies that each site which is no match is about: all that could be a rule in it lies there."""
    graph = scope.model.graph
    holders = set(held_bodies(graph))
    cores = {candidate.name: candidate.core for candidate in candidates}
    found: dict[str, tuple[int, ...]] = {}
    for site in sites:
        if isinstance(site, NoMatch):
            core = _seen(site) or cores.get(site.name, ())
            alone = not any(graph.standard[node] in anchors for node in core)
            found[site.name] = tuple(node for node in core if alone and node in holders)
    return found


def _lowered(scope: Enclosed, site: Site, candidates: Sequence[Candidate]) -> bool:
    """Whether what is no rule is what ``fuse lower`` wrote."""
    core = next((candidate.core for candidate in candidates if candidate.name == site.name), _seen(site))
    return isinstance(site, NoMatch) and written_by_lower(scope.model, core)


def _seen(site: Site) -> tuple[int, ...]:
    """The node that a site is only seen in."""
    number = site.name.removeprefix(_SEEN)
    return (int(number),) if site.name.startswith(_SEEN) and number.isdecimal() else ()


def _vague(site: Site) -> bool:
    """Whether all that is known of a site is that something is there, or that it is no rule."""
    return isinstance(site, NoMatch) and site.reason.code in (*_INSIDE, "not-the-rule", "root-type")


def _inside(within: Sequence[Site]) -> Reason | None:
    """The reason of those found inside that says most, None where there is none."""
    reasons = [site.reason for site in within if isinstance(site, NoMatch)]
    return min(reasons, key=lambda reason: _INSIDE.index(reason.code) if reason.code in _INSIDE else -1, default=None)


def _searched(site: Site) -> Site:
    """A site of which is known no more than that it may hold a rule, after a search in it."""
    if isinstance(site, NoMatch) and site.reason.code == "inside-body":
        return replace(site, reason=Reason("inside-unproven", site.reason.args))
    return site


def _unfit(site: Site, reason: Reason) -> Site:
    return replace(site, reason=reason) if isinstance(site, NoMatch) and site.reason.code == "inside-body" else site
