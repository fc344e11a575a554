"""``--html FILE`` of ``fuse`` and ``fuse inspect``: what was found, why, and what becomes of it, as one page.

The page needs nothing else, no network either. Its top is plain HTML; sites are made when they are opened, from data
that lies in the page, and their pictures are laid out then, by Graphviz in a worker.
"""

from __future__ import annotations

import base64
from pathlib import Path

from deltafuse.evidence import Evidence
from deltafuse.files import atomic
from deltafuse.html_base import asset, embedded_json, environment, packed
from deltafuse.layer_map import layer_map
from deltafuse.match import FuseReport
from deltafuse.page_pictures import Pictures
from deltafuse.page_sites import lines, sites
from deltafuse.page_summary import bars, ends, facts
from deltafuse.tables import STATUS_STYLES, sentences

__all__ = ["page", "write_page"]

#: Graphviz as one JavaScript file, as it is published, compressed; see NOTICE.
LAYOUT = "viz-3.31.0.js.gz"
#: Scripts of the page, in the order they are run.
SCRIPTS = ("elements.js", "picture.js", "sites.js", "page.js")


def write_page(path: Path, report: FuseReport, evidence: Evidence) -> None:
    """Writes the page."""
    with atomic(path) as file:
        file.write(page(report, evidence).encode())


def page(report: FuseReport, evidence: Evidence) -> str:
    """The page as text."""
    pictures = Pictures(evidence)
    details = sites(evidence, report.sites, pictures)
    counts = {status: sum(site.status == status for site in report.sites) for status in STATUS_STYLES}
    shown = bars(report)
    template = environment().get_template("fuse.html.j2")
    return template.render(
        report=report,
        counts={status: count for status, count in counts.items() if count},
        said=list(sentences(report, reasons=False, steps=False)),
        facts=facts(evidence, report),
        ends=ends(evidence, report),
        bars=shown,
        longest=max((max(bar.before, bar.after) for bar in shown), default=1),
        layers=layer_map(evidence, report.sites),
        lines=embedded_json(lines(report.sites)),
        details=packed({"sites": details, "pictures": pictures.documents}),
        layout=base64.b64encode(asset(LAYOUT)).decode(),
        worker=embedded_json(asset("layout.js").decode()),
        scripts=[asset(name).decode() for name in SCRIPTS],
    )
