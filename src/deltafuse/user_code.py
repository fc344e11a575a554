"""Python files of the user's own: patterns, targets and lowerings."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Literal

from deltafuse.errors import UserError


def run_file(path: Path, kind: Literal["lowering", "pattern", "target"], code: str) -> ModuleType:
    """Runs a file as a module of its own.

    Args:
        path: of the file.
        kind: what it is to define.
        code: of the error.

    Raises:
        UserError: there is no such file, it is no Python file, or it raises.
    """
    if not path.is_file():
        raise UserError(code, f"there is no {kind} file {path}; check the path")
    spec = importlib.util.spec_from_file_location(f"deltafuse_{kind}_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise UserError(code, f"{path} cannot be imported; give a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UserError(code, f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    return module
