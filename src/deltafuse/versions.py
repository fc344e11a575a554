"""Versions that a bug report needs. Light: nothing is imported to tell its version."""

from __future__ import annotations

import platform
import re
from contextlib import suppress
from importlib import metadata

#: Names under which onnxruntime is published.
RUNTIMES = ("onnxruntime", "onnxruntime-gpu", "onnxruntime-openvino", "onnxruntime-directml")
PACKAGES = ("onnx", "onnxruntime", "numpy")


def installed(package: str) -> str | None:
    """The version of a package, None where it is not installed."""
    names = RUNTIMES if package == "onnxruntime" else (package,)
    return next((found for found in map(_version, names) if found is not None), None)


def _version(name: str) -> str | None:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(name)
    return None


def numbers(version: str) -> tuple[int, ...]:
    """The first three numbers of a version, to be compared."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def versions() -> dict[str, str | None]:
    """Name -> version of deltafuse, of what it computes with, of Python and of the machine."""
    found = {name: installed(name) for name in ("deltafuse", *PACKAGES)}
    machine = f"{platform.system()} {platform.release()} {platform.machine()}"
    return found | {"python": platform.python_version(), "platform": machine}
