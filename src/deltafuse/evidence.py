"""What a run knows of a model beyond its report: for the page that shows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deltafuse.drafting import Part
    from deltafuse.finder import Candidate
    from deltafuse.shapes import Shapes
    from deltafuse.wire import Model


@dataclass(frozen=True)
class Evidence:
    """The model, and what was found in its main graph.

    Attributes:
        file: as it was scanned.
        model: in topological order, with those calls in place that hold a rule.
        kinds: of the values of `model`.
        shapes: of the values of `model`.
        candidates: by the site's name, what was looked at, a match or not.
        draft: what is to be changed in the main graph.
    """

    file: Model
    model: Model
    kinds: bytearray
    shapes: Shapes
    candidates: Mapping[str, Candidate]
    draft: Part
