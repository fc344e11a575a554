"""One graph of a pair, prefill or decode, as the levels beyond its sites see it: both files and what the sites tell."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from deltafuse.dims import Dim
from deltafuse.foreign import Foreign
from deltafuse.inputs import InputOptions, Inputs, make_inputs
from deltafuse.inputs_sizes import SiteSizes
from deltafuse.verify_cut import Pair, Side, axis_dims
from deltafuse.verify_diff import Region
from deltafuse.verify_feeds import Input, Part
from deltafuse.verify_trial import SiteVerdict

Array = npt.NDArray[np.generic]


@dataclass(frozen=True)
class Stage:
    """Both files of one graph.

    Attributes:
        before, after: unfused and fused.
        pairs: both sides of the sites that can be cut out.
        sites: verdicts of all sites.
        regions: the nodes of all sites of a rule, in topological order.
        foreign: what lowers Custom nodes of other tools.
        given: values that sites inside bodies read -> which operand of them.
        expressions: the nodes that stand in place of ordinary expressions, such as a causal convolution.
        inside: names of the sites inside bodies.
    """

    before: Side
    after: Side
    pairs: tuple[Pair, ...]
    sites: tuple[SiteVerdict, ...]
    regions: tuple[Region, ...]
    foreign: Foreign | None = None
    given: Mapping[str, Part] = field(default_factory=dict[str, Part])
    expressions: tuple[Region, ...] = ()
    inside: tuple[str, ...] = ()

    @property
    def parts(self) -> Mapping[str, Part]:
        """Value that a fused site reads -> which operand of it."""
        return {**self.given, **{item.name: item.part for pair in self.pairs for item in _operands(pair)}}

    @property
    def sizes(self) -> Sequence[SiteSizes]:
        """What the sites say about sizes."""
        ran = {site.name: site.tokens for site in self.sites}
        return [
            SiteSizes(pair.tokens, pair.valid, ran.get(pair.name, ()), tuple(axis_dims(pair, "tokens")), _dims(pair))
            for pair in self.pairs
        ]

    def inputs(
        self,
        options: InputOptions,
        *,
        given: Mapping[str, Array] | None = None,
        steps: int = 0,
        held: Collection[str] = (),
    ) -> Inputs:
        """Inputs of the whole model, see `deltafuse.inputs.make_inputs`."""
        model, kinds = self.after.model, self.after.kinds
        return make_inputs(model, kinds, self.sizes, self.parts, options, given=given, steps=steps, held=held)


def _dims(pair: Pair) -> tuple[Dim, ...]:
    return tuple(dim for item in _operands(pair) for dim in item.shape)


def _operands(pair: Pair) -> list[Input]:
    return [item for item in pair.inputs if item.part.role not in ("shape", "other")]
