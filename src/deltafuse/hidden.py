"""What no trial of a site may show: choices by a size, far reads, further memories, constants that round."""

from __future__ import annotations

import math
from collections.abc import Sequence

from deltafuse.bench import Binding
from deltafuse.constants import rounded_constant
from deltafuse.dims import symbol_name
from deltafuse.guards import find_guard
from deltafuse.memory import Memory
from deltafuse.nested_sums import find_nested_sums
from deltafuse.odd_terms import find_odd_term
from deltafuse.probe import backward_slice
from deltafuse.quasi_linear import LARGEST_CHUNK
from deltafuse.reasons import Reason
from deltafuse.scope import Scope
from deltafuse.search import Setting
from deltafuse.size_flow import Sizes, sizes_along
from deltafuse.trial import Trial
from deltafuse.validity import find_range


def find_guard_between(
    setting: Setting, inputs: Sequence[int], ends: Sequence[int], known: Sizes | None = None
) -> Reason | None:
    """What forbids a proof by draws between the cut's inputs and some of its values.

    Args:
        setting: the site.
        inputs: where to begin.
        ends: where to end.
        known: what is known of the sizes; is told more.
    """
    graph = setting.model.graph
    scope = Scope(setting.model, graph, setting.kinds, setting.shapes)
    nodes, _ = backward_slice(graph, inputs, ends)
    sizes = [value for value, dims in setting.candidate.sizes if not all(isinstance(dim, int) for dim in dims)]
    decays = setting.pattern.decay != "none"
    exempt = setting.reading.exempt
    guard = find_guard(scope, nodes, setting.roots, sizes, exempt, decays=decays, known=known)
    return find_odd_term(scope, nodes, setting.roots, exempt, decays=decays) if guard is None else guard


def open_sizes(setting: Setting, trial: Trial) -> Sizes | Reason:
    """What is known of a site's sizes if it hides nothing; else what may be hidden between operands and results.

    Args:
        setting: the site.
        trial: of what it was found to be.
    """
    at = trial.binding
    sizes = sizes_along(at.tokens_dims, at.batch_dims, at.numbers)
    found = _hidden(setting, trial, sizes)
    if found is not None and found.code == "position-gate":
        valid = _valid(trial, at)
        if valid is not None:
            sizes = sizes_along(at.tokens_dims, at.batch_dims, at.numbers, valid)
            found = _hidden(setting, trial, sizes)
    return sizes if found is None else found


def _hidden(setting: Setting, trial: Trial, sizes: Sizes) -> Reason | None:
    graph, of = setting.model.graph, trial.explained.assignment.sizes
    inputs, ends = trial.bench.cut.inputs, [value for value in (trial.out, trial.final) if value is not None]
    found = find_guard_between(setting, inputs, ends, sizes)
    if found is None:
        elements = math.prod(of[letter] for letter in "BHKV")
        memory = Memory(elements, trial.binding, sizes.tokens or frozenset(), trial.final or 0)
        scope = Scope(setting.model, graph, setting.kinds, setting.shapes)
        nodes, _ = backward_slice(graph, inputs, ends)
        found = memory.find_further(scope, nodes)
        found = find_nested_sums(scope, nodes) if found is None else found
    if found is None:
        found = rounded_constant(setting.worker, setting.model, setting.kinds, setting.shapes, inputs, ends)
    return found


def _valid(trial: Trial, at: Binding) -> tuple[int, int] | None:
    """Least and greatest token count that a site is right for, where it is right for few only.

    A graph that was traced within one chunk takes the lesser of its tokens and the chunk: for these it is the tokens.
    """
    if not at.tokens_dims or any(symbol_name(dim) is None for dim in at.tokens_dims):
        return None
    validity, _ = find_range(trial, at, 0)
    few = validity.above is not None and validity.high <= LARGEST_CHUNK
    return (validity.low, validity.high) if few else None
