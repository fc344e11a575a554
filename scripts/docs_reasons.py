"""Every code of a reason, a note, a finding and an error as a page of the documentation, read from the code."""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import lru_cache
from pathlib import Path

from deltafuse import explaining
from deltafuse.glossary import GLOSSARY
from deltafuse.note_texts import NOTES
from docs_rooms import room_of
from docs_text import cell, code, table

ROOT = Path(__file__).parents[1]

@lru_cache
def sources() -> dict[str, ast.Module]:
    """Syntax trees of what ships, by path below the project's folder."""
    return {str(path.relative_to(ROOT)): tree for path, tree in explaining.sources().items()}


def places() -> dict[str, list[str]]:
    """Code -> the files that give it a text."""
    known, found = explaining.texts(), defaultdict[str, list[str]](list)
    for path, tree in sources().items():
        for name in explaining.keys(tree):
            if name in known:
                found[name].append(path)
    return dict(found)


def reasons() -> str:
    """Reason codes by the room where they arise."""
    known, where = explaining.texts(), places()
    rooms = defaultdict[str, list[list[str]]](list)
    for name in sorted(known):
        files = where[name]
        said, _, fix = known[name].rpartition("; ")
        row = [f"{code(name)}{{ #{name} }}", cell(said or fix), cell(fix if said else "")]
        rooms[room_of(files[0])].append([*row, ", ".join(code(Path(path).stem) for path in files)])
    head = ("code", "what it says", "what to do", "from")
    return "\n".join(f"## {room}\n\n{table(head, rows)}" for room, rows in sorted(rooms.items()))


def notes() -> str:
    """Codes of notes on sites."""
    rows = [[f"{code(name)}{{ #note-{name} }}", *map(cell, NOTES[name].rsplit("; ", 1))] for name in sorted(NOTES)]
    return table(("code", "what it means", "what to do"), rows)


def glossary() -> str:
    """The words of reports, in the order that reports have them."""
    rows = [[", ".join(map(code, names)), cell(text)] for names, text in GLOSSARY.items()]
    return table(("word", "what it means"), rows)


def findings() -> str:
    """Codes of what lint finds, with what to do about each."""
    found = [one for one in explaining.explained() if one.kind == "finding"]
    rows = [[f"{code(one.code)}{{ #finding-{one.code} }}", "<br>".join(map(cell, one.texts))] for one in found]
    return table(("code", "what to do"), rows)


def errors() -> str:
    """Codes of what is exit 1, with the messages that go with each."""
    found = defaultdict[str, list[str]](list)
    for tree in sources().values():
        for name, message in explaining.raised(tree):
            if message and message not in found[name]:
                found[name].append(message)
    rows = [[f"{code(name)}{{ #error-{name} }}", "<br>".join(map(cell, messages))] for name, messages in found.items()]
    return table(("code", "messages"), sorted(rows))
