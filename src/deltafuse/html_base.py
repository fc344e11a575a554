"""What the pages share: one style, one set of templates, files that are put into a page."""

from __future__ import annotations

import base64
import gzip
import json
from importlib.resources import files
from typing import Any, cast

from jinja2 import Environment, PackageLoader, StrictUndefined

from deltafuse.wording import number

__all__ = ["asset", "embedded_json", "environment", "packed", "sci"]


def environment() -> Environment:
    """The templates, and the filters that they use."""
    found = Environment(
        loader=PackageLoader("deltafuse", "templates"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    found.filters["sci"] = sci
    found.filters["number"] = cast("Any", number)
    return found


def sci(value: float | None) -> str:
    """``1.50e-03``, nothing for None."""
    return "" if value is None else f"{value:.2e}"


def asset(name: str) -> bytes:
    """A file of the folder ``web``."""
    return (files("deltafuse") / "web" / name).read_bytes()


def embedded_json(document: Any) -> str:
    """A document inside a script element: no text in it can end that element."""
    text = json.dumps(document, separators=(",", ":"), allow_nan=False, default=str)
    return text.replace("<", "\\u003c")


def packed(document: Any) -> str:
    """A document as compact JSON, compressed, in letters that a page may hold."""
    text = json.dumps(document, separators=(",", ":"), allow_nan=False, default=str)
    return base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()
