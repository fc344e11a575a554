"""What people read of ``fuse verify``: sites, whole models and the task level, as tables and sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from deltafuse.tables_causes import print_causes, print_divergence, print_masks
from deltafuse.tables_fit import hanging, print_table
from deltafuse.verify_tolerances import EXACT, Bar
from deltafuse.wording import grouped, number, of_sites

if TYPE_CHECKING:
    from deltafuse.network_diff import OutputVerdict, Top1
    from deltafuse.rollout import LossReport, RolloutReport, TaskReport
    from deltafuse.rollout_diff import RolloutRun
    from deltafuse.verify import NetworkReport, VerifyReport
    from deltafuse.verify_trial import Finding, SiteVerdict

#: ``error`` is in double; the last two are what rounding at the target's precision adds.
VERIFY_COLUMNS = ("site", "verdict", "error", "draws", "tokens", "rounding nrmse", "rounding max abs")

#: ``worst`` is the element that differs most: its index, the unfused and the fused value.
NETWORK_COLUMNS = ("output", "verdict", "type", "cosine", "nrmse", "max abs", "worst: unfused, fused")
#: NRMSE of the fused pair: after the prefill, at the end, at most, and step by step.
ROLLOUT_COLUMNS = ("fused pair", "state", "first nrmse", "last", "most", "drift")
_LARGEST = "the largest difference of one number"
BARS = "▁▂▃▄▅▆▇█"


def bar_text(bar: Bar) -> str:
    """The bar and what it asks for."""
    return f"the bar ({bar.title}): {bar.values}"


def legend(report: VerifyReport) -> Iterator[str]:
    """What the columns of the tables mean that a report has, and the bar."""
    network, rounded = report.network, any(site.rounding is not None for site in report.sites)
    if report.sites:
        yield f"error: of a site alone, on drawn operands in double: largest relative difference, at most {EXACT:g}"
    if rounded:
        yield "rounding: the same at the target's precision; nrmse is held to the bar, max abs to none"
    if rounded or network is not None:
        yield f"nrmse: root mean square of the difference over that of the unfused values; max abs: {_LARGEST}"
    if network is not None and network.divergence is not None:
        yield (
            "isolated: the site in the whole model, fed the unfused model's own values; accumulated: in the fused run, "
            "with what came before it"
        )
    if report.bar is not None and (rounded or network is not None):
        yield bar_text(report.bar)


def print_verify(report: VerifyReport, screen: Console) -> None:
    """The report of ``fuse verify``."""
    for name, graph in (("prefill", report.prefill), ("decode", report.decode)):
        if graph is not None:
            screen.print(f"{name}: {graph.unfused} and {graph.fused}", style="bold")
            print_verify(graph, screen)
            screen.print()
    if report.unrelated is not None:
        screen.print(unrelated_text(report.unrelated, len(report.findings) - 1))
        return
    _print_sites(report, screen)
    if report.network is not None:
        _print_network(report.network, screen)
    for sentence in network_sentences(report):
        screen.print(hanging(sentence, screen.width))
    if report.task is not None:
        print_task(report.task, screen)
    print_causes(report, screen)
    for line in legend(report):
        screen.print(hanging(line, screen.width))
    for note in report.notes:
        screen.print(f"note: {note}")
    if report.unfused is not None:
        screen.print(verify_summary(report))


def unrelated_text(found: Finding, others: int) -> str:
    """The one sentence of two files that are not of each other."""
    return f"{found.code}: {found.text}\nwhat follows from that is in --json: {number(others, 'finding')}"


def _print_sites(report: VerifyReport, screen: Console) -> None:
    if report.sites:
        print_table(VERIFY_COLUMNS, [_verdict_row(site) for site in report.sites], screen)
    for line in site_lines(report):
        screen.print(hanging(line, screen.width))


def site_lines(report: VerifyReport) -> Iterator[str]:
    """Why sites are not equal, what else differs, and notes on nodes; what holds for several sites is said once."""
    total = len(report.sites)
    reasons = [((site.reason.code, site.reason.text), site.name) for site in report.sites if site.reason is not None]
    for (code, text), names in grouped(reasons):
        yield f"{of_sites(names, total)} ({code}): {text}"
    for finding in (*report.findings, *(found for node in report.structure for found in node.findings)):
        yield f"{finding.code}: {finding.text}"
    for note, names in grouped((note, node.site) for node in report.structure for note in node.notes):
        yield f"note, {of_sites(names, total)}: {note}"


def verify_summary(report: VerifyReport) -> str:
    """The last line: how much of both levels holds."""
    equal = sum(site.verdict == "equal" for site in report.sites)
    text = f"{equal} of {number(len(report.sites), 'fused site')} equal"
    text += f"; {number(len(report.findings), 'other difference')}" if report.findings else ""
    wrong = sum(len(node.findings) for node in report.structure)
    text += f"; {number(wrong, 'fault of structure')}" if wrong else ""
    if report.network is not None:
        passed = sum(output.verdict == "passes" for output in report.network.outputs)
        text += f"; {passed} of {number(len(report.network.outputs), 'output of the whole model')} within the bar"
    return text


def network_sentences(report: VerifyReport) -> Iterator[str]:
    """What is to be said of the network level."""
    network = report.network
    if report.skipped is not None:
        level = "site level only" if report.unfused is not None else "no task level"
        yield f"{level} ({report.skipped.code}): {report.skipped.text}"
    if network is None:
        return
    for reason in (network.reason, *(output.reason for output in network.outputs)):
        if reason is not None:
            yield f"{reason.code}: {reason.text}"
    yield from run_sentences(network)


def run_sentences(network: NetworkReport) -> Iterator[str]:
    """What the whole models were fed, and how often they chose the same token."""
    for output in network.outputs:
        if output.top1 is not None:
            yield f"{output.name}: {top1_text(output.top1)}"
    fed = ", ".join(f"{item.name} {list(item.shape)} {item.role}" for item in network.inputs)
    yield f"inputs (seed {network.seed}): {fed}"


def top1_text(top1: Top1) -> str:
    """How often both models have the same most likely token, and by how much it leads."""
    agree = f"same most likely token in {top1.agree} of {number(top1.rows, 'row')}"
    text = f"{agree}; it leads by {top1.margin:.2g} or more"
    return text if top1.lost is None else f"{text}, where they differ by at most {top1.lost:.2g}"


def _print_network(network: NetworkReport, screen: Console) -> None:
    if network.outputs:
        print_table(NETWORK_COLUMNS, [_output_row(output) for output in network.outputs], screen)
    if network.divergence is not None:
        print_divergence(network.divergence, screen)
    if network.masks is not None:
        print_masks(network.masks, screen)


def _output_row(output: OutputVerdict) -> tuple[str | Text, ...]:
    verdict = Text(output.verdict, style="green" if output.verdict == "passes" else "red")
    shape = f"{output.dtype} {list(output.shape)}"
    cosine = "" if output.cosine is None else f"{output.cosine:.7f}"
    others = ("" if value is None else f"{value:.1e}" for value in (output.nrmse, output.max_abs))
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


def print_task(task: TaskReport, screen: Console) -> None:
    """The task level: what decode goes on with, and how far the fused pair drifts."""
    if task.rollout is not None:
        _print_rollout(task.rollout, screen)
    if task.loss is not None:
        screen.print(_loss_text(task.loss))
        if task.loss.reason is not None:
            screen.print(f"{task.loss.reason.code}: {task.loss.reason.text}")


def _print_rollout(rollout: RolloutReport, screen: Console) -> None:
    for pair in rollout.mapping:
        screen.print(f"state: {pair}")
    for note in rollout.fitted:
        screen.print(f"state changed to fit: {note}")
    rows = [row for run in rollout.runs for row in _run_rows(run)]
    if rows:
        print_table(ROLLOUT_COLUMNS, rows, screen)
    for run in rollout.runs:
        screen.print(_tokens_text(run, len(rollout.tokens)))
        if run.reason is not None:
            screen.print(f"{run.precision} ({run.reason.code}): {run.reason.text}")
    if rollout.reason is not None:
        screen.print(f"{rollout.reason.code}: {rollout.reason.text}")


def _run_rows(run: RolloutRun) -> Iterator[tuple[str, ...]]:
    curves = [("logits", run.logits)] if run.logits else []
    for name, curve in (*curves, *((drift.name, drift.nrmse) for drift in run.drift)):
        yield run.precision, name, f"{curve[0]:.1e}", f"{curve[-1]:.1e}", f"{max(curve):.1e}", sparkline(curve)


def sparkline(curve: Sequence[float], width: int = 32) -> str:
    """A curve as one line of text, from zero to its largest value."""
    finite = [value for value in curve if value < float("inf")]
    top = max(finite, default=0.0)
    step = max(1, -(-len(curve) // width))
    parts = [max(curve[at : at + step]) for at in range(0, len(curve), step)]
    return "".join(BARS[min(7, int(value / top * 7.999)) if top and value < float("inf") else 0] for value in parts)


def _tokens_text(run: RolloutRun, count: int) -> str:
    if not count:
        return f"{run.precision}: {run.verdict} ({run.bar})"
    text = f"{run.precision}: {run.verdict} ({run.bar}); {run.equal_tokens} of {number(count, 'token')} equal"
    first = run.first_difference
    if first is None:
        return text
    leads = f"{first.unfused} by {first.unfused_margin:.2g}, then {first.fused} by {first.fused_margin:.2g}"
    return f"{text}, the first that differs at step {first.step}: {leads}"


def _loss_text(loss: LossReport) -> str:
    fused = ", ".join(
        f"{value:.6f} {name}"
        for value, name in ((loss.exact, "without rounding"), (loss.rounded, "at the target's precision"))
        if value is not None
    )
    split = f"{loss.prefilled} through prefill"
    return f"loss per token over {number(loss.tokens, 'token')} ({split}): {loss.unfused:.6f} unfused; fused {fused}"
