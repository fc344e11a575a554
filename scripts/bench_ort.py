"""Compares the speed of unfused and fused graphs on onnxruntime's CPU kernels, and how long both take to load.

    python scripts/bench_ort.py [--tokens 1 32 128 512 2048] [--runs 7] [--threads 2] [--layers 24] [--json]

Measured are one linear attention layer without its MLP and the rule in it alone, float32, with the dims of Qwen3.5-4B;
1 token is a step of decode. An unfused graph is right for as many chunks as were traced, so each token count has an
export of its own; the fused one is made once, of an export for 32 tokens, and is right for all. Both get the same
inputs, in turns, in sessions that are made alike; what both give is compared with torch, and exit is 1 where it
differs. Exports are kept for the next run. Loaded are graphs of 24 linear layers and 8 of the other kind, whose weights
are narrow: the widths around the rule add nothing to the graph.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from bench_fuse import ENVIRONMENT
from qwen_dims import DIMS as FULL
from qwen_dims import NARROW

#: As `NARROW`, but for the width of the hidden states: the layer's projections are measured too.
DIMS = NARROW | {"hidden": FULL["hidden"]}
PARTS = ("layer", "rule")
#: The token count that the fused prefill's export was traced at.
TRACED = 32
#: Largest difference from torch, against the largest number there is: float32, sums in another order.
TOLERANCE = 1e-4
LAYER = "import sys; from pathlib import Path; from layer_models import write_layer; "
LAYER += "write_layer(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4], dynamic=sys.argv[5] == 'True', "
LAYER += "chunk=int(sys.argv[6]) or None)"
STACK = "import sys, json; from pathlib import Path; import big_model; "
STACK += "big_model.write_big_prefill(Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]))"
LOAD = """
import sys, time
import onnxruntime
options = onnxruntime.SessionOptions()
options.log_severity_level = 4
options.intra_op_num_threads, options.inter_op_num_threads = int(sys.argv[2]), 1
start = time.perf_counter()
onnxruntime.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
print(time.perf_counter() - start)
"""


def made(path: Path, code: str, *arguments: object) -> Path:
    """A file that a child makes, unless it is there."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name("partial.onnx")
        command = [sys.executable, "-W", "ignore", "-c", code, str(partial), *map(str, arguments)]
        subprocess.run(command, check=True, cwd=Path(__file__).parent, stdout=sys.stderr)
        if partial.with_suffix(".npz").exists():
            partial.with_suffix(".npz").rename(path.with_suffix(".npz"))
        partial.rename(path)
    return path


def fused(path: Path) -> Path:
    """The model for target ort, unless it is there."""
    out = path.with_name("fused.onnx")
    if not out.exists():
        command = [sys.executable, "-m", "deltafuse", str(path), "-o", str(out), "--target", "ort"]
        subprocess.run(command, check=True, env=ENVIRONMENT, stdout=sys.stderr)
    return out


def session(path: Path, threads: int) -> onnxruntime.InferenceSession:
    """A session whose threads do not spin: those of the other one are to have the cores in their turn."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def difference(results: list[np.ndarray], expected: list[np.ndarray]) -> float:
    """Largest difference, against the largest number of the same tensor."""
    pairs = zip(results, expected, strict=True)
    return max(float(np.abs(one - other).max() / np.abs(other).max()) for one, other in pairs)


def compare(pair: tuple[Path, Path], arrays: dict[str, np.ndarray], options: argparse.Namespace) -> dict[str, float]:
    """Median milliseconds of an unfused and a fused model on the same inputs, and how far each is from torch."""
    feeds = {name.removeprefix("in_"): array for name, array in arrays.items() if name.startswith("in_")}
    wanted = [name.removeprefix("out_") for name in arrays if name.startswith("out_")]
    expected = [arrays[f"out_{name}"] for name in wanted]
    sessions = [session(path, options.threads) for path in pair]
    # The first run is no measurement: it allocates.
    errors = [difference(one.run(wanted, feeds), expected) for one in sessions]
    times: list[list[float]] = [[], []]
    for _ in range(options.runs):
        for one, spent in zip(sessions, times, strict=True):
            start = time.perf_counter()
            one.run(wanted, feeds)
            spent.append(1e3 * (time.perf_counter() - start))
    unfused, quick = map(statistics.median, times)
    return {
        "unfused_ms": round(unfused, 3),
        "fused_ms": round(quick, 3),
        "ratio": round(unfused / quick, 2),
        "unfused_error": errors[0],
        "fused_error": errors[1],
    }


def rows(options: argparse.Namespace) -> list[dict[str, Any]]:
    """What `compare` tells of each part and token count."""
    found: list[dict[str, Any]] = []
    dims = json.dumps(options.dims)
    for part in options.parts:
        for tokens in options.tokens:
            folder = options.keep / f"{part}-{tokens}"
            path = made(folder / "model.onnx", LAYER, part, tokens, dims, False, options.chunk)
            free = path
            if tokens > 1:
                folder = options.keep / f"{part}-free"
                free = made(folder / "model.onnx", LAYER, part, TRACED, dims, True, options.chunk)
            with np.load(path.with_suffix(".npz")) as stored:
                arrays = {name: stored[name] for name in stored.files}
            found.append({"part": part, "tokens": tokens, **compare((path, fused(free)), arrays, options)})
    return found


def loads(options: argparse.Namespace) -> dict[str, Any]:
    """Median seconds to load a graph of many layers, unfused and fused, each in a process of its own."""
    dims = options.dims | {"hidden": 64}
    path = made(options.keep / f"stack-{options.layers}" / "model.onnx", STACK, options.layers, json.dumps(dims))
    seconds: list[float] = []
    for one, runs in ((path, options.load_runs), (fused(path), options.load_runs)):
        command = [sys.executable, "-c", LOAD, str(one), str(options.threads)]
        seconds.append(statistics.median(float(subprocess.check_output(command, text=True)) for _ in range(runs)))
    unfused, quick = seconds
    return {
        "layers": options.layers,
        "unfused_seconds": round(unfused, 2),
        "fused_seconds": round(quick, 2),
        "ratio": round(unfused / quick, 1),
    }


def lines_of(result: dict[str, Any]) -> list[str]:
    """The result for people."""
    said = f"onnxruntime {result['onnxruntime']}, CPU, {result['threads']} threads, median of {result['runs']} runs"
    lines = [said, f"{'part':6} {'tokens':>6} {'unfused':>12} {'fused':>12} {'speed':>7}"]
    for row in result["rows"]:
        slower = "  fused is slower" if row["ratio"] < 1 else ""
        times = f"{row['unfused_ms']:9.2f} ms {row['fused_ms']:9.2f} ms {row['ratio']:6.2f}x"
        lines.append(f"{row['part']:6} {row['tokens']:6} {times}{slower}")
    if load := result.get("load"):
        times = f"{load['unfused_seconds']:10.2f} s {load['fused_seconds']:10.2f} s {load['ratio']:6.1f}x"
        lines.append(f"load, {load['layers']:3} layers {times}")
    return lines + result["faults"]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 32, 128, 512, 2048])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--layers", type=int, default=24, help="linear layers of the graph that is loaded, 0 for none")
    parser.add_argument("--load-runs", type=int, default=3)
    parser.add_argument("--dims", type=json.loads, default=DIMS, help="as JSON; other ones need another --keep")
    parser.add_argument("--chunk", type=int, default=0, help="tokens of a layer's chunk, 0 for the model's own")
    parser.add_argument("--keep", type=Path, default=Path(tempfile.gettempdir()) / "deltafuse-bench-ort")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(arguments)


def main() -> int:
    """Measures and judges."""
    options = parse()
    about = {"onnxruntime": onnxruntime.__version__, "threads": options.threads, "runs": options.runs}
    result: dict[str, Any] = {**about, "dims": options.dims, "rows": rows(options)}
    if options.layers:
        result["load"] = loads(options)
    result["faults"] = [
        f"{row['part']} at {row['tokens']} tokens: {side} is {row[f'{side}_error']:.1e} from torch"
        for row in result["rows"]
        for side in ("unfused", "fused")
        if not row[f"{side}_error"] <= TOLERANCE
    ]
    print(json.dumps(result) if options.json else "\n".join(lines_of(result)))
    return int(bool(result["faults"]))


if __name__ == "__main__":
    sys.exit(main())
