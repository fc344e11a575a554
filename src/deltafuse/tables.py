"""What people read on the terminal: the same reports as the JSON documents, as tables and sentences."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from deltafuse.match import Dims, FuseReport, Match, Pinned, SiteReport, Validity
from deltafuse.report import dim

if TYPE_CHECKING:
    from deltafuse.verify import VerifyReport
    from deltafuse.verify_trial import SiteVerdict

STATUS_STYLES = {"fused": "green", "match": "green", "refused": "red", "near-miss": "yellow"}
#: Width where the output goes to a file or another program: nothing is wrapped there.
PIPED_WIDTH = 250
#: Below this a table is given up for one short block per site.
NARROW = 90

SITE_COLUMNS = ("site", "status", "rule", "form", "operator", "dims", "scale", "l2 norm", "tokens", "error")

#: ``error`` is in double; the last two are what rounding at the target's precision adds.
VERIFY_COLUMNS = ("site", "verdict", "error", "draws", "tokens", "rounding nrmse", "max abs")


def console() -> Console:
    """Where results go: stdout; colours on terminals only (rich honours NO_COLOR)."""
    width = None if sys.stdout.isatty() else PIPED_WIDTH
    return Console(file=sys.stdout, highlight=False, markup=False, width=width)


def table(headings: Sequence[str], rows: Sequence[Sequence[str | Text]], title: str | None = None) -> Table:
    """A table without a frame, so that it reads the same in a file."""
    grid = Table(box=None, pad_edge=False, title=title, title_justify="left", title_style="bold", header_style="bold")
    for heading in headings:
        grid.add_column(heading, overflow="fold")
    for row in rows:
        grid.add_row(*row)
    return grid


def print_fuse(report: FuseReport, screen: Console) -> None:
    """The report of ``fuse`` and ``inspect``."""
    if report.sites:
        _print_sites(report.sites, screen)
    for sentence in sentences(report):
        screen.print(sentence)
    if report.pinned:
        screen.print(table(("pinned", "axis", "was", "now"), [_pinned_row(entry) for entry in report.pinned]))
    screen.print(summary(report))


def _print_sites(sites: Sequence[SiteReport], screen: Console) -> None:
    rows = [site_row(site) for site in sites]
    if screen.width >= NARROW:
        screen.print(table(SITE_COLUMNS, rows))
        return
    for row in rows:
        screen.print(Text.assemble(*_spaced(row)))


def _spaced(row: Sequence[str | Text]) -> Iterator[str | Text]:
    for cell, heading in zip(row, SITE_COLUMNS, strict=True):
        if not str(cell):
            continue
        yield cell if heading in {"site", "status", "operator"} else f"{heading} {cell}"
        yield "  "


def site_row(site: SiteReport) -> tuple[str | Text, ...]:
    """One line of the table of sites, a cell for each of `SITE_COLUMNS`."""
    status = Text(site.status, style=STATUS_STYLES.get(site.status, ""))
    match = site.match
    if match is None:
        return (site.name, status, *[""] * (len(SITE_COLUMNS) - 2))
    return (
        site.name,
        status,
        match.rule,
        match.form,
        site.op or "",
        dims_text(match.dims),
        f"{match.scale:.6g}",
        norm_text(match),
        valid_text(match.valid_tokens),
        f"{match.proof.max_error:.1e}",
    )


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


def sentences(report: FuseReport) -> Iterator[str]:
    """Reasons, then notes; one that several sites share is said once."""
    reasons = [
        (site.reason.text, f"{site.name} ({site.reason.code})") for site in report.sites if site.reason is not None
    ]
    for text, names in _grouped(reasons):
        yield f"{', '.join(names)}: {text}"
    notes = [(note, site.name) for site in report.sites for note in site.notes]
    for text, names in _grouped(notes):
        yield f"note, {', '.join(names)}: {text}"
    for note in report.notes:
        yield f"note: {note}"


def _grouped(pairs: Sequence[tuple[str, str]]) -> list[tuple[str, list[str]]]:
    grouped: dict[str, list[str]] = {}
    for text, name in pairs:
        grouped.setdefault(text, []).append(name)
    return list(grouped.items())


def _pinned_row(entry: Pinned) -> tuple[str, ...]:
    return entry.value, str(entry.axis), entry.was, str(entry.now)


def print_verify(report: VerifyReport, screen: Console) -> None:
    """The report of ``fuse verify``."""
    if report.sites:
        screen.print(table(VERIFY_COLUMNS, [_verdict_row(site) for site in report.sites]))
    for site in report.sites:
        if site.reason is not None:
            screen.print(f"{site.name} ({site.reason.code}): {site.reason.text}")
    for finding in report.findings:
        screen.print(f"{finding.code}: {finding.text}")
    equal = sum(site.verdict == "equal" for site in report.sites)
    others = f"; {len(report.findings)} other differences" if report.findings else ""
    screen.print(f"{equal} of {len(report.sites)} fused sites equal{others}")


def _verdict_row(site: SiteVerdict) -> tuple[str | Text, ...]:
    error = "" if site.error is None else f"{site.error:.1e}"
    low, high = min(site.tokens, default=0), max(site.tokens, default=0)
    tokens = "" if not site.tokens else str(low) if low == high else f"{low}..{high}"
    rounding = site.rounding
    rounded = ("", "") if rounding is None else (f"{rounding.nrmse:.1e}", f"{rounding.max_abs:.1e}")
    verdict = Text(site.verdict, style="green" if site.verdict == "equal" else "red")
    return site.name, verdict, error, str(site.draws), tokens, *rounded


def summary(report: FuseReport) -> str:
    """The last line: what was done, or why nothing was."""
    counts = {status: sum(site.status == status for site in report.sites) for status in STATUS_STYLES}
    found = ", ".join(f"{count} {status}" for status, count in counts.items() if count) or "no site found"
    spent = report.seconds.get("total", sum(report.seconds.values()))
    if report.exit == 0 and report.output is not None and counts["fused"]:
        change = f"{report.nodes_before} nodes became {report.nodes_after}"
        return f"{found}; {change}; wrote {report.output} for {report.target} in {spent:.1f} s"
    if report.extracted:
        return f"{found}; {len(report.extracted)} files extracted in {spent:.1f} s"
    return f"{found}; nothing written ({spent:.1f} s)"
