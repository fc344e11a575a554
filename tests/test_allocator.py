"""Threads share one arena of memory where the C library has several."""

from __future__ import annotations

import subprocess
import sys

import pytest

from deltafuse import allocator

#: Counts the address ranges that are set aside while eight threads hold memory.
MEASURED = """
import sys, threading
from pathlib import Path

if len(sys.argv) > 1:
    from deltafuse.allocator import one_arena
    one_arena()
waiting = threading.Barrier(9)

def work():
    kept = [bytearray(50_000) for _ in range(10)]
    waiting.wait(60)

for _ in range(8):
    threading.Thread(target=work).start()
waiting.wait(60)
print(Path("/proc/self/maps").read_text().count(" ---p "))
"""


def reserved(*arguments: str) -> int:
    """Address ranges that are set aside for the stacks and arenas of the threads."""
    command = [sys.executable, "-c", MEASURED, *arguments]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_threads_have_no_arenas_of_their_own() -> None:
    assert reserved("one") <= reserved() - 6


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Bare:
        """A C library without mallopt."""

    asked: list[object] = []
    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda name: asked.append(name) or Bare())
    allocator.one_arena()
    assert asked == [None]
