"""Candidates in their order, the next ones found while the worker still proves one.

Nearly always a proof that has come to its last steps holds, and the sites that follow are the same again. So they are
looked for as if it did, while nothing but the worker works; where it does not hold, all that is forgotten. Everything
is asked in the order in which it would be asked without: what is found does not depend on how far the look went.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, TypeVar

from deltafuse.background import Background
from deltafuse.finder import Candidate, Finder
from deltafuse.patterns import Pattern
from deltafuse.prover import Outlook, Proven
from deltafuse.shapes import Shapes
from deltafuse.signature import Signature, sign

T = TypeVar("T")


@dataclass
class Seen(Generic[T]):
    """A candidate and what is known of it so far.

    Attributes:
        after: how many places of the finder were looked at up to it.
        likely: what becomes of it if the proof that goes on, or went on, holds; None where that was not looked at.
    """

    candidate: Candidate
    signature: Signature
    after: int
    likely: T | None = None


class Lookahead(Outlook, Generic[T]):
    """Hands out candidates with their signatures; each proof goes on in a ``with`` statement.

    Args:
        finder: finds them.
        shapes: what all this asks; goes back to what it was where a proof does not hold.
        settle: says what becomes of a candidate if it is what is likely, and tells `shapes` of it: likely outcome and
            pattern of the site that is being proven, that site, the candidate.
        foresee: is told what becomes of the candidate that is being proven and all that follow, where that is likely.
        measured: see `Outlook.measured`.
    """

    def __init__(
        self,
        finder: Finder,
        shapes: Shapes,
        settle: Callable[[Proven, Pattern, Seen[T], Seen[T]], T],
        foresee: Callable[[Sequence[T]], object] | None = None,
        measured: Callable[[int, int], object] | None = None,
    ) -> None:
        self._finder = finder
        self._shapes = shapes
        self._settle = settle
        self._foresee = foresee
        self._measured = measured
        self._next = 0
        self._ready: deque[Seen[T]] = deque()
        self._last: Seen[T] | None = None
        self._forget: Callable[[], None] | None = None
        self._look: Background | None = None

    def __iter__(self) -> Iterator[Seen[T]]:
        while True:
            found = self._ready.popleft() if self._ready else self._find()
            if found is None:
                return
            self._last = found
            yield found

    def expect(self, likely: Proven, pattern: Pattern) -> None:
        """The candidate that was handed out last is likely to be this: looks at what follows it."""
        first = self._last
        if first is None or self._ready:
            return
        self._forget = self._shapes.checkpoint()
        first.likely = self._settle(likely, pattern, first, first)

        self._look = Background(self._looks(likely, pattern, first))

    def _looks(self, likely: Proven, pattern: Pattern, first: Seen[T]) -> Iterator[None]:
        """Looks at one candidate after the other, as long as they are like the first."""
        while (found := self._find()) is not None:
            self._ready.append(found)
            if found.signature.key != first.signature.key:
                return
            found.likely = self._settle(likely, pattern, first, found)
            yield
        if self._foresee is not None:
            self._foresee([seen.likely for seen in (first, *self._ready) if seen.likely is not None])

    def retract(self) -> None:
        """It is not: forgets what was found since."""
        look, forget, last = self._end()
        if look is not None:
            look.drop()
        if forget is not None and last is not None:
            forget()
            last.likely = None
            self._ready.clear()
            self._next = last.after

    def measured(self, done: int, of: int) -> None:
        """Hands it on."""
        if self._measured is not None:
            self._measured(done, of)

    def __enter__(self) -> None:
        """A proof begins."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """The proof is at its end: looks no further, and keeps what was found unless that was retracted."""
        look, _, _ = self._end()
        if look is not None and error is None:
            look.stop()
        elif look is not None:
            look.drop(error)

    def _end(self) -> tuple[Background | None, Callable[[], None] | None, Seen[T] | None]:
        """What went on, how to forget it, and the candidate that was being proven."""
        ended = (self._look, self._forget, self._last)
        self._look = self._forget = None
        return ended

    def _find(self) -> Seen[T] | None:
        places = self._finder.places
        while self._next < len(places):
            candidate = self._finder.candidate(places[self._next])
            self._next += 1
            if candidate is not None:
                return Seen(candidate, sign(self._shapes, candidate), self._next)
        return None
