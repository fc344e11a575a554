"""What a user should know about a site although it is right."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import cached_property

from deltafuse import layouts
from deltafuse.draws import DRAWS
from deltafuse.graph import Graph
from deltafuse.match import Match
from deltafuse.wire import Model
from deltafuse.wording import span

_MASK = (
    "state_ignores_mask: the recurrent state does not depend on {mask}; feed prompts without padding, "
    "padded ones leave a wrong state"
)
_APART = (
    "sizes_taken_as_equal: the {what} axis is declared as {sizes}; the fused node takes these to be equal, while the "
    "unfused graph may spread one of size 1 over the others"
)


class Notes:
    """Makes the notes of the sites of one model."""

    def __init__(self, model: Model) -> None:
        self._graph = model.graph
        self._masks = [value for value in model.graph.inputs if "mask" in model.graph.name(value)]

    def of(self, match: Match, pins: Collection[tuple[int, int, int]] = ()) -> tuple[str, ...]:
        """Notes on one site: the valid range of the unfused graph, masks that the state ignores, sizes taken as equal.

        Args:
            match: the site.
            pins: axes that become one size, see `deltafuse.match.Plan`.
        """
        pinned = {(value, axis) for value, axis, _ in pins}
        apart = _size_notes(match, pinned)
        return (*_range_notes(match, pinned), *_overflow_notes(match), *self._mask_notes(match), *apart)

    def _mask_notes(self, match: Match) -> Iterable[str]:
        if match.final_state is None or match.dims.tokens == 1:
            return
        operands = (match.key, match.value, match.g, match.beta)
        for mask in self._masks:
            if not any(role and self._behind[mask][role.value] for role in operands):
                yield _MASK.format(mask=self._graph.name(mask))

    @cached_property
    def _behind(self) -> dict[int, bytearray]:
        """By mask, 1 for each value that depends on its numbers."""
        return {mask: _behind(self._graph, mask) for mask in self._masks}


def _behind(graph: Graph, start: int) -> bytearray:
    reached = bytearray(len(graph.value_names))
    reached[start] = 1
    captures = graph.captures
    standard, outputs = graph.standard, graph.node_outputs
    for node, read in enumerate(graph.node_inputs):
        depends = any(map(reached.__getitem__, read if node not in captures else graph.reads(node)))
        if depends and standard[node] not in ("Shape", "Size"):
            for output in outputs[node]:
                reached[output] = 1
            reached[0] = 0
    return reached


def _overflow_notes(match: Match) -> Iterable[str]:
    if match.proof.draws < len(DRAWS):
        yield (
            "overflows: the unfused arithmetic overflows for strong decay, the fused node does not; "
            "proven where both are finite"
        )


def _size_notes(match: Match, pinned: Collection[tuple[int, int]]) -> Iterable[str]:
    names = ("query", "key", "value", "g", "beta", "state")
    operands = {name: role for name in names if (role := getattr(match, name)) is not None}
    for letter, what in (("B", "batch"), ("T", "tokens")):
        given: dict[str, list[str]] = {}
        for name, role in operands.items():
            for axis, (group, dim) in enumerate(zip(layouts.axes(role.layout), role.shape, strict=True)):
                if group == letter and (role.value, axis) not in pinned:
                    given.setdefault(str(dim), []).append(name)
        if len(given) > 1:
            shown = ", ".join(f"{size} ({', '.join(given[size])})" for size in given)
            yield _APART.format(what=what, sizes=shown)


def _range_notes(match: Match, pinned: Collection[tuple[int, int]]) -> Iterable[str]:
    valid = match.valid_tokens
    if valid is None or isinstance(match.dims.tokens, int) or (valid.below is None and valid.above is None):
        return
    ends = [
        f"{'fails' if end == 'fails' else 'is silently wrong'} {where}"
        for end, where in ((valid.below, "below"), (valid.above, "above"))
        if end is not None
    ]
    axes = [(role.value, axis, of) for role in match.operands() for axis, of in enumerate(layouts.axes(role.layout))]
    fixed = any((value, axis) in pinned for value, axis, letters in axes if "T" in letters)
    fused = "fixed to it" if fixed else "right beyond"
    right = f"the rule for {span(valid.low, valid.high, 'token')} and {' and '.join(ends)}"
    yield f"valid_tokens: the unfused graph is {right}; the fused node is {fused}"
