"""Puts sites back in a fused file that was edited since: message by message, the edits are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx

from deltafuse.edits import Changes, Edit, Insertion, build
from deltafuse.errors import UserError
from deltafuse.patch import Record
from deltafuse.protobuf import fields
from deltafuse.record import node_digest
from deltafuse.restore_types import declared, undeclare, unpin
from deltafuse.subgraphs import attribute_graphs, free_names
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


@dataclass(frozen=True)
class _Node:
    """A node of the original that was removed: its bytes and the names it writes and reads (subgraphs included)."""

    payload: bytes
    outputs: tuple[str, ...]
    reads: tuple[str, ...]


@dataclass(frozen=True)
class _Site:
    """One site: the fused nodes that stand for it, the original's nodes in runs."""

    name: str
    fused: tuple[int, ...]
    runs: tuple[tuple[_Node, ...], ...]

    @property
    def nodes(self) -> Iterator[_Node]:
        return (node for run in self.runs for node in run)


def restore(model: Model, record: Record, sites: Sequence[str]) -> Restoration:
    """Works out how to put `sites` back; those whose nodes were changed are refused.

    Raises:
        UserError: ``record-mismatch``: the record is of another model; ``site-changed``: no site can be put back.
    """
    candidates, refused = dict[str, _Site](), dict[str, str]()
    for name in sites:
        fused = _claim(model, record, name)
        if isinstance(fused, str):
            refused[name] = fused
        else:
            candidates[name] = _Site(name, fused, tuple(_runs(record, name)))
    while problems := dict(_conflicts(model, candidates)):
        refused |= problems
        candidates = {name: site for name, site in candidates.items() if name not in problems}
    if not candidates:
        raise _nothing_left(model, record, refused)
    last = set(record.sites) <= set(candidates)
    changes = _changes(model, record, candidates)
    pins, notes = unpin(model, record) if last else ([], [])
    extra = [*pins, *undeclare(model, record, candidates.keys(), _written(candidates))]
    return Restoration(build(model, changes, extra), tuple(candidates), tuple(refused.items()), tuple(notes))


def runnable(model: Model) -> bool:
    """Whether all that a node reads is given or written by a node before it."""
    graph = model.graph
    given = _given(model)
    written = bytearray(len(graph.value_names))
    for node, inputs in enumerate(graph.node_inputs):
        for value in (*inputs, *graph.captures.get(node, ())):
            if not written[value] and value not in given:
                return False
        for value in graph.node_outputs[node]:
            written[value] = 1
    return True


def _given(model: Model) -> set[int]:
    graph = model.graph
    return {0, *graph.inputs, *graph.initializers, *(d.value for d in model.declarations if d.number == 11)}


def _claim(model: Model, record: Record, site: str) -> tuple[int, ...] | str:
    """The nodes that were inserted for a site, or what became of them."""
    graph = model.graph
    claimed: list[int] = []
    for digest in record.digests:
        if digest.site != site or digest.number != 1:
            continue
        node = _writer(model, digest.name)
        if node < 0:
            return f"the node that wrote {digest.name} is no longer there"
        if node_digest(graph.node(node)) != digest.digest:
            return f"the node that writes {digest.name} was changed"
        claimed.append(node)
    return tuple(claimed)


def _runs(record: Record, site: str) -> Iterator[tuple[_Node, ...]]:
    for entry in record.entries:
        if entry.site == site and entry.kind == "nodes" and entry.removed:
            raw = entry.removed
            spans = [(begin, stop) for _, _, _, begin, stop, _ in fields(raw, 0, len(raw))]
            yield tuple(_node(raw[begin:stop]) for begin, stop in spans)


def _node(payload: bytes) -> _Node:
    node = onnx.NodeProto.FromString(payload)
    reads = dict.fromkeys(filter(None, node.input))
    for number, _, _, begin, stop, _ in fields(payload, 0, len(payload)):
        if number == 5:
            for graph in attribute_graphs(payload, begin, stop):
                reads.update(dict.fromkeys(name.decode() for name in free_names(payload, graph)))
    return _Node(payload, tuple(filter(None, node.output)), tuple(reads))


def _written(sites: Mapping[str, _Site]) -> set[str]:
    return {name for site in sites.values() for node in site.nodes for name in node.outputs}


def _conflicts(model: Model, sites: Mapping[str, _Site]) -> Iterator[tuple[str, str]]:
    """Sites that cannot be put back beside what the file is now."""
    graph = model.graph
    fused = {node for site in sites.values() for node in site.fused}
    written = _written(sites)
    there = {value for value, node in enumerate(graph.producer) if node >= 0 and node not in fused} | _given(model)
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


def _changes(model: Model, record: Record, sites: Mapping[str, _Site]) -> Changes:
    fused = sorted(node for site in sites.values() for node in site.fused)
    places = _places(model, record, sites, set(fused))
    groups, pulled = _arrange(model, places, set(fused))
    infos = tuple(declared(model, record, sites.keys()))
    inserted = [Insertion("", before, tuple(payloads)) for before, payloads in groups.items()]
    return Changes(
        removed=(("", (*fused, *pulled)),), inserted=(*inserted, Insertion("", len(model.graph.op), (), infos))
    )


def _places(model: Model, record: Record, sites: Mapping[str, _Site], fused: set[int]) -> dict[int, list[_Node]]:
    """Node index -> original nodes to put in front of it, as near to their old place as the file tells."""
    places: dict[int, list[_Node]] = {}
    runs = {name: iter(site.runs) for name, site in sites.items()}
    for entry in record.entries:
        if entry.site not in runs or entry.kind != "nodes" or not entry.removed:
            continue
        nodes = next(runs[entry.site])
        before, after = (_writer(model, name) for name in (entry.before, entry.after))
        if before < 0 or before in fused:
            before = after + 1 if after >= 0 and after not in fused else max(fused)
        places.setdefault(before, []).extend(nodes)
    return places


def _writer(model: Model, name: str) -> int:
    value = model.graph.find(name) if name else None
    return -1 if value is None else model.graph.producer[value]


def _arrange(
    model: Model, places: Mapping[int, list[_Node]], fused: set[int]
) -> tuple[dict[int, list[bytes]], list[int]]:
    """Puts new and kept nodes in a topological order that moves as few as it can.

    Returns:
        node index -> messages to insert in front of it; the kept nodes that had to go forward (among those messages).
    """
    graph = model.graph
    items: list[_Node | int] = []
    before: list[int] = []
    for index in range(len(graph.op) + 1):
        new = places.get(index, [])
        kept = [index] if index < len(graph.op) and index not in fused else []
        items += [*new, *kept]
        before += [index] * (len(new) + len(kept))
    writer = {name: at for at, item in enumerate(items) if isinstance(item, _Node) for name in item.outputs}
    place = {item: at for at, item in enumerate(items) if isinstance(item, int)}

    def needs(at: int) -> list[int]:
        item = items[at]
        if isinstance(item, _Node):
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
        if isinstance(item, _Node):
            groups.setdefault(before[root], []).append(item.payload)
        elif at != root:
            groups.setdefault(before[root], []).append(graph.node(item).SerializeToString())
            pulled.append(item)
    return groups, pulled


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
