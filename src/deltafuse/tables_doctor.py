"""The report of ``fuse doctor`` for people. Without rich, which may be what is missing."""

from __future__ import annotations

import os
import shutil
import textwrap
from collections.abc import Iterator
from typing import TextIO

from deltafuse.doctor import DoctorReport

_COLOURS = {"fine": "\x1b[32m", "lacks": "\x1b[33m", "mend": "\x1b[31m"}
_PLAIN = "\x1b[0m"


def print_doctor(report: DoctorReport, out: TextIO) -> None:
    """One line a check, what to do beneath it; colours on a terminal alone, and never where NO_COLOR is set."""
    coloured = out.isatty() and not os.environ.get("NO_COLOR")
    room = shutil.get_terminal_size().columns if out.isatty() else None
    out.writelines(f"{line}\n" for line in _lines(report, _COLOURS if coloured else {}, room))


def _folded(text: str, room: int | None) -> list[str]:
    first, further = " " * 8, " " * 13
    if room is None:
        return [first + text]
    return textwrap.wrap(text, room, initial_indent=first, subsequent_indent=further, break_on_hyphens=False)


def _lines(report: DoctorReport, colours: dict[str, str], room: int | None) -> Iterator[str]:
    part = ""
    for check in report.checks:
        if check.part != part:
            part = check.part
            yield part
        colour = colours.get(check.verdict, "")
        yield f"  {colour}{check.verdict:<6}{_PLAIN if colour else ''}{check.name}: {check.found}"
        if check.fix:
            yield from _folded(f"fix: {check.fix}", room)
    counts = {verdict: sum(check.verdict == verdict for check in report.checks) for verdict in _COLOURS}
    yield f"{counts['mend'] or 'nothing'} to mend; {counts['lacks']} that may be done without"
