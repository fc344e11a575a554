"""``fuse inspect``: sites as a tree or in detail, tables of the graph, each site as files of its own."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, get_args

from deltafuse.children import early
from deltafuse.commands import fuse_options, refuse_page, show, show_fuse
from deltafuse.console import progress
from deltafuse.errors import UserError
from deltafuse.match import FuseReport
from deltafuse.options import Operator
from deltafuse.report import Document, listing_document


def inspect(given: argparse.Namespace) -> int:
    """What the command line asks for."""
    forced = [op for op in given.op if op in get_args(Operator)]
    types = [op for op in given.op if op not in forced]
    given.op = forced[-1] if forced else None
    given.sites = [*given.sites, *given.detail]
    tables = given.tensors is not None or given.nodes is not None or types
    if given.model.is_dir():
        return _folder(given, bool(tables))
    listed: Document = {}
    if tables:
        listed = _list(given, types)
        if not (given.sites or given.extract or given.netron or given.html):
            return show(given.json, listed, ())
    if not given.netron:
        return _sites(given, listed)
    _check_netron()
    with tempfile.TemporaryDirectory(prefix="deltafuse-") as folder:
        given.extract = given.extract or Path(folder)
        return _sites(given, listed)


def _sites(given: argparse.Namespace, listed: Document) -> int:
    options = fuse_options(given)
    with early(str(options.model), "" if given.json else "deltafuse.tables") as begun:
        from deltafuse import pipeline

        with progress() as shown:
            report = pipeline.inspect(options, shown, begun)
    if given.extract and not report.extracted:
        text = f"nothing was extracted to {given.extract}: only sites that could be fused are; --html FILE draws all"
        report = replace(report, notes=(*report.notes, text))
    code = _show(report, given, listed)
    if given.netron:
        _open_netron(report)
    return code


def _show(report: FuseReport, given: argparse.Namespace, listed: Document) -> int:
    if not given.detail:
        return show_fuse(report, given.json, listed, tree=True)
    from deltafuse.patterns import formulas
    from deltafuse.tables import console
    from deltafuse.tables_sites import print_details, recurrence_text

    templates = formulas(given.patterns)
    if given.json:
        texts = {
            site.name: recurrence_text(site.match, templates.get(site.match.rule, ""))
            for site in report.sites
            if site.match is not None
        }
        return show_fuse(report, True, {**listed, "recurrences": texts})
    names = [site.name for site in report.sites if any(fnmatchcase(site.name, glob) for glob in given.detail)]
    print_details(report, names, templates, console())
    return report.exit


def _folder(given: argparse.Namespace, tables: bool) -> int:
    from deltafuse import folder_commands

    refuse_page(given)
    if tables:
        raise UserError("usage", "--tensors, --nodes and --op TYPE are of one model: give the path of a model")
    if given.detail or given.netron:
        raise UserError("usage", "--site and --netron are of one model: give the path of a model, or take --sites")
    return folder_commands.inspect(fuse_options(given), given.json)


def _list(given: argparse.Namespace, types: Sequence[str]) -> Document:
    """Prints the tables that were asked for, or gives them as a document where that is to be printed."""
    from deltafuse.probing import listing

    found = listing(given.model, tensors=given.tensors, nodes=given.nodes, ops=types)
    if given.json:
        return listing_document(found)
    from deltafuse.tables_listing import print_listing

    print_listing(found, sys.stdout)
    return {}


def _check_netron() -> None:
    """Before the work: that the viewer is there."""
    if importlib.util.find_spec("netron") is None:
        text = "netron is not installed: pip install 'deltafuse[netron]'"
        raise UserError("netron-missing", f"{text}, or open what --extract DIR writes at netron.app")


def _open_netron(report: FuseReport) -> None:
    """Shows the first site before and after, each in a page of its own, until the user ends it."""
    if not report.extracted:
        sys.stderr.write("fuse: there is no site to show\n")
        return
    # It has no types, and is imported where it is asked for alone.
    viewer: Any = importlib.import_module("netron")
    stem = report.extracted[0].removesuffix(".before.onnx")
    for path in report.extracted:
        if path.startswith(f"{stem}.") and not path.endswith(".lowered.onnx"):
            viewer.start(path)
    viewer.wait()
