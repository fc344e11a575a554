"""Threads share one arena of memory, and what is freed is kept, where the C library can be told so."""

from __future__ import annotations

import subprocess
import sys

import pytest

from deltafuse import allocator

#: Counts the bytes of addresses that are set aside while eight threads hold memory.
MEASURED = """
import sys, threading
from pathlib import Path

if len(sys.argv) > 1:
    from deltafuse.allocator import keep_memory
    keep_memory()
waiting = threading.Barrier(9)

def work():
    kept = [bytearray(50_000) for _ in range(10)]
    waiting.wait(60)

for _ in range(8):
    threading.Thread(target=work).start()
waiting.wait(60)
ranges = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines() if " ---p " in line]
print(sum(int(end, 16) - int(start, 16) for start, end in ranges))
"""


def reserved(*arguments: str) -> int:
    """Bytes of addresses that are set aside for the stacks and arenas of the threads."""
    command = [sys.executable, "-c", MEASURED, *arguments]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_threads_have_no_arenas_of_their_own() -> None:
    # Each arena has 64 MB of addresses.
    assert reserved() - reserved("one") > 6 * (60 << 20)


#: Counts the pages that are made anew while a large array comes and goes.
REPEATED = """
import resource, sys

import numpy as np

if len(sys.argv) > 1:
    from deltafuse.allocator import keep_memory
    keep_memory()
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
np.ones(1 << 18)
before = faults()
for _ in range(20):
    arrays = [np.ones(1 << 18) for _ in range(4)]
    del arrays
print(faults() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc")
def test_what_is_freed_is_kept_for_the_next_array() -> None:
    def made(*arguments: str) -> int:
        command = [sys.executable, "-c", REPEATED, *arguments]
        return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    # Four arrays of 2 MB have 2,048 pages of 4 kB.
    assert made("kept") < 3 * 2048
    assert made() > 2 * made("kept")


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Bare:
        """A C library without mallopt."""

    asked: list[object] = []
    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda name: asked.append(name) or Bare())
    allocator.keep_memory()
    assert asked == [None]
