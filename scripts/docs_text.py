"""Markdown for the documentation's made parts: tables, code, nothing that a page could misread."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def cell(text: object) -> str:
    """Text of a table's cell: on one line, its signs no markup."""
    plain = " ".join(str(text).split())
    for sign, written in (("&", "&amp;"), ("<", "&lt;"), ("|", "&#124;"), ("*", "&#42;"), ("_", "&#95;")):
        plain = plain.replace(sign, written)
    return plain


def code(text: object) -> str:
    """A cell in the font of code; a text without content stays empty."""
    return f"`{str(text).replace('|', chr(92) + '|')}`" if str(text) else ""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; cells are Markdown already."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
