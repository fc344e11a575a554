"""What ``fuse lower`` leaves in a file, so that its nodes are not taken for those of an export."""

from __future__ import annotations

from collections.abc import Sequence

from deltafuse.reasons import TEXTS
from deltafuse.wire import Model

#: Entry in the file's metadata.
KEY = "deltafuse.lowered"
#: Stands in the name of each node that is written in place of a fused one.
PART = "/lowered"

#: Code of the note on a file of plain operators in place of fused nodes.
LOWERED = "lowered"
TEXTS["lowered"] = "the file was written by fuse lower; take the fused file or the one before it"


def is_lowered(model: Model) -> bool:
    """Whether ``fuse lower`` wrote a file."""
    return KEY in model.metadata_parts


def written_by_lower(model: Model, core: Sequence[int]) -> bool:
    """Whether a candidate begins in nodes that stand for a fused one.

    Args:
        model: whose main graph it lies in.
        core: its nodes, ascending.
    """
    return is_lowered(model) and bool(core) and f"{PART}/" in model.graph.node_name(core[0])
