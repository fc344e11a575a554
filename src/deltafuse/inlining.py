"""Calls of functions that the model defines, put in their place where a rule lies inside one among other nodes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import onnx
import onnx.inliner

from deltafuse.bodies import is_call
from deltafuse.buried import holds
from deltafuse.edits import Changes, Insertion
from deltafuse.functions import plain_domain
from deltafuse.graph import Graph
from deltafuse.match import Match
from deltafuse.patterns import Pattern
from deltafuse.restated import Restated
from deltafuse.sites import Site
from deltafuse.wire import Model

#: A function inside a function inside a function: real exports have one for each module around a layer.
_DEEPEST = 32


def inlined(
    file: Restated,
    model: Model,
    order: Sequence[int] | None,
    kinds: bytearray,
    rules: Iterable[Pattern],
    sites: Iterable[Site],
) -> Restated | None:
    """The file with those calls in place that hold what may be a rule and are part of no match.

    Args:
        file: as it was searched.
        model: of `file`, in topological order.
        order: number in the file of each of its nodes, None where they are the same.
        kinds: of the values of `model`.
        rules: that were looked for.
        sites: that were found.

    Returns:
        None where no call can be put in place.
    """
    if not model.functions or file.depth >= _DEEPEST:
        return None
    graph = model.graph
    matched = {node for site in sites if isinstance(site, Match) for node in site.nodes}
    calls = [
        node
        for node in range(len(graph.op))
        if is_call(model, graph, node)
        and node not in matched
        and any(holds(model, graph, kinds, node, rule) for rule in rules)
    ]
    made = {node: nodes for node in calls if (nodes := _body(model, node, file.depth)) is not None}
    if not made:
        return None
    places = {node: node if order is None else order[node] for node in made}
    marks = {node: f"call {file.depth}.{places[node]}" for node in made}
    changes = Changes(
        removed=tuple((marks[node], (places[node],)) for node in made),
        inserted=tuple(Insertion(marks[node], places[node], nodes) for node, nodes in made.items()),
        opsets=_imports(model, made),
    )
    return file.changed(changes, functions=[graph.op[node] for node in made])


def _body(model: Model, node: int, depth: int) -> tuple[onnx.NodeProto, ...] | None:
    """The nodes that a call stands for, None where their operators are of another version, or a result is missing."""
    graph = model.graph
    call = graph.node(node)
    function = model.local_functions[graph.domain[node], graph.op[node]]
    versions = {plain_domain(one.domain): one.version for one in function.opset_import}
    own = model.opset_imports
    if any(own.get(domain, version) != version for domain, version in versions.items()):
        return None
    # The inliner knows no defaults: an attribute that is not given would get that of the operator which refers to it.
    given = {attribute.name for attribute in call.attribute}
    call.attribute.extend(default for default in function.attribute_proto if default.name not in given)
    inputs, outputs = ([onnx.ValueInfoProto(name=n) for n in names if n] for names in (call.input, call.output))
    alone = onnx.ModelProto(
        ir_version=model.ir_version,
        graph=onnx.GraphProto(name="call", node=[call], input=inputs, output=outputs),
        opset_import=[onnx.OperatorSetIdProto(domain=domain, version=v) for domain, v in (own | versions).items()],
        functions=model.local_functions.values(),
    )
    try:
        result = onnx.inliner.inline_selected_functions(alone, [(function.domain, function.name)])
    except RuntimeError:
        # A call that does not fit its function: no runtime takes it.
        return None
    written = [name for one in result.graph.node for name in one.output if name]
    if len(written) != len(set(written)) or not {info.name for info in outputs} <= set(written):
        # A function that no call has a meaning for: it stays as it is.
        return None
    if not all(_gives_results(attribute.g) for one in result.graph.node for attribute in one.attribute):
        # The inliner renames what a body takes and not what it gives back, where both are one.
        return None
    return tuple(_renamed(graph, result.graph.node, {info.name for info in (*inputs, *outputs)}, f"{node}.{depth}"))


def _gives_results(body: onnx.GraphProto) -> bool:
    """Whether a body, and each body in it, has all that it gives back; true of none."""
    known = {name for node in body.node for name in node.output}
    known |= {info.name for info in (*body.input, *body.initializer)}
    inner = (attribute.g for node in body.node for attribute in node.attribute)
    return {info.name for info in body.output} <= known and all(map(_gives_results, inner))


def _imports(model: Model, calls: Iterable[int]) -> tuple[tuple[str, int], ...]:
    """The operator sets of functions that the file itself does not import."""
    graph = model.graph
    functions = [model.local_functions[graph.domain[node], graph.op[node]] for node in calls]
    wanted = {plain_domain(one.domain): one.version for function in functions for one in function.opset_import}
    return tuple((domain, version) for domain, version in wanted.items() if domain not in model.opset_imports)


def _renamed(graph: Graph, nodes: Iterable[onnx.NodeProto], kept: set[str], suffix: str) -> Iterable[onnx.NodeProto]:
    """The nodes, with names for their values that the file does not have yet."""
    names: dict[str, str] = {name: name for name in kept}

    def name(old: str) -> str:
        if old and old not in names:
            new = f"{old}/{suffix}"
            while graph.find(new) is not None:
                new += "'"
            names[old] = new
        return names.get(old, old)

    def rename(scope: Iterable[onnx.NodeProto]) -> None:
        for node in scope:
            node.name = node.name and f"{node.name}/{suffix}"
            node.input[:] = [name(value) for value in node.input]
            node.output[:] = [name(value) for value in node.output]
            for attribute in node.attribute:
                for body in (attribute.g, *attribute.graphs):
                    for info in (*body.input, *body.output, *body.initializer, *body.value_info):
                        info.name = name(info.name)
                    rename(body.node)

    nodes = list(nodes)
    rename(nodes)
    return nodes
