"""The commands that list and explain: targets, patterns, codes."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase

from deltafuse.commands import show
from deltafuse.errors import UserError
from deltafuse.explaining import Explained, explained
from deltafuse.glossary import GLOSSARY, term_of
from deltafuse.patterns import loaded
from deltafuse.report import SCHEMA, write
from deltafuse.tables import columns, console
from deltafuse.tables_fit import hanging
from deltafuse.targets import get, names
from deltafuse.targets.listing import LEGEND, MARKS, details_of, lines_of, target_document
from deltafuse.wording import number

_KINDS = {
    "reason": "a reason", "note": "a note, of a site that is right", "error": "an error, exit 1",
    "finding": "of fuse lint, exit 5 unless it is a note",
    "term": "a word of tables, pages and JSON documents",
}  # fmt: skip


def targets(given: argparse.Namespace) -> int:
    """``fuse targets``."""
    profiles = [get(given.target)] if given.target else [get(name) for name in names()]
    lines = [line for one in profiles for line in (details_of(one) if given.target else lines_of(one))]
    if not given.target:
        lines.append("fuse targets NAME shows one in detail, its operators with all ports")
    document = {"targets": [target_document(profile) for profile in profiles], "marks": MARKS}
    return show(given.json, document, [*lines, LEGEND])


def patterns(given: argparse.Namespace) -> int:
    """``fuse patterns``."""
    found = loaded(given.patterns)
    profiles = [get(name) for name in names()]
    on = {entry.name: [p.name for p in profiles if entry.default or entry.operator in p.ordinary] for entry in found}
    rows = [
        {
            "name": entry.name,
            "kind": entry.kind,
            "default": entry.default,
            "targets": on[entry.name],
            "summary": entry.summary,
        }
        for entry in found
    ]
    if given.json:
        return show(True, {"patterns": rows}, ())
    cells = [
        (entry.name, entry.kind, "on" if entry.default else ", ".join(on[entry.name]) or "off", entry.summary)
        for entry in found
    ]
    return show(False, {}, list(columns(("rule", "kind", "default", "what it is"), cells)))


def explain(given: argparse.Namespace) -> int:
    """``fuse explain``."""
    # A term of several words needs no quotes.
    whole = " ".join(given.codes)
    codes = [whole] if term_of(whole) else given.codes
    found = explained(codes)
    for code in codes:
        if not any(fnmatchcase(one.code, code) for one in found) and not term_of(code):
            raise _unknown(code)
    if given.json:
        write({"schema": SCHEMA, "exit": 0, "error": None, "codes": [_document(one) for one in found]})
        return 0
    screen = console()
    for one in found:
        for line in _lines(one) if given.codes else (f"{one.code} ({one.kind}): {'; '.join(one.texts[:1])}",):
            screen.print(hanging(line, screen.width))
    if not given.codes:
        screen.print(f"{number(len(found), 'code')}; fuse explain CODE tells what to do and where it comes from")
    return 0


def _unknown(code: str) -> UserError:
    known = {one.code for one in explained()} | {name.replace(" ", "-") for names in GLOSSARY for name in names}
    near = difflib.get_close_matches(code, sorted(known), 3)
    hint = f"did you mean {' or '.join(near)}?" if near else "see the list of `fuse explain`"
    return UserError("unknown-code", f"there is no code {code!r}, and no such term; {hint}")


def _document(one: Explained) -> dict[str, object]:
    texts, places = list(one.texts), list(one.places)
    return {"code": one.code, "kind": one.kind, "texts": texts, "fix": one.fix, "from": places}


def _lines(one: Explained) -> Iterator[str]:
    """One code in full."""
    yield f"{one.code}, {_KINDS[one.kind]}"
    yield from (f"  {text}" for text in one.texts or ("what is the matter is worked out where it arises",))
    if one.fix:
        yield f"  fix: {one.fix}"
    if one.kind != "term":
        yield f"  from: {', '.join(one.places)}"
    if any("{" in text or "\u2026" in text for text in (*one.texts, one.fix)):
        yield "  what stands in braces, or as \u2026, is filled in when it is shown"


LISTS: dict[str, Callable[[argparse.Namespace], int]] = {"targets": targets, "patterns": patterns, "explain": explain}
