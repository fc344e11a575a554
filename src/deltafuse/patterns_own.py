"""A recurrence from a file of the user's, looked over when it is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np

from deltafuse.errors import UserError
from deltafuse.kinds import misfits
from deltafuse.user_code import at_fault, blamed, guide

_DECAYS = ("head", "channel", "none")
_HINTS: Mapping[str, Any] = {
    "name": str, "anchors": frozenset[str], "fence": frozenset[str], "contractions": frozenset[str],
    "least_roots": int, "texts": Mapping[str, str],
}  # fmt: skip
_BATCH, _TOKENS, _HEADS, _SIZE = 1, 2, 2, 4


def check_recurrence(pattern: Any, file: Path) -> None:
    """Looks over what a pattern says, and runs its recurrences once.

    Args:
        pattern: has all members of `deltafuse.patterns.Pattern`.
        file: of the user's.

    Raises:
        UserError: ``bad-pattern``.
    """
    for place, what in _faults(pattern):
        raise _error(file, place, what)
    others = {f"PATTERN.neighbours[{code!r}]": one for code, one in pattern.neighbours.items()}
    for place, recurrence in {"PATTERN.recurrence": pattern.recurrence, **others}.items():
        with at_fault(file, "pattern", place), blamed():
            found: Any = recurrence(*_operands(pattern.decay))
        for what in _result_faults(found):
            raise _error(file, place, what)


def _error(file: Path, place: str, what: str) -> UserError:
    return UserError("bad-pattern", f"{file}, {place}: {what}; mend {place}, {guide('pattern')}")


def _faults(pattern: Any) -> Iterator[tuple[str, str]]:
    for name, hint in _HINTS.items():
        value: Any = getattr(pattern, name)
        normal = frozenset(cast("set[Any]", value)) if isinstance(value, set) else value
        yield from misfits(f"PATTERN.{name}", normal, hint)
    if not pattern.name:
        yield "PATTERN.name", "it is empty"
    if pattern.decay not in _DECAYS:
        yield "PATTERN.decay", f"{pattern.decay!r} is none of {', '.join(_DECAYS)}"
    neighbours: object = pattern.neighbours
    if not isinstance(neighbours, Mapping):
        yield "PATTERN.neighbours", f"it is {type(neighbours).__name__} and must be a mapping"


def _operands(decay: str) -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    gate = (_BATCH, _TOKENS, _HEADS)
    rows, state = rng.standard_normal((3, *gate, _SIZE)), rng.standard_normal((_BATCH, _HEADS, _SIZE, _SIZE))
    g = -rng.uniform(size=(*gate, _SIZE) if decay == "channel" else gate)
    return *rows, g * (decay != "none"), rng.uniform(size=gate), state


def _result_faults(found: Any) -> Iterator[str]:
    wanted = {"out": (_BATCH, _TOKENS, _HEADS, _SIZE), "the final state": (_BATCH, _HEADS, _SIZE, _SIZE)}
    kind = type(found).__name__
    parts = cast("tuple[Any, ...]", found) if isinstance(found, tuple) else ()
    if len(parts) != len(wanted):
        yield f"it gives {kind} and must give out and the final state"
        return
    for (name, shape), array in zip(wanted.items(), parts, strict=True):
        kind = type(array).__name__
        said = f"{array.dtype}{array.shape}" if hasattr(array, "dtype") and hasattr(array, "shape") else kind
        if said not in (f"float64{shape}", f"float32{shape}"):
            yield f"{name} is {said} where it must be float64{shape}"
