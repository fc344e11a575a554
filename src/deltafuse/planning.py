"""Decide for each site what is to become of it: nodes of the target, or a reason why not."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from fnmatch import fnmatchcase

from deltafuse.dims import Dim
from deltafuse.errors import UserError
from deltafuse.match import Match, NoMatch, Plan, SiteReport
from deltafuse.opset import LEAST
from deltafuse.options import FuseOptions
from deltafuse.reasons import TEXTS, Reason
from deltafuse.sites import Site
from deltafuse.targets.base import Target, target_options
from deltafuse.wording import span

TEXTS.update(
    {
        "batch-one-only": "the site is right for a batch of one only and the batch is to be another, or free; "
        "leave --batch out, or export the model with batch 1",
        "opset-old": "the file imports opset {opset}, and what is written in the site's place is of opset {least} or "
        "newer; export the model again with a newer opset",
        "left-out": "left out: {why}; change {option} to take the site",
        "pin-out-of-range": "--pin {symbol}={size}: the unfused graph is the rule for {valid} only, "
        "so nothing can be compared at {size}; pin a size within, or drop --pin and read the note on valid_tokens",
    }
)


_WHY_LEFT = {
    "--sites": "not among --sites",
    "--skip-sites": "named by --skip-sites",
    "--form": "not written in the form that --form asks for",
    "--plan": "the plan skips it, or does not list it",
}


def left_out(option: str, form: str = "") -> Reason:
    """Why a site that could be taken is not: the option that says so, and for ``--form`` the site's own form."""
    where = "the plan's entry (action fuse)" if option == "--plan" else option
    why = f"written as {form}, --form asks for another" if form and option == "--form" else _WHY_LEFT[option]
    return Reason("left-out", {"option": where, "why": why})


def check_names(options: FuseOptions, names: Iterable[str]) -> None:
    """Raises where ``--sites`` (``--site`` is one) or ``--skip-sites`` names no site, which is a slip of the pen.

    Raises:
        UserError: ``site-unknown``; the message lists the names there are.
    """
    known = sorted(names)
    for glob in (*options.sites, *options.skip_sites):
        if known and not any(fnmatchcase(name, glob) for name in known):
            near = difflib.get_close_matches(glob, known, 1) if glob == _stem(glob) else _near_globs(glob, known)
            hint = f"did you mean {near[0]}? There are" if near else "there are"
            raise UserError("site-unknown", f"no site is named {glob}; {hint} {_list(known)}")


def _stem(glob: str) -> str:
    """What stands in front of the first wildcard."""
    return re.split(r"[*?\[]", glob, maxsplit=1)[0]


def _near_globs(glob: str, known: list[str]) -> list[str]:
    """The glob with another beginning, as some site has it."""
    stem = _stem(glob)
    beginnings = sorted({name[:end] for name in known for end in range(1, len(name) + 1)})
    near = [begin + glob[len(stem) :] for begin in difflib.get_close_matches(stem, beginnings)]
    return [one for one in near if any(fnmatchcase(name, one) for name in known)]


def _list(names: list[str], shown: int = 12) -> str:
    more = f" and {len(names) - shown} more, see fuse inspect" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


def plan_site(
    options: FuseOptions, target: Target, site: Site, opset: int, *, likely: bool = False
) -> Plan | SiteReport:
    """The plan of one site, or the report of why there is none.

    Args:
        options: for the site.
        target: what it is written for.
        site: proven or `likely`; then the plan may be without its nodes.
        opset: version of the ai.onnx operators that the file imports.
        likely: whether it is only likely.
    """
    if isinstance(site, NoMatch):
        return SiteReport(
            site.name, "near-miss" if site.near_miss else "refused", None, None, site.reason, (), site.nodes
        )
    option = _left_out(options, site)
    if option:
        return SiteReport(site.name, "match", site, None, left_out(option, site.form), site.notes)
    plan = Reason("opset-old", {"opset": opset, "least": LEAST}) if opset < LEAST else _out_of_range(options, site)
    if plan is None:
        asked = target_options(options, pinned_tokens(options, site.dims.tokens), opset)
        plan = target.plan(site, asked, likely=likely)
    if site.one_sequence and isinstance(plan, Plan) and (options.batch > 1 or not plan.pins):
        plan = Reason("batch-one-only")
    if isinstance(plan, Reason):
        return SiteReport(site.name, "refused", site, None, plan, site.notes)
    return plan


def unchosen(options: FuseOptions, name: str) -> str:
    """The option that leaves out a site of this name, "" where none does."""
    planned = options.plan is not None and not options.dry_run
    if options.sites and not any(fnmatchcase(name, glob) for glob in options.sites):
        return "--plan" if planned else "--sites"
    skipped = any(fnmatchcase(name, glob) for glob in options.skip_sites)
    return "" if not skipped else "--plan" if planned else "--skip-sites"


def _left_out(options: FuseOptions, match: Match) -> str:
    if options.form is not None and match.form != options.form:
        return "--form"
    return unchosen(options, match.name)


def pinned_tokens(options: FuseOptions, tokens: Dim) -> int | None:
    """The token count that the user pins, None where it stays as it is."""
    return None if isinstance(tokens, int) else dict(options.pins).get(str(tokens))


def _out_of_range(options: FuseOptions, match: Match) -> Reason | None:
    size, valid = pinned_tokens(options, match.dims.tokens), match.valid_tokens
    if size is None or valid is None:
        return None
    if (size < valid.low and valid.below is not None) or (size > valid.high and valid.above is not None):
        right = span(valid.low, valid.high, "token")
        return Reason("pin-out-of-range", {"symbol": str(match.dims.tokens), "size": size, "valid": right})
    return None
