"""Wrong fusions: edits of a fused graph, of its first site unless they say another."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from deltafuse.lowering import fused_type


def custom(graph, site=0):
    return [node for node in graph.node if fused_type(node)][site]


def attribute(node, name):
    return next(item for item in node.attribute if item.name == name)


def port(node, name):
    """Position of a port among the node's inputs."""
    names = [item.decode() for item in attribute(node, "input_names").strings]
    return list(attribute(node, "input_index").ints).index(names.index(name))


def insert(graph, node, *new):
    at = next(i for i, other in enumerate(graph.node) if other.output == node.output)
    for offset, item in enumerate(new):
        graph.node.insert(at + offset, item)


def constant(name, array):
    return helper.make_node("Constant", [], [name], value=numpy_helper.from_array(np.asarray(array)))


def operand_times(graph, name, factor, dtype):
    node = custom(graph)
    at = port(node, name)
    new = [
        constant("patch_factor", np.array(factor, dtype)),
        helper.make_node("Mul", [node.input[at], "patch_factor"], ["patched"]),
    ]
    insert(graph, node, *new)
    custom(graph).input[at] = "patched"


def scale_forgotten(graph):
    node = custom(graph)
    node.attribute.remove(attribute(node, "scale_value"))


def scale_one(graph):
    attribute(custom(graph), "scale_value").f = 1.0


def scale_off(graph):
    attribute(custom(graph), "scale_value").f *= 1.01


def g_scaled(graph):
    operand_times(graph, "g", 0.9, np.float32)


def g_gone(graph):
    operand_times(graph, "g", 0.0, np.float32)


def beta_scaled(graph):
    operand_times(graph, "beta", 0.97, np.float16)


def q_and_k_swapped(graph):
    node = custom(graph)
    node.input[0], node.input[1] = node.input[1], node.input[0]


def undecayed_delta(graph):
    """The delta from the undecayed state, for one token: v + (exp(g) - 1) S k is read in place of v."""
    node = custom(graph)
    names = {name: node.input[port(node, name)] for name in ("query", "key", "value", "state", "g")}
    new = [
        constant("p_one", np.array(1, np.float16)),
        constant("p_heads", np.array([0, 0, 1, 1])),
        constant("p_shape", np.array([1, 4, 1])),
        helper.make_node("Gather", [names["key"], "p_heads"], ["p_keys"], axis=1),
        helper.make_node("Einsum", [names["state"], "p_keys"], ["p_read"], equation="bhvk,bhk->bhv"),
        helper.make_node("Cast", [names["g"]], ["p_half"], to=TensorProto.FLOAT16),
        helper.make_node("Exp", ["p_half"], ["p_decay"]),
        helper.make_node("Sub", ["p_decay", "p_one"], ["p_less"]),
        helper.make_node("Reshape", ["p_less", "p_shape"], ["p_column"]),
        helper.make_node("Mul", ["p_read", "p_column"], ["p_extra"]),
        helper.make_node("Add", [names["value"], "p_extra"], ["p_value"]),
    ]
    insert(graph, node, *new)
    custom(graph).input[port(node, "value")] = "p_value"


def state_transpose_dropped(graph):
    """Of the state that comes in: Dk = Dv, so that every shape stays legal."""
    node = custom(graph)
    at = port(node, "state")
    cast = next(item for item in graph.node if node.input[at] in item.output)
    transpose = next(item for item in graph.node if cast.input[0] in item.output)
    assert (cast.op_type, transpose.op_type) == ("Cast", "Transpose")
    cast.input[0] = transpose.input[0]
    graph.node.remove(transpose)


def final_transpose_dropped(graph):
    node = custom(graph)
    transpose = next(item for item in graph.node if node.output[1] in item.input)
    after = next(item for item in graph.node if transpose.output[0] in item.input)
    assert transpose.op_type == "Transpose"
    after.input[0] = node.output[1]
    graph.node.remove(transpose)


def tiled_heads(graph):
    """Value head h reads key head h % 2 where it must read h // 2: values, gates and state heads change places."""
    node = custom(graph)
    order = [0, 2, 1, 3]
    new = [constant("p_order", np.array(order))]
    for name in ("value", "beta", "g", "state"):
        at = port(node, name)
        new.append(helper.make_node("Gather", [node.input[at], "p_order"], [f"p_{name}"], axis=1))
    insert(graph, node, *new)
    node = custom(graph)
    for name in ("value", "beta", "g", "state"):
        node.input[port(node, name)] = f"p_{name}"
    for index, result in enumerate(list(node.output)):
        node.output[index] = f"p_result_{index}"
        at = next(i for i, other in enumerate(graph.node) if result in other.input)
        graph.node.insert(at, helper.make_node("Gather", [f"p_result_{index}", "p_order"], [result], axis=1))


def g_rounded(graph):
    """Through float16 and back: in double nothing of it shows."""
    node = custom(graph)
    at = port(node, "g")
    new = [
        helper.make_node("Cast", [node.input[at]], ["p_half"], to=TensorProto.FLOAT16),
        helper.make_node("Cast", ["p_half"], ["p_single"], to=TensorProto.FLOAT),
    ]
    insert(graph, node, *new)
    custom(graph).input[at] = "p_single"


def state_zeroed(graph):
    """The state that comes in is not read."""
    node = custom(graph)
    insert(graph, node, constant("p_zero", np.zeros((1, 4, 16, 16), np.float16)))
    custom(graph).input[port(node, "state")] = "p_zero"


def layers_exchanged(graph):
    """The first two layers read and write each other's state."""
    first, second = custom(graph, 0), custom(graph, 1)
    at = port(first, "state")
    first.input[at], second.input[at] = second.input[at], first.input[at]
    ends = first.output[1], second.output[1]
    for node in graph.node:
        if node.op_type != "Custom":
            node.input[:] = [ends[1 - ends.index(name)] if name in ends else name for name in node.input]
