"""``--html FILE`` of ``fuse`` and ``fuse inspect``: what was found, why, and what becomes of it, as one page.

The page needs nothing else, no network either. Its top is plain HTML; sites are made when they are opened, from data
that lies in the page, and their pictures are laid out then, by Graphviz in a worker.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path

from deltafuse.evidence import Evidence
from deltafuse.files import atomic
from deltafuse.html_base import asset, embedded_json, environment, packed
from deltafuse.layer_map import layer_map
from deltafuse.match import FuseReport
from deltafuse.page_pictures import Pictures
from deltafuse.page_sites import lines, sites
from deltafuse.page_summary import bars, changes, ends, facts, pins
from deltafuse.tables import sentences, status_counts

__all__ = ["page", "write_page"]

#: Graphviz as one JavaScript file, as it is published, compressed; see NOTICE.
LAYOUT = "viz-3.31.0.js.gz"
#: Scripts of the page, in the order they are run.
SCRIPTS = ("elements.js", "picture.js", "sites.js", "page.js")


def write_page(path: Path, report: FuseReport, evidence: Evidence, formulas: Mapping[str, str]) -> None:
    """Writes the page; arguments as `page` has them."""
    with atomic(path) as file:
        file.write(page(report, evidence, formulas).encode())


def page(report: FuseReport, evidence: Evidence, formulas: Mapping[str, str] | None = None) -> str:
    """The page as text.

    Args:
        report: of all sites.
        evidence: what is known beyond it.
        formulas: rule -> the template of its recurrence; nothing is told of a rule without one.
    """
    pictures = Pictures(evidence)
    details = sites(evidence, report.sites, pictures, formulas or {})
    shown = bars(report)
    template = environment().get_template("fuse.html.j2")
    return template.render(
        report=report,
        counts=status_counts(report),
        said=list(sentences(report, steps=False)),
        facts=facts(evidence, report),
        ends=ends(evidence, report),
        bars=shown,
        pins=pins(report),
        changed=changes(report),
        longest=max((max(bar.before, bar.after) for bar in shown), default=1),
        layers=layer_map(evidence, report.sites),
        lines=embedded_json(lines(report.sites)),
        details=packed({"sites": details, "pictures": pictures.documents}),
        layout=base64.b64encode(asset(LAYOUT)).decode(),
        worker=embedded_json(asset("layout.js").decode()),
        scripts=[asset(name).decode() for name in SCRIPTS],
    )
