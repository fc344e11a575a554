"""The plan file: what becomes of each site, as a dry run found it and as a user may change it.

One JSON document. ``schema`` is 1. ``model`` has the ``path`` and the ``sha256`` of the graph file; weights outside of
it do not count. ``options`` are those that the plan was made with. ``sites`` are in the order of the file; each has

- ``name``: as the report shows it. A site that is not listed is left alone.
- ``action``: ``fuse``; ``skip`` leaves the site alone, as ``--skip-sites`` does; ``refused`` is what the dry run could
  not fuse: it is tried again, and keeps the others from being written unless ``keep_going``.
- ``target``: name of a target, or the path of a target file. Only targets that one runtime runs may stand together.
- ``op``: name of an operator of that target, ``ChunkGatedDeltaRule`` say, or as ``--op`` calls it; null for the first
  that is legal.

What else stands at a site (``rule``, ``form``, ``nodes``, ``reason``) is for the reader and is not read.
"""

from __future__ import annotations

import dataclasses
import glob
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from deltafuse import targets
from deltafuse.choosing import Choice, Chosen, of_options
from deltafuse.errors import UserError
from deltafuse.files import atomic
from deltafuse.match import SiteReport
from deltafuse.options import FuseOptions
from deltafuse.report import reason_document

SCHEMA = 1
ACTIONS = ("fuse", "skip", "refused")
#: Options that a plan holds, so that it does the same wherever it is applied.
OPTIONS = (
    "target", "rules", "patterns", "pin", "pins", "batch", "boundary", "signature", "allow_bf16_to_fp16", "keep_going",
    "strict",
)  # fmt: skip
#: Options that choose sites or operators: the plan's entries do that.
_CHOOSING = ("form", "op", "sites", "skip_sites")
_TYPES: dict[str, type | tuple[type, ...]] = {
    "target": str, "rules": list, "patterns": list, "pin": bool, "pins": dict, "batch": int,
    "allow_bf16_to_fp16": bool, "keep_going": bool, "strict": bool,
}  # fmt: skip
_READ = frozenset({"name", "action", "target", "op"})
_SHOWN = frozenset({"rule", "form", "nodes", "reason"})


def chosen_by(options: FuseOptions) -> Chosen:
    """What a run is to do: as its options say, or as the plan file does that they name.

    Raises:
        UserError: ``usage``: an option beside the plan says what the plan says; ``plan-file``, ``plan-version``,
            ``plan-model``, ``plan-target``, ``plan-targets``: the plan cannot be applied.
    """
    if options.plan is None or options.dry_run:
        return of_options(options)
    _check_alone(options)
    document = _read(options.plan)
    _check_model(options, document)
    held = _options(options.plan, document)
    sites = _sites(options.plan, document)
    taken = tuple(glob.escape(name) for name, entry in sites.items() if entry["action"] != "skip")
    more = {"keep_going": options.keep_going or held.keep_going, "strict": options.strict or held.strict}
    # Nothing that is taken must not mean everything.
    chosen = {"sites": taken, "skip_sites": () if taken else ("*",)}
    plain = {name: getattr(held, name) for name in OPTIONS} | more | chosen
    choices = {
        name: Choice(_target(options.plan, name, entry.get("target") or held.target), entry.get("op"))
        for name, entry in sites.items()
        if entry["action"] != "skip"
    }
    return Chosen(dataclasses.replace(options, **plain), _target(options.plan, "options", held.target), choices)


def check_sites(chosen: Chosen, names: Sequence[str]) -> None:
    """Raises where the plan takes a site that the model does not have.

    Raises:
        UserError: ``plan-site``; the message lists the sites there are.
    """
    unknown = [name for name in chosen.sites if name not in names]
    if unknown:
        there = ", ".join(sorted(names)[:12]) or "none"
        text = f"the plan names the site {unknown[0]!r}, which the model does not have; it has: {there}"
        raise UserError("plan-site", f"{text}. Correct the name, or take the entry out")


def write_plan(options: FuseOptions, reports: Sequence[SiteReport]) -> None:
    """Writes what a dry run would do; see the module.

    Raises:
        UserError: the file cannot be written.
    """
    assert options.plan is not None, "there is a file to write"
    held = {name: getattr(options, name) for name in OPTIONS}
    held |= {"pins": dict(options.pins), "patterns": list(map(str, options.patterns))}
    document = {
        "schema": SCHEMA,
        "model": {"path": str(options.model), "sha256": _sha256(options.model)},
        "options": held,
        "sites": [_entry(options, report) for report in reports],
    }
    with atomic(options.plan, [options.model]) as file:
        file.write(f"{json.dumps(document, indent=1)}\n".encode())


def _entry(options: FuseOptions, report: SiteReport) -> dict[str, Any]:
    action = {"fused": "fuse", "match": "skip"}.get(report.status, "refused")
    known = None if report.match is None else report.match
    return {
        "name": report.name,
        "action": action,
        "target": options.target,
        "op": report.op if action == "fuse" else options.op,
        "rule": report.rule or (None if known is None else known.rule),
        "form": None if known is None else known.form,
        "nodes": report.nodes,
        "reason": None if report.reason is None else reason_document(report.reason),
    }


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _check_alone(options: FuseOptions) -> None:
    plain = FuseOptions(options.model)
    ours = (*_CHOOSING, *(name for name in OPTIONS if name not in ("keep_going", "strict")))
    for name in ours:
        if getattr(options, name) != getattr(plain, name):
            option = {"pins": "pin", "pin": "no-pin"}.get(name, name.replace("_", "-"))
            text = f"--{option} beside --plan: the plan says that already; edit {options.plan}, or leave --{option} out"
            raise UserError("usage", text)


def _read(path: Path) -> Mapping[str, Any]:
    try:
        document: Any = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise UserError("plan-file", f"{path} does not exist: write it with --dry-run --plan {path}") from None
    except ValueError as error:
        raise UserError("plan-file", f"{path} is no JSON ({error}): undo the last edit, or write it again") from None
    if not isinstance(document, dict) or not isinstance(cast("dict[str, Any]", document).get("schema"), int):
        raise UserError("plan-file", f"{path} is no plan: write one with fuse MODEL --dry-run --plan FILE")
    found = cast("Mapping[str, Any]", document)
    if found["schema"] > SCHEMA:
        text = f"{path} has schema {found['schema']} and this deltafuse reads up to {SCHEMA}: update deltafuse"
        raise UserError("plan-version", f"{text}, or write the plan again")
    return found


def _check_model(options: FuseOptions, document: Mapping[str, Any]) -> None:
    model: Any = document.get("model")
    held = cast("dict[str, Any]", model) if isinstance(model, dict) else {}
    wanted = held.get("sha256")
    if not isinstance(wanted, str):
        raise UserError("plan-file", f"{options.plan} does not say of which model it is: write it again")
    if not options.model.is_file():
        raise UserError("missing-file", f"{options.model} does not exist: check the path")
    if _sha256(options.model) != wanted:
        text = f"{options.model} is not the file that {options.plan} was made of ({held.get('path')}), or has changed"
        raise UserError("plan-model", f"{text}: give that file, or write a plan of this one with --dry-run --plan FILE")


def _options(path: Path, document: Mapping[str, Any]) -> FuseOptions:
    held: Any = document.get("options", {})
    if not isinstance(held, dict):
        raise UserError("plan-file", f"options in {path} must be an object: write the plan again")
    given = cast("dict[str, Any]", held)
    unknown = sorted(given.keys() - set(OPTIONS))
    if unknown:
        raise UserError("plan-file", f"{path} has the option {unknown[0]!r}; it may have {', '.join(OPTIONS)}")
    for name, value in given.items():
        if not isinstance(value, _TYPES.get(name, (str, type(None)))):
            raise UserError("plan-file", f"{path}: the option {name} cannot be {value!r}: write the plan again")
    try:
        found: dict[str, Any] = {
            **given,
            "rules": tuple(given.get("rules", ())),
            "patterns": tuple(map(Path, given.get("patterns", ()))),
            "pins": tuple(given.get("pins", {}).items()),
        }
        return FuseOptions(Path(), **found)
    except (TypeError, UserError) as error:
        raise UserError("plan-file", f"{path}: {error}") from None


def _sites(path: Path, document: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    listed: Any = document.get("sites")
    if not isinstance(listed, list):
        raise UserError("plan-file", f"sites in {path} must be a list: write the plan again")
    found: dict[str, Mapping[str, Any]] = {}
    for entry in cast("list[Any]", listed):
        name, why = _fault(entry, found)
        if why:
            raise UserError("plan-file", f"{path}, site {name}: {why}")
        found[name] = entry
    return found


def _fault(entry: Any, found: Mapping[str, object]) -> tuple[str, str]:
    """The name of an entry, and what is wrong with it, "" where nothing is."""
    if not isinstance(entry, dict) or not isinstance(cast("dict[str, Any]", entry).get("name"), str):
        return str(len(found)), "an entry is an object with a name"
    given = cast("dict[str, Any]", entry)
    name: str = given["name"]
    unknown = sorted(given.keys() - _READ - _SHOWN)
    if unknown:
        return name, f"there is no key {unknown[0]!r}; an entry may have {', '.join(sorted(_READ))}"
    if given.get("action") not in ACTIONS:
        return name, f"the action {given.get('action')!r} is none of {', '.join(ACTIONS)}"
    if not all(given.get(key) is None or isinstance(given[key], str) for key in ("target", "op")):
        return name, "target and op are names, or null"
    return name, "it is listed twice; take one entry out" if name in found else ""


def _target(path: Path, where: str, name: str) -> targets.Profile:
    try:
        return targets.get(name)
    except UserError as error:
        raise UserError("plan-target", f"{path}, {where}: {error}") from None
