"""Pairs the states that a graph gives with those that a graph takes: by name, else by sizes and layer.

What is not told is not guessed: where two pairings would fit, the user says which with ``--map``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from deltafuse.errors import UserError
from deltafuse.states import How, Link
from deltafuse.wording import number

#: Words that say on which side of a run a state is, or nothing.
_SIDES = frozenset({
    "past", "present", "input", "inputs", "output", "outputs", "in", "out", "new", "next", "prev", "previous",
    "initial", "final", "last", "updated", "old", "init",
})  # fmt: skip
#: Words that every state may have.
_ANY = frozenset({"state", "states", "cache", "caches", "layer", "layers", "value", "values"})
_LAYERS = re.compile(r"\d+")


@dataclass(frozen=True)
class State:
    """A graph input or output that may be a state.

    Attributes:
        shape: sizes, None where they are free.
        layer: the layer that reads or writes it, None where neither its name nor its nodes' names tell.
    """

    name: str
    shape: tuple[int | None, ...] | None
    layer: int | None = None


def pair_states(
    outputs: Sequence[State],
    inputs: Sequence[State],
    maps: Sequence[tuple[str, str]],
    *,
    needed: Iterable[str],
    giver: str = "decode",
) -> tuple[Link, ...]:
    """Which output becomes which input.

    Args:
        outputs: what may be a state of the graph that ran.
        inputs: what may be one of the graph that runs next.
        maps: what the user says, as (outputs, inputs), several names parted by commas.
        needed: inputs that must come from somewhere.
        giver: what to call the graph that ran.

    Raises:
        UserError: ``state-ambiguous``, ``state-missing``, ``unknown-state``; each with what to paste.
    """
    links = list(_mapped(outputs, inputs, maps))
    wanted = set(needed)
    for step in (_by_name, _by_layer_names):
        links += step(*_open(outputs, inputs, links))
    links += _by_sizes(*_open(outputs, inputs, links), wanted)
    sources, targets = _open(outputs, inputs, links)
    missing = [state for state in targets if state.name in wanted]
    if missing:
        raise _missing(missing[0], sources, giver)
    order = {state.name: index for index, state in enumerate(inputs)}
    return tuple(sorted(links, key=lambda link: order[link.targets[0]]))


def _open(
    outputs: Sequence[State], inputs: Sequence[State], links: Sequence[Link]
) -> tuple[list[State], list[State]]:
    given = {name for link in links for name in link.sources}
    taken = {name for link in links for name in link.targets}
    return ([state for state in outputs if state.name not in given],
            [state for state in inputs if state.name not in taken])  # fmt: skip


def _mapped(
    outputs: Sequence[State], inputs: Sequence[State], maps: Sequence[tuple[str, str]]
) -> Iterator[Link]:
    """What the user says, as far as these graphs have it: a prefill and a decode may name theirs differently."""
    given, taken = {state.name: state for state in outputs}, {state.name: state for state in inputs}
    for left, right in maps:
        sources, targets = tuple(left.split(",")), tuple(right.split(","))
        if not (set(sources) <= set(given) and set(targets) <= set(taken)):
            continue
        how: How = "same" if len(sources) == len(targets) else "stack" if len(targets) == 1 else "unstack"
        if how == "unstack" and len(sources) > 1:
            raise UserError("usage", f"--map {left}={right}: one of both sides must be a single name, or both as long")
        misfit = _misfit(how, [given[name] for name in sources], [taken[name] for name in targets])
        if misfit:
            raise UserError("state-misfit", f"--map {left}={right}: {misfit}; pair states of the same kind")
        yield Link(sources, targets, how, "map")


def _misfit(how: How, sources: Sequence[State], targets: Sequence[State]) -> str:
    """Why outputs cannot be made to fit inputs, "" where they may: only the last two axes are ever cut or filled."""
    if how != "same":
        many, (stack,) = (sources, targets) if how == "stack" else (targets, sources)
        layers = None if stack.shape is None else (*stack.shape, None)[0]
        if layers not in (None, len(many)):
            return f"{_shown(stack)} has {number(layers, 'layer')}, and --map names {len(many)}"
        inner = State(stack.name, None if stack.shape is None else stack.shape[1:])
        pairs = [(one, inner) for one in many]
    else:
        pairs = list(zip(sources, targets, strict=True))
    for one, other in pairs:
        if one.shape is None or other.shape is None:
            continue
        if len(one.shape) != len(other.shape):
            return f"{_shown(one)} has {number(len(one.shape), 'axis')} and {_shown(other)} {len(other.shape)}"
        for axis, (a, b) in enumerate(zip(one.shape[:-2], other.shape[:-2], strict=True)):
            if None not in (a, b) and a != b:
                return f"axis {axis} of {_shown(one)} is not that of {_shown(other)}"
    return ""


def check_maps(
    maps: Sequence[tuple[str, str]], known: Mapping[str, Sequence[str]], states: Mapping[str, Sequence[str]]
) -> None:
    """Raises where a name of ``--map`` is none of any graph's, or that of no state.

    Args:
        maps: what the user says.
        known: names of the ``outputs`` and ``inputs`` of all graphs.
        states: those of them that may be states.
    """
    for left, right in maps:
        for names, side in ((left, "outputs"), (right, "inputs")):
            for name in names.split(","):
                for there, what in ((known[side], side), (states[side], f"{side} that may be states")):
                    if name not in there:
                        text = ", ".join(dict.fromkeys(there)) or "none"
                        raise UserError(
                            "unknown-state", f"--map {left}={right}: {name} is none of the {what}, which are {text}"
                        )


def _stem(name: str) -> tuple[str, ...]:
    words = re.split(r"[._/:]+", name.lower())
    return tuple(word for word in words if word and word not in _SIDES)


def _by_name(sources: Sequence[State], targets: Sequence[State]) -> Iterator[Link]:
    """Equal but for words such as past and present."""
    given, taken = _grouped(sources, _stem), _grouped(targets, _stem)
    for stem, states in taken.items():
        others = given.get(stem, []) if stem else []
        if len(states) == len(others) == 1 and _fits(others[0], states[0]):
            yield Link((others[0].name,), (states[0].name,), "same", "name")


def _by_layer_names(sources: Sequence[State], targets: Sequence[State]) -> Iterator[Link]:
    """One stack on one side, states numbered by layer on the other, whose names are equal but for the numbers."""
    for stacks, layers, how in ((targets, sources, "stack"), (sources, targets, "unstack")):
        groups = _grouped(layers, lambda name: tuple(word for word in _stem(name) if not word.isdigit()))
        for stack in stacks:
            for stem, members in groups.items():
                if not _alike(_stem(stack.name), stem) or not _is_stack(stack, members):
                    continue
                numbered = sorted(members, key=lambda state: [int(n) for n in _LAYERS.findall(state.name)])
                names = tuple(state.name for state in numbered)
                if how == "stack":
                    yield Link(names, (stack.name,), "stack", "name and layer")
                else:
                    yield Link((stack.name,), names, "unstack", "name and layer")


def _alike(stack: tuple[str, ...], layers: tuple[str, ...]) -> bool:
    """Whether what a stack is called is part of what its layers are called."""
    own = set(stack) - _ANY
    return bool(own) and own <= set(layers)


def _is_stack(stack: State, members: Sequence[State]) -> bool:
    if stack.shape is None or not members or stack.shape[0] not in (None, len(members)):
        return False
    return all(member.shape is not None and _agree(member.shape, stack.shape[1:]) for member in members)


def _by_sizes(sources: Sequence[State], targets: Sequence[State], wanted: set[str]) -> Iterator[Link]:
    """Of rank and sizes that only one on either side has, or as many on both, one a layer."""
    done: set[str] = set()
    for target in targets:
        if target.name not in wanted or target.name in done:
            continue
        fitting = [source for source in sources if _fits(source, target)]
        rivals = [other for other in targets if any(_fits(source, other) for source in fitting)]
        if not fitting:
            continue
        if not _paired_by_layer(fitting, rivals):
            raise _ambiguous(target, fitting)
        for source, rival in zip(_layered(fitting), _layered(rivals), strict=True):
            done.add(rival.name)
            yield Link((source.name,), (rival.name,), "same", "sizes" if len(rivals) == 1 else "sizes and layer")


def _paired_by_layer(sources: Sequence[State], targets: Sequence[State]) -> bool:
    """Whether there are as many on both sides, all of them fit each other and each is of a layer of its own."""
    if len(sources) != len(targets) or not all(_fits(a, b) for a in sources for b in targets):
        return False
    if len(sources) == 1:
        return True
    if any(state.layer is None for state in (*sources, *targets)):
        return False
    return all(len({state.layer for state in side}) == len(side) for side in (sources, targets))


def _layered(states: Sequence[State]) -> list[State]:
    return sorted(states, key=lambda state: state.layer or 0)


def _fits(source: State, target: State) -> bool:
    return source.shape is None or target.shape is None or _agree(source.shape, target.shape)


def _agree(source: Sequence[int | None], target: Sequence[int | None]) -> bool:
    """Equal sizes but for one, on an axis that a cache or a convolution may have."""
    if len(source) != len(target):
        return False
    differ = [
        axis
        for axis, (a, b) in enumerate(zip(source, target, strict=True))
        if a is not None and b is not None and a != b
    ]
    return not differ or (len(differ) == 1 and differ[0] >= 1 and len(source) >= 3)


def _grouped(states: Sequence[State], key: Callable[[str], tuple[str, ...]]) -> dict[tuple[str, ...], list[State]]:
    groups: dict[tuple[str, ...], list[State]] = {}
    for state in states:
        groups.setdefault(key(state.name), []).append(state)
    return groups


def _missing(target: State, sources: Sequence[State], giver: str) -> UserError:
    if not sources:
        return UserError(
            "state-missing",
            f"{giver} has no output for the state {_shown(target)} that decode takes: export it with the output that "
            "hands this state on",
        )
    left = ", ".join(state.name for state in sources)
    return UserError(
        "state-missing",
        f"no output is the state {_shown(target)} that decode takes; the outputs that are not taken yet: {left}. "
        f"Say which it is with --map OUTPUT={target.name}",
    )


def _ambiguous(target: State, sources: Sequence[State]) -> UserError:
    lines = "  ".join(f"--map {state.name}={target.name}" for state in sources)
    several = ", ".join(_shown(state) for state in sources)
    return UserError(
        "state-ambiguous", f"{_shown(target)} could be any of {several}: say which, by one of  {lines}"
    )


def _shown(state: State) -> str:
    sizes = "?" if state.shape is None else ", ".join("?" if size is None else str(size) for size in state.shape)
    return f"{state.name} [{sizes}]"
