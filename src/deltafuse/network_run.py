"""Runs a whole model in a child process of its own; inputs and outputs go through files."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from deltafuse.limits import left
from deltafuse.network_child import RESULT
from deltafuse.network_model import Runnable
from deltafuse.reasons import TEXTS, Reason

TEXTS.update(
    {
        "network-timeout": "running {model} took longer than {seconds:.0f} s; raise --timeout",
        "network-memory": "memory ran out while {model} was run (graph and weights have {size}, {free} are free); end "
        "other programs or use a larger machine, or take --level site, which needs no weights",
        "network-crash": "onnxruntime crashed on {model} ({status}): {error}; take --level site, or look whether "
        "onnxruntime runs the model by itself",
        "network-operator-missing": "onnxruntime has no operator that {model} needs: {error}; update onnxruntime, "
        "give a file that lowers it with --lowering, or take --level site",
        "network-does-not-load": "onnxruntime cannot load {model}: {error}; look whether onnxruntime loads the "
        "exported file, or take --level site",
        "network-does-not-run": "onnxruntime cannot run {model}: {error}; give other inputs with --inputs, other "
        "sizes with --dim, or take --level site",
    }
)

Array = npt.NDArray[np.generic]

#: The child; the request's path follows.
COMMAND = (sys.executable, "-m", "deltafuse.network_child")
_NO_MEMORY = re.compile(r"MemoryError|bad.?alloc|Failed to allocate memory|Cannot allocate memory|out of memory", re.I)
_NO_OPERATOR = re.compile(r"is not a registered function/op|No Op registered for|Could not find an implementation for")
_ERROR_LENGTH = 600


@dataclass(frozen=True)
class Ran:
    """What a run left.

    Attributes:
        outputs: name -> ``.npy`` file.
        seconds: that loading and running took.
        peak: bytes of memory the child had at most, mapped weights among them.
        further: outputs of the further sets of inputs.
    """

    outputs: Mapping[str, Path]
    seconds: float
    peak: int
    further: tuple[Mapping[str, Path], ...] = ()


def write_inputs(arrays: Mapping[str, Array], folder: Path) -> dict[str, Path]:
    """Writes each array where a child finds it."""
    folder.mkdir()
    files = {name: folder / f"{index}.npy" for index, name in enumerate(arrays)}
    for name, path in files.items():
        np.save(path, arrays[name])
    return files


def run_model(
    model: Runnable,
    name: str,
    inputs: Mapping[str, Path],
    folder: Path,
    seconds: float,
    memory: int | None = None,
    *,
    further: Sequence[Mapping[str, Path]] = (),
    taps: Collection[str] = (),
) -> Ran | Reason:
    """Runs a model once, or once more for each further set of inputs.

    Args:
        model: what to run.
        name: what to call it in messages.
        inputs: input -> ``.npy`` file.
        folder: for the outputs; is made.
        seconds: limit of all runs.
        memory: address space limit of the child in bytes; none where None.
        further: more sets of inputs for the same session.
        taps: outputs that are wanted of the first set only.
    """
    sets = [{key: str(path) for key, path in each.items()} for each in (inputs, *further)]
    answer = ask(COMMAND, model, name, {"sets": sets, "taps": sorted(taps)}, folder, seconds, memory)
    if isinstance(answer, Reason):
        return answer
    first, *others = ({key: Path(path) for key, path in run.items()} for run in answer["runs"])
    return Ran(first, answer["seconds"], answer["peak"], tuple(others))


def ask(
    command: Sequence[str],
    model: Runnable,
    name: str,
    request: Mapping[str, object],
    folder: Path,
    seconds: float,
    memory: int | None = None,
) -> dict[str, Any] | Reason:
    """Has a child do something with a model; see `deltafuse.network_child.serve`.

    Args:
        command: the child; the request's path follows.
        model: what it is to load.
        name: what to call the model in messages.
        request: what it is to do, as JSON.
        folder: for its files; is made.
        seconds: limit of all it does.
        memory: address space limit of the child in bytes; none where None.

    Returns:
        The child's answer, or why there is none.
    """
    folder.mkdir()
    (folder / "request.json").write_text(json.dumps({"model": str(model.path), "memory": memory or 0} | {**request}))
    seconds = left(seconds)
    status = _wait(command, folder, seconds)
    if status is None:
        return Reason("network-timeout", {"model": name, "seconds": seconds})
    result = folder / RESULT
    if not result.is_file():
        return _crash(model, name, status, (folder / "log").read_text(errors="replace"))
    answer = json.loads(result.read_text())
    return _failure(model, name, answer["stage"], answer["error"]) if "error" in answer else answer


def _wait(command: Sequence[str], folder: Path, seconds: float) -> int | None:
    """The child's exit status, None where it had to be ended."""
    with (folder / "log").open("wb") as log:
        asked = [*command, str(folder / "request.json")]
        child = subprocess.Popen(asked, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        return child.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()


def _crash(model: Runnable, name: str, status: int, log: str) -> Reason:
    # Signal 9 is what the system sends to the process that it takes the memory from.
    if status == -9 or _NO_MEMORY.search(log):
        return _no_memory(model, name)
    how = f"signal {-status}" if status < 0 else f"exit status {status}"
    lines = log.strip().splitlines()
    said = lines[-1][:_ERROR_LENGTH] if lines else "it said nothing"
    return Reason("network-crash", {"model": name, "status": how, "error": said})


def _failure(model: Runnable, name: str, stage: str, error: str) -> Reason:
    if _NO_MEMORY.search(error):
        return _no_memory(model, name)
    code = "network-does-not-load" if stage == "load" else "network-does-not-run"
    if _NO_OPERATOR.search(error):
        code = "network-operator-missing"
    return Reason(code, {"model": name, "error": " ".join(error.split())[:_ERROR_LENGTH]})


def _no_memory(model: Runnable, name: str) -> Reason:
    return Reason("network-memory", {"model": name, "size": gigabytes(model.size), "free": gigabytes(_free())})


def _free() -> int:
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return 0


def gigabytes(count: int) -> str:
    """A size for people."""
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
