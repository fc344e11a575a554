"""The bodies of the commands: each runs one stage of the house and shows its report."""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import sys
from collections.abc import Callable, Sequence
from typing import Any, cast

from deltafuse.children import early
from deltafuse.console import progress
from deltafuse.diagnosis import explained
from deltafuse.errors import UserError
from deltafuse.options import FuseOptions
from deltafuse.report import SCHEMA, Document, fuse_document, plain_document, write
from deltafuse.wording import number, some


def run(name: str, given: argparse.Namespace) -> int:
    """Runs a command; the exit code is what its report says."""
    with explained(*(getattr(given, key, None) for key in _MODELS)):
        return COMMANDS[name](given)


def fuse_options(given: argparse.Namespace) -> FuseOptions:
    """What the command line says, as the options of a run."""
    return FuseOptions(**{name: _frozen(value) for name, value in vars(given).items() if name in _FIELDS})


def _frozen(value: Any) -> Any:
    return tuple(cast("list[object]", value)) if isinstance(value, list) else value


def _fuse(given: argparse.Namespace) -> int:
    if given.model.is_dir():
        from deltafuse import folder_commands

        refuse_page(given)
        if given.plan is not None:
            raise UserError("usage", "--plan is of one model: give the path of a model")
        return folder_commands.fuse(fuse_options(given), given.json)
    options = fuse_options(given)
    with early(str(options.model), "" if given.json else "deltafuse.tables") as begun:
        from deltafuse import pipeline

        with progress() as shown:
            report = pipeline.fuse(options, shown, begun)
    if report.exit or given.dry_run:
        report = dataclasses.replace(report, output=None)
    if given.dry_run and not given.json:
        from deltafuse.outcome import shown as unwritten

        report = dataclasses.replace(report, sites=unwritten(report.sites))
    return show_fuse(report, given.json)


def _inspect(given: argparse.Namespace) -> int:
    from deltafuse.commands_inspect import inspect

    return inspect(given)


def refuse_page(given: argparse.Namespace) -> None:
    """Raises where a page is asked for of a folder."""
    if given.html is not None:
        from deltafuse.next_steps import page_each

        each = f"give the path of a model, or write a page for each with `{page_each(given.model)}`"
        raise UserError("usage", f"--html is of one model, and {given.model} is a folder: {each}")


def show_fuse(report: Any, as_json: bool, more: Document | None = None, *, tree: bool = False) -> int:
    """Prints the report of a fuse or an inspection, as JSON with what else was asked for."""
    if as_json:
        listed, document = more or {}, fuse_document(report)
        write(listed | document | {"notes": [*listed.get("notes", ()), *document["notes"]]})
    else:
        from deltafuse.tables import console, print_fuse

        print_fuse(report, console(), tree=tree)
    return report.exit


def _verify(given: argparse.Namespace) -> int:
    if any(path is not None and path.is_dir() for path in (given.unfused, given.fused)):
        from deltafuse import folder_commands

        return folder_commands.compare(given)
    from deltafuse.commands_verify import verify

    with progress() as shown:
        report = verify(given, shown)
    if given.json:
        return show(True, plain_document(report), (), report.exit)
    from deltafuse.tables import console
    from deltafuse.tables_verify import print_verify

    print_verify(report, console())
    return report.exit


def _rollback(given: argparse.Namespace) -> int:
    if given.fused.is_dir():
        from deltafuse import folder_commands

        return folder_commands.rollback(given)
    from deltafuse.rollback import rollback

    with progress() as shown:
        shown.start("restoring")
        report = rollback(
            given.fused,
            given.output,
            sites=given.sites or None,
            all_records=given.all,
            sidecar=given.sidecar,
            how=given.external_data,
            allow_outside=given.allow_outside,
            progress=shown.advance,
        )
    document = plain_document(report)
    what = _PART if report.mode == "bytes" and report.remaining else _MODES[report.mode]
    lines = [f"wrote {report.output}: {what}", f"restored: {some(report.restored, _NAMED) or 'no site'}"]
    lines += [f"still fused: {some(report.remaining, _NAMED)}"] if report.remaining else []
    lines += [f"{site} could not be put back: {why}" for site, why in report.refused]
    lines += [f"note: {note}" for note in report.notes]
    return show(given.json, document, lines, 4 if report.refused else 0)


def _lower(given: argparse.Namespace) -> int:
    from deltafuse.lower import lower

    with progress() as shown:
        report = lower(
            given.fused,
            given.output,
            rounding=given.rounding == "on",
            linear_attention=given.linear_attention,
            external_data=given.external_data,
            allow_outside=given.allow_outside,
            progress=shown,
        )
    change = f"{number(report.nodes_before, 'node')} became {report.nodes_after}"
    lines = [f"{node.name}: {node.op}" for node in report.lowered]
    lines += [f"note: {note}" for note in report.notes]
    lines.append(
        "nothing written" if report.exit else f"{len(report.lowered)} lowered; {change}; wrote {report.output}"
    )
    return show(given.json, plain_document(report), lines, report.exit)


def _demo(given: argparse.Namespace) -> int:
    from deltafuse.demo import write_demo

    demo = write_demo(given.folder)
    lines = ["wrote", *(f"  {file}" for file in demo.files), "now try", *(f"  {command}" for command in demo.commands)]
    return show(given.json, {"files": list(demo.files), "commands": list(demo.commands)}, lines)


def _lint(given: argparse.Namespace) -> int:
    from deltafuse.lint import lint

    with progress() as shown:
        report = lint(given.fused, given.target, shown)
    if given.json:
        return show(True, plain_document(report), (), report.exit)
    from deltafuse.tables import console, print_lint

    print_lint(report, console())
    return report.exit


def _list(name: str, given: argparse.Namespace) -> int:
    from deltafuse import commands_lists

    return commands_lists.LISTS[name](given)


def _version(given: argparse.Namespace) -> int:
    from deltafuse.versions import versions

    found = versions()
    lines = [f"{name} {version or 'not installed'}" for name, version in found.items()]
    return show(given.json, {"version": found["deltafuse"], "versions": found}, lines)


def _doctor(given: argparse.Namespace) -> int:
    from deltafuse.doctor import examine

    report = examine(given.target)
    if given.json:
        return show(True, plain_document(report), (), report.exit)
    from deltafuse.tables_doctor import print_doctor

    print_doctor(report, sys.stdout)
    return report.exit


def _completion(given: argparse.Namespace) -> int:
    from deltafuse.completion_scripts import install, script

    if given.install:
        written = [str(path) for path in install(given.shell)]
        said = [*(f"wrote {path}" for path in written), "open a new shell, and completion is there"]
        return show(given.json, {"written": written}, said)
    text = script(given.shell)
    return show(given.json, {"script": text}, text.splitlines(), fold=False)


def show(as_json: bool, document: Document, lines: Sequence[str], exit_code: int = 0, *, fold: bool = True) -> int:
    """Prints a small result as JSON or as lines, which a terminal gets folded at words."""
    if as_json:
        write({"schema": SCHEMA, "exit": exit_code, "error": None} | document)
        return exit_code
    if fold and sys.stdout.isatty():
        from deltafuse.tables_fit import hanging

        room = shutil.get_terminal_size().columns
        lines = [hanging(line, room) for line in lines]
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return exit_code


_MODES = {
    "bytes": "the file as it was before the fuse, byte for byte (sha256 checked)",
    "in-place": "the file was edited since the fuse; sites were put back one by one and the edits are kept",
}
_PART = "the named sites are as they were before the fuse; the rest of the file is as fuse wrote it"
#: Sites that are told one by one.
_NAMED = 12
#: Options that name a model which is read.
_MODELS = ("model", "unfused", "fused")
_FIELDS = frozenset(field.name for field in dataclasses.fields(FuseOptions))
COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "fuse": _fuse,
    "inspect": _inspect,
    "verify": _verify,
    "rollback": _rollback,
    "lower": _lower,
    "demo": _demo,
    "lint": _lint,
    "targets": lambda given: _list("targets", given),
    "patterns": lambda given: _list("patterns", given),
    "explain": lambda given: _list("explain", given),
    "version": _version,
    "doctor": _doctor,
    "completion": _completion,
}
