"""Operands and results of a fused node: element types, sizes that must agree, constants, memory of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import onnx

from deltafuse.dtypes import dtype_name
from deltafuse.layouts import axes
from deltafuse.lint_lengths import length_findings
from deltafuse.lint_view import Finding, View, is_attention
from deltafuse.targets.profile import Port
from deltafuse.wording import number

#: Operators whose result is a view of their first input.
_VIEWS = frozenset({"Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze"})
_LETTERS = {"query": {"H": "N", "D": "K"}, "key": {"H": "N", "D": "K"}}


def letters(port: Port) -> list[str]:
    """A port's axes with the letters of `sizes_of`: N key heads, H value heads, K and V head sizes."""
    names = _LETTERS.get(port.role, {"D": "V"})
    return ["".join(names.get(letter, letter) for letter in axis) for axis in axes(port.layout)]


def operand_findings(view: View) -> Iterator[Finding]:
    """Where every input that is fed comes from, its element type and rank."""
    graph = view.graph
    for port in view.operator.inputs:
        value = view.ports.get(port.name)
        if value is None:
            continue
        if graph.producer[value] < 0 and value not in graph.initializers and value not in graph.inputs:
            found = f"{graph.name(value)}, which nothing writes"
            fix = f"feed {port.name} with a value of the graph, or fuse the unfused file again"
            yield view.finding("input-unwritten", port.name, found, "a value that is written", fix)
        wanted = port.dtypes or (view.boundary,)
        dtype, shape = view.shapes.dtype(value), view.shape(value)
        if dtype is not None and dtype not in wanted:
            names = " or ".join(map(dtype_name, wanted))
            yield view.finding("input-dtype", port.name, dtype_name(dtype), names, f"cast {port.name} to {names}")
        rank = len(axes(port.layout))
        if shape is not None and len(shape) != rank:
            fix = f"bring {port.name} into the layout {port.layout}"
            yield view.finding("input-rank", port.name, number(len(shape), "axis"), number(rank, "axis"), fix)


def sizes_of(view: View) -> tuple[dict[str, int], list[Finding]]:
    """Sizes by letter as the inputs have them, and inputs that disagree with those before them."""
    sizes: dict[str, int] = {}
    findings: list[Finding] = []
    for port in view.operator.inputs:
        shape = view.shape(view.ports.get(port.name, 0)) if view.ports.get(port.name) else None
        if shape is None or len(shape) != len(axes(port.layout)) or not port.role:
            continue
        for axis, size in zip(letters(port), shape, strict=True):
            if not isinstance(size, int) or len(axis) != 1 or port.role in ("lengths", "offsets", "accepted"):
                continue
            if is_attention(view) and axis == "H" and port.role in ("g", "beta"):
                # may be one number for all heads, or one per key channel: looked at with the widths
                continue
            if sizes.setdefault(axis, size) != size:
                wanted = " x ".join(str(sizes.get(letter, "?")) for letter in letters(port))
                found = " x ".join(map(str, shape))
                fix = f"feed {port.name} as {port.layout}, in the sizes of the other inputs"
                findings.append(view.finding("input-shape", port.name, found, wanted, fix))
                break
    return sizes, findings


def count_findings(view: View) -> Iterator[Finding]:
    """Results without a name, and inputs beyond the operator's."""
    named, count = [value for value in view.results if value], len(view.operator.outputs)
    for place, port in enumerate(view.operator.outputs):
        if place >= len(view.results) or not view.results[place]:
            fix = f"give every result a name, {port.name} too: none is optional"
            yield view.finding("output-count", port.name, number(len(named), "output"), number(count, "output"), fix)
    inputs = len(view.operator.inputs)
    if any(view.message.input[inputs:]):
        fix = "remove the inputs that the operator does not have"
        yield view.finding("input-extra", "", number(len(view.message.input), "input"), f"{inputs} at most", fix)


def result_findings(view: View, sizes: Mapping[str, int]) -> Iterator[Finding]:
    """What the file declares of the results: element type and sizes."""
    for port, value in zip(view.operator.outputs, view.results, strict=False):
        info = view.graph.value_info(value) if value else None
        if info is None or not info.type.HasField("tensor_type"):
            continue
        tensor = info.type.tensor_type
        wanted = port.dtypes or (view.boundary,)
        if tensor.elem_type and tensor.elem_type not in wanted:
            names = " or ".join(map(dtype_name, wanted))
            fix = f"declare {info.name} as {names}: three places must agree on the type of the results"
            yield view.finding("declared-type", port.name, dtype_name(tensor.elem_type), names, fix)
        if tensor.HasField("shape"):
            yield from _declared_shape(view, port, list(tensor.shape.dim), sizes)


def _declared_shape(
    view: View, port: Port, dims: list[onnx.TensorShapeProto.Dimension], sizes: Mapping[str, int]
) -> Iterator[Finding]:
    names = letters(port)
    known = [int(np.prod([sizes[letter] for letter in axis])) if set(axis) <= sizes.keys() else None for axis in names]
    same = len(dims) == len(names) and all(
        size is None or not dim.dim_value or dim.dim_value == size for dim, size in zip(dims, known, strict=False)
    )
    if not same:
        found = " x ".join(str(dim.dim_value or dim.dim_param or "?") for dim in dims)
        wanted = " x ".join("?" if size is None else str(size) for size in known)
        fix = f"declare {port.name} in the sizes that the inputs give it"
        yield view.finding("declared-shape", port.name, found, wanted, fix)


def constant_findings(view: View) -> Iterator[Finding]:
    """Inputs that must be constants of the file."""
    for port in view.operator.inputs:
        value = view.ports.get(port.name)
        if port.constant and value is not None and view.array(value) is None:
            node = view.graph.producer[value]
            found = "a graph input" if node < 0 else f"computed by {view.graph.op[node]}"
            fix = f"store {port.name} as a constant: what computes it does not survive the converter"
            yield view.finding("not-constant", port.name, found, "a constant", fix)


def sequence_findings(view: View, sizes: Mapping[str, int]) -> Iterator[Finding]:
    """Lengths, slot indices and accepted tokens, where they are constants."""
    fed = {port.role: view.ports[port.name] for port in view.operator.inputs if port.name in view.ports}
    arrays = {role: view.integers(value) for role, value in fed.items()}
    lengths, slots, accepted = arrays.get("lengths"), arrays.get("slots"), arrays.get("accepted")
    tokens = sizes.get("T") if lengths is None else int(lengths.sum())
    yield from length_findings(view)
    state = view.shape(view.ports.get("state", 0)) if "state" in view.ports else None
    count = state[0] if state else None
    if slots is not None and tokens is not None and view.operator.port("slots") is not None:
        per_token = view.operator.port("slots") is not None and slots.size == tokens
        low, high = (int(slots.min()), int(slots.max())) if slots.size else (0, 0)
        in_range = low >= 0 and (not isinstance(count, int) or high < count)
        if view.ports.get("state") and not (per_token and in_range):
            wanted = f"{number(tokens, 'index', 'indices')} below {count}"
            fix = "give one slot index a token; all zero for one sequence"
            yield view.finding("slots", "ssm_state_indices", slots.tolist(), wanted, fix)
    if accepted is not None and lengths is not None:
        fits = accepted.size == lengths.size and bool(np.all((accepted >= 1) & (accepted <= lengths)))
        if not fits:
            wanted = f"1 to {lengths.tolist()}"
            fix = "accept at least one token a sequence and no more than it has"
            yield view.finding("accepted", "num_accepted_tokens", accepted.tolist(), wanted, fix)


def memory_findings(view: View) -> Iterator[Finding]:
    """A state that is overwritten in place must be a node's own output that nothing else reads."""
    graph = view.graph
    for port in view.operator.inputs:
        value = view.ports.get(port.name)
        if not port.fresh or value is None:
            continue
        views = _views(view, value)
        source = _source(view, views[-1])
        # What is given needs a copy however many read it; of what is made here, every view may be read by the next.
        own = views[:1] if source else views
        given = any(one in graph.outputs for one in own)
        readers = list(view.message.input).count(graph.name(value)) - 1
        readers += sum(len(set(graph.consumers[one])) - 1 for one in own)
        if given or readers:
            found = "a graph output" if given else f"read by {readers} more"
            fix = f"copy {port.name} into a value of its own: the kernel overwrites it in place"
            yield view.finding("state-shared", port.name, found, "one reader", fix)
        if source:
            fix = f"copy {port.name} by a node that no converter removes (a Cast, or a Gather of every index)"
            yield view.finding("state-not-fresh", port.name, source, "a node's own output", fix)


def _views(view: View, value: int) -> list[int]:
    """Values that share their memory: one, and what it is a view of, to the one that a node makes or that is given."""
    graph, found = view.graph, [value]
    while (node := graph.producer[value]) >= 0 and _is_view(view, node):
        value = graph.node_inputs[node][0]
        found.append(value)
    return found


def _is_view(view: View, node: int) -> bool:
    """Whether a node's result is its first input, in other sizes at most; such a Cast is taken out by converters."""
    graph, shapes = view.graph, view.shapes
    if graph.standard[node] == "Cast":
        have = shapes.dtype(graph.node_inputs[node][0])
        return have is not None and have == shapes.dtype(graph.node_outputs[node][0])
    return graph.standard[node] in _VIEWS


def _source(view: View, value: int) -> str:
    """What memory a value is, where it is not its producer's own: data of the file, which converters compute too."""
    node = view.graph.producer[value]
    if node < 0:
        return "a constant" if value in view.graph.initializers else "a graph input"
    return "a constant" if _folds(view, value) else ""


def _folds(view: View, value: int) -> bool:
    """Whether a value is computed from constants of the file alone."""
    graph, seen, left = view.graph, set[int](), [value]
    while left:
        value = left.pop()
        if not value or value in seen or value in graph.initializers:
            continue
        seen.add(value)
        node = graph.producer[value]
        if node < 0 or not graph.standard[node] or graph.standard[node].startswith("Random"):
            return False
        left += graph.reads(node)
    return True
