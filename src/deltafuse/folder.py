"""``fuse EXPORT_DIR -o OUT_DIR``: every model below a folder, and the pair of prefill and decode as a whole.

The layout is kept. A model without a site is copied as it is, and so is every other file; external data stays beside
its model, since its names are local to a folder. Nothing appears at the output unless all of it does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TypeVar

from deltafuse import outcome, pipeline, targets
from deltafuse.errors import UserError
from deltafuse.folder_pairing import Pairing, paired
from deltafuse.folder_pairs import Interface, Pair, interface, shared_data, with_pins
from deltafuse.folder_tree import Stage, Tree, copy_rest, named, place, read_tree, staged
from deltafuse.match import FuseReport
from deltafuse.options import FuseOptions, Progress
from deltafuse.pin_names import unknown_symbol
from deltafuse.planning import check_names, left_out
from deltafuse.wire import scan

_T = TypeVar("_T")
#: Outcomes that are told where anything is written, too, though the model is copied.
_KEPT = ("refused", "failed", "near-miss")
#: Runs one model.
Run = Callable[[FuseOptions, Progress], FuseReport]


@dataclass(frozen=True)
class Entry:
    """One model of the folder.

    Attributes:
        name: path below the folder.
        outcome: ``fused`` (written), ``copied`` (written as it was), ``match`` (can be fused, nothing was written),
            or why it cannot: ``refused``, ``failed`` or ``near-miss`` (written as it was, where anything is),
            ``left out``, ``fused already``, ``no site``.
        report: as for a single model, None where it failed.
        error: what a single model ends with, a file that is no model, say; None where it did not fail.
    """

    name: str
    outcome: str
    report: FuseReport | None
    error: UserError | None = None


@dataclass(frozen=True)
class _Result:
    """What became of one model, and its interface as it is afterwards, None where the file cannot be read."""

    became: FuseReport | UserError
    interface: Interface | None

    @property
    def exit(self) -> int:
        return 1 if isinstance(self.became, UserError) else self.became.exit


@dataclass(frozen=True)
class FolderReport:
    """What became of a folder.

    Attributes:
        source, output: the folders; the output is None where nothing was written.
        pairs: each decode and its prefill, and whether the states fit.
        notes: a prefill or decode without a partner, and why nothing was written where something could be.
        copied: files that were taken over byte for byte.
        seconds: all in all.
        exit: see `fuse_folder`.
    """

    source: str
    output: str | None
    target: str
    models: tuple[Entry, ...]
    pairs: tuple[Pair, ...]
    copied: tuple[str, ...]
    notes: tuple[str, ...]
    seconds: float
    exit: int

    @property
    def errors(self) -> tuple[UserError, ...]:
        """Those of the models that failed."""
        return tuple(entry.error for entry in self.models if entry.error is not None)


def fuse_folder(options: FuseOptions, progress: Progress) -> FolderReport:
    """Fuses all models below a folder into a new one; see `FuseOptions`, where ``model`` and ``output`` are folders.

    Returns:
        Exit 0 where at least one model was fused and no other is refused or a near miss; 1 where a model failed; 3
        where no site of any matches; else 4: a model is refused or a near miss, or the states of a prefill do not fit
        its decode. Only with exit 0 something is written, which ``keep_going`` makes of 4 where any model can be fused;
        with it they are with exit 1, too.

    Raises:
        UserError: what a single model raises, with its name, where all fail; ``no-models``, ``output-not-empty`` and
            others of the output folder.
    """
    begin, tree = time.perf_counter(), read_tree(options.model)
    writing = options.output is not None and not options.dry_run
    stage = staged(options.model, options.output) if writing and options.output else nullcontext()
    with stage as open_stage:
        reports = _run_all(options, progress, tree, open_stage, pipeline.fuse)
        report = _report(options, tree, reports)
        fine = _writes(options, report)
        if open_stage is None or not fine:
            report = report if options.dry_run and fine else _unwritten(report)
            return replace(report, seconds=time.perf_counter() - begin)
        progress.start("copying")
        report = _publish(report, tree, open_stage)
    return replace(report, seconds=time.perf_counter() - begin)


def inspect_folder(options: FuseOptions, progress: Progress) -> FolderReport:
    """Shows the sites of all models below a folder, and writes nothing but what ``extract`` asks for."""
    begin, tree = time.perf_counter(), read_tree(options.model)
    found = _run_all(options, progress, tree, None, pipeline.inspect)
    report = _report(replace(options, dry_run=True), tree, found)
    return replace(_unwritten(report), seconds=time.perf_counter() - begin)


def _run_all(
    options: FuseOptions, progress: Progress, tree: Tree, stage: Stage | None, run: Run
) -> dict[str, _Result]:
    """What becomes of each model.

    Raises:
        UserError: the error of a run where all models have one: that of the options, as a rule.
    """
    tried = {name: _tried(name, lambda name=name: interface(scan(tree.root / name))) for name in tree.models}
    before = {name: seen for name, seen in tried.items() if isinstance(seen, Interface)}
    declared = frozenset[str]().union(*(known.symbols for known in before.values()))
    for symbol, size in options.pins:
        if symbol not in declared:
            raise unknown_symbol(symbol, size, declared)
    found = {name: _Result(seen, None) for name, seen in tried.items() if isinstance(seen, UserError)}
    for name, seen in before.items():
        own = replace(
            options,
            model=tree.root / name,
            output=None if stage is None else place(stage.path, name),
            dry_run=stage is None,
            pins=tuple(pin for pin in options.pins if pin[0] in seen.symbols),
            extract=None if options.extract is None else options.extract / Path(name).with_suffix(""),
        )
        became = _tried(name, lambda own=own: _run(own, progress, run))
        pinned = became.pinned if isinstance(became, FuseReport) and not became.exit else ()
        found[name] = _Result(became, with_pins(seen, pinned))
    reports = [one.became for one in found.values() if isinstance(one.became, FuseReport)]
    if not reports:
        # Files that cannot be read come first: an error of the others tells more.
        raise [one.became for one in found.values() if isinstance(one.became, UserError)][-1]
    check_names(options, {site.name for report in reports for site in report.sites})
    return {name: found[name] for name in tree.models}


def _tried(name: str, run: Callable[[], _T]) -> _T | UserError:
    """What one model gives, or what is wrong with it."""
    try:
        return named(name, run)
    except UserError as error:
        return error


def _run(options: FuseOptions, progress: Progress, run: Run) -> FuseReport:
    """Runs one model; a site's name that another model has need not be in this one."""
    try:
        return run(options, progress)
    except UserError as error:
        if error.code != "site-unknown":
            raise
    seen = pipeline.inspect(replace(options, output=None, sites=(), skip_sites=(), extract=None), progress)
    names = [site.name for site in seen.sites]
    sites, skipped = (
        tuple(glob for glob in globs if any(fnmatchcase(name, glob) for name in names))
        for globs in (options.sites, options.skip_sites)
    )
    if not options.sites or sites:
        return run(replace(options, sites=sites, skip_sites=skipped), progress)
    reason = left_out("--sites")
    left = tuple(replace(one, op=None, reason=reason) if one.status == "match" else one for one in seen.sites)
    return replace(seen, sites=left, pinned=(), nodes_after=seen.nodes_before, exit=3)


def _report(options: FuseOptions, tree: Tree, found: Mapping[str, _Result]) -> FolderReport:
    """What the models come to together."""
    read = {name: one.interface for name, one in found.items() if one.interface is not None}
    joined = paired(read)
    fits = not any(pair.differences for pair in joined.pairs)
    entries = tuple(_entry(name, one.became) for name, one in found.items())
    near = bool(_near(options, entries))
    code = exit_of([one.exit for one in found.values()], fits=fits, near=near, keep_going=options.keep_going)
    notes = (*(reason.text for reason in joined.alone), *_notes(options, entries, joined))
    report = FolderReport(str(tree.root), None, options.target, entries, joined.pairs, (), notes, 0.0, code)
    if not _writes(options, report) or not targets.get(options.target).lint.own_data:
        return report
    shared = shared_data({name: seen for name, seen in read.items() if not found[name].exit})
    return replace(report, notes=(*notes, *shared))


def _entry(name: str, became: FuseReport | UserError) -> Entry:
    failed = isinstance(became, UserError)
    return Entry(name, "failed", None, became) if failed else Entry(name, _outcome(became), became)


def _writes(options: FuseOptions, report: FolderReport) -> bool:
    """Whether something is written, where an output is given."""
    return not report.exit or (options.keep_going and any(entry.outcome == "match" for entry in report.models))


def exit_of(exits: Collection[int], *, fits: bool, near: bool, keep_going: bool) -> int:
    """The exit of a folder.

    Args:
        exits: of its models, each as if it were fused alone with the same options.
        fits: whether the states of each prefill fit its decode.
        near: whether a model has a near miss and nothing that matches.
        keep_going: whether what can be fused is written whatever else is there.

    Returns:
        1 where a model has it; with `keep_going` the best of all others; else 4 where a model has it, or beside a 0 one
        is a near miss or states do not fit; and 3 where all have it.
    """
    if 1 in exits:
        return 1
    if keep_going and 0 in exits:
        return 0
    if 4 in exits or (0 in exits and (near or not fits)):
        return 4
    return 0 if 0 in exits else 3


def _outcome(report: FuseReport) -> str:
    if report.exit in (0, 4):
        return "match" if report.exit == 0 else "refused"
    if any(note.startswith(outcome.ALREADY) for note in report.notes):
        return "fused already"
    statuses = {site.status for site in report.sites}
    return "near-miss" if "near-miss" in statuses else "left out" if statuses else "no site"


def _near(options: FuseOptions, entries: Sequence[Entry]) -> list[str]:
    """The models that have a near miss which was asked for, and nothing that matches."""
    reports = [(entry.name, entry.report) for entry in entries if entry.outcome == "near-miss"]
    return [name for name, report in reports if report is not None and any(outcome.blocking(options, report.sites))]


def _notes(options: FuseOptions, entries: tuple[Entry, ...], joined: Pairing) -> tuple[str, ...]:
    """Why nothing is written where something could be."""
    fine = [entry.name for entry in entries if entry.outcome == "match"]
    if not fine or options.keep_going or options.dry_run:
        return ()
    refused, failed = ([entry.name for entry in entries if entry.outcome == kind] for kind in ("refused", "failed"))
    near = _near(options, entries)
    have = "has" if len(near) == 1 else "have"
    told = {"failed": failed, "cannot be fused": refused, f"{have} near misses alone": near}
    what = [f"{', '.join(names)} {how}" for how, names in told.items() if names]
    if not what and any(pair.differences for pair in joined.pairs):
        what = ["the states do not fit"]
    sites = {entry.name: {site.name for site in entry.report.sites} for entry in entries if entry.report is not None}
    # A site of that name in a model that is fine would be left too.
    skips = near and not (refused or failed) and not any(sites[name] & sites[one] for name in near for one in fine)
    more = ", or name what to leave with --skip-sites" if skips else ""
    going = f"give --keep-going to write {', '.join(fine)} all the same{more}"
    return (f"nothing was written: {' and '.join(what)}; {going}",) if what else ()


def _unwritten(report: FolderReport) -> FolderReport:
    """The same where nothing is written: what would be fused is a match."""

    def unwritten(one: FuseReport | None) -> FuseReport | None:
        return None if one is None else replace(one, output=None, sites=outcome.shown(one.sites))

    return replace(report, models=tuple(replace(entry, report=unwritten(entry.report)) for entry in report.models))


def _publish(report: FolderReport, tree: Tree, stage: Stage) -> FolderReport:
    """Adds all that was not fused and gives the folder its name."""
    fused = {entry.name for entry in report.models if entry.outcome == "match"}
    copied = tuple(name for name in (*tree.models, *tree.others) if name not in fused)
    copy_rest(tree, copied, stage.path)
    stage.publish()
    models = tuple(
        replace(
            entry,
            outcome={"match": "fused"}.get(entry.outcome, entry.outcome if entry.outcome in _KEPT else "copied"),
            report=entry.report and replace(entry.report, output=str(stage.output / entry.name)),
        )
        for entry in report.models
    )
    return replace(report, output=str(stage.output), models=models, copied=copied)
