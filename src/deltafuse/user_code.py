"""Python files of the user's own: patterns, targets and lowerings."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Literal
from zlib import crc32

from deltafuse.errors import UserError


def run_file(path: Path, kind: Literal["lowering", "pattern", "target"], code: str) -> ModuleType:
    """Runs a file as a module of its own; what it defines can be found under the module's name, as `pickle` does.

    Args:
        path: of the file.
        kind: what it is to define.
        code: of the error.

    Raises:
        UserError: there is no such file, it is no Python file, or it raises.
    """
    if not path.is_file():
        raise UserError(code, f"there is no {kind} file {path}; check the path")
    name = f"deltafuse_{kind}_{path.stem}_{crc32(bytes(path.absolute())):08x}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UserError(code, f"{path} cannot be imported; give a Python file")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise UserError(code, f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    return module
