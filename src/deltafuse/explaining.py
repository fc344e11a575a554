"""What a code means: reasons, notes and errors, read from the code itself. Needs no model and no network."""

from __future__ import annotations

import ast
import importlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Literal

import deltafuse
from deltafuse.note_texts import NOTES
from deltafuse.patterns import loaded, shipped_folder
from deltafuse.reasons import TEXTS, plain
from deltafuse.wording import plural

__all__ = ["Explained", "explained", "keys", "raised", "sources", "texts"]

#: What starts a process when it is imported, or needs more than deltafuse itself does.
_APART = frozenset({"__main__", "worker_main", "torch"})
_PACKAGE = Path(deltafuse.__file__).parent
#: Where notes are told.
_NOTED = ("deltafuse/note_texts.py",)


@dataclass(frozen=True)
class Explained:
    """One code.

    Attributes:
        code: e.g. ``not-the-rule``.
        kind: ``reason``: why a site is no match, may not be fused, or differs; ``note``: what to know of a site that
            is right; ``error``: what ends a command with exit 1.
        texts: what it says: one for a reason or a note, all messages of an error; ``{name}`` and ``…`` are filled
            in when it is shown.
        fix: what to do; "" where the texts say it themselves.
        places: files that it comes from.
    """

    code: str
    kind: Literal["reason", "note", "error"]
    texts: tuple[str, ...]
    fix: str
    places: tuple[str, ...]


def explained(globs: Sequence[str] = ()) -> tuple[Explained, ...]:
    """All codes that fit, sorted.

    Args:
        globs: codes, or shell-style patterns of codes; all codes where there is none.
    """
    exact = bool(globs) and not any(set(glob) & set("*?[") for glob in globs)
    chosen = {path: text for path, text in _written().items() if not exact or any(f'"{one}"' in text for one in globs)}

    def fits(code: str) -> bool:
        return not globs or any(fnmatchcase(code, glob) for glob in globs)

    known = texts(list(chosen))
    places, messages = defaultdict[str, list[str]](list), defaultdict[str, list[str]](list)
    errors = defaultdict[str, list[str]](list)
    for path in chosen:
        place, tree = _place(path), sources()[path] if not exact else ast.parse(chosen[path])
        for code in dict.fromkeys(keys(tree)):
            places[code].append(place)
        for code, message in raised(tree):
            errors[code] += [place] if place not in errors[code] else []
            messages[code] += [message] if message and message not in messages[code] else []
    found = [_told(code, "reason", known[code], places[code]) for code in known if fits(code) and places[code]]
    found += [_told(code, "note", NOTES[code], _NOTED) for code in NOTES if fits(code)]
    found += [Explained(code, "error", tuple(messages[code]), "", tuple(errors[code])) for code in errors if fits(code)]
    return tuple(sorted(found, key=lambda one: (one.code, one.kind)))


def _told(code: str, kind: Literal["reason", "note"], text: str, places: Sequence[str]) -> Explained:
    before, mark, fix = text.rpartition("; ")
    return Explained(code, kind, (before if mark else fix,), fix if mark else "", tuple(places))


def texts(paths: Sequence[Path] | None = None) -> Mapping[str, str]:
    """Reason codes with their texts, those of the shipped patterns among them.

    Args:
        paths: files whose codes are asked for; all where None.
    """
    for path in _written() if paths is None else paths:
        if not path.is_relative_to(_PACKAGE) or path.parent == shipped_folder():
            loaded()
        elif not _APART & set(module := path.relative_to(_PACKAGE).with_suffix("").parts):
            importlib.import_module(".".join(("deltafuse", *module)).removesuffix(".__init__"))
    return {code: plain(text) for code, text in TEXTS.items()}


@lru_cache
def _written() -> Mapping[Path, str]:
    """The files that ship, with their text."""
    found = [*sorted(_PACKAGE.rglob("*.py")), *sorted(shipped_folder().glob("*.py"))]
    return {path: path.read_text(encoding="utf-8") for path in dict.fromkeys(found)}


@lru_cache
def sources() -> Mapping[Path, ast.Module]:
    """Syntax trees of what ships."""
    return {path: ast.parse(text) for path, text in _written().items()}


def _place(path: Path) -> str:
    inside = shipped_folder() if path.parent == shipped_folder() else _PACKAGE
    return f"{'patterns' if inside == shipped_folder() else 'deltafuse'}/{path.relative_to(inside).as_posix()}"


def keys(tree: ast.Module) -> Iterator[str]:
    """Keys of dictionaries and of subscripts that are assigned to.

    Args:
        tree: of a file.
    """
    for node in ast.walk(tree):
        found = node.keys if isinstance(node, ast.Dict) else [node.slice] if isinstance(node, ast.Subscript) else []
        yield from (key.value for key in found if isinstance(key, ast.Constant) and isinstance(key.value, str))


def raised(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Code and message of each `UserError` of a file; the message is "" where it is made elsewhere.

    Args:
        tree: of that file.
    """
    for scope in [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]:
        assigned = {
            target.id: node.value
            for node in ast.walk(scope)
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(scope):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "UserError" and len(node.args) > 1:
                name, message = node.args[:2]
                if isinstance(message, ast.Name):
                    message = assigned.get(message.id, message)
                if isinstance(name, ast.Constant):
                    yield str(name.value), _message(message)


def _message(node: ast.expr) -> str:
    """A message as it is written, ``{name}`` for a plain value and ``…`` for what is worked out."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.BinOp):
        return _message(node.left) + _message(node.right)
    if not isinstance(node, ast.JoinedStr):
        return ""
    return "".join(_message(part) if isinstance(part, ast.Constant) else _said(part) for part in node.values)


def _said(part: ast.expr) -> str:
    """What stands for a value of a message: ``{size}``, ``{size} bytes`` of ``number(size, "byte")``, or ``…``."""
    value = part.value if isinstance(part, ast.FormattedValue) else part
    if isinstance(value, ast.Name):
        return f"{{{value.id}}}"
    if isinstance(value, ast.Call) and ast.unparse(value.func).endswith("number"):
        count, what, *more = value.args
        return f"{_said(count)} {_message(more[0]) if more else plural(_message(what))}"
    return "…"
