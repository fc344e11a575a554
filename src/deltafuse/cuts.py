"""Cuts a candidate out of its graph, to be run by itself."""

from __future__ import annotations

from deltafuse.bench import Bench, open_bench
from deltafuse.dims import Dim
from deltafuse.probe import cut_model
from deltafuse.reasons import Reason
from deltafuse.roots import odd_root
from deltafuse.search import Setting
from deltafuse.strangers import behind_strangers

#: Chains of values behind the rule (casts, layout, the norm that follows) that are looked at.
_CHAIN = 48


def open_cut(setting: Setting, *, known_operators: bool = False) -> Bench | Reason:
    """Cuts a candidate where a reading says, with all that may be a result of the rule, and loads it in double.

    Args:
        setting: the candidate, and where it is cut.
        known_operators: leave out what is computed by an operator that is never part of a rule.
    """
    graph, shapes, sizes = setting.model.graph, setting.shapes, dict(setting.candidate.sizes)
    known: dict[int, tuple[Dim, ...]] = {}
    for value in setting.roots:
        shape = shapes.shape(value)
        if shape is None:
            return Reason("dims-unknown", {"value": graph.name(value)})
        known[value] = shape
    if (odd := odd_root(graph, setting.kinds, shapes, setting.roots)) is not None:
        return odd
    inputs = (*setting.roots, *sizes)
    chains = [chain[:_CHAIN] for chain in setting.chains.values()]
    offered = dict.fromkeys(value for chain in chains for value in chain if value not in inputs)
    if known_operators:
        strange = behind_strangers(setting.model, setting.kinds, inputs, list(offered))
        offered = {value: None for value in offered if graph.producer[value] not in strange}
    cut = cut_model(setting.model, shapes, inputs, list(offered))
    if isinstance(cut, Reason):
        return cut
    names = {value: graph.name(value) for value in (*inputs, *offered)}
    return open_bench(setting.worker, cut, names, known, sizes, setting.know_sizes)
