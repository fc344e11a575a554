"""Sizes of a model's inputs, solved from what its graph says about them instead of drawn.

Symbols that look unrelated are tied by data flow: a mask is as long as past and step together, whatever the exporter
called it. The shape engine knows these ties as unions and equations; here numbers are looked for that keep them all,
at a token count that the unfused graph is proven for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice

from deltafuse.dims import Dim, evaluate, symbol, symbol_name, symbols
from deltafuse.errors import UserError
from deltafuse.shapes import Shapes
from deltafuse.wording import number, span

#: Token count where the proven range admits it, and size of any other free axis.
TOKENS, FREE = 24, 8
#: Sizes tried for an axis, and how many that fit are gone on with.
_TRIED, _BRANCHES = 1024, 4
#: Ties named in a message.
_SAID = 8


@dataclass(frozen=True)
class SiteSizes:
    """What one fused site says about sizes.

    Attributes:
        tokens: the token count, symbolic where it is free.
        valid: the range for which the unfused graph is right, None where the file does not say.
        ran: token counts at which the site level ran.
        alike: token counts of the site's operands: exporters may give each a symbol of its own.
        others: further sizes of the site's operands: its batch, which is one sequence for a kernel.
    """

    tokens: Dim
    valid: tuple[int, int] | None
    ran: tuple[int, ...] = ()
    alike: tuple[Dim, ...] = ()
    others: tuple[Dim, ...] = ()


@dataclass(frozen=True)
class Tie:
    """Two sizes that must be equal, and who says so."""

    left: Dim
    right: Dim
    why: str


def visited(shapes: Shapes) -> Shapes:
    """The same engine, with all that the graph says about sizes worked out."""
    for outputs in shapes.graph.node_outputs:
        for value in outputs:
            shapes.shape(value)
    return shapes


def input_symbols(shapes: Shapes) -> tuple[str, ...]:
    """Canonical symbols of the graph inputs' sizes, in order of first mention; float inputs before the others."""
    graph = shapes.graph
    floats = [value for value in graph.inputs if shapes.dtype(value) in (1, 10, 11, 16)]
    order = [*floats, *(value for value in graph.inputs if value not in floats)]
    dims = [dim for value in order for dim in shapes.shape(value) or ()]
    return tuple(dict.fromkeys(name for dim in dims for name in sorted(symbols(dim))))


def declared_names(shapes: Shapes) -> dict[str, str]:
    """Symbol as an input declares it -> its canonical one."""
    declared = [dim for value in shapes.graph.inputs for dim in shapes.declared(value) or () if dim is not None]
    named = {name: shapes.unions.root(name) for dim in declared for name in sorted(symbols(dim))}
    return named | {name: name for name in input_symbols(shapes)}


def solve_sizes(
    shapes: Shapes, sites: Sequence[SiteSizes], given: Mapping[str, int], arrays: Mapping[str, tuple[int, ...]]
) -> dict[str, int]:
    """Numbers for every symbol of the inputs, by the names that the file declares.

    Args:
        shapes: of the fused file, see `visited`.
        sites: what its sites need.
        given: symbol -> size, as the user asks for.
        arrays: input name -> shape of the array the user gives for it.

    Raises:
        UserError: ``unknown-dim``, ``inputs-shape``, ``sizes-outside-range`` or ``sizes-unsolved``.
    """
    names = declared_names(shapes)
    unknown = [name for name in given if name not in names]
    if unknown:
        known = ", ".join(names) or "none, every size is fixed in the file"
        raise UserError("unknown-dim", f"--dim {unknown[0]}: no input has such an axis; the model's are: {known}")
    sites = [_canonical(shapes, site) for site in sites]
    fixed = {names[name]: size for name, size in given.items()}
    if any(fixed[names[name]] != size for name, size in given.items()):
        same = ", ".join(name for name in given if len({s for n, s in given.items() if names[n] == names[name]}) > 1)
        raise UserError("sizes-contradict", f"{same} are one axis of the model: give them one size")
    ties = [*_ties(shapes), *_site_ties(sites), *_given_ties(shapes, arrays)]
    search = _Search(ties, sites, fixed | _demands(shapes, sites, fixed), _wishes(shapes, sites, ties))
    free = _ordered(input_symbols(shapes), sites)
    found = next(search.solutions(free, {}), None)
    if found is None:
        raise _unsolved(ties, sites, given, arrays, names)
    return {name: found[root] for name, root in names.items()}


def _canonical(shapes: Shapes, site: SiteSizes) -> SiteSizes:
    alike, others = (tuple(map(shapes.find, dims)) for dims in (site.alike, site.others))
    return replace(site, tokens=shapes.find(site.tokens), alike=alike, others=others)


def _ordered(free: Sequence[str], sites: Sequence[SiteSizes]) -> tuple[str, ...]:
    """Tokens first: the others follow from them."""
    first = {name for site in sites for name in symbols(site.tokens)}
    return tuple(sorted(free, key=lambda name: name not in first))


def _ties(shapes: Shapes) -> list[Tie]:
    """What data flow says about the inputs' sizes; sizes that only a run tells are left out."""
    own, graph = frozenset(input_symbols(shapes)), shapes.graph
    ties: list[Tie] = []
    for equation in shapes.unions.equations:
        left, right = shapes.find(equation.left), shapes.find(equation.right)
        if (symbols(left) | symbols(right)) <= own:
            node = graph.node_name(equation.node) if equation.node >= 0 else ""
            ties.append(Tie(left, right, f"the node {node or equation.node} needs {left} = {right}"))
    return ties


def _site_ties(sites: Sequence[SiteSizes]) -> list[Tie]:
    pairs = dict.fromkeys((site.tokens, dim) for site in sites for dim in site.alike)
    return [Tie(*pair, f"a fused site needs {pair[0]} = {pair[1]}") for pair in pairs if pair[0] != pair[1]]


def _given_ties(shapes: Shapes, arrays: Mapping[str, tuple[int, ...]]) -> Iterator[Tie]:
    graph = shapes.graph
    for name, sizes in arrays.items():
        value = graph.find(name)
        shape = None if value is None else shapes.shape(value)
        if shape is None:
            continue
        if len(shape) != len(sizes):
            raise UserError(
                "inputs-shape",
                f"{name} has {number(len(sizes), 'axis')} in the file of inputs, in the model it has {len(shape)}",
            )
        for axis, (dim, size) in enumerate(zip(shape, sizes, strict=True)):
            if isinstance(dim, int) and dim != size:
                raise UserError(
                    "inputs-shape",
                    f"{name} has size {size} on axis {axis} in the file of inputs, the fused model takes {dim}: "
                    "give arrays of that size",
                )
            if not isinstance(dim, int):
                yield Tie(dim, size, f"the array for {name} has size {size} on axis {axis}")


def _demands(shapes: Shapes, sites: Sequence[SiteSizes], fixed: Mapping[str, int]) -> dict[str, int]:
    """Symbols that can only be one number; the user knows better."""
    # A kernel takes one sequence: what else is free in a site is the batch.
    others = {name for site in sites for dim in site.others for name in symbols(dim)}
    tokens = {name for site in sites for dim in (site.tokens, *site.alike) for name in symbols(dim)}
    return {name: size for name, size in (dict.fromkeys(others - tokens, 1) | shapes.bindings).items()
            if name not in fixed}  # fmt: skip


def _wishes(shapes: Shapes, sites: Sequence[SiteSizes], ties: Sequence[Tie]) -> list[tuple[Dim, Dim]]:
    """Sizes to try first: tokens in the middle of the range, masks as long as the caches have grown."""
    wishes: list[tuple[Dim, Dim]] = [(site.tokens, _tokens(site)) for site in sites]
    tied = {name for tie in ties for name in symbols(tie.left) | symbols(tie.right)}
    own = frozenset(input_symbols(shapes))
    grown = {
        dim: None
        for value in shapes.graph.outputs
        for dim in shapes.shape(value) or ()
        if symbols(dim) and symbols(dim) <= own and symbol_name(dim) is None
    }
    if len(grown) == 1:
        (total,) = grown
        free = [name for name in own - tied if name not in symbols(total)]
        masks = [v for v in shapes.graph.inputs if shapes.dtype(v) in (6, 7, 9)]
        names = {name for value in masks for dim in shapes.shape(value) or () for name in symbols(dim)}
        wishes += [(symbol(name), total) for name in sorted(names.intersection(free))]
    return wishes


def _tokens(site: SiteSizes) -> int:
    if site.valid is None:
        return site.ran[0] if site.ran else FREE
    return min(max(TOKENS, site.valid[0]), site.valid[1])


class _Search:
    """Depth first: one symbol after the other gets a size that no tie forbids."""

    def __init__(
        self,
        ties: Sequence[Tie],
        sites: Sequence[SiteSizes],
        fixed: Mapping[str, int],
        wishes: Sequence[tuple[Dim, Dim]],
    ) -> None:
        self._ties = [(tie.left, tie.right) for tie in ties]
        self._sites = [site for site in sites if site.valid is not None]
        self._fixed = fixed
        self._wishes = wishes

    def solutions(self, free: Sequence[str], known: Mapping[str, int]) -> Iterator[dict[str, int]]:
        """Every solution within the sizes that are tried."""
        if not free:
            yield dict(known)
            return
        name = next((name for name in free if name in self._fixed or self._determined(name, known)), free[0])
        rest = tuple(other for other in free if other != name)
        # What no tie joins to a symbol that is still open need not be tried again.
        branches = _BRANCHES if self._binds(name, known) else 1
        for size in islice(self._sizes(name, known), branches):
            yield from self.solutions(rest, {**known, name: size})

    def _sizes(self, name: str, known: Mapping[str, int]) -> Iterator[int]:
        if name in self._fixed:
            tried: Iterable[int] = (self._fixed[name],)
        else:
            told = [_root(left, right, name, known) for left, right in chain(self._wishes, self._ties)]
            tried = dict.fromkeys((*(size for size in told if size >= 1), FREE, *range(1, _TRIED)))
        return (size for size in tried if self._fits(name, {**known, name: size}))

    def _determined(self, name: str, known: Mapping[str, int]) -> bool:
        return any(_root(left, right, name, known) >= 1 for left, right in self._ties)

    def _binds(self, name: str, known: Mapping[str, int]) -> bool:
        sides = [symbols(left) | symbols(right) for left, right in self._ties]
        sides += [symbols(site.tokens) for site in self._sites]
        return any(name in own and own - known.keys() - {name} for own in sides)

    def _fits(self, name: str, known: Mapping[str, int]) -> bool:
        """Whether all that can be told by now holds."""
        for left, right in self._ties:
            own = symbols(left) | symbols(right)
            if name in own <= known.keys() and evaluate(left, known) != evaluate(right, known):
                return False
        for site in self._sites:
            low, high = site.valid or (0, 0)
            own = symbols(site.tokens)
            if name in own <= known.keys() and not low <= evaluate(site.tokens, known) <= high:
                return False
        return True


def _root(left: Dim, right: Dim, name: str, known: Mapping[str, int]) -> int:
    """The size of the one symbol that is not known at which both are equal, as a straight line tells it; 0 for none."""
    own = symbols(left) | symbols(right)
    if name not in own or not own - {name} <= known.keys():
        return 0
    # Far out, where a Min or Max of a slice is settled.
    first, second = (evaluate(left - right, {**known, name: size}) for size in (_TRIED, _TRIED + 1))
    slope = second - first
    if not slope or first % slope:
        return 0
    size = _TRIED - first // slope
    return size if size >= 1 and evaluate(left - right, {**known, name: size}) == 0 else 0


def _unsolved(
    ties: Sequence[Tie],
    sites: Sequence[SiteSizes],
    given: Mapping[str, int],
    arrays: Mapping[str, tuple[int, ...]],
    names: Mapping[str, str],
) -> UserError:
    ranges = {
        f"the unfused graph is right for {span(*site.valid, 'token')} ({site.tokens})"
        for site in sites
        if site.valid is not None and not isinstance(site.tokens, int)
    }
    said = [*(f"--dim {name}={size}" for name, size in given.items()), *sorted(ranges)]
    said += dict.fromkeys(tie.why for tie in ties[:_SAID])
    if given or arrays:
        text = f"the given sizes do not go together: {'; '.join(said)}. Give others"
        return UserError("sizes-contradict", text)
    text = f"no sizes were found for {', '.join(names)}: {'; '.join(said)}. Give some with --dim SYMBOL=N"
    return UserError("sizes-unsolved", text)
