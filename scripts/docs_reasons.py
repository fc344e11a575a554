"""Every reason code and every error code as a page of the documentation, read from the code."""

from __future__ import annotations

import ast
import importlib
import pkgutil
from collections import defaultdict
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import deltafuse
from deltafuse.patterns import loaded
from deltafuse.reasons import TEXTS
from docs_rooms import room_of
from docs_text import cell, code, table

ROOT = Path(__file__).parents[1]
#: What starts a process when it is imported, or needs more than deltafuse itself does.
_APART = ("__main__", "worker_main", "torch")


def texts() -> dict[str, str]:
    """All reason codes with their texts, those of the shipped patterns among them."""
    for module in pkgutil.walk_packages(deltafuse.__path__, "deltafuse."):
        if not set(module.name.split(".")) & set(_APART):
            importlib.import_module(module.name)
    loaded()
    return dict(TEXTS)


@lru_cache
def sources() -> dict[str, ast.Module]:
    """Syntax trees of what ships, by path below the project's folder."""
    files = [*sorted((ROOT / "src").rglob("*.py")), *sorted((ROOT / "patterns").glob("*.py"))]
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in files}


def places() -> dict[str, list[str]]:
    """Code -> the files that give it a text."""
    known, found = texts(), defaultdict[str, list[str]](list)
    for path, tree in sources().items():
        for name in dict.fromkeys(_keys(tree)):
            if name in known:
                found[name].append(path)
    return dict(found)


def _keys(tree: ast.Module) -> Iterator[str]:
    """Keys of dictionaries and of subscripts that are assigned to."""
    for node in ast.walk(tree):
        keys = node.keys if isinstance(node, ast.Dict) else [node.slice] if isinstance(node, ast.Subscript) else []
        yield from (key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str))


def reasons() -> str:
    """Reason codes by the room where they arise."""
    known, where = texts(), places()
    rooms = defaultdict[str, list[list[str]]](list)
    for name in sorted(known):
        files = where[name]
        said, _, fix = known[name].rpartition("; ")
        row = [f"{code(name)}{{ #{name} }}", cell(said or fix), cell(fix if said else "")]
        rooms[room_of(files[0])].append([*row, ", ".join(code(Path(path).stem) for path in files)])
    head = ("code", "what it says", "what to do", "from")
    return "\n".join(f"## {room}\n\n{table(head, rows)}" for room, rows in sorted(rooms.items()))


def errors() -> str:
    """Codes of what is exit 1, with the messages that go with each."""
    found = defaultdict[str, list[str]](list)
    for tree in sources().values():
        for name, message in _raised(tree):
            if message and message not in found[name]:
                found[name].append(message)
    rows = [[f"{code(name)}{{ #error-{name} }}", "<br>".join(map(cell, messages))] for name, messages in found.items()]
    return table(("code", "messages"), sorted(rows))


def _raised(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Code and message of each `UserError` of a file; the message is "" where it is made elsewhere."""
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
    return "".join(
        str(part.value)
        if isinstance(part, ast.Constant)
        else f"{{{part.value.id}}}"
        if isinstance(part, ast.FormattedValue) and isinstance(part.value, ast.Name)
        else "…"
        for part in node.values
    )
