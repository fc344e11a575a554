"""Nodes and tensors as the page shows them, and what stands in a site's place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import onnx
from onnx import helper, numpy_helper

from deltafuse.expression_match import ExpressionPlan
from deltafuse.fused import call, kernel
from deltafuse.match import Plan, Role
from deltafuse.probing import short_dtype, tensor_text, title
from deltafuse.reasons import Reason
from deltafuse.wording import number

__all__ = ["attribute_texts", "emitted_document", "node_title", "ports_of", "types_of"]

Document = dict[str, Any]

#: Numbers of an attribute that are shown, and characters of a text.
_SHOWN, _LONG = 8, 160


def node_title(node: onnx.NodeProto) -> str:
    """The operator with its domain; a Custom node goes by what it calls."""
    return kernel(node) or title(node.op_type, node.domain)


def attribute_texts(node: onnx.NodeProto) -> dict[str, str]:
    """The attributes of a node as texts."""
    return {attribute.name: _attribute_text(attribute) for attribute in node.attribute}


def _attribute_text(attribute: onnx.AttributeProto) -> str:
    if attribute.type in (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS):
        graphs = [attribute.g] if attribute.type == onnx.AttributeProto.GRAPH else attribute.graphs
        return f"a subgraph of {number(sum(len(graph.node) for graph in graphs), 'node')}"
    if attribute.type == onnx.AttributeProto.TENSOR:
        return _constant_text(attribute.t)
    if attribute.ref_attr_name:
        return f"the attribute {attribute.ref_attr_name} of the function"
    value = helper.get_attribute_value(attribute)
    if isinstance(value, (list, tuple)):
        numbers = cast("Sequence[object]", value)
        items = [_plain(item) for item in numbers[:_SHOWN]]
        return f"[{', '.join(items)}{', ...' if len(numbers) > _SHOWN else ''}]"
    return _plain(value)


def _plain(value: object) -> str:
    number = f"{value:.9g}" if isinstance(value, float) else str(value)
    text = value.decode(errors="replace") if isinstance(value, bytes) else number
    return text if len(text) <= _LONG else f"{text[:_LONG]}..."


def _constant_text(tensor: onnx.TensorProto) -> str:
    """Type and sizes, and the numbers where there are few."""
    told = tensor_text(tensor.data_type, tuple(tensor.dims))
    if int(np.prod(tensor.dims)) > _SHOWN or tensor.data_location == onnx.TensorProto.EXTERNAL:
        return told
    return f"{told} {numpy_helper.to_array(tensor).tolist()}"


def types_of(plan: Plan | ExpressionPlan, opset: int) -> dict[str, str]:
    """Type and sizes of the values that emitted nodes read and write, as far as onnx infers them.

    Args:
        plan: what is written.
        opset: version of the default domain that it is written for.
    """
    nodes, match = plan.nodes, plan.match
    roles = (*match.operands(), *match.results())
    written = {name for node in nodes for name in node.output}
    inputs = [_declared(role) for role in {role.name: role for role in roles if role.name not in written}.values()]
    # What onnx does not know, it leaves alone: the fused node's results are declared by the plan.
    domains = {"": min(opset, onnx.defs.onnx_opset_version())} | {node.domain: 1 for node in nodes if node.domain}
    model = helper.make_model(
        helper.make_graph(nodes, "emitted", inputs, [], value_info=plan.value_info),
        opset_imports=[helper.make_opsetid(domain, version) for domain, version in domains.items()],
    )
    graph = onnx.shape_inference.infer_shapes(model).graph
    known = {info.name: _info_text(info) for info in (*graph.input, *graph.value_info)}
    return known | {role.name: tensor_text(role.dtype, role.shape) for role in roles}


def _declared(role: Role) -> onnx.ValueInfoProto:
    shape = [size if isinstance(size, int) else str(size) for size in role.shape]
    return helper.make_tensor_value_info(role.name, role.dtype, shape)


def _info_text(info: onnx.ValueInfoProto) -> str:
    tensor = info.type.tensor_type
    sizes = [dim.dim_value if dim.HasField("dim_value") else _symbol(dim.dim_param) for dim in tensor.shape.dim]
    known = f"{short_dtype(tensor.elem_type)} [{', '.join(map(str, sizes))}]"
    return known if tensor.HasField("shape") else short_dtype(tensor.elem_type)


def _symbol(name: str) -> str:
    """A size's name; what onnx calls a size that it knows nothing of says nothing."""
    return "?" if not name or name.startswith("unk__") else name


def emitted_document(plan: Plan | ExpressionPlan, types: Mapping[str, str]) -> Document:
    """What stands in the site's place: the target's node, and the casts around it."""
    node = next((node for node in plan.nodes if kernel(node) or node.op_type == plan.op), None)
    casts = [
        [cast.input[0], cast.output[0], short_dtype(helper.get_attribute_value(attribute))]
        for cast in plan.nodes
        for attribute in cast.attribute
        if cast.op_type == "Cast" and attribute.name == "to"
    ]
    document: Document = {"op": plan.op, "nodes": len(plan.nodes), "casts": casts}
    if node is None:
        return document
    ports = ports_of(node)
    return document | {
        "node": node.name,
        "type": node.op_type if node.op_type != "Custom" else f"Custom, type {kernel(node)}",
        "domain": node.domain or "ai.onnx",
        "attributes": [*attribute_texts(node).items()],
        "inputs": [[ports.get(name, ""), name, types.get(name, "")] for name in node.input],
        "outputs": [[ports.get(name, ""), name, types.get(name, "")] for name in node.output],
    }


def ports_of(node: onnx.NodeProto) -> dict[str, str]:
    """Tensor -> the fused operator's names for the ports that take or give it; empty where it is no such node."""
    found = call(node) if kernel(node) else Reason("attention-malformed")
    if isinstance(found, Reason):
        return {}
    ports: dict[str, list[str]] = {found.out: ["out"], found.state: ["final_state"]}
    for port, value in found.ports.items():
        ports.setdefault(value, []).append(port)
    return {value: ", ".join(names) for value, names in ports.items()}
