"""What is drawn of a site: few boxes, each for all nodes that do the same in every row and chunk.

A chunk rule leaves an exporter as thousands of nodes, most of them one row or chunk after the other. Nodes of one
operator are one box at first; boxes are parted, step by step, where their nodes read or are read by different boxes,
as long as few enough to be drawn are left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

#: Boxes of one picture at most, operands and results included: laying out a thousand takes half a minute.
DRAWN = 150
#: Steps after which two nodes that are still in one box stay there.
_STEPS = 24
_OTHERS = "other operators"


@dataclass(frozen=True)
class Part:
    """One node of what is to be drawn.

    Attributes:
        op: its operator.
        reads, writes: what flows through it; whatever is hashable and equal for the same value.
        kind: ``node``, ``fused``, ``cast``, ``operand`` or ``result``.
    """

    op: str
    reads: tuple[object, ...]
    writes: tuple[object, ...]
    kind: str = "node"


@dataclass(frozen=True)
class Picture:
    """A graph of boxes.

    Attributes:
        boxes: (operator or role, kind, how many nodes it stands for).
        edges: (from, to, how many values flow that way), boxes by number.
        box_of: number of the box of each part.
    """

    boxes: tuple[tuple[str, str, int], ...]
    edges: tuple[tuple[int, int, int], ...]
    box_of: tuple[int, ...]


def draw(parts: Sequence[Part], most: int = DRAWN) -> Picture:
    """Puts the parts of a graph into boxes.

    Args:
        parts: in any order; operands and results among them are boxes of their own.
        most: boxes at most.
    """
    links = _links(parts)
    colours = _coloured(parts, links, most)
    edges = Counter((colours[source], colours[target]) for source, target in links)
    counts = Counter(colours)
    boxes: dict[int, tuple[str, str, int]] = {}
    named: dict[int, set[tuple[str, str]]] = {}
    for part, colour in zip(parts, colours, strict=True):
        named.setdefault(colour, set()).add((part.op, part.kind))
    for colour, names in named.items():
        op, kind = next(iter(names)) if len(names) == 1 else (_OTHERS, "node")
        boxes[colour] = (op, kind, counts[colour])
    flows = tuple((source, target, count) for (source, target), count in sorted(edges.items()))
    return Picture(tuple(boxes[colour] for colour in range(len(boxes))), flows, tuple(colours))


def _links(parts: Sequence[Part]) -> list[tuple[int, int]]:
    writer = {value: index for index, part in enumerate(parts) for value in part.writes}
    return [(writer[value], index) for index, part in enumerate(parts) for value in part.reads if value in writer]


def _coloured(parts: Sequence[Part], links: Sequence[tuple[int, int]], most: int) -> list[int]:
    """The number of each part's box, numbered by first appearance."""
    kinds = [(part.kind, index) if part.kind in ("operand", "result") else part.op for index, part in enumerate(parts)]
    colours = _numbered(kinds)
    if max(colours, default=0) >= most:
        return _numbered(_commonest(parts, kinds, most))
    before: list[list[int]] = [[] for _ in parts]
    behind: list[list[int]] = [[] for _ in parts]
    for source, target in links:
        before[target].append(source)
        behind[source].append(target)
    for _ in range(_STEPS):
        finer = _numbered(
            [
                # How often a value is read hangs on the number of rows: where it is read is what tells nodes apart.
                (colour, tuple(colours[node] for node in before[index]), frozenset(colours[n] for n in behind[index]))
                for index, colour in enumerate(colours)
            ]
        )
        count = max(finer, default=0) + 1
        if count > most or count == max(colours, default=0) + 1:
            break
        colours = finer
    return colours


def _commonest(parts: Sequence[Part], kinds: Sequence[object], most: int) -> list[object]:
    """The most frequent kinds by themselves, all others as one."""
    # Operands and results come first: without them nothing says what goes in and out.
    order: Mapping[object, int] = Counter(kinds)
    ends = {kind for part, kind in zip(parts, kinds, strict=True) if part.kind in ("operand", "result")}
    ranked = sorted(order, key=lambda kind: (kind not in ends, -order[kind]))
    kept = set(ranked[: most - 1])
    return [kind if kind in kept else None for kind in kinds]


def _numbered(keys: Sequence[object]) -> list[int]:
    numbers: dict[object, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]
