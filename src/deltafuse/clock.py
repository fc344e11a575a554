"""How long each stage of a run takes."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager

from deltafuse.options import Progress


class Clock:
    """Seconds by stage, and the stage shown to the user."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Generator[None]:
        """One stage; those of one name add up."""
        self.progress.start(name)
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = round(self.seconds.get(name, 0.0) + time.perf_counter() - begin, 3)
