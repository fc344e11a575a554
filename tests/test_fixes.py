"""Every reason says what to do next."""

from __future__ import annotations

import ast
import importlib
import pkgutil
from pathlib import Path

import pytest

import deltafuse
from deltafuse.note_texts import NOTES
from deltafuse.patterns import loaded
from deltafuse.reasons import TEXTS, Reason

SOURCES = Path(deltafuse.__file__).parent
#: What a fix begins with: a verb that tells the reader to do something.
VERBS = frozenset({
    "accept", "add", "apply", "begin", "bring", "cast", "change", "compare", "compute", "copy", "declare",
    "end", "exchange", "export", "feed", "fill", "fold", "free", "fuse", "give", "inline", "invert", "leave",
    "let", "load", "look", "make", "mask", "move", "multiply", "negate", "number", "pad", "pin", "put", "raise",
    "read", "remove", "run", "say", "set", "shift", "store", "subtract", "swap", "take", "trace", "transpose",
    "undo", "update", "use", "write",
})  # fmt: skip
#: Fixes that depend on more than the code: the module that chooses one, and what it calls it.
CHOSEN = {
    "network-sizes": ("verify_network.py", "advice"),
    "root-type": ("roots.py", "fix"),
    "structure-profile": ("lint_operands.py", "fix"),
}


def fix_of(text: str) -> str:
    """The part of a template that says what to do, "" where it has none."""
    _, mark, fix = text.rpartition("; ")
    return fix if mark else ""


def says_what_to_do(fix: str) -> bool:
    words = fix.replace(":", "").replace(",", "").split()
    return len(words) > 1 and words[0] in VERBS


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    for module in pkgutil.walk_packages(deltafuse.__path__, "deltafuse."):
        if not module.name.endswith(("__main__", "worker_main")):
            importlib.import_module(module.name)
    loaded()
    return dict(TEXTS)


def test_every_text_ends_with_a_fix(texts: dict[str, str]) -> None:
    assert len(texts) > 150
    assert [code for code in sorted(set(texts) - set(CHOSEN)) if not says_what_to_do(fix_of(texts[code]))] == []


def test_every_note_ends_with_what_to_do() -> None:
    assert [code for code in sorted(NOTES) if not says_what_to_do(fix_of(NOTES[code]))] == []


def test_a_fix_is_not_all_that_a_text_says(texts: dict[str, str]) -> None:
    assert [code for code, text in texts.items() if len(text.rpartition("; ")[0]) < 5] == []


@pytest.mark.parametrize(
    "text",
    [
        "the mask is upside down",
        "the mask is upside down; ",
        "the mask is upside down; the site stays as it is",
        "the mask is upside down; leave",
        "the mask is upside down: turn it",
    ],
)
def test_a_text_without_a_fix_is_noticed(text: str) -> None:
    assert not says_what_to_do(fix_of(text))


@pytest.mark.parametrize("code", CHOSEN)
def test_a_fix_that_is_chosen_says_what_to_do_whichever_it_is(texts: dict[str, str], code: str) -> None:
    module, name = CHOSEN[code]
    assert fix_of(texts[code]) == f"{{{name}}}"
    found = [text for text in _assigned(ast.parse((SOURCES / module).read_text()), name) if text]
    assert len(found) > 1
    assert [text for text in found if text.split()[0] not in VERBS] == []


def _assigned(tree: ast.AST, name: str) -> list[str]:
    """The texts that a variable is set to, both of a choice, and constants of the module that stand for one."""
    constants = {
        node.targets[0].id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }

    def texts_of(value: ast.expr) -> list[str]:
        if isinstance(value, ast.IfExp):
            return [*texts_of(value.body), *texts_of(value.orelse)]
        if isinstance(value, ast.Name):
            return texts_of(constants[value.id])
        if isinstance(value, ast.BinOp):
            return texts_of(value.left)
        first = value.values[0] if isinstance(value, ast.JoinedStr) else value
        assert isinstance(first, ast.Constant), "a fix begins with words"
        return [str(first.value)]

    assigned = [node for node in ast.walk(tree) if isinstance(node, ast.Assign)]
    return [
        text
        for node in assigned
        if isinstance(node.targets[0], ast.Name) and node.targets[0].id == name
        for text in texts_of(node.value)
    ]


def test_what_and_fix_are_the_text(texts: dict[str, str]) -> None:
    reason = Reason("left-out", {"option": "--sites", "why": "not among --sites; or so"})
    assert reason.text == f"{reason.what}; {reason.fix}"
    assert reason.what == "left out: not among --sites; or so"
    assert says_what_to_do(reason.fix)


def test_a_text_of_ones_own_may_lack_a_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TEXTS, "my-own", "{value} is odd")
    reason = Reason("my-own", {"value": "x"})
    assert (reason.what, reason.fix, reason.text) == ("x is odd", "", "x is odd")
