"""The targets by name. A profile is imported when it is asked for."""

from __future__ import annotations

from collections.abc import Callable

from deltafuse.errors import UserError
from deltafuse.targets.base import Limit, Target, TargetOptions

__all__ = ["Limit", "Target", "TargetOptions", "get", "names"]


def _ascend_310p() -> Target:
    from deltafuse.targets.ascend_310p import Ascend310P

    return Ascend310P()


_TARGETS: dict[str, Callable[[], Target]] = {"ascend-310p": _ascend_310p}


def names() -> tuple[str, ...]:
    """Names of all targets, sorted."""
    return tuple(sorted(_TARGETS))


def get(name: str) -> Target:
    """The target of that name.

    Raises:
        UserError: ``unknown-target``; the message lists the known names.
    """
    if name not in _TARGETS:
        known = ", ".join(names())
        raise UserError("unknown-target", f"there is no target named {name!r}; give one of: {known}")
    return _TARGETS[name]()
