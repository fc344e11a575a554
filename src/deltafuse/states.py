"""States that a model gives and the next run of a model takes: which goes where, and how each is made to fit.

Light: the child that runs a rollout imports it beside numpy and onnxruntime.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from deltafuse.wording import number

Array: TypeAlias = npt.NDArray[np.generic]

#: How states of several layers are kept: each as it is, stacked where they are taken, stacked where they are given.
How = Literal["same", "stack", "unstack"]


@dataclass(frozen=True)
class Link:
    """Outputs that become inputs.

    Attributes:
        sources: outputs, several of them where each is one layer of a stack that is taken.
        targets: inputs, several of them where each is one layer of a stack that is given.
        why: what paired them, e.g. ``name``.
    """

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    how: How = "same"
    why: str = "name"

    @property
    def text(self) -> str:
        """As it is shown, and as ``--map`` takes it."""
        return f"{','.join(self.sources)}={','.join(self.targets)}"


@dataclass(frozen=True)
class Slot:
    """What an input takes.

    Attributes:
        shape: sizes, None where any will do.
        dtype: name of the element type.
        rigid: whether no size may be made to fit: a recurrent state is a matrix, no row of columns.
    """

    shape: tuple[int | None, ...]
    dtype: str
    rigid: bool = False


#: Columns that a convolution may keep: a last axis of more is something else.
_COLUMNS = 16


class MisfitError(ValueError):
    """A state that cannot be made to fit; the message says how."""


def carry(
    links: Iterable[Link], outputs: Mapping[str, Array], slots: Mapping[str, Slot], tokens: int, *, first: bool
) -> tuple[dict[str, Array], tuple[str, ...]]:
    """The states of the next run.

    Args:
        links: which output goes where.
        outputs: of the run before.
        slots: what each input takes.
        tokens: how many tokens the run before took: an axis of that size is a cache's, or has grown by it.
        first: whether that was the prefill, whose cache is all there is.

    Returns:
        An array for each target, in memory of its own, and what had to be changed to make it fit, a sentence for each.

    Raises:
        MisfitError: sizes that differ in a way that has no meaning.
    """
    found: dict[str, Array] = {}
    notes: list[str] = []
    for link in links:
        for name, array in _arrays(link, outputs).items():
            found[name] = _fitted(link, name, array, slots[name], tokens, first, notes)
    return found, tuple(notes)


def _arrays(link: Link, outputs: Mapping[str, Array]) -> dict[str, Array]:
    given = [outputs[name] for name in link.sources]
    if link.how == "stack":
        return {link.targets[0]: np.stack(given)}
    if link.how == "unstack":
        if len(given[0]) != len(link.targets):
            layers, inputs = number(len(given[0]), "layer"), number(len(link.targets), "input")
            raise MisfitError(f"{link.sources[0]} has {layers} for {inputs}")
        return dict(zip(link.targets, given[0], strict=True))
    return dict(zip(link.targets, given, strict=True))


def _fitted(
    link: Link, name: str, array: Array, slot: Slot, tokens: int, first: bool, notes: list[str]
) -> Array:
    label = name if link.sources == (name,) else f"{','.join(link.sources)} -> {name}"
    if array.ndim != len(slot.shape):
        raise MisfitError(f"{label}: it has {number(array.ndim, 'axis')} and is to have {len(slot.shape)}")
    for axis, (have, want) in enumerate(zip(array.shape, slot.shape, strict=True)):
        if want is None or have == want:
            continue
        if slot.rigid:
            raise MisfitError(f"{label}: axis {axis} has size {have} and is to have {want}")
        array = _resized(label, array, axis, want, tokens, first, notes)
    if str(array.dtype) != slot.dtype:
        notes.append(f"{label}: cast from {array.dtype} to {slot.dtype}")
        array = array.astype(slot.dtype)
    # Its own memory: a runtime may write into what it gave once more, or into what it is fed.
    return np.array(array, order="C")


def _resized(
    label: str, array: Array, axis: int, want: int, tokens: int, first: bool, notes: list[str]
) -> Array:
    have, behind = array.shape[axis], array.ndim - axis
    if behind == 1 and want < have <= _COLUMNS:
        notes.append(f"{label}: kept the last {want} of {number(have, 'column')} of axis {axis}")
        return np.take(array, range(have - want, have), axis)
    if behind == 2 and have == want + tokens and not first:
        entries = number(have, f"entry of axis {axis}")
        notes.append(f"{label}: dropped the oldest {tokens} of {entries}, the cache is full")
        return np.take(array, range(tokens, have), axis)
    if behind == 2 and have == tokens < want and first:
        notes.append(f"{label}: put {number(have, 'entry')} of axis {axis} into a cache of {want}, zeros behind")
        pads = [(0, want - have if other == axis else 0) for other in range(array.ndim)]
        return np.pad(array, pads)
    raise MisfitError(f"{label}: axis {axis} has size {have} and is to have {want}")


def as_document(links: Sequence[Link], slots: Mapping[str, Slot]) -> dict[str, Any]:
    """Links and slots as JSON."""
    return {"links": [asdict(link) for link in links], "slots": {name: asdict(slot) for name, slot in slots.items()}}


def from_document(document: Mapping[str, Any]) -> tuple[tuple[Link, ...], dict[str, Slot]]:
    """What `as_document` made."""
    links = tuple(
        Link(tuple(item["sources"]), tuple(item["targets"]), cast("How", item["how"]), item["why"])
        for item in document["links"]
    )
    slots = {name: Slot(tuple(item["shape"]), item["dtype"], item["rigid"]) for name, item in document["slots"].items()}
    return links, slots
