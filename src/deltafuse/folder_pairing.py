"""Which prefill and which decode of a folder belong together: by folder, then by name, then by states that fit."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os.path import commonpath
from pathlib import PurePosixPath

from deltafuse.folder_pairs import Interface, Pair, candidates
from deltafuse.reasons import TEXTS, Reason
from deltafuse.wording import some

TEXTS.update(
    {
        "pair-unsure": "{model} has no partner of its own: its states fit {others} alike; give the two of a pair a "
        "folder of their own, or names that differ in prefill and decode only",
        "pair-none": "{model} has no partner among {others}: {difference}; export the two of a pair from one model, or "
        "fuse this one in a folder of its own",
    }
)

#: A word, or what is no word: a number, or a short name with its number (fp16, b32).
_PARTS = re.compile(r"[A-Z]?[a-z]{3,}|[A-Za-z0-9]+")
#: How many models a sentence names.
_NAMED = 3

_End = Callable[[Pair], str]
_ENDS: tuple[_End, _End] = (lambda pair: pair.prefill, lambda pair: pair.decode)


@dataclass(frozen=True)
class Pairing:
    """The pairs of a folder.

    Attributes:
        pairs: each with its states compared.
        alone: of each prefill, and of each decode that none of these speaks of, why it is in no pair.
    """

    pairs: tuple[Pair, ...]
    alone: tuple[Reason, ...]


def paired(models: Mapping[str, Interface]) -> Pairing:
    """Joins each prefill with its decode.

    Those nearest to each other by folder and then by name belong together. Where that leaves several, the states say:
    one that fits is taken before those that do not, and where several fit alike there is no pair.

    Args:
        models: path below the folder -> interface.
    """
    possible = candidates(models)
    taken = [pair for pair in possible if _belongs(pair, *(_nearest(pair, possible, end) for end in _ENDS))]
    joined = [pair for pair in taken if any(len(_sharing(pair, taken, end)) == 1 for end in _ENDS)]
    fitting = [pair for pair in possible if not pair.differences]
    for end in _ENDS:
        left = {end(pair) for pair in fitting} - {end(pair) for pair in joined}
        joined += [pair for pair in fitting if end(pair) in left and len(_sharing(pair, fitting, end)) == 1]
    return Pairing(tuple(pair for pair in possible if pair in joined), tuple(_alone(possible, joined)))


def _sharing(pair: Pair, among: Sequence[Pair], end: _End) -> list[Pair]:
    return [other for other in among if end(other) == end(pair)]


def _nearest(pair: Pair, among: Sequence[Pair], end: _End) -> list[Pair]:
    own = _sharing(pair, among, end)
    least = min(map(_distance, own))
    return [other for other in own if _distance(other) == least]


def _belongs(pair: Pair, given: Sequence[Pair], taken: Sequence[Pair]) -> bool:
    """Whether each is nearest to the other; one that does not fit has to be the only one, with none that fits."""
    if pair not in given or pair not in taken:
        return False
    ways = ((given, taken), (taken, given))
    return not pair.differences or any(len(one) == 1 and all(other.differences for other in many) for one, many in ways)


def _distance(pair: Pair) -> tuple[int, int]:
    """How far two models are apart: folders that hold both, the more the nearer; parts of names that only one has."""
    shared = len(PurePosixPath(commonpath([f"/{pair.prefill}", f"/{pair.decode}"])).parts)
    prefill, decode = (Counter(part.lower() for part in _PARTS.findall(name)) for name in (pair.prefill, pair.decode))
    return -shared, ((prefill - decode) + (decode - prefill)).total()


def _alone(possible: Sequence[Pair], joined: Sequence[Pair]) -> Iterator[Reason]:
    """What to say of those that are in no pair; a decode that a prefill's sentence names needs none of its own."""
    named: set[str] = set()
    for end, other in (_ENDS, _ENDS[::-1]):
        for model in dict.fromkeys(map(end, possible)):
            own = [pair for pair in possible if end(pair) == model]
            if model not in named and not any(pair in joined for pair in own):
                fitting = [pair for pair in own if not pair.differences]
                named |= {other(pair) for pair in fitting or own}
                yield _why(model, [other(pair) for pair in fitting or own], min(own, key=_unlike))


def _why(model: str, others: Sequence[str], nearest: Pair) -> Reason:
    where: dict[str, object] = {"model": model, "others": some(others, _NAMED)}
    if not nearest.differences:
        return Reason("pair-unsure", where)
    return Reason("pair-none", {**where, "difference": nearest.differences[0].what})


def _unlike(pair: Pair) -> tuple[int, tuple[int, int]]:
    return len(pair.differences), _distance(pair)
