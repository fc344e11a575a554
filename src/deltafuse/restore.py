"""Puts sites back in a fused file that was edited since: message by message, the edits are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx

from deltafuse.edits import Changes, Edit, Insertion, build
from deltafuse.errors import UserError
from deltafuse.opset import adapt
from deltafuse.patch import Record
from deltafuse.reasons import Reason
from deltafuse.restore_sites import SHARED, Node, Site, given_values, shared_nodes, site_of, writer_of, written_by
from deltafuse.restore_types import declared, undeclare, unpin
from deltafuse.wire import Model

__all__ = ["Restoration", "restore", "runnable"]


@dataclass(frozen=True)
class Restoration:
    """How sites are put back.

    Attributes:
        edits: of the fused file, in its order; the record is not among them.
        restored: names of the sites that are put back.
        refused: (site, why) of the others that were asked for.
        notes: for the report.
    """

    edits: tuple[Edit, ...]
    restored: tuple[str, ...]
    refused: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]


def restore(model: Model, record: Record, sites: Sequence[str]) -> Restoration:
    """Works out how to put `sites` back; those whose nodes were changed are refused.

    Raises:
        UserError: ``record-mismatch``: the record is of another model; ``site-changed``: no site can be put back.
    """
    candidates, refused = dict[str, Site](), dict[str, str]()
    for name in sites:
        site = site_of(model, record, name)
        if isinstance(site, str):
            refused[name] = site
        else:
            candidates[name] = site
    shared = shared_nodes(model, record, candidates)
    if shared.runs:
        candidates[SHARED] = shared
    while problems := dict(_conflicts(model, candidates)):
        refused |= problems
        candidates = {name: site for name, site in candidates.items() if name not in problems}
    refused.pop(SHARED, None)
    restored = tuple(name for name in candidates if name != SHARED)
    if not restored:
        raise _nothing_left(model, record, refused)
    last = set(record.sites) <= set(restored)
    changes = _changes(model, record, candidates)
    pins, notes = unpin(model, record) if last else ([], [])
    extra = [*pins, *undeclare(model, record, set(restored), written_by(candidates))]
    return Restoration(build(model, changes, extra), restored, tuple(refused.items()), tuple(notes))


def runnable(model: Model) -> bool:
    """Whether all that a node reads is given or written by a node before it."""
    graph = model.graph
    given = given_values(model)
    written = bytearray(len(graph.value_names))
    for node, inputs in enumerate(graph.node_inputs):
        for value in (*inputs, *graph.captures.get(node, ())):
            if not written[value] and value not in given:
                return False
        for value in graph.node_outputs[node]:
            written[value] = 1
    return True


def _conflicts(model: Model, sites: Mapping[str, Site]) -> Iterator[tuple[str, str]]:
    """Sites that cannot be put back beside what the file is now."""
    graph = model.graph
    fused = {node for site in sites.values() for node in site.fused}
    written = written_by(sites)
    there = {value for value, node in enumerate(graph.producer) if node >= 0 and node not in fused} | given_values(
        model
    )
    outputs = set(graph.outputs)
    for site in sites.values():
        own = [value for node in site.fused for value in graph.node_outputs[node] if value]
        lost = [value for value in own if graph.name(value) not in written]
        used = [v for v in lost if v in outputs or any(node not in fused for node in graph.consumers[v])]
        twice = [name for node in site.nodes for name in node.outputs if graph.find(name) in there]
        reads = {name for node in site.nodes for name in node.reads if name not in written}
        gone = [name for name in sorted(reads) if graph.find(name) not in there]
        if used:
            yield site.name, f"its inner value {graph.name(used[0])} is read by what was added since"
        elif twice:
            yield site.name, f"another node writes its value {twice[0]} now"
        elif gone:
            yield site.name, f"it needs the value {gone[0]}, which is no longer there"


def _changes(model: Model, record: Record, sites: Mapping[str, Site]) -> Changes:
    fused = sorted(node for site in sites.values() for node in site.fused)
    places = _places(model, sites, set(fused))
    groups, pulled = _arrange(model, places, set(fused), _raised_from(record))
    infos = tuple(declared(model, record, sites.keys() - {SHARED}))
    inserted = [Insertion("", before, tuple(payloads)) for before, payloads in groups.items()]
    return Changes(
        removed=(("", (*fused, *pulled)),), inserted=(*inserted, Insertion("", len(model.graph.op), (), infos))
    )


def _places(model: Model, sites: Mapping[str, Site], fused: set[int]) -> dict[int, list[Node]]:
    """Node index -> original nodes to put in front of it, as near to their old place as the file tells."""
    places: dict[int, list[Node]] = {}
    for run in sorted((run for site in sites.values() for run in site.runs), key=lambda run: run.start):
        before, after = (writer_of(model, name) for name in (run.before, run.after))
        if before < 0 or before in fused:
            before = after + 1 if after >= 0 and after not in fused else max(fused)
        places.setdefault(before, []).extend(run.nodes)
    return places


def _arrange(
    model: Model, places: Mapping[int, list[Node]], fused: set[int], opset: int | None
) -> tuple[dict[int, list[bytes]], list[int]]:
    """Puts new and kept nodes in a topological order that moves as few as it can.

    Returns:
        node index -> messages to insert in front of it; the kept nodes that had to go forward (among those messages).
    """
    graph = model.graph
    items: list[Node | int] = []
    before: list[int] = []
    for index in range(len(graph.op) + 1):
        new = places.get(index, [])
        kept = [index] if index < len(graph.op) and index not in fused else []
        items += [*new, *kept]
        before += [index] * (len(new) + len(kept))
    writer = {name: at for at, item in enumerate(items) if isinstance(item, Node) for name in item.outputs}
    place = {item: at for at, item in enumerate(items) if isinstance(item, int)}

    def needs(at: int) -> list[int]:
        item = items[at]
        if isinstance(item, Node):
            values: Iterable[int | None] = map(graph.find, item.reads)
            names = [writer[name] for name in item.reads if name in writer]
        else:
            values = (*graph.node_inputs[item], *graph.captures.get(item, ()))
            names = [writer[name] for value in values if value and (name := graph.name(value)) in writer]
        nodes = (graph.producer[value] for value in values if value)
        return names + [place[node] for node in nodes if node in place]

    groups: dict[int, list[bytes]] = {}
    pulled: list[int] = []
    for at, root in _emit(len(items), needs):
        item = items[at]
        if isinstance(item, Node):
            groups.setdefault(before[root], []).extend(_written(model, item.payload, opset))
        elif at != root:
            groups.setdefault(before[root], []).append(graph.node(item).SerializeToString())
            pulled.append(item)
    return groups, pulled


def _raised_from(record: Record) -> int | None:
    """The ai.onnx version before the fuse, None where the fuse did not raise it."""
    for entry in record.entries:
        imports = onnx.ModelProto.FromString(entry.removed).opset_import if entry.kind == "opset" else ()
        for found in imports:
            if found.domain in ("", "ai.onnx"):
                return found.version
    return None


def _written(model: Model, payload: bytes, opset: int | None) -> list[bytes]:
    """A node of the original, as the opset that the file imports now writes it."""
    now = model.opset_imports.get("", 0)
    if opset is None or opset >= now:
        return [payload]
    new = adapt(onnx.NodeProto.FromString(payload), opset, now)
    if isinstance(new, Reason):
        raise UserError(new.code, f"the file is of opset {now} now and cannot hold the original's nodes: {new.text}")
    return [payload] if new is None else [node.SerializeToString() for node in new]


def _emit(count: int, needs: Callable[[int], list[int]]) -> Iterator[tuple[int, int]]:
    """Items in a topological order near to theirs: each with the one in whose turn it came."""
    done, open_ = bytearray(count), bytearray(count)
    for root in range(count):
        stack = [root]
        while stack:
            item = stack[-1]
            if done[item]:
                stack.pop()
                continue
            pending = [need for need in needs(item) if not done[need]]
            if not pending:
                done[item] = 1
                yield stack.pop(), root
            elif open_[item]:
                raise UserError(
                    "site-changed", "the edits made since leave no order in which the original nodes could run"
                )
            else:
                open_[item] = 1
                stack += reversed(pending)


def _nothing_left(model: Model, record: Record, refused: Mapping[str, str]) -> UserError:
    if not any(model.graph.find(digest.name) for digest in record.digests if digest.site):
        return UserError(
            "record-mismatch",
            f"the rollback record is of another model than {model.path}: give the file's own with --sidecar FILE",
        )
    reasons = "; ".join(f"{site}: {why}" for site, why in refused.items())
    return UserError("site-changed", f"no site can be restored in {model.path}: {reasons}; take the original file")
