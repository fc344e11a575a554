"""Puts sites back in a fused file that was edited since: message by message, the edits are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx

from deltafuse.edits import Changes, Edit, Insertion, build
from deltafuse.errors import UserError
from deltafuse.patch import Record
from deltafuse.protobuf import fields, write_field
from deltafuse.record import node_digest, value_digest
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
    """One site: the fused nodes that stand for it, the original's nodes in runs with what followed each run."""

    name: str
    fused: tuple[int, ...]
    runs: tuple[tuple[str, tuple[_Node, ...]], ...]

    @property
    def nodes(self) -> Iterator[_Node]:
        return (node for _, run in self.runs for node in run)


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
    pins, notes = _unpin(model, record) if last else ([], [])
    return Restoration(build(model, changes, pins), tuple(candidates), tuple(refused.items()), tuple(notes))


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


def _info_name(payload: bytes) -> str:
    return onnx.ValueInfoProto.FromString(payload).name


def _claim(model: Model, record: Record, site: str) -> tuple[int, ...] | str:
    """The nodes that were inserted for a site, or what became of them."""
    graph = model.graph
    claimed: list[int] = []
    for digest in record.digests:
        if digest.site != site or digest.number != 1:
            continue
        value = graph.find(digest.name)
        node = graph.producer[value] if value is not None else -1
        if node < 0:
            return f"the node that wrote {digest.name} is no longer there"
        if node_digest(graph.node(node)) != digest.digest:
            return f"the node that writes {digest.name} was changed"
        claimed.append(node)
    return tuple(claimed)


def _runs(record: Record, site: str) -> Iterator[tuple[str, tuple[_Node, ...]]]:
    for entry in record.entries:
        if entry.site == site and entry.kind == "nodes" and entry.removed:
            raw = entry.removed
            spans = [(begin, stop) for _, _, _, begin, stop, _ in fields(raw, 0, len(raw))]
            yield entry.anchor, tuple(_node(raw[begin:stop]) for begin, stop in spans)


def _node(payload: bytes) -> _Node:
    node = onnx.NodeProto.FromString(payload)
    reads = dict.fromkeys(filter(None, node.input))
    for number, _, _, begin, stop, _ in fields(payload, 0, len(payload)):
        if number == 5:
            for graph in attribute_graphs(payload, begin, stop):
                reads.update(dict.fromkeys(name.decode() for name in free_names(payload, graph)))
    return _Node(payload, tuple(filter(None, node.output)), tuple(reads))


def _conflicts(model: Model, sites: Mapping[str, _Site]) -> Iterator[tuple[str, str]]:
    """Sites that cannot be put back beside what the file is now."""
    graph = model.graph
    fused = {node for site in sites.values() for node in site.fused}
    written = {name for site in sites.values() for node in site.nodes for name in node.outputs}
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
    infos = tuple(_declared(model, record, sites))
    inserted = [Insertion("", before, tuple(payloads)) for before, payloads in groups.items()]
    return Changes(
        removed=(("", (*fused, *pulled)),), inserted=(*inserted, Insertion("", len(model.graph.op), (), infos))
    )


def _places(model: Model, record: Record, sites: Mapping[str, _Site], fused: set[int]) -> dict[int, list[_Node]]:
    """Node index -> original nodes to put in front of it, as near to their old place as the file tells."""
    graph = model.graph
    places: dict[int, list[_Node]] = {}
    runs = {name: iter(site.runs) for name, site in sites.items()}
    for entry in record.entries:
        if entry.site not in runs or entry.kind != "nodes" or not entry.removed:
            continue
        anchor, nodes = next(runs[entry.site])
        value = graph.find(anchor) if anchor else None
        before = graph.producer[value] if value is not None else -1
        if not anchor:
            before = len(graph.op)
        elif before < 0 or before in fused:
            before = min(sites[entry.site].fused, default=len(graph.op))
        places.setdefault(before, []).extend(nodes)
    return places


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


def _declared(model: Model, record: Record, sites: Mapping[str, _Site]) -> Iterator[bytes]:
    """The value_info that fusing took out or replaced, where nothing else declares the value since."""
    now = {model.graph.name(d.value) for d in model.declarations}
    ours = {digest.name: digest.digest for digest in record.digests if digest.number == 13 and digest.site in sites}
    for entry in record.entries:
        if entry.site not in sites or entry.kind != "values":
            continue
        for _, _, _, begin, stop, _ in fields(entry.removed, 0, len(entry.removed)):
            payload = entry.removed[begin:stop]
            name = _info_name(payload)
            if name not in now or _digest_now(model, name) == ours.get(name):
                yield payload


def _digest_now(model: Model, name: str) -> str:
    value = model.graph.find(name)
    info = model.graph.value_info(value) if value is not None else None
    return "" if info is None else value_digest(info)


def _unpin(model: Model, record: Record) -> tuple[list[Edit], list[str]]:
    """Gives pinned declarations their old dims, but for those that were changed since."""
    pinned = {(digest.number, digest.name): digest.digest for digest in record.digests if not digest.site}
    old: dict[tuple[int, str], bytes] = {}
    for entry in record.entries:
        if entry.kind == "pins":
            for number, _, _, begin, stop, _ in fields(entry.removed, 0, len(entry.removed)):
                old[number, _info_name(entry.removed[begin:stop])] = entry.removed[begin:stop]
    edits: list[Edit] = []
    for declaration in model.declarations:
        key = (declaration.number, model.graph.name(declaration.value))
        payload = old.pop(key, None)
        if payload is None:
            continue
        _, _, _, begin, stop, _ = next(fields(model.data, declaration.start, declaration.end))
        if value_digest(onnx.ValueInfoProto.FromString(bytes(model.data[begin:stop]))) == pinned.get(key):
            edits.append(Edit(declaration.start, declaration.end, write_field(key[0], payload), "", "pins"))
        else:
            old[key] = payload
    return edits, [f"the declaration of {name} was changed since, its dims are left as they are" for _, name in old]


def _nothing_left(model: Model, record: Record, refused: Mapping[str, str]) -> UserError:
    if not any(model.graph.find(digest.name) for digest in record.digests if digest.site):
        return UserError(
            "record-mismatch",
            f"the rollback record is of another model than {model.path}: give the file's own with --sidecar FILE",
        )
    reasons = "; ".join(f"{site}: {why}" for site, why in refused.items())
    return UserError("site-changed", f"no site can be restored in {model.path}: {reasons}; take the original file")
