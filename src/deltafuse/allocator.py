"""How glibc hands out memory in a process that is short and makes many large arrays.

By default each thread has an arena of its own, which keeps what is freed in it for that thread alone; threads here take
turns, so that this only adds up. And large arrays, and what is free at the end, go back to the system each time: the
pages that a new array then needs are made again, which took a tenth of the time of a large model.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress

#: Of malloc.h; other C libraries have no such options. Setting one of the last three ends their adaption.
_M_ARENA_MAX, _M_MMAP_THRESHOLD, _M_TOP_PAD, _M_TRIM_THRESHOLD = -8, -3, -2, -1
_SETTINGS = (
    (_M_ARENA_MAX, 1),
    (_M_MMAP_THRESHOLD, 32 << 20),
    (_M_TOP_PAD, 16 << 20),
    (_M_TRIM_THRESHOLD, (1 << 31) - 1),
)


def keep_memory() -> None:
    """One arena, and what is freed is kept for what comes next; to be called before the first thread is started.

    Does nothing where there is no glibc.
    """
    with suppress(OSError, AttributeError, TypeError):
        option = ctypes.CDLL(None).mallopt
        for setting in _SETTINGS:
            option(*setting)
