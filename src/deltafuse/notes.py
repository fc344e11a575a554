"""What a user should know about a site although it is right."""

from __future__ import annotations

from collections.abc import Iterable

from deltafuse.match import Match
from deltafuse.probe import backward_slice
from deltafuse.wire import Model

_MASK = (
    "state_ignores_mask: the recurrent state does not depend on {mask}; feed prompts without padding, "
    "padded ones leave a wrong state"
)


def site_notes(model: Model, match: Match) -> tuple[str, ...]:
    """Notes on one site: the valid range of the unfused graph, masks that the state ignores."""
    return tuple([*_range_notes(match), *_mask_notes(model, match)])


def _range_notes(match: Match) -> Iterable[str]:
    valid = match.valid_tokens
    if valid is None or isinstance(match.dims.tokens, int) or (valid.below is None and valid.above is None):
        return
    span = f"{valid.low} token" if valid.low == valid.high else f"{valid.low} to {valid.high} tokens"
    ends = [
        f"{'fails' if end == 'fails' else 'is silently wrong'} {where}"
        for end, where in ((valid.below, "below"), (valid.above, "above"))
        if end is not None
    ]
    yield f"valid_tokens: the unfused graph is the rule for {span} and {' and '.join(ends)}; the fused node is right beyond"


def _mask_notes(model: Model, match: Match) -> Iterable[str]:
    """A model that takes a mask whose state does not see it."""
    graph = model.graph
    if match.final_state is None or match.dims.tokens == 1:
        return
    masks = [value for value in graph.inputs if "mask" in graph.name(value)]
    if not masks:
        return
    operands = (match.key, match.value, match.g, match.beta)
    _, loose = backward_slice(graph, (), [role.value for role in operands])
    for mask in masks:
        if mask not in loose:
            yield _MASK.format(mask=graph.name(mask))
