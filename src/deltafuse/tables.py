"""What people read on the terminal: the same reports as the JSON documents, as tables and sentences."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from deltafuse.expression_match import ExpressionMatch
from deltafuse.match import Dims, FuseReport, Match, Pinned, SiteReport, Validity
from deltafuse.report import dim, roles_text

if TYPE_CHECKING:
    from deltafuse.lint import LintReport
    from deltafuse.probing import Listing, NodeRow, TensorRow

STATUS_STYLES = {"fused": "green", "match": "green", "refused": "red", "near-miss": "yellow"}
#: Width where the output goes to a file or another program: nothing is wrapped there.
PIPED_WIDTH = 250
#: Below this a table is given up for one short block per site.
NARROW = 90

SITE_COLUMNS = ("site", "status", "rule", "form", "operator", "dims", "scale", "l2 norm", "tokens", "error")

TENSOR_COLUMNS = ("tensor", "dtype", "shape", "bytes", "written by", "readers", "external data")
NODE_COLUMNS = ("node", "operator", "name", "inputs", "outputs")


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
        return (site.name, status, site.rule, *[""] * (len(SITE_COLUMNS) - 3))
    if isinstance(match, ExpressionMatch):
        found = (match.rule, match.form, site.op or "", roles_text(match))
        return (site.name, status, *found, "", "", "", f"{match.proof.max_error:.1e}")
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
    for text, names in _grouped([(f"it lies inside {site.inside}", site.name) for site in report.sites if site.inside]):
        yield f"{names}: {text}"
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


def print_listing(listing: Listing, out: TextIO) -> None:
    """The tables of ``inspect --tensors --nodes --op``: plain text, since a graph may have 200,000 rows."""
    parts: list[Iterator[str]] = []
    if listing.tensors is not None:
        parts.append(columns(TENSOR_COLUMNS, [_tensor_row(row) for row in listing.tensors]))
    if listing.nodes is not None:
        parts.append(columns(NODE_COLUMNS, [_node_row(row) for row in listing.nodes]))
    if listing.ops is not None:
        parts.append(columns(("operator", "count"), [(op, str(count)) for op, count in listing.ops.items()]))
    for part in parts:
        out.writelines(f"{line}\n" for line in part)
        out.write("\n")
    out.writelines(f"note: {note}\n" for note in listing.notes)
    opsets = ", ".join(f"{domain or 'ai.onnx'} {version}" for domain, version in listing.opsets.items())
    counts = [f"{len(rows)} {name} listed" for name, rows in _rows(listing)]
    out.write(f"{'; '.join([f'{listing.node_count} nodes', *counts])}; opset {opsets}\n")


def columns(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines of a table, each column as wide as its widest cell; the last is not filled up."""
    widths = [max(map(len, cells)) for cells in zip(headings, *rows, strict=True)]
    for row in (headings, *rows):
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _rows(listing: Listing) -> Iterator[tuple[str, Sequence[object]]]:
    if listing.tensors is not None:
        yield "tensors", listing.tensors
    if listing.nodes is not None:
        yield "nodes", listing.nodes


def _tensor_row(row: TensorRow) -> tuple[str, ...]:
    shape = "?" if row.shape is None else f"[{', '.join('?' if size is None else str(size) for size in row.shape)}]"
    written = row.kind if row.producer is None else f"{row.producer} {row.producer_op}"
    where = "" if row.location is None else f"{row.location} at {row.offset}"
    size = "" if row.bytes is None else str(row.bytes)
    readers = f"{row.consumers} + output" if row.output else str(row.consumers)
    return row.name, row.dtype or "?", shape, size, written, readers, where


def _node_row(row: NodeRow) -> tuple[str, ...]:
    op = f"{row.domain}.{row.op}" if row.domain else row.op
    return str(row.index), op, row.name, ", ".join(row.inputs), ", ".join(row.outputs)


def print_lint(report: LintReport, screen: Console) -> None:
    """The report of ``fuse lint``."""
    for finding in report.findings:
        where = f"{finding.node}, {finding.part}" if finding.part else finding.node
        screen.print(f"{finding.code}: {where}: found {finding.found}; wanted {finding.wanted}; {finding.fix}")
    for note in report.notes:
        screen.print(f"note, {note.node}: {note.found}")
    counted = f"{report.nodes} fused nodes against {', '.join(report.targets)}"
    screen.print(f"{counted}: {len(report.findings) or 'no'} findings, {len(report.notes)} notes")


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
