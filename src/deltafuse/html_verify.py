"""``--html FILE``: the report of ``fuse verify`` as one page that needs nothing else, in light and in dark."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from deltafuse.divergence import DivergenceReport
from deltafuse.files import atomic
from deltafuse.html_base import environment
from deltafuse.plots import Series, log_plot
from deltafuse.rollout import RolloutReport
from deltafuse.tables_verify import run_sentences, verify_summary
from deltafuse.verify import VerifyReport

__all__ = ["page", "write_page"]


@dataclass(frozen=True)
class _Graph:
    """One graph's report, the plot of its sites, and what is said of both levels as on the terminal."""

    title: str
    report: VerifyReport
    plot: str | None
    summary: str
    network: tuple[str, ...]


def write_page(report: VerifyReport, path: Path) -> None:
    """Writes the page.

    Raises:
        UserError: see `deltafuse.files.check_output`.
    """
    with atomic(path) as file:
        file.write(page(report).encode())


def page(report: VerifyReport) -> str:
    """The page as text."""
    rollout = None if report.task is None else report.task.rollout
    template = environment().get_template("verify.html.j2")
    return template.render(
        report=report,
        graphs=list(_graphs(report)),
        drift=None if rollout is None else _drift_plot(rollout),
        passed=report.exit == 0,
    )


def _graphs(report: VerifyReport) -> Iterable[_Graph]:
    named = [("prefill", report.prefill), ("decode", report.decode), ("", None if report.unfused is None else report)]
    for title, graph in named:
        if graph is not None:
            divergence = None if graph.network is None else graph.network.divergence
            plot = None if divergence is None else _site_plot(divergence)
            said = () if graph.network is None else tuple(run_sentences(graph.network))
            yield _Graph(title, graph, plot, verify_summary(graph), said)


def _site_plot(divergence: DivergenceReport) -> str:
    """Error per site: fed the unfused model's own values, and in the fused run."""
    sites = divergence.sites
    isolated = [0.0 if site.isolated is None else site.isolated.nrmse for site in sites]
    lines = [
        # Where both are the same, a ring of the first is seen around the second.
        Series("accumulated", [site.accumulated.nrmse for site in sites], "second", dot=5.5),
        Series("isolated", isolated, "first", dot=3.5),
    ]
    labels = [site.name for site in sites]
    return log_plot("NRMSE per site", lines, labels, divergence.nrmse)


def _drift_plot(rollout: RolloutReport) -> str:
    """Drift per step of each recurrent state, without rounding and with it."""
    colours = {"exact": "first", "rounded": "second"}
    lines = [
        Series(f"{drift.name}, {run.precision}", drift.nrmse, colours[run.precision])
        for run in rollout.runs
        for drift in run.drift
    ]
    steps = max((len(line.values) for line in lines), default=0)
    # Outputs have a value less than states, which have one before the first step.
    lines = [Series(one.name, [0.0] * (steps - len(one.values)) + list(one.values), one.colour) for one in lines]
    bar = max((run.nrmse for run in rollout.runs if run.precision == "rounded"), default=None)
    return log_plot("NRMSE of the recurrent states per step", lines, [str(step) for step in range(steps)], bar)
