"""Whether a fused file was made from the unfused one at all; where not, each difference by itself says nothing."""

from __future__ import annotations

from deltafuse.errors import UserError
from deltafuse.fused import fused_nodes
from deltafuse.graph import Graph
from deltafuse.patch import Record
from deltafuse.reasons import TEXTS, Reason
from deltafuse.record import find
from deltafuse.undoing import content_digest, node_digest
from deltafuse.verify_diff import Difference
from deltafuse.verify_regions import marked
from deltafuse.wire import Model

__all__ = ["UNRELATED", "foreign_record", "record_notes", "recorded", "unrelated"]

UNRELATED = "unrelated-files"
TEXTS.update(
    {
        "unrelated-files": "{fused} was not made from {unfused}: {nodes} of its {kept:# node} that no fuse wrote, "
        "{inputs} and {outputs} are the same in both{recorded}; give the file that it was made from in place of "
        "{unfused}, or fuse {unfused} and give what that writes",
        "record-of-another": "the record in {fused} is of another pair of files (its original has the sha256 "
        "{recorded}): of the {count:# node} that it tells of {fused} has {held}; fuse {unfused} again, since nothing "
        "can be rolled back by this record",
    }
)


def recorded(fused: Model) -> Record | UserError:
    """The last record of a file, or why there is none that can be read."""
    try:
        return find(fused).record
    except UserError as error:
        return error


def record_notes(record: Record | UserError) -> tuple[str, ...]:
    """That a record cannot be read, which rollback would need; that there is none is no news."""
    if isinstance(record, Record) or record.code == "no-record":
        return ()
    return (f"nothing can be rolled back, {record.code}: {record}",)


def unrelated(unfused: Model, fused: Model, difference: Difference, record: Record | UserError) -> Reason | None:
    """Says so where the fused file has little of the unfused one: a fuse keeps all names and most nodes.

    That holds where its record is not of the unfused file, and most of its nodes are others, or inputs or outputs have
    other names and the record is of another file.

    Args:
        unfused: the one file.
        fused: the other.
        difference: what differs in their main graphs.
        record: that of the fused file.
    """
    original = record.original_sha256 if isinstance(record, Record) else ""
    if not difference.findings or original == content_digest(unfused.data):
        return None
    graph, changed = fused.graph, difference.changed
    written = {*fused_nodes(graph, changed), *(node for node in changed if marked(graph, node))}
    kept, nodes = (len(graph.op) - len(others) for others in (written, changed))
    renamed = _names(unfused.graph) != _names(fused.graph)
    if 2 * nodes >= kept and not (renamed and original):
        return None
    files = {"unfused": unfused.path, "fused": fused.path, "nodes": nodes, "kept": kept}
    shared = {
        f"{kind}s": f"{len(set(old) & set(new))} of {len(new)} graph {kind}s"
        for kind, old, new in zip(("input", "output"), _names(unfused.graph), _names(fused.graph), strict=True)
    }
    told = f", and its record is of another file (sha256 {original})" if original else ""
    return Reason(UNRELATED, {**files, **shared, "recorded": told})


def foreign_record(unfused: Model, fused: Model, record: Record | UserError) -> Reason | None:
    """Says so where a record is neither of the unfused file nor of the fused one.

    The original's hash alone does not tell: what was fused twice has a record of the last fuse, and a file that was
    saved anew has other bytes. So most of the nodes that the record tells of must be others, too.
    """
    if isinstance(record, UserError) or record.original_sha256 == content_digest(unfused.data):
        return None
    graph = fused.graph
    told = [digest for digest in record.digests if digest.number == 1 and digest.name]
    values = [graph.find(digest.name) for digest in told]
    nodes = [-1 if value is None else graph.producer[value] for value in values]
    held = sum(
        node >= 0 and node_digest(graph.node(node)) == digest.digest for node, digest in zip(nodes, told, strict=True)
    )
    if not told or 2 * held >= len(told):
        return None
    files = {"fused": fused.path, "unfused": unfused.path}
    return Reason("record-of-another", {**files, "recorded": record.original_sha256, "count": len(told), "held": held})


def _names(graph: Graph) -> tuple[list[str], list[str]]:
    return [graph.name(value) for value in graph.inputs], [graph.name(value) for value in graph.outputs]
