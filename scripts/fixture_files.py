"""Writes one fixture: NAME.onnx, NAME.npz (inputs by name, outputs as out0, out1, ...) and NAME.json (the truth)."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import torch

#: Largest difference from torch that an export may show, relative to the largest output: rounding, nothing else.
ROUNDING = {"float32": 2e-5, "float16": 2e-2}
STACK_TRACE = "pkg.torch.onnx.stack_trace"
FRAME = re.compile(r'File "[^"]*?([^/"]+)", line (\d+), in (\w+)')


def seed_of(name: str) -> int:
    """A seed that follows from the name alone."""
    return zlib.crc32(name.encode()) % 100_000


def shorten_traces(path: Path) -> None:
    """Leaves of each stack trace the file's name, the line and the function: folders of this machine say nothing."""
    model = onnx.load(path)
    for node in model.graph.node:
        for entry in node.metadata_props:
            if entry.key == STACK_TRACE:
                frames = FRAME.findall(entry.value)
                entry.value = "\n".join(f"{file}:{line} {function}" for file, line, function in frames[-1:])
    onnx.save(model, path)


def file_inputs(path: Path) -> list[str]:
    """Names of a file's inputs: an exporter may drop one that nothing reads."""
    model = onnx.load(path, load_external_data=False)
    return [value.name for value in model.graph.input]


def largest_error(path: Path, feeds: dict[str, np.ndarray], expected: Sequence[np.ndarray]) -> float:
    """How far onnxruntime is from torch: largest difference over largest expected value."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    results = session.run(None, feeds)
    worst = 0.0
    for got, want in zip(results, expected, strict=True):
        wide = want.astype(np.float64)
        worst = max(worst, float(np.abs(got.astype(np.float64) - wide).max() / np.abs(wide).max()))
    return worst


def write_fixture(
    path: Path,
    inputs: dict[str, torch.Tensor],
    expected: Sequence[torch.Tensor | np.ndarray],
    truth: dict[str, object],
) -> None:
    """Writes the arrays and the truth beside ``path`` once onnxruntime agrees with torch.

    Raises:
        AssertionError: if it does not, but for models that are wrong on purpose and carry no truth of their own.
    """
    present = file_inputs(path)
    feeds = {name: tensor.numpy() for name, tensor in inputs.items() if name in present}
    arrays = [np.asarray(array) for array in expected]
    error = largest_error(path, feeds, arrays)
    assert error <= ROUNDING[str(truth["dtype"])], f"{path.name}: onnxruntime and torch differ by {error:.1e}"
    np.savez_compressed(path.with_suffix(".npz"), **feeds, **{f"out{i}": array for i, array in enumerate(arrays)})
    model = onnx.load(path, load_external_data=False)
    truth = {
        "name": path.stem,
        **truth,
        "nodes": len(model.graph.node),
        "inputs": present,
        "outputs": [value.name for value in model.graph.output],
        "max_error": float(f"{error:.1e}"),
    }
    path.with_suffix(".json").write_text(json.dumps(truth, indent=1, sort_keys=True) + "\n")
    print(f"{path.stem}: {len(model.graph.node)} nodes, {path.stat().st_size:,} bytes, error {error:.1e}", flush=True)
