"""The child that runs one whole model on onnxruntime: ``python -m deltafuse.network_child REQUEST``.

The request is a JSON file, arrays go through files beside it. Nothing but the model is ever in this process: weights
outside the model file are mapped, no copy of them is made (no optimisation, no packing), so that the peak is about one
model.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

RESULT = "result.json"

#: What a child does with an open session: request, session, folder for its files -> what to answer.
Work: TypeAlias = Callable[[dict[str, Any], Any, Path], dict[str, Any]]


def serve(work: Work) -> None:
    """Loads the model that the request names, does the work and writes the answer as JSON beside the request."""
    path = Path(sys.argv[1])
    request = json.loads(path.read_text())
    if request["memory"]:
        resource.setrlimit(resource.RLIMIT_AS, (request["memory"], request["memory"]))
    # Where memory runs out, this process is to end and not the one that waits for it (Linux).
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    answer = _answer(request, path.parent, work)
    (path.parent / RESULT).write_text(json.dumps(answer))


def _answer(request: dict[str, Any], folder: Path, work: Work) -> dict[str, Any]:
    started = time.monotonic()
    stage = "load"
    try:
        session = _open(request["model"])
        stage = "run"
        answer = work(request, session, folder)
    except Exception as error:
        # A MemoryError has no text of its own.
        return {"stage": stage, "error": f"{type(error).__name__}: {error}"}
    return answer | {"seconds": time.monotonic() - started, "peak": _peak()}


def _peak() -> int:
    """Bytes of memory that this process had at most."""
    # Not getrusage where it can be helped: what it tells a child includes the parent's memory at the fork.
    with suppress(OSError):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:")), 0)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _open(model: str) -> Any:
    import onnxruntime

    ort: Any = onnxruntime
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    options.enable_cpu_mem_arena = options.enable_mem_pattern = False
    # Weights of float16 are cast where there is no kernel for it: in this order each just before it is needed.
    options.execution_order = ort.ExecutionOrder.PRIORITY_BASED
    options.add_session_config_entry("session.disable_prepacking", "1")
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def tensor_outputs(session: Any) -> list[str]:
    """Names of the outputs that are tensors."""
    return [output.name for output in session.get_outputs() if output.type.startswith("tensor(")]


def taken(session: Any, feeds: Mapping[str, Any]) -> dict[str, Any]:
    """What the session takes of some feeds: a model need not have every input of the other."""
    names = {value.name for value in session.get_inputs()}
    return {name: feed for name, feed in feeds.items() if name in names}


def _run_sets(request: dict[str, Any], session: Any, folder: Path) -> dict[str, Any]:
    """Runs each set of inputs and writes each output as a ``.npy`` file; the taps for the first set only."""
    import numpy as np

    wanted, runs = tensor_outputs(session), list[dict[str, str]]()
    for number, inputs in enumerate(request["sets"]):
        names = [name for name in wanted if not number or name not in request["taps"]]
        feeds = {name: np.load(path) for name, path in taken(session, inputs).items()}
        files: dict[str, str] = {}
        for index, (name, array) in enumerate(zip(names, session.run(names, feeds), strict=True)):
            files[name] = str(folder / f"{number}-{index}.npy")
            np.save(files[name], array)
        runs.append(files)
    return {"runs": runs}


if __name__ == "__main__":
    serve(_run_sets)
