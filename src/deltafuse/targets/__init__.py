"""The targets by name, or by the path of a user's own. A profile is imported when it is asked for."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from types import ModuleType

from deltafuse.errors import UserError
from deltafuse.targets.base import Case, Limit, Target, TargetOptions
from deltafuse.targets.profile import Profile

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
        UserError: ``unknown-target``; the message lists the known names. ``target-file``: the file defines no profile.
    """
    if name in _MODULES:
        return _profile(importlib.import_module(f"deltafuse.targets.{_MODULES[name]}"), name)
    if name.endswith(".py"):
        return _profile(_load(Path(name)), name)
    known = ", ".join(names())
    raise UserError(
        "unknown-target", f"there is no target named {name!r}; give one of: {known}, or the path of a .py file"
    )


def _load(path: Path) -> ModuleType:
    if not path.is_file():
        raise UserError("target-file", f"there is no target file {path}; check the path")
    spec = importlib.util.spec_from_file_location(f"deltafuse_target_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise UserError("target-file", f"{path} cannot be imported; give a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UserError("target-file", f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    return module


def _profile(module: ModuleType, name: str) -> Profile:
    found = getattr(module, "PROFILE", None)
    if isinstance(found, Profile):
        return found
    raise UserError("target-file", f"{name} defines no PROFILE of type deltafuse.targets.Profile")
