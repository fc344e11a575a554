"""One arena of memory for all threads of a process.

glibc gives each thread an arena of its own, which keeps what is freed in it for that thread alone. Threads here take
turns, so that this only adds up.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress

#: Of malloc.h; other C libraries have no such option.
_M_ARENA_MAX = -8


def one_arena() -> None:
    """Asks for it; to be called before the first thread is started. Does nothing where there is no glibc."""
    with suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)
