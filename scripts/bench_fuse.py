"""Fuses a prefill graph of a real size and compares the time with what reading and writing it costs.

    python scripts/bench_fuse.py [--layers 24] [--runs 3] [--keep DIR] [--json]

The graph has the dims of Qwen3.5-4B; its layers are real exports, its weights a sparse file. The floor is onnx's own
parsing and serialising of the same file in the same run. Exit 1 above either limit.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FLOOR = """
import statistics, sys, time
import onnx
data = open(sys.argv[1], "rb").read()
def once():
    start = time.perf_counter()
    model = onnx.ModelProto()
    model.ParseFromString(data)
    model.SerializeToString()
    return time.perf_counter() - start
model = onnx.ModelProto.FromString(data)
nodes = len(model.graph.node)
del model
print(nodes, statistics.median(once() for _ in range(5)))
"""
BUILD = "import sys; from pathlib import Path; from big_model import write_big_model as w; w(Path(sys.argv[1]), {})"


def run_child(command: list[str]) -> tuple[float, float, int]:
    """Seconds from start to exit, peak memory in MB, exit code.

    The peak is that of the largest process: the kernel keeps no sum over a process and its workers. This process must
    stay small itself, since a child begins with its parent's peak.
    """
    start = time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    spent = time.perf_counter() - start
    child.returncode = os.waitstatus_to_exitcode(status)
    return spent, usage.ru_maxrss / 1024, child.returncode


def build(folder: Path, layers: int) -> Path:
    """The model in ``folder``, made unless it is there."""
    path = folder / f"prefill-{layers}" / "model.onnx"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name("partial.onnx")
        script = [sys.executable, "-W", "ignore", "-c", BUILD.format(layers), str(partial)]
        subprocess.run(script, check=True, cwd=Path(__file__).parent)
        partial.rename(path)
    return path


def measure(path: Path, runs: int) -> dict[str, float | int]:
    """Nodes, floor, median time, their ratio, peak."""
    nodes, floor = subprocess.check_output([sys.executable, "-c", FLOOR, str(path)], text=True).split()
    times: list[float] = []
    peaks: list[float] = []
    for _ in range(runs):
        fused = path.with_name("fused.onnx")
        fused.unlink(missing_ok=True)
        spent, peak, code = run_child([sys.executable, "-m", "deltafuse", str(path), "-o", str(fused)])
        if code:
            raise SystemExit(f"fuse gave exit code {code}")
        times.append(spent)
        peaks.append(peak)
    seconds = statistics.median(times)
    return {
        "nodes": int(nodes),
        "floor_seconds": round(float(floor), 3),
        "fuse_seconds": round(seconds, 3),
        "ratio": round(seconds / float(floor), 2),
        "peak_mb": round(max(peaks), 1),
        "runs": runs,
    }


def main() -> int:
    """Measures and judges."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24, help="linear layers; after every third comes a full one")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--keep", type=Path, default=Path(tempfile.gettempdir()) / "deltafuse-bench")
    parser.add_argument("--max-ratio", type=float, default=30.0)
    parser.add_argument("--max-peak-mb", type=float, default=700.0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    result = measure(build(options.keep, options.layers), options.runs)
    print(json.dumps(result) if options.json else "\n".join(f"{key:14} {value}" for key, value in result.items()))
    too_slow, too_large = result["ratio"] > options.max_ratio, result["peak_mb"] > options.max_peak_mb
    return int(too_slow or too_large)


if __name__ == "__main__":
    sys.exit(main())
