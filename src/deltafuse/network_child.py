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
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

RESULT = "result.json"


def main() -> None:
    """Loads, runs, writes each output as a ``.npy`` file and the result as JSON beside the request."""
    path = Path(sys.argv[1])
    request = json.loads(path.read_text())
    if request["memory"]:
        resource.setrlimit(resource.RLIMIT_AS, (request["memory"], request["memory"]))
    # Where memory runs out, this process is to end and not the one that waits for it (Linux).
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    answer = _answer(request, path.parent)
    (path.parent / RESULT).write_text(json.dumps(answer))


def _answer(request: dict[str, Any], folder: Path) -> dict[str, Any]:
    started = time.monotonic()
    stage = "load"
    try:
        run = _load(request)
        stage = "run"
        outputs = run(folder)
    except Exception as error:
        # A MemoryError has no text of its own.
        return {"stage": stage, "error": f"{type(error).__name__}: {error}"}
    return {"outputs": outputs, "seconds": time.monotonic() - started, "peak": _peak()}


def _peak() -> int:
    """Bytes of memory that this process had at most."""
    # Not getrusage where it can be helped: what it tells a child includes the parent's memory at the fork.
    with suppress(OSError):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:")), 0)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _load(request: dict[str, Any]) -> Callable[[Path], dict[str, str]]:
    import numpy as np
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
    session = ort.InferenceSession(request["model"], options, providers=["CPUExecutionProvider"])
    wanted = [output.name for output in session.get_outputs() if output.type.startswith("tensor(")]
    taken = {value.name for value in session.get_inputs()}

    def run(folder: Path) -> dict[str, str]:
        feeds = {name: np.load(path) for name, path in request["inputs"].items() if name in taken}
        files: dict[str, str] = {}
        for index, (name, array) in enumerate(zip(wanted, session.run(wanted, feeds), strict=True)):
            files[name] = str(folder / f"{index}.npy")
            np.save(files[name], array)
        return files

    return run


if __name__ == "__main__":
    main()
