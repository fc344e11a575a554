"""Runs one pair of graphs, prefill and a chain of decode steps, each in a child process of its own."""

from __future__ import annotations

import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from deltafuse.errors import UserError
from deltafuse.inputs import InputOptions, Inputs
from deltafuse.network_model import Runnable, runnable
from deltafuse.network_run import ask, run_model, write_inputs
from deltafuse.options import Progress
from deltafuse.reasons import Reason
from deltafuse.rollout_child import last_row
from deltafuse.rollout_states import Ports, first_links, next_links, ports_of, slots_of, state_names
from deltafuse.states import Link, MisfitError, as_document, carry
from deltafuse.states_map import check_maps
from deltafuse.verify_stage import Stage
from deltafuse.wording import number

Array = npt.NDArray[np.generic]
#: The unfused pair, the fused one without the boundary's rounding, the fused one at the target's precision.
Which = Literal["unfused", "exact", "rounded"]

COMMAND = (sys.executable, "-m", "deltafuse.rollout_child")


@dataclass(frozen=True)
class Limits:
    """Of one run: seconds, and bytes of address space (None for none)."""

    seconds: float
    memory: int | None = None


@dataclass(frozen=True)
class Went:
    """What a prefill and its steps left.

    Attributes:
        prefill: the prefill's logits [tokens, vocabulary], None where there is none.
        logits: those of each decode step [steps, vocabulary], None where the graph gives none.
        curves: state or output -> ``.npy`` file [steps, layers, numbers].
        fitted: what had to be changed of a state to make it fit.
    """

    prefill: Array | None
    logits: Array | None
    curves: Mapping[str, Path]
    fitted: tuple[str, ...]

    @property
    def rows(self) -> Array | None:
        """The logits that tell each next token: the prefill's last row, then one row a step."""
        last = () if self.prefill is None else (last_row(self.prefill),)
        rows = [*last, *(() if self.logits is None else self.logits)]
        return np.stack(rows) if rows else None


class Runner:
    """Runs the pairs of one call on the same prompt; its files are gone with the folder.

    Args:
        prefill: None for a decode graph alone.
        decode: None for a prefill alone.
        options: what the user says about the inputs of the first graph.
        maps: states that the user pairs.
        limits: of each run.
        folder: for arrays and lowered models.
        progress: told which model is run.
    """

    def __init__(
        self,
        prefill: Stage | None,
        decode: Stage | None,
        options: InputOptions,
        maps: Sequence[tuple[str, str]],
        limits: Limits,
        folder: Path,
        progress: Progress,
    ) -> None:
        self._prefill, self._decode, self._options = prefill, decode, options
        self._limits, self._folder, self._progress, self._numbers = limits, folder, progress, count()
        self.first: tuple[Link, ...] = ()
        self.links: tuple[Link, ...] = ()
        self.prefill_ports = None if prefill is None else ports_of(prefill)
        self.ports = None if decode is None else ports_of(decode)
        if prefill is not None:
            _check_speaks(prefill, ports_of(prefill))
        if prefill is not None and decode is not None:
            _check_speaks(decode, ports_of(decode))
            _check_takes(decode, prefill, self.ports)
        check_maps(maps, _known(prefill, decode), state_names(prefill, decode, self.ports))
        if decode is not None and self.ports is not None:
            known = first_links(prefill, decode, self.ports, maps) if prefill is not None else None
            self.first = known or ()
            self.links = next_links(decode, self.ports, maps, known)
        self._held = {name for link in self.links for name in link.targets}

    def go(
        self, which: Which, prompt: Array | None, steps: int, tokens: Sequence[int] | None
    ) -> Went | Reason:
        """Runs a pair.

        Args:
            which: of the three.
            prompt: of the prefill; drawn where None.
            steps: of decode.
            tokens: what each row of logits is to be followed by; the pair's own most likely tokens where None.

        Returns:
            Why a model does not run.
        """
        if self._prefill is None:
            return self._chain(which, self._alone(steps), None, tokens)
        ran = self._run_prefill(which, prompt)
        if isinstance(ran, Reason):
            return ran
        outputs, logits, length = ran
        if self._decode is None or not steps:
            return Went(logits, None, {}, ())
        return self._chain(which, self._behind(outputs, logits, length, steps), logits, tokens)

    def _run_prefill(self, which: Which, prompt: Array | None) -> tuple[dict[str, Path], Array, int] | Reason:
        stage, ports = self._prefill, self.prefill_ports
        assert stage is not None, "there is a prefill"
        assert ports is not None, "there is a prefill"
        given = {} if prompt is None else {ports.ids: _as_ids(stage, ports, prompt)}
        inputs = stage.inputs(self._options, given=given)
        folder = self._new()
        with _opened(stage, which, folder) as source:
            if isinstance(source, Reason):
                return source
            self._progress.start(f"prefill, {which}")
            files = write_inputs(inputs.arrays, folder / "inputs")
            name = _name(stage, which)
            ran = run_model(source, name, files, folder / "run", self._limits.seconds, self._limits.memory)
        if isinstance(ran, Reason):
            return ran
        logits = np.load(ran.outputs[ports.logits], mmap_mode="r")
        length = inputs.arrays[ports.ids].shape[-1]
        return dict(ran.outputs), np.reshape(logits, (-1, logits.shape[-1])), length

    def _alone(self, steps: int) -> _First:
        assert self._decode is not None, "there is a decode"
        assert self.ports is not None, "there is a decode"
        inputs = self._decode.inputs(self._options, steps=steps, held=self._held)
        token = int(np.ravel(inputs.arrays[self.ports.ids])[0]) if self.ports.ids else 0
        return _First(inputs, _past_alone(inputs, self.ports, steps), steps, token, ())

    def _behind(self, outputs: Mapping[str, Path], logits: Array, length: int, steps: int) -> _First:
        assert self._decode is not None, "there is a decode"
        assert self.ports is not None, "there is a decode"
        arrays = {name: np.load(outputs[name]) for link in self.first for name in link.sources}
        try:
            given, fitted = carry(self.first, arrays, slots_of(self._decode, self.ports), length, first=True)
        except MisfitError as error:
            raise UserError(
                "state-misfit", f"a state of the prefill does not fit the decode graph: {error}; pair another output "
                "with --map OUTPUT=INPUT, or export both graphs for the same sizes"
            ) from None  # fmt: skip
        options = replace(self._options, path=None, save=None, dims={})
        inputs = self._decode.inputs(options, given=given, steps=steps, held=self._held)
        _check_room(inputs, self.ports, length, steps)
        return _First(inputs, length, steps, int(last_row(logits).argmax()), fitted)

    def _chain(
        self, which: Which, first: _First, prefill: Array | None, tokens: Sequence[int] | None
    ) -> Went | Reason:
        stage, ports = self._decode, self.ports
        assert stage is not None, "there is a decode"
        assert ports is not None, "there is a decode"
        folder = self._new()
        request = self._request(stage, ports, first, tokens, write_inputs(first.inputs.arrays, folder / "inputs"))
        request["drawn"] = {n: str(path) for n, path in write_inputs(first.inputs.steps, folder / "drawn").items()}
        with _opened(stage, which, folder) as source:
            if isinstance(source, Reason):
                return source
            self._progress.start(f"{number(first.steps, 'decode step')}, {which}")
            limits = self._limits
            name = _name(stage, which)
            answer = ask(COMMAND, source, name, request, folder / "run", limits.seconds, limits.memory)
        if isinstance(answer, Reason):
            return answer
        files = {name: Path(path) for name, path in answer["files"].items()}
        rows = files.pop("logits", None)
        fitted = tuple(dict.fromkeys((*first.fitted, *answer["notes"])))
        return Went(prefill, None if rows is None else np.load(rows), files, fitted)

    def _request(
        self, stage: Stage, ports: Ports, first: _First, tokens: Sequence[int] | None, files: Mapping[str, Path]
    ) -> dict[str, object]:
        taken = {name for link in self.links for name in link.sources}
        names = [stage.after.graph.name(value) for value in stage.after.graph.outputs]
        # A decode graph alone starts with a drawn token, which no row of logits told.
        fed = [*([] if self._prefill is not None else [first.token]), *(tokens or ())]
        several = ports.ids in first.inputs.steps
        return {
            "inputs": {name: str(path) for name, path in files.items()},
            "steps": first.steps,
            "ids": "" if several else ports.ids,
            "first": fed[0] if tokens else first.token,
            "tokens": [*fed[1:], *[0] * first.steps][: first.steps] if tokens else None,
            "logits": ports.logits,
            "past": first.past,
            "stride": first.inputs.arrays[ports.ids].shape[-1] if several else 1,
            "clocks": dict(ports.clocks),
            "states": as_document(self.links, slots_of(stage, ports)),
            "watch": dict(ports.recurrent),
            "outputs": [] if ports.logits else [name for name in names if name not in taken],
        }

    def _new(self) -> Path:
        folder = self._folder / f"{next(self._numbers)}"
        folder.mkdir()
        return folder


@dataclass(frozen=True)
class _First:
    """What the first decode step starts with."""

    inputs: Inputs
    past: int
    steps: int
    token: int
    fitted: tuple[str, ...]


def _check_speaks(stage: Stage, ports: Ports) -> None:
    """A pair goes on token by token: each graph takes ids and tells the next one."""
    path = stage.before.model.path
    if not ports.ids:
        text = "give a decode graph alone, with --decode U F, to chain its steps on drawn inputs"
        raise UserError("no-ids", f"{path} has no input for token ids: {text}")
    if not ports.logits:
        raise UserError("no-logits", f"{path} has no output that tells the next token, [.., {ports.rows}] or named "
                        "logits: export the graph with its logits")  # fmt: skip


def _check_takes(decode: Stage, prefill: Stage, ports: Ports | None) -> None:
    """A decode goes on from what the prefill gives."""
    if not state_names(prefill, decode, ports)["inputs"]:
        path = decode.before.model.path
        raise UserError("no-states", f"{path} has no input for the states of the tokens before: give with --decode the "
                        "graph that takes them, and with --prefill the one that takes the prompt")  # fmt: skip


def _known(prefill: Stage | None, decode: Stage | None) -> dict[str, list[str]]:
    """Names that ``--map`` may have."""
    graphs = [stage.after.graph for stage in (prefill, decode) if stage is not None]
    outputs = [graph.name(value) for graph in graphs for value in graph.outputs]
    return {"outputs": outputs, "inputs": [] if decode is None else list(map(graphs[-1].name, graphs[-1].inputs))}


@contextmanager
def _opened(stage: Stage, which: Which, folder: Path) -> Generator[Runnable | Reason]:
    side = stage.before if which == "unfused" else stage.after
    with runnable(side.model, folder, rounding=which != "exact", foreign=stage.foreign) as source:
        yield source


def _name(stage: Stage, which: Which) -> str:
    return str((stage.before if which == "unfused" else stage.after).model.path)


def _as_ids(stage: Stage, ports: Ports, prompt: Array) -> Array:
    """A prompt as the ids input takes it, [batch, tokens] as a rule."""
    bad = [token for token in map(int, np.ravel(prompt)) if not 0 <= token < ports.rows]
    if bad:
        raise UserError("prompt-ids", f"the token {bad[0]} is none of the model's {ports.rows}: give other ids")
    dtype = np.dtype(slots_of(stage, ports)[ports.ids].dtype)
    rank = len(stage.after.shapes.shape(stage.after.graph.find(ports.ids) or 0) or (1, 1))
    return np.reshape(prompt, (*[1] * (rank - 1), -1)).astype(dtype)


def _past_alone(inputs: Inputs, ports: Ports, steps: int) -> int:
    """Tokens before the first step of a decode graph alone; a cache of fixed size must have room for the steps."""
    rooms = [inputs.arrays[name].shape[-1] for name, how in ports.clocks.items() if how == "mask"]
    return max(0, min([inputs.past, *(room - steps for room in rooms)]))


def _check_room(inputs: Inputs, ports: Ports, past: int, steps: int) -> None:
    rooms = [inputs.arrays[name].shape[-1] for name, how in ports.clocks.items() if how == "mask"]
    if rooms and past + steps > min(rooms):
        raise UserError(
            "cache-full", f"the decode graph's cache holds {number(min(rooms), 'token')}, the prompt has {past}: give "
            f"--rollout {max(0, min(rooms) - past)} or less"
        )  # fmt: skip
