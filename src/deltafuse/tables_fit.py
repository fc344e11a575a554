"""Tables that fit the screen: names fold, numbers and words do not, and what does not fit becomes a block a row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from textwrap import wrap

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

Cell = str | Text

#: Characters from which on a word is a name, which may be broken: no number is as long.
NAME = 20
#: Lines that a row of a table has at most.
LINES = 2
_GAP = 2


def table(headings: Sequence[str], rows: Sequence[Sequence[Cell]], widths: Sequence[int] | None = None) -> Table:
    """A table without a frame, so that it reads the same in a file.

    Args:
        headings: of the columns.
        rows: cells.
        widths: of the columns, None for as wide as each wants to be.
    """
    grid = Table(box=None, pad_edge=False, header_style="bold")
    for index, heading in enumerate(headings):
        grid.add_column(heading, overflow="fold", width=None if widths is None else widths[index])
    for row in rows:
        grid.add_row(*row)
    return grid


def print_table(headings: Sequence[str], rows: Sequence[Sequence[Cell]], screen: Console) -> None:
    """Prints a table where it fits, else each row as a block: the first cell, then ``heading value`` of all others.

    Args:
        headings: of the columns.
        rows: cells; one that is empty is left out of a block.
        screen: where to print.
    """
    widths = fitting(headings, rows, screen.width)
    if widths is not None:
        screen.print(table(headings, rows, widths))
        return
    for row in rows:
        for line in block(headings, row, screen.width):
            screen.print(line)


def fitting(headings: Sequence[str], rows: Sequence[Sequence[Cell]], room: int) -> list[int] | None:
    """Widths of the columns, None where words or numbers would have to be broken, or a row had many lines.

    Args:
        headings: of the columns.
        rows: cells.
        room: characters of a line.
    """
    columns = [[heading, *map(str, cells)] for heading, *cells in zip(headings, *rows, strict=True)]
    widths = [max(map(cell_len, cells)) for cells in columns]
    least = [max(map(_longest, cells)) for cells in columns]
    room -= _GAP * (len(columns) - 1)
    if sum(least) > room:
        return None
    while sum(widths) > room:
        widest = max((at for at in range(len(widths)) if widths[at] > least[at]), key=lambda at: widths[at])
        widths[widest] -= 1
    most = [max(map(cell_len, cells)) for cells in columns]
    return widths if all(have * LINES >= wanted for have, wanted in zip(widths, most, strict=True)) else None


def _longest(text: str) -> int:
    """Characters of the longest word; of a name, what is told of it in a line."""
    return max((min(cell_len(word), NAME) for word in text.split()), default=0)


def block(headings: Sequence[str], row: Sequence[Cell], room: int) -> Iterator[Text]:
    """A row as lines: a heading and its value stay together where they fit into a line.

    Args:
        headings: of the columns.
        row: its cells.
        room: characters of a line.
    """
    first, *cells = (cell if isinstance(cell, Text) else Text(cell) for cell in row)
    yield Text(first.plain, style="bold")
    facts = [
        Text.assemble((f"{heading} ", "dim"), cell)
        for heading, cell in zip(headings[1:], cells, strict=True)
        if cell.plain
    ]
    for line in packed([fact.cell_len for fact in facts], room - _GAP):
        yield Text("  ") + Text("  ").join(facts[at] for at in line)


def hanging(text: str, room: int) -> str:
    """A line, folded at words where it is too long, what follows set in.

    Args:
        text: the line, which may be set in itself.
        room: characters of a line.
    """
    if cell_len(text) <= room:
        return text
    start = text[: len(text) - len(text.lstrip())]
    return "\n".join(wrap(
        text, room, initial_indent="", subsequent_indent=f"{start}  ", break_on_hyphens=False, break_long_words=False,
    ))  # fmt: skip


def packed(lengths: Sequence[int], room: int) -> Iterator[list[int]]:
    """Which of some texts go into which line, with a gap between two; one that is too long has a line of its own.

    Args:
        lengths: of the texts.
        room: characters of a line.
    """
    line: list[int] = []
    used = 0
    for index, length in enumerate(lengths):
        if line and used + _GAP + length > room:
            yield line
            line, used = [], 0
        used += length + (_GAP if line else 0)
        line.append(index)
    if line:
        yield line
