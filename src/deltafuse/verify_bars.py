"""The bars of ``fuse verify``, of both levels in one table.

The bars at a target's precision are those of the reference exporter's own comparison of fused and unfused tensors. They
are a smoke test: a norm follows the rule in every such model, so that a lost scale passes them. What decides is
`EXACT`, site by site.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

#: Largest relative error of a site in double, per output and draw.
EXACT = 1e-12


@dataclass(frozen=True)
class Bar:
    """How close is close enough at the target's precision.

    Attributes:
        cosine: least cosine of the angle between both.
        nrmse: largest root mean square of the difference, over that of the unfused values.
        max_abs: largest difference of one element.
    """

    cosine: float
    nrmse: float
    max_abs: float

    def met(self, cosine: float, nrmse: float, max_abs: float) -> bool:
        """Whether a comparison keeps all three; a NaN keeps none."""
        return cosine >= self.cosine and nrmse <= self.nrmse and max_abs <= self.max_abs


#: Level -> bar. A site is fed with values that no network has, up to 1e4: its largest difference says nothing.
BARS = {"site": Bar(0.999, 0.02, inf), "network": Bar(0.999, 0.02, 1.0)}
