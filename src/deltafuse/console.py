"""Progress on stderr: a line that moves where someone watches, nothing where no one does."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from deltafuse.options import Progress, SilentProgress

if TYPE_CHECKING:
    from rich.progress import Progress as RichBars
    from rich.progress import ProgressColumn


class Bars:
    """One moving line for the stage that is running."""

    def __init__(self, bars: RichBars) -> None:
        self._bars = bars
        self._stage = "starting"
        self._task = bars.add_task(self._stage, total=None)

    def start(self, stage: str) -> None:
        """Shows the next stage."""
        self._stage = stage
        self._bars.reset(self._task, total=None, description=stage)

    def advance(self, n: int, total: int) -> None:
        """Shows how much of the stage is done."""
        self._bars.update(self._task, completed=n, total=total)

    def note(self, text: str) -> None:
        """Says it beside the stage; it goes with the line."""
        self._bars.update(self._task, description=f"{self._stage}: {text}")


@contextmanager
def progress() -> Generator[Progress, None, None]:
    """Progress for one run; it is gone from the screen when the run ends."""
    if not sys.stderr.isatty():
        yield SilentProgress()
        return
    from rich.console import Console
    from rich.progress import Progress as RichBars

    with RichBars(*_columns(), console=Console(stderr=True), transient=True) as bars:
        yield Bars(bars)


def _columns() -> tuple[ProgressColumn, ...]:
    """What runs, how much of it is done where that is known, and for how long."""
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

    told = TextColumn("{task.description}", markup=False)
    return told, BarColumn(), TaskProgressColumn(show_speed=False), TimeElapsedColumn()
