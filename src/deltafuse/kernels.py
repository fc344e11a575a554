"""Which operators the installed onnxruntime has a kernel for."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from onnx import NodeProto, ValueInfoProto, helper


def has_kernel(node: NodeProto, inputs: Sequence[ValueInfoProto], outputs: Sequence[ValueInfoProto]) -> bool:
    """Whether the installed onnxruntime loads a model of this one node, of opset 27 or of a domain's version 1.

    Args:
        node: of ai.onnx (domain "") or of another domain.
        inputs: what it reads.
        outputs: what it writes.
    """
    # onnxruntime has no types: `Any` stops here.
    runtime: Any = importlib.import_module("onnxruntime")
    opset = helper.make_opsetid("", 17 if node.domain else 27)
    opsets = [opset, helper.make_opsetid(node.domain, 1)] if node.domain else [opset]
    graph = helper.make_graph([node], "has", inputs, outputs)
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    options = runtime.SessionOptions()
    options.log_severity_level = 4
    try:
        runtime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception:  # onnxruntime's errors have no common base but this
        return False
    return True
