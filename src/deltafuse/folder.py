"""``fuse EXPORT_DIR -o OUT_DIR``: every model below a folder, and the pair of prefill and decode as a whole.

The layout is kept. A model without a site is copied as it is, and so is every other file; external data stays beside
its model, since its names are local to a folder. Nothing appears at the output unless all of it does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from deltafuse import outcome, pipeline, targets
from deltafuse.errors import UserError
from deltafuse.folder_pairing import Pairing, paired
from deltafuse.folder_pairs import Interface, Pair, interface, with_pins
from deltafuse.folder_tree import Stage, Tree, copy_rest, named, place, read_tree, staged
from deltafuse.match import FuseReport
from deltafuse.options import FuseOptions, Progress
from deltafuse.pin_names import unknown_symbol
from deltafuse.planning import check_names, left_out
from deltafuse.reasons import TEXTS, Reason
from deltafuse.wire import scan

TEXTS["data-shared"] = (
    "{models} keep weights in one file, {location}: names of external data are local to a graph, and what the target's "
    "converter writes for one overwrites the other's; put each model into a folder of its own, with a copy of the file"
)

#: Runs one model.
Run = Callable[[FuseOptions, Progress], FuseReport]


@dataclass(frozen=True)
class Entry:
    """One model of the folder.

    Attributes:
        name: path below the folder.
        outcome: ``fused`` (written), ``copied`` (written as it was), ``match`` (can be fused, nothing was written),
            or why it cannot: ``refused`` (written as it was, where anything is), ``near-miss``, ``left out``,
            ``fused already``, ``no site``.
        report: as for a single model.
    """

    name: str
    outcome: str
    report: FuseReport


@dataclass(frozen=True)
class FolderReport:
    """What became of a folder.

    Attributes:
        source, output: the folders; the output is None where nothing was written.
        pairs: each decode and its prefill, and whether the states fit.
        notes: a prefill or decode without a partner, and why nothing was written where something could be.
        copied: files that were taken over byte for byte.
        seconds: all in all.
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


def fuse_folder(options: FuseOptions, progress: Progress) -> FolderReport:
    """Fuses all models below a folder into a new one; see `FuseOptions`, where ``model`` and ``output`` are folders.

    Returns:
        Exit 0 where at least one model was fused and no other is refused; 3 where no model has a site; else 4: a model
        is refused, or the states of a prefill do not fit its decode. Only with exit 0 something is written, which
        ``keep_going`` makes of 4 where any model can be fused.

    Raises:
        UserError: what a single model raises, with its name; ``no-models``, ``output-not-empty`` and others of the
            output folder.
    """
    begin, tree = time.perf_counter(), read_tree(options.model)
    writing = options.output is not None and not options.dry_run
    stage = staged(options.model, options.output) if writing and options.output else nullcontext()
    with stage as open_stage:
        reports = _run_all(options, progress, tree, open_stage, pipeline.fuse)
        report = _report(options, tree, reports)
        if open_stage is None or report.exit:
            report = report if options.dry_run and not report.exit else _unwritten(report)
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
) -> dict[str, tuple[FuseReport, Interface]]:
    """Each model's report and interface, as it is afterwards."""
    before = {name: interface(named(name, lambda name=name: scan(tree.root / name))) for name in tree.models}
    declared = frozenset[str]().union(*(known.symbols for known in before.values()))
    for symbol, size in options.pins:
        if symbol not in declared:
            raise unknown_symbol(symbol, size, declared)
    found: dict[str, tuple[FuseReport, Interface]] = {}
    for name in tree.models:
        own = replace(
            options,
            model=tree.root / name,
            output=None if stage is None else place(stage.path, name),
            dry_run=stage is None,
            pins=tuple(pin for pin in options.pins if pin[0] in before[name].symbols),
            extract=None if options.extract is None else options.extract / Path(name).with_suffix(""),
        )
        report = named(name, lambda own=own: _run(own, progress, run))
        found[name] = report, before[name] if report.exit else with_pins(before[name], report.pinned)
    check_names(options, {site.name for report, _ in found.values() for site in report.sites})
    return found


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


def _report(options: FuseOptions, tree: Tree, found: dict[str, tuple[FuseReport, Interface]]) -> FolderReport:
    """What the models come to together."""
    joined = paired({name: seen for name, (_, seen) in found.items()})
    fits = not any(pair.differences for pair in joined.pairs)
    code = exit_of([report.exit for report, _ in found.values()], fits=fits, keep_going=options.keep_going)
    entries = tuple(Entry(name, _outcome(report), report) for name, (report, _) in found.items())
    notes = (*(reason.text for reason in joined.alone), *_notes(options, entries, joined))
    if code == 0 and targets.get(options.target).lint.own_data:
        notes += tuple(_shared_data({name: seen for name, (report, seen) in found.items() if not report.exit}))
    return FolderReport(str(tree.root), None, options.target, entries, joined.pairs, (), notes, 0.0, code)


def exit_of(exits: Collection[int], *, fits: bool, keep_going: bool) -> int:
    """The exit of a folder.

    Args:
        exits: of its models, each as if it were fused alone with the same options.
        fits: whether the states of each prefill fit its decode.
        keep_going: whether what can be fused is written whatever else is there.

    Returns:
        With `keep_going` the best of all; else 4 where a model has it or states do not fit, and 3 where all have it.
    """
    if keep_going and 0 in exits:
        return 0
    if 4 in exits or (0 in exits and not fits):
        return 4
    return 0 if 0 in exits else 3


def _shared_data(fused: Mapping[str, Interface]) -> Iterator[str]:
    """What to say of models in one folder that keep their weights in one file."""
    users: dict[tuple[PurePosixPath, str], list[str]] = {}
    for name, seen in fused.items():
        for location in sorted(seen.data):
            users.setdefault((PurePosixPath(name).parent, location), []).append(name)
    for (_, location), names in users.items():
        if len(names) > 1:
            yield Reason("data-shared", {"models": " and ".join(names), "location": location}).text


def _outcome(report: FuseReport) -> str:
    if report.exit in (0, 4):
        return "match" if report.exit == 0 else "refused"
    if any(note.startswith(outcome.ALREADY) for note in report.notes):
        return "fused already"
    statuses = {site.status for site in report.sites}
    return "near-miss" if "near-miss" in statuses else "left out" if statuses else "no site"


def _notes(options: FuseOptions, entries: tuple[Entry, ...], joined: Pairing) -> tuple[str, ...]:
    """Why nothing is written where something could be."""
    fine = [entry.name for entry in entries if entry.outcome == "match"]
    if not fine or options.keep_going or options.dry_run:
        return ()
    refused = [entry.name for entry in entries if entry.outcome == "refused"]
    what = f"{', '.join(refused)} cannot be fused" if refused else "the states do not fit"
    if not refused and not any(pair.differences for pair in joined.pairs):
        return ()
    return (f"nothing was written: {what}; give --keep-going to write {', '.join(fine)} all the same",)


def _unwritten(report: FolderReport) -> FolderReport:
    """The same where nothing is written: what would be fused is a match."""
    models = tuple(
        replace(entry, report=replace(entry.report, output=None, sites=outcome.shown(entry.report.sites)))
        for entry in report.models
    )
    return replace(report, models=models)


def _publish(report: FolderReport, tree: Tree, stage: Stage) -> FolderReport:
    """Adds all that was not fused and gives the folder its name."""
    fused = {entry.name for entry in report.models if entry.outcome == "match"}
    copied = tuple(name for name in (*tree.models, *tree.others) if name not in fused)
    copy_rest(tree, copied, stage.path)
    stage.publish()
    models = tuple(
        replace(
            entry,
            outcome={"match": "fused", "refused": "refused"}.get(entry.outcome, "copied"),
            report=replace(entry.report, output=str(stage.output / entry.name)),
        )
        for entry in report.models
    )
    return replace(report, output=str(stage.output), models=models, copied=copied)
