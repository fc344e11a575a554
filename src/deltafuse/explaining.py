"""What a code means: reasons, notes, findings, errors, read from the code itself, and terms. Needs no model."""

from __future__ import annotations

import ast
import importlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Literal

import deltafuse
from deltafuse.glossary import GLOSSARY, term_of
from deltafuse.note_texts import NOTES
from deltafuse.patterns import loaded, shipped_folder
from deltafuse.reasons import TEXTS, plain
from deltafuse.wording import plural

__all__ = ["Explained", "explained", "findings", "keys", "raised", "sources", "texts"]

#: What starts a process when it is imported, or needs more than deltafuse itself does.
_APART = frozenset({"__main__", "worker_main", "torch"})
_PACKAGE = Path(deltafuse.__file__).parent
#: Where notes are told.
_NOTED = ("deltafuse/note_texts.py",)
#: Where terms are.
_TOLD = ("deltafuse/glossary.py",)


@dataclass(frozen=True)
class Explained:
    """One code.

    Attributes:
        code: e.g. ``not-the-rule``.
        kind: ``reason``: why a site is no match, may not be fused, or differs; ``note``: what to know of a site that
            is right; ``finding``: of lint; ``error``: what ends a command with exit 1; ``term``: a word that
            tables, pages and documents have as a heading or label.
        texts: what it says: one for a reason or a note, all messages of an error, what to do about a finding;
            ``{name}`` and ``…`` are filled in when it is shown.
        fix: what to do; "" where the texts say it themselves.
        places: files that it comes from.
    """

    code: str
    kind: Literal["reason", "note", "finding", "error", "term"]
    texts: tuple[str, ...]
    fix: str
    places: tuple[str, ...]


def explained(globs: Sequence[str] = ()) -> tuple[Explained, ...]:
    """All codes that fit, sorted; of words that are no code, the terms that they are.

    Args:
        globs: codes, or shell-style patterns of codes; all codes and terms where there is none.
    """
    exact = bool(globs) and not any(set(glob) & set("*?[") for glob in globs)
    chosen = {path: text for path, text in _written().items() if not exact or any(f'"{one}"' in text for one in globs)}

    def fits(code: str) -> bool:
        return not globs or any(fnmatchcase(code, glob) for glob in globs)

    known = texts(list(chosen))
    places, messages = defaultdict[str, list[str]](list), defaultdict[str, list[str]](list)
    errors = defaultdict[str, list[str]](list)
    looked = defaultdict[str, tuple[list[str], list[str]]](lambda: ([], []))
    for path in chosen:
        place, tree = _place(path), _tree(path)
        for code in keys(tree):
            places[code].append(place)
        for code, message in raised(tree):
            errors[code] += [place] if place not in errors[code] else []
            messages[code] += [message] if message and message not in messages[code] else []
        for code, fix in findings(tree):
            for told, more in zip(looked[code], (fix, place), strict=True):
                told += [more] if more and more not in told else []
    found = [_told(code, "reason", known[code], places[code]) for code in known if fits(code) and places[code]]
    found += [_told(code, "note", NOTES[code], _NOTED) for code in NOTES if fits(code)]
    found += [Explained(code, "error", tuple(messages[code]), "", tuple(errors[code])) for code in errors if fits(code)]
    found += [Explained(code, "finding", tuple(do), "", tuple(of)) for code, (do, of) in looked.items() if fits(code)]
    found += _terms([glob for glob in globs if not any(fnmatchcase(one.code, glob) for one in found)], not globs)
    return tuple(sorted(found, key=lambda one: (one.code, one.kind)))


def _terms(words: Sequence[str], every: bool) -> list[Explained]:
    named = [(names[0], text) for names, text in GLOSSARY.items()] if every else [*map(term_of, words)]
    known = dict(found for found in named if found is not None)
    return [Explained(name.replace(" ", "-"), "term", (text,), "", _TOLD) for name, text in known.items()]


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


@cache
def _written() -> Mapping[Path, str]:
    """The files that ship, with their text."""
    found = [*sorted(_PACKAGE.rglob("*.py")), *sorted(shipped_folder().glob("*.py"))]
    return {path: path.read_text(encoding="utf-8") for path in dict.fromkeys(found)}


def sources() -> Mapping[Path, ast.Module]:
    """Syntax trees of what ships."""
    return {path: _tree(path) for path in _written()}


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(_written()[path])


def _place(path: Path) -> str:
    inside = shipped_folder() if path.parent == shipped_folder() else _PACKAGE
    return f"{'patterns' if inside == shipped_folder() else 'deltafuse'}/{path.relative_to(inside).as_posix()}"


@cache
def keys(tree: ast.Module) -> tuple[str, ...]:
    """Keys of dictionaries and of subscripts, each once.

    Args:
        tree: of a file.
    """
    found: list[ast.expr | None] = []
    for node in ast.walk(tree):
        found += node.keys if isinstance(node, ast.Dict) else [node.slice] if isinstance(node, ast.Subscript) else []
    written = [key.value for key in found if isinstance(key, ast.Constant)]
    return tuple(dict.fromkeys(key for key in written if isinstance(key, str)))


def raised(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Code and message of each `UserError` of a file; the message is "" where it is made elsewhere.

    Args:
        tree: of that file.
    """
    for called, scope in _calls(tree):
        name, message = called.args[:2]
        if _name(called) == "UserError" and isinstance(name, ast.Constant):
            yield str(name.value), _message(_assigned(scope, message))


def findings(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Code of each finding of lint of a file, and what to do about it; "" where that is made elsewhere.

    Args:
        tree: of that file.
    """
    for called, scope in _calls(tree):
        name, fix = called.args[0], called.args[-1]
        if _name(called) in ("finding", "Finding") and isinstance(name, ast.Constant):
            yield str(name.value), _message(_assigned(scope, fix))


@cache
def _calls(tree: ast.Module) -> tuple[tuple[ast.Call, ast.FunctionDef], ...]:
    """All calls with two arguments or more, each with the function that it stands in."""
    scopes = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    within = ((node, scope) for scope in scopes for node in ast.walk(scope))
    return tuple((node, scope) for node, scope in within if isinstance(node, ast.Call) and len(node.args) > 1)


def _name(called: ast.Call) -> str:
    """What is called, without what it is an attribute of."""
    of = called.func
    return of.attr if isinstance(of, ast.Attribute) else of.id if isinstance(of, ast.Name) else ""


def _assigned(scope: ast.FunctionDef, value: ast.expr) -> ast.expr:
    """What was last assigned to a plain name above the place where it stands, else the expression itself."""
    if not isinstance(value, ast.Name):
        return value
    found = [
        (node.lineno, part)
        for node in ast.walk(scope)
        if isinstance(node, ast.Assign) and node.lineno <= value.lineno
        for target in node.targets
        for name, part in _pairs(target, node.value)
        if isinstance(name, ast.Name) and name.id == value.id
    ]
    return max(found, key=lambda one: one[0])[1] if found else value


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    """The names of an assignment and what each is given."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        yield from zip(target.elts, value.elts, strict=True)
    else:
        yield target, value


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
