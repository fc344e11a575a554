"""Puts other tools beside fuse: how many nodes each leaves of a model, and whether a fused rule is among them.

    python scripts/compare_tools.py MODEL... [--seconds 120] [--json]

Each tool runs in a process of its own with its defaults; one that is not installed is named as such. fuse is run for
target ``ort``, whose operator the others could have written too.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import onnx

#: What the rule and its convolution are called where they are one node.
FUSED = ("LinearAttention", "CausalConvWithState", "Custom")
_ORT = (
    "import onnxruntime as o; s = o.SessionOptions(); s.log_severity_level = 4; s.optimized_model_filepath = target; "
    "s.graph_optimization_level = o.GraphOptimizationLevel.ORT_ENABLE_{}; "
    "o.InferenceSession(source, s, providers=['CPUExecutionProvider'])"
)
#: Name -> package that must be installed, and what it does from `source` to `target`.
TOOLS = {
    "onnxsim": ("onnxsim", "import onnx, onnxsim; onnx.save(onnxsim.simplify(onnx.load(source))[0], target)"),
    "onnxslim": ("onnxslim", "import onnx, onnxslim; onnx.save(onnxslim.slim(source), target)"),
    "onnxscript optimizer and rewriter": (
        "onnxscript",
        "import onnx, onnxscript.optimizer as o, onnxscript.rewriter as r; "
        "onnx.save(r.rewrite(o.optimize(onnx.load(source))), target)",
    ),
    "onnxscript fusions for onnxruntime": (
        "onnxscript",
        "import onnx_ir as ir; from onnxscript.rewriter.ort_fusions import optimize_for_ort as f; "
        "m = f(ir.load(source)); ir.save(m[0] if isinstance(m, tuple) else m, target)",
    ),
    "onnxruntime, basic": ("onnxruntime", _ORT.format("BASIC")),
    "onnxruntime, extended": ("onnxruntime", _ORT.format("EXTENDED")),
    "onnxruntime.transformers optimizer": (
        "onnxruntime",
        "from onnxruntime.transformers.optimizer import optimize_model as f; "
        "f(source, model_type='gpt2', opt_level=0).save_model_to_file(target)",
    ),
    "fuse --target ort": ("deltafuse", "import deltafuse as d; d.fuse(source, target, target='ort', keep_going=True)"),
}


def counted(path: Path) -> tuple[int, int]:
    """Nodes of a model, those of branches, loops and functions included, and how many of them are `FUSED`."""
    model = onnx.load(path, load_external_data=False)
    graphs, nodes = [model.graph, *model.functions], []
    while graphs:
        found = list(graphs.pop().node)
        nodes += found
        attributes = [attribute for node in found for attribute in node.attribute]
        graphs += [graph for attribute in attributes for graph in (attribute.g, *attribute.graphs) if graph.node]
    return len(nodes), sum(node.op_type in FUSED for node in nodes)


def tried(code: str, source: Path, limit: float) -> dict[str, Any]:
    """What one tool makes of one model."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "model.onnx"
        head = "import sys, warnings; warnings.simplefilter('ignore'); source, target = sys.argv[1:]; "
        command = [sys.executable, "-c", head + code, str(source), str(target)]
        start = time.perf_counter()
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
        except subprocess.TimeoutExpired:
            return {"why": f"over {limit:.0f} s"}
        spent = round(time.perf_counter() - start, 1)
        if not target.is_file():
            return {"why": (done.stderr.strip().splitlines() or ["it wrote nothing"])[-1][:160], "seconds": spent}
        nodes, fused = counted(target)
        return {"nodes": nodes, "fused": fused, "seconds": spent}


def compare(source: Path, limit: float) -> dict[str, dict[str, Any]]:
    """All tools on one model."""
    found: dict[str, dict[str, Any]] = {"as exported": dict(zip(("nodes", "fused"), counted(source), strict=True))}
    for name, (package, code) in TOOLS.items():
        installed = importlib.util.find_spec(package) is not None
        found[name] = tried(code, source, limit) if installed else {"why": "not installed"}
    return found


def main() -> None:
    """Compares and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+", metavar="MODEL")
    parser.add_argument("--seconds", type=float, default=120.0, help="limit of each run")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = {str(path): compare(path, options.seconds) for path in options.models}
    if options.json:
        print(json.dumps(found, indent=1))
        return
    for path, rows in found.items():
        print(path)
        for name, row in rows.items():
            known = f"{row['nodes']:>7} nodes, {row['fused']} fused" if "nodes" in row else row["why"]
            print(f"  {name:36} {known}{' in ' + str(row['seconds']) + ' s' if 'seconds' in row else ''}")


if __name__ == "__main__":
    main()
