"""What people read of causes: errors site by site, masks, bisections, ablations, reproductions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from deltafuse.tables_fit import print_table
from deltafuse.wording import number, some

if TYPE_CHECKING:
    from deltafuse.ablating import AblationReport
    from deltafuse.bisecting import BisectReport
    from deltafuse.divergence import DivergenceReport, FirstDivergence
    from deltafuse.masks import MaskReport
    from deltafuse.verify import VerifyReport

#: NRMSE of a site's worst tensor: fed the unfused model's own values, and in the fused run.
DIVERGENCE_COLUMNS = ("site in the model", "isolated nrmse", "accumulated nrmse", "accumulated max abs", "worst tensor")
#: NRMSE of the worst output of the site alone, with one decision undone.
ABLATION_COLUMNS = ("decision undone", "instead", "nrmse", "max abs")


#: Outputs that are told one by one.
_OUTPUTS = 6


def print_divergence(divergence: DivergenceReport, screen: Console) -> None:
    """Errors of all sites in the whole model, and the first tensor beyond tolerance."""
    rows = [
        (
            site.name,
            "" if site.isolated is None else f"{site.isolated.nrmse:.1e}",
            f"{site.accumulated.nrmse:.1e}",
            f"{site.accumulated.max_abs:.1e}",
            site.accumulated.tensor,
        )
        for site in divergence.sites
    ]
    print_table(DIVERGENCE_COLUMNS, rows, screen)
    if divergence.first is not None:
        screen.print(first_text(divergence.first, divergence.bar))


def first_text(first: FirstDivergence, bar: str) -> str:
    """Which tensor is the first beyond tolerance, and who is to blame."""
    blame = f"{first.site} itself" if first.blame == "site" else f"what came before {first.site}"
    return f"first beyond tolerance ({bar}): {first.tensor}, {first.failed}; {blame} is to blame"


def print_masks(masks: MaskReport, screen: Console) -> None:
    """The padded draws, and which outputs the mask reaches."""
    for draw in masks.draws:
        passed = sum(output.verdict == "passes" for output in draw.outputs)
        text = f"{draw.padding}-padded by {draw.tokens[0]} of {number(draw.tokens[1], 'token')}: "
        text += f"{passed} of {number(len(draw.outputs), 'output')} within the bar"
        names = ", ".join(draw.silent)
        text += f"; not compared, infinite or next to nothing under padding: {names}" if names else ""
        screen.print(text)
        for output in draw.outputs:
            if output.reason is not None:
                screen.print(f"{draw.padding}-padded, {output.reason.code}: {output.reason.text}")
    reached = some([reach.output for reach in masks.reach if reach.depends], _OUTPUTS) or "no output"
    others = some([reach.output for reach in masks.reach if not reach.depends], _OUTPUTS)
    screen.print(f"the mask reaches {reached}" + (f"; it does not reach {others}" if others else ""))


def print_causes(report: VerifyReport, screen: Console) -> None:
    """What was asked for to find a cause."""
    for ablation in report.ablations:
        _print_ablation(ablation, screen)
    if report.bisect is not None:
        _print_bisect(report.bisect, screen)
    reproduction = report.reproduction
    if reproduction is not None and reproduction.note is not None:
        screen.print(reproduction.note)
    elif reproduction is not None:
        screen.print(f"wrote {', '.join(reproduction.files)}; the fault of {reproduction.site} is shown by")
        screen.print(f"  {reproduction.command}")


def _print_ablation(ablation: AblationReport, screen: Console) -> None:
    rows = [
        (row.decision, row.instead, *("does not run" if n is None else f"{n:.2e}" for n in (row.nrmse, row.max_abs)))
        for row in ablation.rows
    ]
    if rows:
        screen.print(f"{ablation.site}, one decision undone in each row:")
        print_table(ABLATION_COLUMNS, rows, screen)
    if ablation.reason is not None:
        screen.print(f"{ablation.site} ({ablation.reason.code}): {ablation.reason.text}")


def _print_bisect(found: BisectReport, screen: Console) -> None:
    if not found.culprits:
        where = " of the main graph" if found.untried else ""
        screen.print(f"bisected in {number(found.runs, 'run')}: no site{where} moves an output beyond tolerance")
    for culprit in found.culprits:
        names = Text(", ".join(culprit.sites), style="red")
        runs = number(found.runs, "run")
        screen.print(Text.assemble(f"bisected in {runs}: ", names, f" breaks it: {culprit.reason.text}"))
    if found.untried:
        names = ", ".join(found.untried)
        screen.print(f"not bisected, inside bodies of If, Loop or Scan: {names}; read their own verdicts")
