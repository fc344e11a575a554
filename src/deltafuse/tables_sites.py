"""Sites on a terminal: as a tree by layer, and one site in detail with its rule in its own names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from string import Formatter

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.text import Text
from rich.tree import Tree

from deltafuse.expression_match import ExpressionMatch
from deltafuse.held import Held
from deltafuse.match import FuseReport, Match, Norm, Role, SiteReport
from deltafuse.next_steps import site_steps
from deltafuse.probing import tensor_text
from deltafuse.reasons import Nearest, compared_with, nearest_text
from deltafuse.report import DTYPES, OUTPUTS, ROLES, dim, roles_text
from deltafuse.tables import dims_text, has_page, held_texts, norm_text, say, status_text, valid_text
from deltafuse.tables_fit import hanging, packed
from deltafuse.tables_pins import pinned_lines
from deltafuse.wording import number

_LAYER = re.compile(r"layers?\.\d+")
#: Stands for a state that is not there.
_ZERO = "0"
#: Of token counts beyond those that are proven: no other was tried, or none differs.
_NO_FAULT = "no fault found"


@dataclass(frozen=True)
class Facts:
    """Facts one after the other, each in one line where there is room for it.

    Attributes:
        texts: of the facts.
    """

    texts: Sequence[str]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        """The lines, for rich."""
        # The comma between two, and behind the last of a line, is the gap.
        for line in packed(list(map(cell_len, self.texts)), options.max_width - 1):
            ending = "" if line[-1] == len(self.texts) - 1 else ","
            yield Text(", ".join(self.texts[at] for at in line) + ending, style="dim")


def print_tree(report: FuseReport, screen: Console) -> None:
    """The sites below their layers, why one is refused beneath it."""
    root = Tree(Text(f"{report.model}: {number(len(report.sites), 'site')}", style="bold"))
    branches: dict[str, Tree] = {}
    for site in report.sites:
        found = _LAYER.match(site.name)
        layer = found.group() if found else ""
        if layer and layer not in branches:
            branches[layer] = root.add(Text(layer, style="bold"))
        leaf = (branches[layer] if layer else root).add(_headline(site))
        for line in _facts(site):
            leaf.add(line)
    screen.print(root)


def _headline(site: SiteReport) -> Text:
    rule = site.rule or (site.match.rule if site.match is not None else "")
    # The whole name: it is what --site takes.
    line = Text(" ".join(filter(None, (site.name, rule, site.match.form if site.match else ""))))
    line.append("  ").append_text(status_text(site))
    return line.append(f"  {_becomes(site)}")


def _becomes(site: SiteReport) -> str:
    """``2488 nodes become 43 with ChunkGatedDeltaRule``; of a site that stays, how many it has."""
    if site.held is not None:
        was = f"{number(site.nodes, 'node')} became " if site.nodes else ""
        return f"{was}{number(site.added, 'node')} with {site.op}"
    if not site.op:
        return number(site.nodes, "node")
    return f"{number(site.nodes, 'node')} {'becomes' if site.nodes == 1 else 'become'} {site.added} with {site.op}"


def _facts(site: SiteReport) -> Iterator[Text | Facts]:
    match = site.match
    if match is not None:
        error = f"error {match.proof.max_error:.1e}"
        yield Facts((*_shape(match), error))
    if site.reason is not None:
        yield Text(f"{site.reason.code}: {site.reason.what}", style="yellow")
        if site.reason.fix:
            yield Text(f"fix: {site.reason.fix}", style="cyan")


def _shape(match: Match | ExpressionMatch) -> Iterator[str]:
    """What the columns of the table say between the operator and the error."""
    if isinstance(match, ExpressionMatch):
        yield roles_text(match)
        return
    yield from (dims_text(match.dims), f"scale {match.scale:.6g}", f"l2 norm {norm_text(match)}")
    if match.valid_tokens is not None:
        yield f"right for {valid_text(match.valid_tokens)} {'token' if match.valid_tokens.high == 1 else 'tokens'}"


def print_details(report: FuseReport, chosen: Sequence[str], formulas: Mapping[str, str], screen: Console) -> None:
    """Everything that is known of some sites, then what is to be said of the whole model.

    Args:
        report: of all sites.
        chosen: names of those to show.
        formulas: rule -> its template.
        screen: where to print.
    """
    for site in report.sites:
        if site.name in chosen:
            screen.print(Text(site.name, style="bold"))
            for line in detail_lines(site, formulas):
                screen.print(hanging(f"  {line}", screen.width))
    why = {site.name: site.reason for site in report.sites if site.name in chosen}
    near = [name for name, reason in why.items() if reason is not None and reason.nearest is not None]
    for line in site_steps(report.again, report.model, near[0], drawn=has_page(report), shown=True) if near else ():
        say(line, screen)
    for line in (*(f"note: {note}" for note in report.notes), *pinned_lines(report.pinned)):
        screen.print(hanging(line, screen.width))


def detail_lines(site: SiteReport, formulas: Mapping[str, str]) -> Iterator[str]:
    """One site in detail, a fact a line."""
    yield f"status: {status_text(site)}, {_becomes(site)}"
    if site.match is not None:
        yield from _known(site.match)
        text = recurrence_text(site.match, formulas.get(site.match.rule, ""))
        if text:
            yield "in its own names:"
            yield from (f"  {line}" for line in text.splitlines())
    if site.held is not None:
        yield from _held(site.held)
    if site.emitted:
        yield f"emitted: {', '.join(f'{count} {op}' for op, count in site.emitted.items())}"
    if site.reason is not None:
        yield f"{site.reason.code}: {site.reason.what}"
        yield f"  fix: {site.reason.fix}"
        for one in site.looked:
            yield f"{one.kind} {one.number}: {one.name} {tensor_text(one.dtype, one.shape)}".rstrip()
        yield from _distances(site.reason.nearest, site.reason.code)
    yield from (f"note: {note}" for note in site.notes)


def _held(held: Held) -> Iterator[str]:
    yield f"node: {held.node}"
    for kind, ports in (("input", held.inputs), ("output", held.outputs)):
        for place, port in enumerate(ports, 1):
            yield f"{port.name or f'{kind} {place}'}: {port.tensor} {port.type}"
    yield from (f"attribute {name}: {text}" for name, text in held.attributes)
    yield from (text for text in held_texts(held) if text.startswith(("rounded: ", "replaced: ")))


def _distances(nearest: Nearest | None, code: str) -> Iterator[str]:
    """How far a near miss is from the rule and from what is like it."""
    if nearest is None:
        return
    yield nearest_text(nearest, code)
    yield f"smallest relative differences over {number(nearest.tokens, 'token')}:"
    for name, what, error in compared_with(nearest):
        yield f"  {error:.1e}  {name}: {what}"


def _known(match: Match | ExpressionMatch) -> Iterator[str]:
    yield f"rule: {match.rule}, written as {match.form}"
    for name, role in _named(match).items():
        yield f"{name}: {'none' if role is None else _role(role)}"
    if isinstance(match, Match):
        yield f"dims: {dims_text(match.dims)}"
        yield f"scale: {match.scale:.9g}; l2 norm: {norm_text(match)}"
        valid = match.valid_tokens
        if valid is not None:
            ends = f"below: {valid.below or _NO_FAULT}; above: {valid.above or _NO_FAULT}"
            fixed = "the number that the file has"
            yield f"valid tokens: {valid_text(valid)}; {fixed if isinstance(match.dims.tokens, int) else ends}"
    else:
        yield from (f"{name}: {value:.9g}" for name, value in match.parameters.items())
    proof = match.proof
    emitted = "" if proof.emitted_error is None else f"; of the nodes in its place {proof.emitted_error:.1e}"
    shared = f"; shared with {proof.shared_with}, which is equal up to names" if proof.shared_with else ""
    draws = number(proof.draws, "draw")
    yield f"proof: {draws} in {proof.precision}, largest error {proof.max_error:.1e}{emitted}{shared}"


def _named(match: Match | ExpressionMatch) -> Mapping[str, Role | None]:
    if isinstance(match, Match):
        return {name: getattr(match, name) for name in (*ROLES, *OUTPUTS)}
    return {**match.roles, **match.outputs}


def _role(role: Role) -> str:
    layout = f" {role.layout}" if role.layout else ""
    sizes = ", ".join(str(dim(size)) for size in role.shape)
    return f"{role.name} {DTYPES.get(role.dtype, str(role.dtype))} [{sizes}]{layout}"


def recurrence_text(match: Match | ExpressionMatch, template: str) -> str:
    """A rule with the names of a site in place of the roles; lines that speak of what it does not have are left out.

    Args:
        match: the site.
        template: of the pattern's file, "" for none.
    """
    names = {name: role.name for name, role in _named(match).items() if role is not None}
    if isinstance(match, Match):
        names |= {"state": names.get("state", _ZERO), "scale": f"{match.scale:.6g}"}
        for name, norm in (("query", match.query_norm), ("key", match.key_norm)):
            names[name] = _normed(names[name], norm)
    else:
        names |= {name: f"{value:.6g}" for name, value in match.parameters.items()}
        names |= {name: _ZERO for name in ("bias", "past_state") if name not in names}
    lines = [line for line in template.splitlines() if _fields(line) <= names.keys()]
    return "\n".join(line.format_map(names) for line in lines)


def _normed(name: str, norm: Norm | None) -> str:
    return name if norm is None else f"l2norm({name})"


def _fields(line: str) -> set[str]:
    return {name for _, name, _, _ in Formatter().parse(line) if name}
