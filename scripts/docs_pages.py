"""Fills the pages of the documentation with what the code knows: a hook of mkdocs, see mkdocs.yml.

A page has a comment ``<!-- made: NAME -->`` where the text of a maker stands in the built site.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from docs_reasons import errors, findings, glossary, notes, reasons
from docs_reference import commands, targets
from docs_reports import reports
from docs_rooms import rooms

MAKERS: dict[str, Callable[[], str]] = {
    "commands": commands,
    "errors": errors,
    "findings": findings,
    "glossary": glossary,
    "notes": notes,
    "reasons": reasons,
    "reports": reports,
    "rooms": rooms,
    "targets": targets,
}
#: What a browser fetches by itself: a page may link to other hosts, but ask none for anything.
_FETCHED = re.compile(r"""<(?:script|link|img|iframe)\b[^>]*?\b(?:src|href)=["']?(?:https?:)?//[^>]*>""")
_MARK = re.compile(r"<!-- made: (\w+) -->")


def filled(markdown: str) -> str:
    """The text of a page with all marks replaced.

    Raises:
        KeyError: a mark names no maker.
    """
    return _MARK.sub(lambda mark: MAKERS[mark[1]](), markdown)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs for each page before it becomes HTML."""
    return filled(markdown)


def on_post_page(output: str, page: Any, **_: Any) -> None:
    """Called by mkdocs for each page that is written.

    Raises:
        ValueError: the page makes a browser ask another host for something.
    """
    found = _FETCHED.search(output)
    if found is not None:
        raise ValueError(f"{page.file.src_uri} would fetch from another host: {found[0]}")
