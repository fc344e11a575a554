"""The JSON documents of the commands whose reports are dataclasses, key by key, from their docstrings."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import typing
from collections.abc import Iterator

from deltafuse.lint import LintReport
from deltafuse.lower import LowerReport
from deltafuse.probing import Listing
from deltafuse.rollback import RollbackReport
from deltafuse.verify import VerifyReport
from docs_text import cell, code, table

#: Command -> what it prints with ``--json``, beside ``schema`` and ``error``.
REPORTS = {
    "fuse verify": VerifyReport,
    "fuse rollback": RollbackReport,
    "fuse lower": LowerReport,
    "fuse lint": LintReport,
    "fuse inspect --tensors --nodes --op": Listing,
}
_ATTRIBUTES = re.compile(r"^Attributes:\n((?:[ \t].*\n?|\n)+)", flags=re.MULTILINE)


def reports() -> str:
    """A section for each report, and one for each kind of part that it has."""
    parts: list[str] = []
    seen: set[type] = set()
    for command, report in REPORTS.items():
        parts.append(f"## {command}\n")
        for kind in _reached(report):
            if kind in seen:
                continue
            seen.add(kind)
            parts.append(_section(kind, report))
    return "\n".join(parts)


def _reached(kind: type) -> Iterator[type]:
    """A dataclass and those that its fields are made of, each once."""
    waiting, seen = [kind], set[type]()
    while waiting:
        one = waiting.pop(0)
        if one not in seen:
            seen.add(one)
            yield one
            hints = _hints(one)
            waiting += [part for field in dataclasses.fields(one) for part in _parts(hints[field.name])]


def _parts(hint: object) -> list[type]:
    """The dataclasses in a type."""
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return [hint]
    return [part for argument in typing.get_args(hint) for part in _parts(argument)]


def _hints(kind: type) -> dict[str, object]:
    """Types of fields; names that a module imports for its checker only are looked up where they are defined."""
    loaded = [module for name, module in sys.modules.items() if name.startswith("deltafuse.")]
    classes = {name: value for module in loaded for name, value in vars(module).items() if isinstance(value, type)}
    return typing.get_type_hints(kind, classes | vars(sys.modules[kind.__module__]))


def _section(kind: type, report: type) -> str:
    said = meanings(kind)
    text = (inspect.getdoc(kind) or "").partition("\n")[0]
    rows = [[code(field.name), cell(_shown(field.type)), cell(said.get(field.name, ""))] for field in _fields(kind)]
    heading = "" if kind is report else f"### {kind.__name__} {{ #{report.__name__}-{kind.__name__} }}\n\n"
    return f"{heading}{cell(text)}\n\n{table(('key', 'type', 'meaning'), rows)}"


def _fields(kind: type) -> tuple[dataclasses.Field[object], ...]:
    return dataclasses.fields(kind)


def _shown(annotation: object) -> str:
    return str(annotation).replace("tuple[", "list[").replace(", ...]", "]").replace("None", "null")


def meanings(kind: type) -> dict[str, str]:
    """Field -> what the docstring's section Attributes says of it; several names may share a line."""
    found = _ATTRIBUTES.search((inspect.getdoc(kind) or "") + "\n")
    if found is None:
        return {}
    entries = re.split(r"\n(?=    \S)", "\n" + found[1].rstrip())
    pairs = (entry.strip().partition(":") for entry in entries if entry.strip())
    return {name.strip(): " ".join(text.split()) for names, _, text in pairs for name in names.split(",")}
