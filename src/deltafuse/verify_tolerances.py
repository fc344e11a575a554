"""The bars of ``fuse verify``: one table by kind of difference, and per target where one asks for another. Light.

What decides is `EXACT`, site by site, in double. All others are met by what rounds rightly and are a smoke test: a norm
follows the rule in every such model, so that a lost scale passes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf
from typing import Literal

from deltafuse.errors import UserError

#: Largest relative error of a site in double, per output and draw.
EXACT = 1e-12

Kind = Literal["exact", "reordered", "fp16", "bf16", "quantised"]

#: What each kind is, for messages.
KINDS: dict[Kind, str] = {
    "exact": "exact",
    "reordered": "reordered arithmetic",
    "fp16": "FP16 boundary",
    "bf16": "BF16 boundary",
    "quantised": "quantised weights",
}
_NAMES = {"cosine": "cosine", "nrmse": "NRMSE", "max_abs": "largest difference"}
_BOUNDS = {"cosine": "at least", "nrmse": "at most", "max_abs": "at most"}


@dataclass(frozen=True)
class Bar:
    """How close is close enough.

    Attributes:
        cosine: least cosine of the angle between both.
        nrmse: largest root mean square of the difference, over that of the unfused values.
        max_abs: largest difference of one element.
        nll: largest difference of a loss per token.
        tokens: how many tokens of a rollout must be equal; None for all.
        kind: why both may differ at all.
        target: whose row of the table this is, "" where none was told apart.
    """

    cosine: float
    nrmse: float
    max_abs: float
    nll: float = inf
    tokens: int | None = None
    kind: Kind = "fp16"
    target: str = ""

    def failed(self, cosine: float, nrmse: float, max_abs: float) -> tuple[str, ...]:
        """Which of the three a comparison does not keep; a NaN keeps none."""
        kept = {"cosine": cosine >= self.cosine, "nrmse": nrmse <= self.nrmse, "max_abs": max_abs <= self.max_abs}
        return tuple(name for name, good in kept.items() if not good)

    def met(self, cosine: float, nrmse: float, max_abs: float) -> bool:
        """Whether a comparison keeps all three."""
        return not self.failed(cosine, nrmse, max_abs)

    @property
    def title(self) -> str:
        """What to call it, e.g. ``FP16 boundary, ascend-310p``."""
        return ", ".join(filter(None, (KINDS[self.kind], self.target)))

    @property
    def values(self) -> str:
        """What is asked for, e.g. ``cosine at least 0.999, NRMSE at most 0.02, largest difference at most 1``."""
        return ", ".join(f"{name} {_BOUNDS[key]} {getattr(self, key):g}" for key, name in _NAMES.items())

    def told(self, cosine: float, nrmse: float, max_abs: float) -> str:
        """The measures that failed, each with the bar it failed, e.g. ``NRMSE 0.03 (at most 0.02)``."""
        found = {"cosine": cosine, "nrmse": nrmse, "max_abs": max_abs}
        parts = [
            f"{_NAMES[name]} {found[name]:.10g} ({_BOUNDS[name]} {getattr(self, name):.10g})"
            for name in self.failed(cosine, nrmse, max_abs)
        ]
        return ", ".join(parts)

    def unbounded(self) -> Bar:
        """The bar for draws that no network has, up to 1e4: the largest difference then says nothing."""
        return replace(self, max_abs=inf)


@dataclass(frozen=True)
class Overrides:
    """Bars that the user sets, for every comparison at the target's precision; None keeps the table's.

    Raises:
        UserError: ``usage`` for a bar that every difference would fail, or none.
    """

    cosine: float | None = None
    nrmse: float | None = None
    max_abs: float | None = None

    def __post_init__(self) -> None:
        """Checks the numbers: of Python they come as they are."""
        if self.cosine is not None and not 0 <= self.cosine <= 1:
            raise UserError("usage", f"cosine {self.cosine}: give a number from 0 to 1")
        for name, value in (("nrmse", self.nrmse), ("max_abs", self.max_abs)):
            if value is not None and not 0 <= value < inf:
                raise UserError("usage", f"{name} {value}: give a number of 0 or more")


#: The FP16 row is the reference exporter's own bar for fused against unfused tensors, its first two tokens too.
_TABLE: dict[Kind, Bar] = {
    "exact": Bar(1.0, 0.0, 0.0, 0.0, None, "exact"),
    "reordered": Bar(0.99999, 0.005, 0.05, 1e-3, None, "reordered"),
    "fp16": Bar(0.999, 0.02, 1.0, 0.02, 2, "fp16"),
    "bf16": Bar(0.99, 0.1, 4.0, 0.1, 2, "bf16"),
    "quantised": Bar(0.99, 0.1, 4.0, 0.1, 2, "quantised"),
}
#: Rows of targets that keep closer than others: onnxruntime's own kernels compute in float32 inside.
_TARGETS: dict[tuple[Kind, str], Bar] = {
    ("fp16", "ort"): Bar(0.9999, 0.01, 0.5, 0.01, 2, "fp16"),
    ("fp16", "onnx"): Bar(0.9999, 0.01, 0.5, 0.01, 2, "fp16"),
}


def bar(kind: Kind, target: str = "", overrides: Overrides | None = None) -> Bar:
    """The row of a kind and target, with what the user sets in its place."""
    found = replace(_TARGETS.get((kind, target), _TABLE[kind]), target=target)
    set_ = {name: value for name, value in vars(overrides or Overrides()).items() if value is not None}
    return replace(found, **set_)


def rows() -> Iterator[Bar]:
    """All rows of the table but that of what is exact: those of any target, then those of a target of its own."""
    for kind, row in _TABLE.items():
        if kind != "exact":
            yield row
    for (_, target), row in _TARGETS.items():
        yield replace(row, target=target)
