"""Folders of exports for tests of the commands on folders."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

DEMO = Path(__file__).parents[1] / "src/deltafuse/demo_models"


def external(source: Path, path: Path) -> None:
    """A model with its weights in a file beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(onnx.load(source), path, save_as_external_data=True, location="weights.bin", size_threshold=64)


def vision(path: Path) -> None:
    """A model without a site, its weight in a file beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    weight = numpy_helper.from_array(np.ones((64, 8), np.float32), "weight")
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["pixels", "weight"], ["image_embeds"])],
        "vision",
        [helper.make_tensor_value_info("pixels", TensorProto.FLOAT, ["n", 64])],
        [helper.make_tensor_value_info("image_embeds", TensorProto.FLOAT, ["n", 8])],
        [weight],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, path, save_as_external_data=True, location="weights.bin", size_threshold=64)


def export_folder(root: Path) -> Path:
    """What an export leaves: prefill, decode, vision, each with weights beside it, and a configuration."""
    for part in ("prefill", "decode"):
        external(DEMO / f"{part}.onnx", root / part / "model.onnx")
    vision(root / "vision/model.onnx")
    (root / "config.json").write_text("{}")
    return root


def contents(root: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def edit(path: Path, change) -> None:
    """Changes a model in place, its external data left alone."""
    model = onnx.load(path, load_external_data=False)
    change(model)
    path.write_bytes(model.SerializeToString())


def copy(source: Path, target: Path) -> Path:
    """A copy of a folder."""
    shutil.copytree(source, target)
    return target
