"""``fuse verify``: each fused site of a file against the nodes it replaced, read from the two files alone.

No weights are needed. Both sides of a site run on the same draws: in double, where they must agree, and once more with
the fused side at the target's precision, where the difference is the target's rounding.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from deltafuse.errors import UserError
from deltafuse.options import DEFAULT_TIMEOUT, Progress, SilentProgress
from deltafuse.probe import Worker
from deltafuse.reasons import Reason
from deltafuse.verify_cut import Pair, Side, cut_pair, site_name
from deltafuse.verify_diff import compare
from deltafuse.verify_trial import Finding, Rounding, SiteVerdict, finding, judge
from deltafuse.wire import scan

__all__ = ["Finding", "Rounding", "SiteVerdict", "VerifyReport", "verify"]


@dataclass(frozen=True)
class VerifyReport:
    """Verdicts of all fused sites, and what else differs between the files."""

    unfused: str
    fused: str
    sites: tuple[SiteVerdict, ...]
    findings: tuple[Finding, ...]
    exit: int


def verify(
    unfused: Path, fused: Path, *, seconds: float = DEFAULT_TIMEOUT, progress: Progress | None = None
) -> VerifyReport:
    """Compares a fused file with the unfused one, site by site.

    Args:
        unfused: the model as exported.
        fused: what was made of it; pinned axes may differ.
        seconds: limit of one run.
        progress: told about stages.

    Returns:
        Exit 0 where all is equal, else 5.

    Raises:
        UserError: a file or a constant beside it cannot be read, or the second file has no fused site that the first
            lacks.
    """
    shown = progress or SilentProgress()
    shown.start("comparing")
    before, after = scan(unfused), scan(fused)
    difference = compare(before, after)
    if not difference.regions and not difference.findings:
        raise UserError(
            "nothing-fused",
            f"{fused} has no fused site that {unfused} lacks; give the unfused model first, then the fused",
        )
    sides = Side.of(before), Side.of(after)
    known: dict[bytes, SiteVerdict] = {}
    sites: list[SiteVerdict] = []
    shown.start("running sites")
    with Worker(seconds) as worker:
        for index, region in enumerate(difference.regions):
            pair = cut_pair(*sides, region)
            sites.append(_verdict(pair, site_name(after.graph, region), worker, known))
            shown.advance(index + 1, len(difference.regions))
    findings = tuple(finding(reason) for reason in difference.findings)
    failed = bool(findings) or any(site.verdict == "differs" for site in sites)
    return VerifyReport(str(unfused), str(fused), tuple(sites), findings, 5 if failed else 0)


def _verdict(pair: Pair | Reason, name: str, worker: Worker, known: dict[bytes, SiteVerdict]) -> SiteVerdict:
    if isinstance(pair, Reason) and pair.code.startswith("external-data"):
        raise UserError(pair.code, pair.text)
    if isinstance(pair, Reason):
        return SiteVerdict(name, "differs", None, None, 0, (), reason=finding(pair))
    if pair.key in known:
        return replace(known[pair.key], name=pair.name, shared_with=known[pair.key].name)
    known[pair.key] = judge(pair, worker)
    return known[pair.key]
