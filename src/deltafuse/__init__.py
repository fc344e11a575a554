"""Finds gated delta rules in exported ONNX graphs, proves them by execution, and replaces each with one fused operator.

The command ``fuse`` as functions, with the same options:

    >>> import deltafuse
    >>> report = deltafuse.fuse("prefill.onnx", "prefill-fused.onnx", target="ascend-310p")
    >>> if report.exit == 0:
    ...     deltafuse.verify("prefill.onnx", "prefill-fused.onnx").exit
    0
    >>> deltafuse.lower("prefill-fused.onnx", "prefill-runnable.onnx", rounding=False)
    >>> deltafuse.rollback("prefill-fused.onnx", "prefill-back.onnx")
    >>> deltafuse.inspect("decode.onnx").sites[0].match.scale
    0.08838834764831845
    >>> deltafuse.listing("decode.onnx", tensors="^past_", ops=["Conv"])

`fuse` and `inspect` return a `FuseReport`, `verify` a `VerifyReport`, `rollback` a `RollbackReport`, `lower` a
`LowerReport`, `listing` a `Listing`. What the caller can mend raises `UserError`, whose message says how; a bug of ours
raises `InternalError`. What is not in ``__all__`` is internal and may change.
"""

from __future__ import annotations

import importlib as _importlib
import sys as _sys
from types import ModuleType as _ModuleType
from typing import TYPE_CHECKING as _TYPE_CHECKING

from deltafuse.api import fuse, inspect, listing, lower, rollback
from deltafuse.api_verify import verify
from deltafuse.errors import DeltafuseError, InternalError, UserError
from deltafuse.options import FuseOptions, Progress

if _TYPE_CHECKING:
    from deltafuse.lower import LowerReport
    from deltafuse.match import FuseReport, Match, SiteReport
    from deltafuse.probing import Listing
    from deltafuse.rollback import RollbackReport
    from deltafuse.verify import VerifyReport

__all__ = [
    "DeltafuseError",
    "FuseOptions",
    "FuseReport",
    "InternalError",
    "Listing",
    "LowerReport",
    "Match",
    "Progress",
    "RollbackReport",
    "SiteReport",
    "UserError",
    "VerifyReport",
    "fuse",
    "inspect",
    "listing",
    "lower",
    "rollback",
    "verify",
]

#: Reports live in modules that import onnx; they are looked up when they are asked for.
_REPORTS = {
    "FuseReport": "match",
    "Listing": "probing",
    "LowerReport": "lower",
    "Match": "match",
    "RollbackReport": "rollback",
    "SiteReport": "match",
    "VerifyReport": "verify",
}


def __getattr__(name: str) -> object:
    if name not in _REPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_importlib.import_module(f"deltafuse.{_REPORTS[name]}"), name)


def __dir__() -> list[str]:
    return __all__


class _Package(_ModuleType):
    """Some functions have the name of the module they come from, and an import binds a module in its package.

    `deltafuse.verify` stays the function however often the module is imported.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in __all__ and isinstance(value, _ModuleType)):
            super().__setattr__(name, value)


_sys.modules[__name__].__class__ = _Package
