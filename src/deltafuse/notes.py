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
#: Whether a value is known to depend on another one; 0 where that was not asked yet.
_NO, _YES = 1, 2


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
            if not any(role and self._behind[mask].holds(role.value) for role in operands):
                yield _MASK.format(mask=self._graph.name(mask))

    @cached_property
    def _behind(self) -> dict[int, _Behind]:
        return {mask: _Behind(self._graph, mask) for mask in self._masks}


class _Behind:
    """The values that depend on the numbers of one value, looked up from their end: no further than is asked."""

    def __init__(self, graph: Graph, start: int) -> None:
        self._graph = graph
        self._known = bytearray(len(graph.value_names))
        self._known[0], self._known[start] = _NO, _YES

    def holds(self, value: int) -> bool:
        """Whether a value is one of them."""
        known, path, left = self._known, list[int](), [iter((value,))]
        while left:
            for source in left[-1]:
                if known[source] == _YES:
                    for one in path:
                        known[one] = _YES
                    return True
                if not known[source]:
                    # It is none until a way back to the start is found.
                    known[source] = _NO
                    path.append(source)
                    left.append(iter(self._sources(source)))
                    break
            else:
                left.pop()
                del path[len(left) - 1 :]
        return False

    def _sources(self, value: int) -> tuple[int, ...]:
        """The values whose numbers a value is computed from."""
        graph, node = self._graph, self._graph.producer[value]
        return () if node < 0 or graph.standard[node] in ("Shape", "Size") else graph.reads(node)


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
