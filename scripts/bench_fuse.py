"""Fuses graphs of a real size and compares the time with what reading and writing them costs.

    python scripts/bench_fuse.py [--layers 24] [--runs 3] [--keep DIR] [--json] [--growth] [--peers]

The graphs, prefill and decode, have the dims of Qwen3.5-4B; their layers are real exports, their weights a sparse file.
The floor is onnx's own parsing and serialising of the same file in the same run. Exit 1 above a limit.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
BUILD = "import sys; from pathlib import Path; import big_model; big_model.write_big_{}(Path(sys.argv[1]), {})"
#: What else one would use on such a graph: name -> (module, code); weights are left alone where that can be asked for.
PEERS = {
    "graphsurgeon, import and export": (
        "onnx_graphsurgeon",
        "import onnx_graphsurgeon as gs; gs.export_onnx(gs.import_onnx(model)).SerializeToString()",
    ),
    "onnxslim": ("onnxslim", "import onnxslim; onnxslim.slim(model).SerializeToString()"),
    "onnxscript, optimizer": (
        "onnxscript",
        "import onnxscript.optimizer as o; o.optimize(model).SerializeToString()",
    ),
    "onnxruntime, session without optimisation": (
        "onnxruntime",
        "import onnxruntime as o; s = o.SessionOptions(); s.log_severity_level = 4; "
        "s.graph_optimization_level = o.GraphOptimizationLevel.ORT_DISABLE_ALL; "
        "o.InferenceSession(sys.argv[1], s, providers=['CPUExecutionProvider'])",
    ),
}
LOAD = "import sys, onnx; model = onnx.load(sys.argv[1], load_external_data=False); "
GROWTH = (6, 12, 24, 48)
#: Installed packages are compiled; so are the children's, whatever this process was told.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def run_child(command: list[str]) -> tuple[float, float, int]:
    """Seconds from start to exit, peak memory in MB, exit code.

    The peak is that of the largest process: the kernel keeps no sum over a process and its workers. This process must
    stay small itself, since a child begins with its parent's peak.
    """
    start = time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=ENVIRONMENT)
    _, status, usage = os.wait4(child.pid, 0)
    spent = time.perf_counter() - start
    child.returncode = os.waitstatus_to_exitcode(status)
    return spent, usage.ru_maxrss / 1024, child.returncode


def build(folder: Path, kind: str, layers: int) -> Path:
    """The model in ``folder``, made unless it is there."""
    path = folder / f"{kind}-{layers}" / "model.onnx"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name("partial.onnx")
        script = [sys.executable, "-W", "ignore", "-c", BUILD.format(kind, layers), str(partial)]
        subprocess.run(script, check=True, cwd=Path(__file__).parent)
        partial.rename(path)
    return path


def floor_of(path: Path) -> tuple[int, float]:
    """Nodes of a model, and the seconds of the floor."""
    nodes, floor = subprocess.check_output([sys.executable, "-c", FLOOR, str(path)], text=True).split()
    return int(nodes), float(floor)


def times_of(arguments: Sequence[str], runs: int, output: Path | None = None) -> tuple[list[float], float]:
    """Seconds of each run of the command, and the largest peak."""
    times: list[float] = []
    peaks: list[float] = []
    for _ in range(runs):
        if output is not None:
            output.unlink(missing_ok=True)
        spent, peak, code = run_child([sys.executable, "-m", "deltafuse", *arguments])
        if code:
            raise SystemExit(f"fuse {' '.join(arguments)} gave exit code {code}")
        times.append(spent)
        peaks.append(peak)
    return times, max(peaks)


def measure(path: Path, runs: int) -> dict[str, float | int]:
    """Nodes, floor, median time of fuse and inspect, fuse over floor, peak of fuse."""
    nodes, floor = floor_of(path)
    fused = path.with_name("fused.onnx")
    times, peak = times_of([str(path), "-o", str(fused)], runs, fused)
    looks, _ = times_of(["inspect", str(path)], runs)
    seconds = statistics.median(times)
    return {
        "nodes": nodes,
        "floor_seconds": round(floor, 3),
        "fuse_seconds": round(seconds, 3),
        "inspect_seconds": round(statistics.median(looks), 3),
        "ratio": round(seconds / floor, 2),
        "peak_mb": round(peak, 1),
        "runs": runs,
    }


def peers(path: Path, floor: float, limit: float) -> dict[str, dict[str, Any]]:
    """Seconds of what is installed of `PEERS`, from start to exit, and how often the floor that is."""
    found: dict[str, dict[str, Any]] = {}
    for name, (module, code) in PEERS.items():
        if importlib.util.find_spec(module) is None:
            found[name] = {"seconds": None, "why": "not installed"}
            continue
        start = time.perf_counter()
        command = [sys.executable, "-W", "ignore", "-c", LOAD * ("model" in code) + code, str(path)]
        command[-2] = command[-2] if "model" in code else f"import sys; {code}"
        try:
            done = subprocess.run(command, capture_output=True, timeout=limit, check=False, env=ENVIRONMENT)
        except subprocess.TimeoutExpired:
            found[name] = {"seconds": None, "why": f"over {limit:.0f} s", "ratio_over": round(limit / floor, 1)}
            continue
        spent = time.perf_counter() - start
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        failed = {"seconds": None, "why": last[:200] or f"exit code {done.returncode}"}
        found[name] = failed if done.returncode else {"seconds": round(spent, 2), "ratio": round(spent / floor, 1)}
    return found


def growth(folder: Path, runs: int) -> list[dict[str, float | int]]:
    """What `measure` tells of graphs of more and more layers."""
    return [{"layers": layers, **measure(build(folder, "prefill", layers), runs)} for layers in GROWTH]


def faults(result: dict[str, Any], options: argparse.Namespace) -> list[str]:
    """The limits that are exceeded."""
    found: list[str] = []
    if result["ratio"] > options.max_ratio:
        found.append(f"ratio {result['ratio']} > {options.max_ratio}")
    if result["peak_mb"] > options.max_peak_mb:
        found.append(f"peak {result['peak_mb']} MB > {options.max_peak_mb} MB")
    if result["inspect_seconds"] > options.max_inspect * result["fuse_seconds"]:
        found.append(f"inspect {result['inspect_seconds']} s > {options.max_inspect} x fuse")
    if result["decode"]["fuse_seconds"] > options.max_decode_seconds:
        found.append(f"decode {result['decode']['fuse_seconds']} s > {options.max_decode_seconds} s")
    sizes = {row["layers"]: row["fuse_seconds"] for row in result.get("growth", [])}
    if sizes and sizes[48] > options.max_growth * sizes[24]:
        found.append(f"48 layers take {sizes[48] / sizes[24]:.2f} times as long as 24, more than {options.max_growth}")
    return found


def lines_of(result: dict[str, Any], indent: str = "") -> list[str]:
    """The result for people."""
    lines: list[str] = []
    for key, value in result.items():
        if isinstance(value, dict):
            lines += [f"{indent}{key}", *lines_of(value, indent + "  ")]
        elif isinstance(value, list):
            lines += [indent + "  ".join(f"{name} {number}" for name, number in row.items()) for row in value]
        else:
            lines.append(f"{indent}{key:16} {value}")
    return lines


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24, help="linear layers; after every third comes a full one")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--keep", type=Path, default=Path(tempfile.gettempdir()) / "deltafuse-bench")
    parser.add_argument("--max-ratio", type=float, default=20.0)
    parser.add_argument("--max-peak-mb", type=float, default=400.0)
    parser.add_argument("--max-decode-seconds", type=float, default=2.5)
    parser.add_argument("--max-inspect", type=float, default=1.1, help="inspect against fuse")
    parser.add_argument("--max-growth", type=float, default=2.2, help="48 layers against 24")
    parser.add_argument("--growth", action="store_true", help=f"measure {', '.join(map(str, GROWTH))} layers too")
    parser.add_argument("--peers", action="store_true", help="time other tools on the same graph too")
    parser.add_argument("--peer-seconds", type=float, default=120.0, help="limit of each of them")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def main() -> int:
    """Measures and judges."""
    options = parse()
    path, decode = (build(options.keep, kind, options.layers) for kind in ("prefill", "decode"))
    times_of(["inspect", str(decode)], 1)  # compiles what is not compiled yet
    result: dict[str, Any] = {**measure(path, options.runs), "decode": measure(decode, options.runs)}
    if options.growth:
        result["growth"] = growth(options.keep, options.runs)
    if options.peers:
        result["peers"] = peers(path, result["floor_seconds"], options.peer_seconds)
    found = faults(result, options)
    print(json.dumps({**result, "faults": found}) if options.json else "\n".join([*lines_of(result), *found]))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
