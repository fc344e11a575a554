"""The targets by name, or by the path of a user's own. A profile is imported when it is asked for."""

from __future__ import annotations

import importlib
from pathlib import Path

from deltafuse.errors import UserError
from deltafuse.targets import own
from deltafuse.targets.base import Case, Limit, Target, TargetOptions
from deltafuse.targets.profile import Profile
from deltafuse.user_code import guide, run_file

__all__ = ["Case", "Limit", "Profile", "Target", "TargetOptions", "get", "names"]

#: name -> module that holds ``PROFILE``.
_MODULES = {
    "ascend-310p": "ascend_310p",
    "ascend-a2": "ascend_a2",
    "onnx": "onnx_opset27",
    "ort": "onnxruntime_contrib",
}


def names() -> tuple[str, ...]:
    """Names of all shipped targets, sorted."""
    return tuple(sorted(_MODULES))


def get(name: str) -> Profile:
    """The target of that name, or the one that a file defines as ``PROFILE``.

    Args:
        name: of a shipped target, or the path of a Python file.

    Raises:
        UserError: ``unknown-target``; the message lists the known names. ``target-file``: the file defines no profile,
            or one with a fault.
    """
    if name in _MODULES:
        return importlib.import_module(f"deltafuse.targets.{_MODULES[name]}").PROFILE
    if name.endswith(".py"):
        return _own(Path(name))
    known = ", ".join(names())
    raise UserError(
        "unknown-target", f"there is no target named {name!r}; give one of: {known}, or the path of a .py file"
    )


def _own(path: Path) -> Profile:
    found: object = getattr(run_file(path, "target"), "PROFILE", None)
    if not isinstance(found, Profile):
        text = f"{path} defines no PROFILE of type deltafuse.targets.Profile; define one, {guide('target')}"
        raise UserError("target-file", text)
    return own.checked(found, path)
