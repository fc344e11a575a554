"""What may stand at the cursor of a command line: commands, options, their values. Light: it answers at a keystroke."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from deltafuse.glossary import GLOSSARY
from deltafuse.note_texts import NOTES
from deltafuse.parsers import PARSERS, plain_parser

__all__ = ["FILES", "answer", "candidates"]

#: Says that a path may stand there.
FILES = ":files"
#: A code as it is written: a key with a text beside it, a text by its key, an error, a finding of lint.
_CODE = re.compile(
    r'(?:TEXTS\[|(?:UserError|[Ff]inding)\(\s*)"([a-z][a-z0-9-]*)"|^\s*"([a-z][a-z0-9-]*)":\s*\(?\s*f?"[^"]* ',
    re.MULTILINE,
)


def answer(environment: Mapping[str, str] | None = None) -> int:
    """Prints the candidates for the words that the shell's script hands over; see `deltafuse.completion_scripts`."""
    given = os.environ if environment is None else environment
    words = given.get("COMP_WORDS", "").split("\n")
    number = given.get("COMP_CWORD", "")
    at = int(number) if number.isdigit() else len(words) - 1
    current = words[at] if at < len(words) else ""
    sys.stdout.writelines(f"{one}\n" for one in candidates(words[1:at], current))
    return 0


def candidates(before: Sequence[str], current: str) -> list[str]:
    """What may stand where ``current`` stands.

    Args:
        before: the words between ``fuse`` and the cursor.
        current: what is typed of the word.
    """
    # bash parts --target=ort into three words.
    words, typed = [word for word in before if word != "="], "" if current == "=" else current
    command = words[0] if words and words[0] in PARSERS else None
    parser = plain_parser() if command is None else PARSERS[command]()
    rest = words if command is None else words[1:]
    option, _, value = typed.partition("=")
    stem = ""
    if option.startswith("--") and "=" in typed:
        rest, typed, stem = [*rest, option], value, f"{option}="
    open_action = _open(parser, rest)
    found = list(_values(open_action)) if open_action is not None else []
    if open_action is None or (open_action.nargs in ("+", "?") and typed.startswith("-")):
        found = list(_words(parser, typed, first=not before))
    fitting = (one for one in dict.fromkeys(found) if one == FILES or one.startswith(typed))
    return [one if one == FILES else f"{stem}{one}" for one in fitting]


def _words(parser: argparse.ArgumentParser, typed: str, *, first: bool) -> Iterator[str]:
    if typed.startswith("-"):
        yield from sorted(name for action in parser._actions for name in action.option_strings)  # pyright: ignore[reportPrivateUsage]
        return
    if first:
        yield from PARSERS
    for action in parser._actions:  # pyright: ignore[reportPrivateUsage]
        if not action.option_strings:
            yield from _values(action)


def _open(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Action | None:
    """The option whose value is typed, None where no option waits for one."""
    named = {name: action for action in parser._actions for name in action.option_strings}  # pyright: ignore[reportPrivateUsage]
    for back, word in enumerate(reversed(words)):
        if word.startswith("-"):
            action = named.get(word)
            return action if action is not None and back < _most(action) else None
    return None


def _most(action: argparse.Action) -> float:
    """How many values an option takes at most."""
    if action.nargs == 0:
        return 0
    return float("inf") if action.nargs in ("+", "*") else action.nargs if isinstance(action.nargs, int) else 1


def _values(action: argparse.Action) -> Iterator[str]:
    if action.choices is not None:
        yield from map(str, action.choices)
    elif action.dest == "target":
        from deltafuse.parsers_types import TARGETS

        yield from TARGETS
        yield FILES
    elif action.dest == "codes":
        yield from _codes()
    elif action.dest == "rules":
        yield from _rules()
    elif action.dest in ("install_completion", "show_completion"):
        from deltafuse.completion_scripts import SHELLS

        yield from SHELLS
    elif action.dest == "op" and action.metavar == "TYPE":
        yield from ("cgdr", "rgdr")
    elif action.type is Path or action.metavar in ("FILE", "DIR"):
        yield FILES


def _rules() -> list[str]:
    """Names of the shipped patterns, which are those of their files."""
    return sorted(path.stem for path in _patterns().glob("[!_]*.py"))


def _patterns() -> Path:
    inside = Path(__file__).parent / "_patterns"
    return inside if inside.is_dir() else Path(__file__).parents[2] / "patterns"


def _codes() -> list[str]:
    """Codes of all kinds, as they are written; see `deltafuse.explaining` for what they mean."""
    files = {*Path(__file__).parent.rglob("*.py"), *_patterns().glob("*.py")}
    texts = (path.read_text(encoding="utf-8") for path in files)
    terms = (names[0].replace(" ", "-") for names in GLOSSARY)
    return sorted({*NOTES, *terms, *(one[1] or one[2] for text in texts for one in _CODE.finditer(text))})
