"""What a run comes to: its exit code, and what is to be said of the model as a whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from deltafuse.enclosed import Enclosed, fused_bodies
from deltafuse.external import data_files, missing_notes
from deltafuse.fused import fused_nodes
from deltafuse.graph import Graph
from deltafuse.lowered import LOWERED, is_lowered
from deltafuse.lowering_conv import is_causal_conv
from deltafuse.match import Match, SiteReport
from deltafuse.options import FuseOptions
from deltafuse.patterns import Pattern
from deltafuse.planning import unchosen
from deltafuse.prover import REFUSALS
from deltafuse.reasons import TEXTS, Reason
from deltafuse.restated import Restated
from deltafuse.sites import Site
from deltafuse.softmax import SOFTMAX_ATTENTION, softmax_attention
from deltafuse.wire import Model
from deltafuse.wording import number, some

if TYPE_CHECKING:
    from deltafuse.searching import Searched

#: What to do where a model has no site and should have one.
_EXPORT = (
    "if the model does have linear attention, export it with plain operators, without a fused kernel or a custom "
    "operator in its place; a rule of another kind is looked for with --rules, see `fuse patterns`"
)
#: Code of the note on a model without a site that has fused nodes.
ALREADY = "already-fused"
TEXTS["already-fused"] = "the model holds fused nodes already ({count}); undo them with fuse rollback"


def exit_code(options: FuseOptions, sites: Sequence[SiteReport]) -> int:
    """0, 3 or 4 as the command exits."""
    statuses = {site.status for site in sites}
    if not statuses & {"fused", "refused"}:
        return 3
    if "fused" not in statuses:
        return 4
    blocked = any(blocking(options, sites)) or (options.strict and any(site.notes for site in sites))
    return 4 if blocked and not options.keep_going else 0


def blocking(options: FuseOptions, sites: Sequence[SiteReport]) -> Iterator[str]:
    """Names of the sites that keep the others from being written.

    Args:
        options: what was asked for.
        sites: of one model.
    """
    for site in sites:
        # What only resembles an ordinary expression is left as it is and keeps nothing from being written, and so is
        # one that was not asked for.
        blocks = {"refused", "near-miss"} if not site.rule else {"refused"} if site.rule in options.rules else ()
        if site.status in blocks and not unchosen(options, site.name):
            yield site.name


def unwritten(options: FuseOptions, sites: Sequence[SiteReport]) -> tuple[str, ...]:
    """Why sites that could be fused were not written, and what to do."""
    fine = sum(site.status == "fused" for site in sites)
    if not fine:
        return ()
    if exit_code(options, sites) == 0:
        return ("nothing was written: no output was given",) if options.output is None and not options.dry_run else ()
    names = list(blocking(options, sites))
    if names:
        return (
            f"nothing was written: {fine} of {number(len(sites), 'site')} can be fused and {some(names)} cannot; "
            "give --keep-going to write the others, or name those to leave with --skip-sites",
        )
    return ("nothing was written: --strict takes the notes for refusals; leave it out to write",)


def shown(sites: Sequence[SiteReport]) -> tuple[SiteReport, ...]:
    """The sites of a run that writes nothing: what would be fused is a match."""
    return tuple(replace(site, status="match") if site.status == "fused" else site for site in sites)


def worth_telling(
    found: Sequence[Site], family: Sequence[Pattern], before: Sequence[Site], *, inside: bool = False
) -> Sequence[Site]:
    """The sites of one search that a user wants to hear of.

    Contractions of data with data are in many a layer that is no rule: inside a body, and where other sites are there,
    only those are told that are a rule or a known neighbour of one. Attention with a softmax is never told.
    """
    if family[0].decay != "none":
        return found
    found = [site for site in found if isinstance(site, Match) or site.reason.code != SOFTMAX_ATTENTION]
    if not (inside or before or any(isinstance(site, Match) for site in found)):
        return found
    telling = {*REFUSALS, *(code for rule in family for code in rule.neighbours)}
    return [site for site in found if isinstance(site, Match) or site.reason.code in telling]


def notes(file: Model, sites: Sequence[SiteReport], searched: Searched) -> tuple[str, ...]:
    """What is to be said of the model as a whole.

    Args:
        file: the model as it was scanned.
        sites: all that were found.
        searched: its main graph.
    """
    missing = missing_notes({name: 0 if path.is_file() else None for name, path in data_files(file).items()})
    if is_lowered(file):
        return (f"{LOWERED}: {TEXTS[LOWERED]}", *missing)
    return missing if sites else (_no_site(file, searched), *missing)


def restated(base: Restated) -> tuple[str, ...]:
    """What was replaced so that rules could be fused."""
    return (*_inlined(base.functions), *_gathered(base.gathered))


def _inlined(functions: Sequence[str]) -> tuple[str, ...]:
    if not functions:
        return ()
    told = f"calls of {some(functions)} became their nodes, because rules lie inside; rollback brings the calls back"
    return (f"inlined: {told}",)


def _gathered(sites: Sequence[str]) -> tuple[str, ...]:
    """Notes on sites whose tokens of output were put together."""
    return tuple(
        f"gathered: {site} wrote each token of its output as a value of its own; the fused node writes all, and each "
        "is taken out of them"
        for site in sites
    )


def _no_site(file: Model, searched: Searched) -> str:
    bodies = (scope.model.graph for scope in fused_bodies(file) if isinstance(scope, Enclosed))
    fused = sum(map(_fused, (file.graph, *bodies)))
    if fused:
        return f"{ALREADY}: {Reason(ALREADY, {'count': fused}).text}"
    anchors, others = searched.anchors, searched.expressions.anchors
    if not anchors:
        looked = _counted(others, "operators", "where an expression could begin")
        return f"no site: {looked}, none of them does"
    some = dict(anchors)
    last, count = some.popitem()
    looked = "".join(f"{_number(seen, what)} and " for what, seen in some.items()) + _counted(count, last)
    return f"no site: {looked}, none is part of a rule{_attention(searched)}; {_EXPORT}"


def _counted(count: int, what: str, where: str = "") -> str:
    """``1 exponential of data was looked at``."""
    return " ".join(filter(None, (_number(count, what), "was" if count == 1 else "were", "looked at", where)))


def _number(count: int, what: str) -> str:
    """``1 exponential of data`` of ``exponentials of data``."""
    head, gap, rest = what.partition(" ")
    return f"{count} {head.removesuffix('s') if count == 1 else head}{gap}{rest}"


def _attention(searched: Searched) -> str:
    """That the model has the other kind of attention."""
    graph = searched.scope.model.graph
    found = softmax_attention(graph, searched.scope.kinds)
    if not found:
        return ""
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return f"; {graph.label(found[0])}{more}: attention with softmax, which is no delta rule"


def _fused(graph: Graph) -> int:
    """How many fused nodes a graph has."""
    convolutions = sum(map(is_causal_conv, graph.op, graph.domain))
    return len(fused_nodes(graph, range(graph.outer, len(graph.op)))) + convolutions
