"""Functions that a model defines, as one call sees them: its attributes in place of the references to them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import onnx
from onnx import AttributeProto, FunctionProto, NodeProto

from deltafuse.errors import UserError

__all__ = ["bound_nodes", "check_names", "plain_domain", "without_references"]


#: Domains that onnxruntime defines operators in, more of them with each release; a model has no functions there.
_RUNTIME = frozenset({"com.microsoft", "com.microsoft.nchwc", "com.ms.internal.nhwc"})


def check_names(functions: Iterable[FunctionProto]) -> None:
    """Looks for functions that have no one meaning.

    Raises:
        UserError: ``function-hides-operator``: one has the name of an operator of ONNX, or lies in a domain of
            onnxruntime, and some runtimes take the one, some the other.
    """
    for function in functions:
        domain, name = plain_domain(function.domain), function.name
        if domain in _RUNTIME:
            what = f"a function {name} in the domain {domain}, whose operators onnxruntime defines"
        elif onnx.defs.has(name, domain):
            what = f"a function {name}, which is the name of an operator of {domain or 'ai.onnx'}"
        else:
            continue
        text = f"the model defines {what}: runtimes differ in which of them they take; give it another name or domain"
        raise UserError("function-hides-operator", text)


def bound_nodes(function: FunctionProto, call: NodeProto) -> list[NodeProto]:
    """A function's nodes for one call: references are what the call gives, or else what the function's default is.

    An attribute that refers to one that is not given is left out, as the standard says.
    """
    given = {attribute.name: attribute for attribute in (*function.attribute_proto, *call.attribute)}
    nodes = [NodeProto.FromString(node.SerializeToString()) for node in function.node]
    for node in _all_nodes(nodes):
        if any(attribute.ref_attr_name for attribute in node.attribute):
            attributes = [_bound(one, given[one.ref_attr_name]) if one.ref_attr_name else one
                          for one in node.attribute if not one.ref_attr_name or one.ref_attr_name in given]  # fmt: skip
            copies = [AttributeProto.FromString(one.SerializeToString()) for one in attributes]
            del node.attribute[:]
            node.attribute.extend(copies)
    return nodes


def without_references(model: onnx.ModelProto) -> None:
    """Gives each different call of a function that refers to attributes a function of its own without references.

    Args:
        model: changed in place; its functions do not call themselves.
    """
    functions = {(plain_domain(one.domain), one.name): one for one in model.functions}
    referring = {key for key, function in functions.items() if _refers(function)}
    if not referring:
        return
    made: dict[tuple[str, ...], FunctionProto] = {}

    def settle(nodes: Iterable[NodeProto]) -> None:
        for node in _all_nodes(nodes):
            key = (plain_domain(node.domain), node.op_type)
            if key not in referring:
                continue
            call = (*key, *sorted(attribute.SerializeToString().hex() for attribute in node.attribute))
            if call not in made:
                own = made[call] = FunctionProto.FromString(functions[key].SerializeToString())
                own.name = _free_name(own, functions.keys(), len(made))
                for repeated in (own.attribute, own.attribute_proto, own.node):
                    del repeated[:]
                own.node.extend(bound_nodes(functions[key], node))
                settle(own.node)
            node.op_type = made[call].name
            del node.attribute[:]

    settle(model.graph.node)
    for key, function in functions.items():
        if key not in referring:
            settle(function.node)
    kept = [function for key, function in functions.items() if key not in referring]
    copies = [FunctionProto.FromString(one.SerializeToString()) for one in (*kept, *made.values())]
    del model.functions[:]
    model.functions.extend(copies)


def _free_name(function: FunctionProto, taken: Iterable[tuple[str, str]], number: int) -> str:
    name = f"{function.name}_{number}"
    while (plain_domain(function.domain), name) in taken:
        name += "_"
    return name


def _all_nodes(nodes: Iterable[NodeProto]) -> Iterator[NodeProto]:
    """Nodes and those of their subgraphs."""
    for node in nodes:
        yield node
        for attribute in node.attribute:
            for graph in (attribute.g, *attribute.graphs):
                yield from _all_nodes(graph.node)


def _bound(reference: AttributeProto, given: AttributeProto) -> AttributeProto:
    bound = AttributeProto()
    bound.CopyFrom(given)
    bound.name = reference.name
    return bound


def _refers(function: FunctionProto) -> bool:
    return any(attribute.ref_attr_name for node in _all_nodes(function.node) for attribute in node.attribute)


def plain_domain(domain: str) -> str:
    """A domain, "" for ai.onnx however it is written."""
    return "" if domain == "ai.onnx" else domain
