"""The commands where they are given folders: one summary table, or one JSON document with ``models``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from deltafuse.console import progress
from deltafuse.errors import UserError
from deltafuse.folder import Entry, FolderReport, fuse_folder, inspect_folder
from deltafuse.folder_pairs import Pair
from deltafuse.folder_undo import Compared, FolderRollback, FolderVerify, Restored, rollback_folder, verify_folders
from deltafuse.foreign import load_lowering
from deltafuse.inputs import InputOptions
from deltafuse.limits import within
from deltafuse.options import FuseOptions
from deltafuse.report import SCHEMA, Document, failure, fuse_document, plain_document, reason_document, write
from deltafuse.tables import console, say, sentences
from deltafuse.tables_fit import hanging, print_table
from deltafuse.tables_pins import pinned_symbols
from deltafuse.tables_verify import bar_text, site_lines, unrelated_text, verify_summary
from deltafuse.verify import Settings, VerifyReport, check
from deltafuse.verify_bars import Overrides
from deltafuse.wording import number, some

#: Options of verify that are of two models: attribute -> option.
_OF_FILES = {
    "inputs": "--inputs", "save_inputs": "--save-inputs", "prefill": "--prefill", "decode": "--decode",
    "rollout": "--rollout", "prompt": "--prompt", "nll": "--nll", "maps": "--map", "bisect": "--bisect",
    "ablate": "--ablate", "minimize": "--minimize", "html": "--html",
}  # fmt: skip
#: Those that need a prefill and a decode by name.
_OF_PAIRS = frozenset({"rollout", "prompt", "nll", "maps"})
#: How many pinned symbols the table shows of a model.
PINS = 3
COLUMNS = ("model", "outcome", "sites", "operators", "nodes before", "after", "pinned")


def fuse(options: FuseOptions, as_json: bool) -> int:
    """``fuse EXPORT_DIR -o OUT_DIR``."""
    with progress() as shown:
        report = fuse_folder(options, shown)
    return _show(report, as_json)


def inspect(options: FuseOptions, as_json: bool) -> int:
    """``fuse inspect DIR``."""
    with progress() as shown:
        report = inspect_folder(options, shown)
    return _show(report, as_json)


def rollback(given: argparse.Namespace) -> int:
    """``fuse rollback FUSED_DIR -o DIR``."""
    if given.sidecar is not None:
        raise UserError("usage", "--sidecar is of one model: records beside the models of a folder are found by name")
    with progress() as shown:
        report = rollback_folder(
            given.fused,
            given.output,
            sites=given.sites or None,
            all_records=given.all,
            progress=shown,
            how=given.external_data,
            allow_outside=given.allow_outside,
        )
    if given.json:
        write(_document(report.exit, error=_first(report.errors), source=report.source, output=report.output,
                        models=_restored(report)))  # fmt: skip
        _complain(report.errors)
        return report.exit
    rows = [_restored_row(one) for one in report.models]
    screen = console()
    print_table(("model", "outcome", "restored", "still fused"), rows, screen)
    for one in report.models:
        for site, why in () if one.report is None else one.report.refused:
            screen.print(f"{one.name}: {site} could not be put back: {why}")
        for note in one.notes:
            screen.print(f"note, {one.name}: {note}")
    screen.print(f"wrote {report.output}")
    _complain(report.errors)
    return report.exit


def compare(given: argparse.Namespace) -> int:
    """``fuse verify DIR FUSED_DIR``."""
    for path in (given.unfused, given.fused):
        if not path.exists():
            raise UserError("usage", f"{path} does not exist; fuse writes it: `fuse {given.unfused} -o {given.fused}`")
        if not path.is_dir():
            raise UserError("usage", f"{path} is no folder and the other is one: give two models, or two folders")
    for name, option in _OF_FILES.items():
        if getattr(given, name):
            how = "name them with --prefill U F --decode U F" if name in _OF_PAIRS else "give two models instead"
            raise UserError("usage", f"{option} is for models and not for folders: {how}")
    options = InputOptions(None, None, given.seed, dict(given.dim))
    bars = Overrides(given.cosine, given.nrmse, given.max_abs)
    foreign = None if given.lowering is None else load_lowering(given.lowering)
    with progress() as shown, within(given.timeout, ", or leave whole models out with --level site"):
        settings = Settings(given.level, options, given.timeout, None, bars, shown, foreign, given.allow_outside)

        def run(unfused: Path, fused: Path) -> VerifyReport:
            return check(unfused, fused, settings).report

        report = verify_folders(given.unfused, given.fused, run)
    if given.json:
        write(_document(report.exit, error=_first(report.errors) if report.exit == 1 else None,
                        unfused=report.unfused, fused=report.fused, models=_verified(report),
                        differing=list(report.differing)))  # fmt: skip
    else:
        _print_verify(report)
    _complain(report.errors)
    return report.exit


def _show(report: FolderReport, as_json: bool) -> int:
    if as_json:
        write(folder_document(report))
    else:
        _print(report)
    _complain(report.errors)
    return report.exit


def _complain(errors: Sequence[UserError]) -> None:
    """What is wrong with models that failed, where errors are told."""
    sys.stdout.flush()
    sys.stderr.write("".join(f"fuse: {error}\n" for error in errors))


def _first(errors: Sequence[UserError]) -> Document | None:
    return next(({"code": error.code, "text": str(error)} for error in errors), None)


def folder_document(report: FolderReport) -> Document:
    """What became of a folder; ``models`` have the keys of a single model's document, ``path`` and two more."""
    models = [
        _model_document(report, entry)
        | {"path": entry.name, "outcome": entry.outcome, "written": _written(report, entry)}
        for entry in report.models
    ]
    return _document(
        report.exit,
        error=_first(report.errors),
        source=report.source,
        output=report.output,
        target=report.target,
        models=models,
        pairs=[_pair_document(pair) for pair in report.pairs],
        copied=list(report.copied),
        seconds={"total": round(report.seconds, 3)},
        notes=list(report.notes),
    )


def _model_document(report: FolderReport, entry: Entry) -> Document:
    if entry.error is not None:
        return failure([str(Path(report.source) / entry.name)], 1, entry.error.code, str(entry.error))
    assert entry.report is not None, "what did not fail has a report"
    return fuse_document(entry.report)


def _document(code: int, **more: object) -> Document:
    return {"schema": SCHEMA, "exit": code, "error": None, **more}


def _pair_document(pair: Pair) -> Document:
    states = [
        {
            "output": state.output or None,
            "input": state.input or None,
            "reason": None
            if state.difference is None
            else reason_document(state.difference),
        }
        for state in pair.states
    ]
    return {"prefill": pair.prefill, "decode": pair.decode, "fits": not pair.differences, "states": states}


def _print(report: FolderReport) -> None:
    screen = console()
    print_table(COLUMNS, [_row(entry) for entry in report.models], screen)
    for entry in report.models:
        for sentence in () if entry.report is None else sentences(entry.report):
            say(f"{entry.name}: {sentence}", screen)
    for pair in report.pairs:
        for difference in pair.differences:
            screen.print(f"{difference.code}: {difference.text}")
        fit = len(pair.states) - len(pair.differences)
        screen.print(f"{pair.prefill} and {pair.decode}: {fit} of {number(len(pair.states), 'state')} fit")
    for note in report.notes:
        screen.print(f"note: {note}")
    outcomes = [entry.outcome for entry in report.models]
    kept = {entry.outcome for entry in report.models if _written(report, entry) == "copied"} - {"copied"}
    counts = {kind: outcomes.count(kind) for kind in outcomes}
    done = "no model written" if report.output is None else f"wrote {report.output} for {report.target}"
    found = ", ".join(f"{count} {kind}{_as_it_was(count) if kind in kept else ''}" for kind, count in counts.items())
    screen.print(f"{number(len(report.models), 'model')}: {found}; {done} ({report.seconds:.1f} s)")


def _written(report: FolderReport, entry: Entry) -> str | None:
    """How a model came into the output: ``fused`` or ``copied`` (as it was); None where nothing was written."""
    return None if report.output is None else "fused" if entry.outcome == "fused" else "copied"


def _as_it_was(count: int) -> str:
    return " (copied as it was)" if count == 1 else " (copied as they were)"


def _row(entry: Entry) -> tuple[str, ...]:
    report = entry.report
    if report is None:
        told = entry.outcome if entry.error is None else f"{entry.outcome}: {entry.error.code}"
        return (entry.name, told, *[""] * (len(COLUMNS) - 2))
    taken = [site for site in report.sites if site.status in ("fused", "match") and site.op]
    operators = [site.op for site in taken if site.op]
    names = ", ".join(f"{operators.count(op)} {op}" for op in dict.fromkeys(operators))
    pinned = pinned_symbols(report.pinned)
    pins = some(pinned, PINS)
    after = str(report.nodes_after) if taken else ""
    return (
        entry.name, entry.outcome, f"{len(taken)} of {len(report.sites)}", names, str(report.nodes_before), after,
        pins,
    )  # fmt: skip


def _restored(report: FolderRollback) -> list[Document]:
    return [
        {"path": one.name, "outcome": one.outcome}
        | ({"error": _first([one.error])} if one.error else _plain(one.report) | {"notes": list(one.notes)})
        for one in report.models
    ]


def _verified(report: FolderVerify) -> list[Document]:
    return [
        {"path": one.name, "outcome": one.outcome, "same_bytes": one.same_bytes}
        | ({"error": _first([one.error])} if one.error else _plain(one.report))
        for one in report.models
    ]


def _plain(report: object) -> Document:
    return {} if report is None else plain_document(report)


def _restored_row(one: Restored) -> tuple[str, ...]:
    if one.report is None:
        return one.name, one.outcome, "", ""
    return one.name, one.outcome, ", ".join(one.report.restored), ", ".join(one.report.remaining)


def _print_verify(report: FolderVerify) -> None:
    screen = console()
    print_table(("model", "outcome", "verdict"), [_compared_row(one) for one in report.models], screen)
    for one in report.models:
        if one.report is None:
            continue
        if one.report.unrelated is not None:
            screen.print(f"{one.name}: {unrelated_text(one.report.unrelated, len(one.report.findings) - 1)}")
            continue
        for line in site_lines(one.report):
            screen.print(f"{one.name}: {line}")
        if one.report.skipped is not None:
            screen.print(f"{one.name}: site level only ({one.report.skipped.code}): {one.report.skipped.text}")
        for note in one.report.notes:
            screen.print(f"note, {one.name}: {note}")
    for bar in dict.fromkeys(one.report.bar for one in report.models if one.report is not None):
        if bar is not None:
            screen.print(hanging(bar_text(bar), screen.width))
    for name in report.differing:
        screen.print(f"{name}: the file is not the same in both folders")
    screen.print(_counted(report))


def _counted(report: FolderVerify) -> str:
    """The last line: of the models that were compared how many are equal, and how many were not compared."""
    outcomes = [one.outcome for one in report.models]
    equal = outcomes.count("equal")
    parts = [f"{equal} of {number(equal + outcomes.count('differs'), 'fused model')} equal"]
    parts += [f"{outcomes.count(kind)} {kind}" for kind in ("unchanged", "unreadable", "failed") if kind in outcomes]
    others = len(report.differing)
    return ", ".join([*parts, number(others, "other file differs", "other files differ")])


def _compared_row(one: Compared) -> tuple[str, ...]:
    if one.error is not None:
        same = "the same file in both folders" if one.same_bytes else "not the same file in both folders"
        return one.name, one.outcome, f"not compared: {one.error.code}; {same}"
    return one.name, one.outcome, "" if one.report is None else verify_summary(one.report)
