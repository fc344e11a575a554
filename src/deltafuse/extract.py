"""``--extract DIR``: each site as stand-alone models, before and after, for Netron and onnxruntime."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import onnx
from onnx import helper

from deltafuse.fused import runnable
from deltafuse.match import Match, Plan, Role

#: Highest IR version that the oldest supported onnxruntime reads; node metadata is known from 10 on.
_IR_VERSION = 10


def extract_site(folder: Path, plan: Plan, before: onnx.ModelProto) -> tuple[Path, ...]:
    """Writes one site into a folder, which is made if need be.

    ``NAME.before.onnx`` holds the nodes that are replaced, ``NAME.after.onnx`` the target's nodes and
    ``NAME.after.lowered.onnx`` the same with the fused node as plain operators, at the target's precision. onnxruntime
    loads the first and the last; the second is for viewers and the target's converter.

    Args:
        folder: where to write.
        plan: the nodes that replace the site.
        before: the cut between the values of the match; its inputs may have no sizes, its outputs no type.

    Returns:
        The files, in that order.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stem = re.sub(r"[^\w.-]+", "_", plan.match.name)
    opsets = list(before.opset_import)
    after = _model(plan, plan.nodes, opsets)
    lowered = runnable(after, keep=False)
    # What is declared of the fused node's results is declared of the lowered form's results too.
    models = {"before": _typed(before, plan.match), "after": after, "after.lowered": lowered}
    files: list[Path] = []
    for kind, model in models.items():
        path = folder / f"{stem}.{kind}.onnx"
        path.write_bytes(model.SerializeToString())
        files.append(path)
    return tuple(files)


def _model(plan: Plan, nodes: Sequence[onnx.NodeProto], opsets: Sequence[onnx.OperatorSetIdProto]) -> onnx.ModelProto:
    match = plan.match
    read = {name for node in nodes for name in node.input}
    operands = (match.query, match.key, match.value, match.g, match.beta, match.state)
    inputs = {role.name: _declare(role) for role in operands if role is not None and role.name in read}
    outputs = [_declare(role) for role in (match.out, match.final_state) if role is not None]
    graph = helper.make_graph(
        nodes,
        match.name,
        list(inputs.values()),
        outputs,
        value_info=plan.value_info,
        doc_string=f"{match.rule}: {plan.op}",
    )
    return helper.make_model(graph, producer_name="deltafuse", opset_imports=opsets, ir_version=_IR_VERSION)


def _typed(before: onnx.ModelProto, match: Match) -> onnx.ModelProto:
    """The cut with the types and sizes that the match knows."""
    model = onnx.ModelProto()
    model.CopyFrom(before)
    roles = (
        match.query, match.key, match.value, match.g, match.beta, match.state, match.out, match.final_state,
    )  # fmt: skip
    declared = {role.name: _declare(role) for role in roles if role is not None}
    for info in (*model.graph.input, *model.graph.output):
        if info.name in declared:
            info.CopyFrom(declared[info.name])
    # Values inside the site that the cut offers as well are of no use on their own.
    kept = [info for info in model.graph.output if info.type.WhichOneof("value") is not None]
    del model.graph.output[:]
    model.graph.output.extend(kept)
    model.graph.name = match.name
    model.producer_name = "deltafuse"
    return model


def _declare(role: Role) -> onnx.ValueInfoProto:
    shape = [size if isinstance(size, int) else str(size) for size in role.shape]
    return helper.make_tensor_value_info(role.name, role.dtype, shape)
