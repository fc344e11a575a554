"""Sizes that are taken over from an equal site are those that the engine gives."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

import graphs
from deltafuse.classes import classify
from deltafuse.finder import Candidate, Finder
from deltafuse.repeats import Repeats
from deltafuse.shapes import Shapes
from exports import export


def copies(count: int) -> onnx.ModelProto:
    """Copies of an export whose chunks read their shapes."""
    model = onnx.load(export("chunk_ts17_dynBT").path)
    whole = onnx.compose.add_prefix(model, "p0.", rename_edges=True)
    for index in range(1, count):
        other = onnx.compose.add_prefix(model, f"p{index}.")
        whole = onnx.compose.merge_models(whole, other, io_map=[])
    # What the file declares lies outside of the sites: an activation ends them.
    for info in whole.graph.output:
        whole.graph.node.append(helper.make_node("Sigmoid", [info.name], [f"{info.name}.end"]))
        info.name += ".end"
    for info in (*whole.graph.input, *whole.graph.output):
        for dim in info.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_param = dim.dim_param.rpartition(".")[2]
    return whole


def found(model: onnx.ModelProto, folder: Path, *, repeats: bool) -> tuple[list[Candidate], int]:
    """The candidates, and how many questions the engine was asked for them."""
    scanned, asked = graphs.scanned(model, folder), list[int]()
    shapes = Shapes(scanned)
    with pytest.MonkeyPatch.context() as patch:
        ask = shapes.contents
        patch.setattr(shapes, "contents", lambda value: (asked.append(value), ask(value))[1])
        if not repeats:
            patch.setattr(Repeats, "_told_otherwise", lambda *_: True)
        candidates = list(Finder(scanned, classify(scanned), shapes, graphs.pattern()).find())
    return candidates, len(asked)


def inner(model: onnx.ModelProto, prefix: str) -> str:
    """A value inside a copy."""
    return next(node.output[0] for node in model.graph.node if node.op_type == "Exp" and node.name.startswith(prefix))


def both(model: onnx.ModelProto, folder: Path) -> tuple[Sequence[Candidate], int, int]:
    plain, questions = found(model, folder, repeats=False)
    candidates, fewer = found(model, folder, repeats=True)
    assert candidates == plain
    assert [candidate.wiring.key for candidate in candidates] == [one.wiring.key for one in plain]
    return candidates, questions, fewer


def test_equal_sites_ask_once(tmp_path: Path) -> None:
    candidates, questions, fewer = both(copies(3), tmp_path)
    assert len(candidates) == 3
    assert all(candidate.sizes for candidate in candidates)
    assert len({candidate.wiring.key for candidate in candidates}) == 1
    assert fewer < questions / 2


def test_a_shape_that_the_file_declares_inside_is_asked_for(tmp_path: Path) -> None:
    model = copies(2)
    value = helper.make_tensor_value_info(inner(model, "p1."), TensorProto.FLOAT, ["a", "b", "c", "d", "e"])
    model.graph.value_info.append(value)
    candidates, questions, fewer = both(model, tmp_path)
    assert len(candidates) == 2
    assert fewer == questions


def test_sites_of_other_shapes_ask_for_their_own(tmp_path: Path) -> None:
    model = copies(2)
    for info in model.graph.input:
        for dim in info.type.tensor_type.shape.dim:
            if info.name.startswith("p1.") and dim.dim_param:
                dim.dim_param += "_other"
    candidates, questions, fewer = both(model, tmp_path)
    first, second = candidates
    assert [dims for _, dims in first.sizes] != [dims for _, dims in second.sizes]
    assert fewer == questions


def test_a_value_beside_a_site_of_which_only_the_shape_is_read_counts(tmp_path: Path) -> None:
    model = copies(2)
    graph = model.graph
    read = [name for node in graph.node for name in node.input]
    made = {name: node.op_type for node in graph.node for name in node.output}
    index, shape = next(
        (index, node)
        for index, node in enumerate(graph.node)
        if node.op_type == "Shape" and node.name.startswith("p1.") and made.get(node.input[0]) == "Slice"
        and read.count(node.input[0]) == 1
    )  # fmt: skip
    graph.node.insert(index, helper.make_node("Concat", [shape.input[0]] * 2, ["twice"], axis=-1))
    shape.input[0] = "twice"
    candidates, _, _ = both(model, tmp_path)
    first, second = candidates
    assert first.wiring.key == second.wiring.key
    assert [dims for _, dims in first.sizes] != [dims for _, dims in second.sizes]
