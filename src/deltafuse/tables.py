"""What people read on the terminal: the same reports as the JSON documents, as tables and sentences."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from deltafuse.expression_match import ExpressionMatch
from deltafuse.match import Dims, FuseReport, Match, SiteReport, Validity
from deltafuse.next_steps import NEXT, site_steps
from deltafuse.report import dim, roles_text
from deltafuse.tables_fit import hanging, print_table
from deltafuse.tables_pins import pinned_lines
from deltafuse.wording import PAGE, grouped, number, of_sites, some

if TYPE_CHECKING:
    from deltafuse.held import Held
    from deltafuse.lint import LintReport

STATUS_STYLES = {"fused": "green", "match": "green", "refused": "red", "near-miss": "yellow"}
LEFT_OUT = "left out"
#: Attributes of a Custom node that only say again what its ports and its operator are.
WIRING = frozenset({
    "type", "input_names", "optional_input_names", "input_index", "output_names", "output_num", "output_types",
    "outputs_shape", "dtype",
})  # fmt: skip
#: How many operators are told of whose number changed; more only where more are new.
OPERATORS = 8
#: Width where the output goes to a file or another program: nothing is wrapped there.
PIPED_WIDTH = 100_000

SITE_COLUMNS = ("site", "status", "rule", "form", "operator", "nodes", "dims", "scale", "l2 norm", "tokens", "error")


def console() -> Console:
    """Where results go: stdout; colours on terminals only (rich honours NO_COLOR)."""
    width = None if sys.stdout.isatty() else PIPED_WIDTH
    return Console(file=sys.stdout, highlight=False, markup=False, width=width)


def print_fuse(report: FuseReport, screen: Console, *, tree: bool = False) -> None:
    """The report of ``fuse`` and ``inspect``; as a tree on terminals only, since its lines get in the way of grep."""
    if tree and screen.is_terminal and report.sites:
        from deltafuse.tables_sites import print_tree

        print_tree(report, screen)
    elif report.sites:
        print_table(SITE_COLUMNS, [site_row(site) for site in report.sites], screen)
    for sentence in sentences(report, reasons=not (tree and screen.is_terminal)):
        say(sentence, screen)
    if report.output is not None and not report.exit:
        for line in columns(("operator", "before", "after", "change"), _changes(report)):
            screen.print(line)
    for line in pinned_lines(report.pinned):
        screen.print(hanging(line, screen.width))
    screen.print(summary(report))


def say(sentence: str, screen: Console) -> None:
    """Prints a sentence, folded at words; a command stays whole, so that it can be copied."""
    whole = NEXT in sentence
    screen.print(sentence if whole else hanging(sentence, screen.width), soft_wrap=whole)


def has_page(report: FuseReport) -> bool:
    """Whether a page was written."""
    return any(note.startswith(PAGE) for note in report.notes)


def site_row(site: SiteReport) -> tuple[str | Text, ...]:
    """One line of the table of sites, a cell for each of `SITE_COLUMNS`."""
    status = status_text(site)
    match = site.match
    if match is None:
        return (site.name, status, site.rule, "", site.op or "", nodes_text(site), *[""] * (len(SITE_COLUMNS) - 6))
    if isinstance(match, ExpressionMatch):
        found = (match.rule, match.form, site.op or "", nodes_text(site), roles_text(match))
        return (site.name, status, *found, "", "", "", f"{match.proof.max_error:.1e}")
    return (
        site.name,
        status,
        match.rule,
        match.form,
        site.op or "",
        nodes_text(site),
        dims_text(match.dims),
        f"{match.scale:.6g}",
        norm_text(match),
        valid_text(match.valid_tokens),
        f"{match.proof.max_error:.1e}",
    )


def nodes_text(site: SiteReport) -> str:
    """``2488 to 43``: nodes that a site has and that come in its place; of one that stays, how many it has."""
    return f"{site.nodes} to {site.added}" if site.op and site.nodes else str(site.nodes or site.added)


def status_text(site: SiteReport) -> Text:
    """The status; of a site that could be fused and was not asked for, that."""
    if site.reason is not None and site.reason.code == "left-out":
        return Text(LEFT_OUT, style="dim")
    return Text(site.status, style=STATUS_STYLES.get(site.status, ""))


def dims_text(dims: Dims) -> str:
    """``B1 Tseq_len H16/32 D128x128``: batch, tokens, key and value heads, key and value head size."""
    batch, tokens = dim(dims.batch), dim(dims.tokens)
    return f"B={batch} T={tokens} H={dims.key_heads}/{dims.value_heads} D={dims.key_dim}x{dims.value_dim}"


def norm_text(match: Match) -> str:
    """``eps 1e-06``, or ``no``."""
    return "no" if match.query_norm is None else f"eps {match.query_norm.eps:.4g}"


def valid_text(valid: Validity | None) -> str:
    """Token counts for which the source graph is the rule, e.g. ``1..64``."""
    if valid is None:
        return ""
    return str(valid.low) if valid.low == valid.high else f"{valid.low}..{valid.high}"


def _changes(report: FuseReport) -> list[tuple[str, ...]]:
    """The operators that sites became and those that are new, then those whose number changed most."""
    first = telling(report)
    counts = {op: both for op, both in report.operators.items() if both[0] != both[1]}
    order = [*first, *(op for op in counts if op not in first)]
    changed = [(op, *map(str, counts[op]), f"{counts[op][1] - counts[op][0]:+d}") for op in order]
    shown = max(OPERATORS, len(first))
    more = len(changed) - shown
    return changed if more <= 0 else [*changed[:shown], (f"{more} more", "", "", "see --json")]


def held_texts(held: Held | None) -> Iterator[str]:
    """What is known of a site that was fused before this run, a sentence each."""
    if held is None:
        return
    takes, gives = (
        ", ".join(f"{port.name} {port.type}".strip() for port in ports) for ports in (held.inputs, held.outputs)
    )
    yield f"takes {takes}; gives {gives}"
    attributes = [f"{name} = {text}" for name, text in held.attributes if name not in WIRING]
    if attributes:
        yield f"attributes: {', '.join(attributes)}"
    for (was, now), names in grouped([((was, now), name) for name, was, now in held.rounded]):
        yield f"rounded: {', '.join(names)} from {was} to {now}"
    if held.replaced:
        ops = [f"{count} {op}" for op, count in held.replaced.items()]
        yield f"replaced: {number(sum(held.replaced.values()), 'node')}: {some(ops, OPERATORS)}"


def telling(report: FuseReport) -> list[str]:
    """Operators that a table of changes always has: what sites become, then what is new in the graph."""
    ops = {site.op for site in report.sites if site.op}
    changed = [op for op, (before, after) in report.operators.items() if before != after]
    fused = [op for op in changed if op.removeprefix("Custom ").rpartition(".")[2] in ops]
    return [*fused, *(op for op in changed if not report.operators[op][0] and op not in fused)]


def sentences(report: FuseReport, *, reasons: bool = True, steps: bool = True) -> Iterator[str]:
    """Reasons, each with its fix, then notes; one that several sites share is said once. `steps`: the next command."""
    total = len(report.sites)
    refused = [
        ((site.reason.code, site.reason.what, site.reason.fix), site.name)
        for site in report.sites
        if reasons and site.reason is not None
    ]
    for (code, what, fix), names in grouped(refused):
        yield f"{of_sites(names, total)} ({code}): {what}"
        if fix:
            yield f"  fix: {fix}"
    for text, names in grouped([(f"it lies inside {site.inside}", site.name) for site in report.sites if site.inside]):
        yield f"{of_sites(names, total)}: {text}"
    near = [site.name for site in report.sites if site.reason is not None and site.reason.nearest is not None]
    if near and steps:
        yield from site_steps(report.again, report.model, near[0], drawn=has_page(report), shown=False)
    for text, names in grouped([(text, site.name) for site in report.sites for text in held_texts(site.held)]):
        yield f"{of_sites(names, total)}: {text}"
    notes = [(note, site.name) for site in report.sites for note in site.notes]
    for text, names in grouped(notes):
        yield f"note, {of_sites(names, total)}: {text}"
    for note in report.notes:
        yield f"note: {note}"


def columns(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines of a table, each column as wide as its widest cell; the last is not filled up."""
    widths = [max(map(len, cells)) for cells in zip(headings, *rows, strict=True)]
    for row in (headings, *rows):
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def print_lint(report: LintReport, screen: Console) -> None:
    """The report of ``fuse lint``."""
    for finding in report.findings:
        where = f"{finding.node}, {finding.part}" if finding.part else finding.node
        screen.print(f"{finding.code}: {where}: found {finding.found}; wanted {finding.wanted}; {finding.fix}")
    for note in report.notes:
        more = "" if note.fix.startswith("nothing") else f"; {note.fix}"
        screen.print(f"note, {note.node}: {note.found}{more}")
    if report.lowered and not report.nodes:
        told = f"{report.model} was written by fuse lower and holds no fused node"
        screen.print(f"{told}: give the fused file that it was made from")
    elif not report.nodes and not report.notes:
        told = f"{report.model} holds no fused node of {' or '.join(report.targets) or 'any target'}"
        other = ", or with --target the target that it was written for" if report.targets else ""
        screen.print(f"{told}: give the file that fuse wrote{other}")
        fused = str(Path(report.model).with_suffix("")) + "-fused.onnx"
        step = ("lint", report.model) if report.targets else (report.model, "-o", fused)
        say(NEXT + shlex.join(["fuse", *step]), screen)
    counted = f"{number(report.nodes, 'fused node')} against {', '.join(report.targets) or 'any target'}"
    found = number(len(report.findings), "finding") if report.findings else "no findings"
    if not report.nodes and not report.findings:
        counted, found = "nothing to lint, which is no pass", "no fused node"
    screen.print(f"{counted}: {found}, {number(len(report.notes), 'note')}")


def _folder(report: FuseReport) -> str:
    """Where ``--extract`` wrote."""
    return str(Path(report.extracted[0]).parent)


def status_counts(report: FuseReport) -> dict[str, int]:
    """How many sites have each status, of those that any has."""
    statuses = [str(status_text(site)) for site in report.sites]
    return {status: statuses.count(status) for status in (*STATUS_STYLES, LEFT_OUT) if status in statuses}


def _node_change(report: FuseReport, became: str, went: str, came: str) -> str:
    """How many nodes there were and are, and where more or fewer go than the sites have, why."""
    text = f"{number(report.nodes_before, 'node')} {became} {report.nodes_after}"
    taken = [site for site in report.sites if site.removed]
    own, gone, new = (sum(getattr(site, name) for site in taken) for name in ("nodes", "removed", "added"))
    rest = report.nodes_after - (report.nodes_before - gone + new) if taken else 0
    # Calls of functions that became their nodes, and nodes in the form of a later opset.
    more = f", {rest:+d} elsewhere" if rest else ""
    if gone > own:
        fed = number(gone - own, "node")
        return f"{text}: {own} of the sites and {fed} that only fed them {went}, {new} {came}{more}"
    if gone < own:
        shared = "the rest they share, or others read it"
        return f"{text}: {gone} of the {own} of the sites {went} ({shared}), {new} {came}{more}"
    return text


def summary(report: FuseReport) -> str:
    """The last line: what was done, or why nothing was."""
    counts = status_counts(report)
    found = ", ".join(f"{count} {status}" for status, count in counts.items()) or "no site found"
    spent = report.seconds.get("total", sum(report.seconds.values()))
    if report.exit == 0 and report.output is not None and "fused" in counts:
        change = _node_change(report, "became", "went", "came")
        return f"{found}; {change}; wrote {report.output} for {report.target} in {spent:.1f} s"
    if report.extracted:
        return f"{found}; {number(len(report.extracted), 'file')} extracted to {_folder(report)} in {spent:.1f} s"
    change = _node_change(report, "would become", "would go", "would come")
    told = f"{found}; {change}" if not report.exit and report.nodes_after != report.nodes_before else found
    return f"{told}; no model written ({spent:.1f} s)"
