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
    from deltafuse.network_diff import OutputVerdict, Top1
    from deltafuse.probing import Listing, NodeRow, TensorRow
    from deltafuse.verify import NetworkReport, VerifyReport
    from deltafuse.verify_trial import SiteVerdict

STATUS_STYLES = {"fused": "green", "match": "green", "refused": "red", "near-miss": "yellow"}
#: Width where the output goes to a file or another program: nothing is wrapped there.
PIPED_WIDTH = 250
#: Below this a table is given up for one short block per site.
NARROW = 90

SITE_COLUMNS = ("site", "status", "rule", "form", "operator", "dims", "scale", "l2 norm", "tokens", "error")

TENSOR_COLUMNS = ("tensor", "dtype", "shape", "bytes", "written by", "readers", "external data")
NODE_COLUMNS = ("node", "operator", "name", "inputs", "outputs")

#: ``error`` is in double; the last two are what rounding at the target's precision adds.
VERIFY_COLUMNS = ("site", "verdict", "error", "draws", "tokens", "rounding nrmse", "max abs")

#: ``worst`` is the element that differs most: its index, the unfused and the fused value.
NETWORK_COLUMNS = ("output", "verdict", "type", "cosine", "nrmse", "max abs", "worst: unfused, fused")


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
    if report.network is not None:
        _print_network(report.network, screen)
    for sentence in network_sentences(report):
        screen.print(sentence)
    for note in report.notes:
        screen.print(f"note: {note}")
    screen.print(verify_summary(report))


def verify_summary(report: VerifyReport) -> str:
    """The last line: how much of both levels holds."""
    equal = sum(site.verdict == "equal" for site in report.sites)
    text = f"{equal} of {len(report.sites)} fused sites equal"
    text += f"; {len(report.findings)} other differences" if report.findings else ""
    if report.network is not None:
        passed = sum(output.verdict == "passes" for output in report.network.outputs)
        text += f"; {passed} of {len(report.network.outputs)} outputs of the whole model within the bar"
    return text


def network_sentences(report: VerifyReport) -> Iterator[str]:
    """What is to be said of the network level."""
    network = report.network
    if report.skipped is not None:
        yield f"site level only ({report.skipped.code}): {report.skipped.text}"
    if network is None:
        return
    for reason in (network.reason, *(output.reason for output in network.outputs)):
        if reason is not None:
            yield f"{reason.code}: {reason.text}"
    for output in network.outputs:
        if output.top1 is not None:
            yield f"{output.name}: {top1_text(output.top1)}"
    fed = ", ".join(f"{item.name} {list(item.shape)} {item.role}" for item in network.inputs)
    yield f"inputs (seed {network.seed}): {fed}"


def top1_text(top1: Top1) -> str:
    """How often both models have the same most likely token, and by how much it leads."""
    text = f"same first token in {top1.agree} of {top1.rows} rows; it leads by {top1.margin:.2g} or more"
    return text if top1.lost is None else f"{text}, where they differ by at most {top1.lost:.2g}"


def _print_network(network: NetworkReport, screen: Console) -> None:
    if network.outputs:
        screen.print(table(NETWORK_COLUMNS, [_output_row(output) for output in network.outputs]))


def _output_row(output: OutputVerdict) -> tuple[str | Text, ...]:
    verdict = Text(output.verdict, style="green" if output.verdict == "passes" else "red")
    shape = f"{output.dtype} {list(output.shape)}"
    cosine = "" if output.cosine is None else f"{output.cosine:.7f}"
    others = ("" if number is None else f"{number:.1e}" for number in (output.nrmse, output.max_abs))
    worst = output.worst
    at = "" if worst is None else f"{list(worst.index)}: {worst.unfused:.6g}, {worst.fused:.6g}"
    return output.name, verdict, shape, cosine, *others, at


def _verdict_row(site: SiteVerdict) -> tuple[str | Text, ...]:
    error = "" if site.error is None else f"{site.error:.1e}"
    low, high = min(site.tokens, default=0), max(site.tokens, default=0)
    tokens = "" if not site.tokens else str(low) if low == high else f"{low}..{high}"
    rounding = site.rounding
    rounded = ("", "") if rounding is None else (f"{rounding.nrmse:.1e}", f"{rounding.max_abs:.1e}")
    verdict = Text(site.verdict, style="green" if site.verdict == "equal" else "red")
    return site.name, verdict, error, str(site.draws), tokens, *rounded


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
