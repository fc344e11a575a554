"""A file as it is searched: some of it said in other nodes, which do the same, because a rule lies among them.

What is searched, proven and changed is the file as it would be with them; what is written undoes into the file as it
was.
"""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deltafuse.composing import compose, joined, pieces
from deltafuse.edits import Changes, Edit, apply, build
from deltafuse.wire import Model, scan_view


@dataclass(frozen=True)
class Restated:
    """A file with some of its nodes replaced by others that do the same.

    Attributes:
        model: the file as it would be.
        edits: of the file, that make it so; those of one place have a label of their own in place of a site's name.
        functions: whose calls were put in place.
        gathered: values that hold all tokens of an output, of which the file has each for itself.
        depth: how many times something was replaced, one inside the other.
    """

    model: Model
    edits: tuple[Edit, ...] = ()
    functions: tuple[str, ...] = ()
    gathered: tuple[str, ...] = ()
    depth: int = 0

    def changed(self, changes: Changes, functions: Sequence[str] = (), gathered: Sequence[str] = ()) -> Restated:
        """The same with some more changes, and what they are for."""
        edits = build(self.model, changes)
        return Restated(
            _edited(self.model, edits),
            compose(self.edits, edits, nested=True) if self.edits else edits,
            tuple(dict.fromkeys((*self.functions, *functions))),
            (*self.gathered, *gathered),
            self.depth + 1,
        )

    def composed(self, edits: Sequence[Edit], sites: Mapping[str, Sequence[int]]) -> tuple[Edit, ...]:
        """Edits of `model` as edits of the file. What was replaced for a site goes back with it.

        Args:
            edits: of `model`.
            sites: where in `model` the nodes begin that each fused site takes, by the site's name.
        """
        if not self.edits:
            return tuple(edits)
        ranges = [(start, stop, label) for start, stop, label in pieces(self.edits) if label]
        owner: dict[str, str] = {}
        for site, places in sites.items():
            for start, stop, label in ranges:
                if any(start <= place < stop for place in places):
                    owner.setdefault(label, site)
        own = [edit._replace(site=owner.get(edit.site, "")) for edit in self.edits]
        return joined(compose(own, edits))


def _edited(model: Model, edits: Sequence[Edit]) -> Model:
    """The edited file as a model of its own; it goes when nobody reads it any more."""
    with tempfile.TemporaryFile() as file:
        apply(model.data, edits, file)
        file.flush()
        view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    return scan_view(model.path, view, allow_outside=model.allow_outside)
