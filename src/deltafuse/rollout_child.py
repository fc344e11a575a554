"""The child that chains the steps of a decode graph: ``python -m deltafuse.rollout_child REQUEST``.

States that a step gives go into the next one. The tokens are the graph's own most likely ones, or given. What is
written: the tokens' logits and, of every state and output that is watched, the numbers after each step.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from deltafuse.network_child import serve, taken, tensor_outputs
from deltafuse.states import carry, from_document

Array: TypeAlias = npt.NDArray[np.generic]

#: Numbers of one layer's state that are kept for each step; of larger ones a sample.
SAMPLE = 1 << 16


def chain(request: dict[str, Any], session: Any, folder: Path) -> dict[str, Any]:
    """Runs all steps.

    The request says:
        inputs: input -> ``.npy`` file, of the first step.
        steps: how many.
        ids: the input for the token, "" where there is none; first: the first token.
        tokens: those to feed in place of the most likely ones, None for these.
        logits: the output that tells the next token, "" where there is none.
        past: how many tokens came before; stride: how many each step takes; clocks: see `clocked`.
        drawn: input -> ``.npy`` file with one array a step.
        states: see `deltafuse.states.as_document`.
        watch: inputs that are recurrent states -> whether their first axis is layers.
        outputs: further outputs to keep.
    """
    links, slots = from_document(request["states"])
    feeds = {name: np.load(path) for name, path in taken(session, request["inputs"]).items()}
    drawn = {name: np.load(path) for name, path in taken(session, request["drawn"]).items()}
    wanted, kept = tensor_outputs(session), _Kept(request)
    token, notes = int(request["first"]), tuple[str, ...]()
    for step in range(request["steps"]):
        feeds |= {name: arrays[step] for name, arrays in drawn.items()}
        feeds |= clocked(request["clocks"], feeds, int(request["past"]) + step * request["stride"], request["stride"])
        if request["ids"]:
            feeds[request["ids"]] = np.full_like(feeds[request["ids"]], token)
        kept.states(feeds)
        outputs = dict(zip(wanted, session.run(wanted, taken(session, feeds)), strict=True))
        states, fitted = carry(links, outputs, slots, request["stride"], first=False)
        notes = notes if step else fitted
        feeds |= states
        kept.outputs(outputs)
        if request["logits"]:
            told = int(last_row(outputs[request["logits"]]).argmax())
            token = told if request["tokens"] is None else int(request["tokens"][step])
    kept.states(feeds)
    return {"files": kept.write(folder), "notes": list(notes)}


def last_row(logits: Array) -> Array:
    """Logits of the last token [vocabulary]."""
    return np.reshape(logits, (-1, logits.shape[-1]))[-1]


def clocked(clocks: Mapping[str, str], feeds: Mapping[str, Array], past: int, stride: int = 1) -> dict[str, Array]:
    """Inputs that tell how many tokens came before.

    Args:
        clocks: input -> ``past`` (positions, the first is how many came before), ``total`` (a length: those and the
            ones of this step), ``grow`` (a mask as long as these) or ``mask`` (one of fixed length).
        feeds: what they had before, for shapes and types.
        past: how many tokens came before.
        stride: how many tokens this step takes.
    """
    return {name: _clock(how, feeds[name], past, stride) for name, how in clocks.items()}


def _clock(how: str, array: Array, past: int, stride: int) -> Array:
    if how == "past":
        steps = past + np.arange(array.shape[-1] if array.ndim else 1)
        return np.broadcast_to(steps if array.ndim else steps[0], array.shape).astype(array.dtype)
    if how == "total":
        return np.full_like(array, past + stride)
    seen, unseen = (0.0, _least(array)) if array.dtype.kind == "f" else (1, 0)
    if how == "grow":
        return np.full((*array.shape[:-1], past + stride), seen, array.dtype)
    mask = np.full_like(array, unseen)
    mask[..., : past + stride] = seen
    return mask


def _least(array: Array) -> float:
    """What an additive mask has where nothing is to be seen: low, and low still when it is added to a score."""
    return -3e4 if array.dtype == np.float16 else -1e30


class _Kept:
    """What is written of all steps."""

    def __init__(self, request: Mapping[str, Any]) -> None:
        self._request = request
        self._rows: dict[str, list[Array]] = {}

    def states(self, feeds: Mapping[str, Array]) -> None:
        """Keeps what goes in: the state before the step, which is that after the step before."""
        for name, stacked in self._request["watch"].items():
            array = feeds[name]
            layers = np.reshape(array, (len(array) if stacked else 1, -1))
            self._rows.setdefault(f"state {name}", []).append(sampled(layers))

    def outputs(self, outputs: Mapping[str, Array]) -> None:
        """Keeps what comes out: logits whole."""
        for name in self._request["outputs"]:
            self._rows.setdefault(f"output {name}", []).append(sampled(np.reshape(outputs[name], (1, -1))))
        if self._request["logits"]:
            self._rows.setdefault("logits", []).append(np.array(last_row(outputs[self._request["logits"]])))

    def write(self, folder: Path) -> dict[str, str]:
        """One file for each: steps along the first axis."""
        files: dict[str, str] = {}
        for index, (name, rows) in enumerate(self._rows.items()):
            files[name] = str(folder / f"{index}.npy")
            np.save(files[name], np.stack(rows))
        return files


def sampled(layers: Array) -> Array:
    """Of each layer's numbers [layers, n] the same few everywhere, all where they are few."""
    if layers.shape[1] <= SAMPLE:
        return np.array(layers)
    chosen = np.random.default_rng(0).choice(layers.shape[1], SAMPLE, replace=False)
    return layers[:, np.sort(chosen)]


if __name__ == "__main__":
    serve(chain)
