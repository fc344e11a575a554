"""What a target emits is proven once more: every way to get it wrong is noticed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import graphs
from deltafuse import targets
from deltafuse.agreement import BAR
from deltafuse.classes import classify
from deltafuse.emitted import prove_emitted
from deltafuse.errors import InternalError
from deltafuse.finder import Finder
from deltafuse.lowering import fused_type
from deltafuse.match import Plan
from deltafuse.shapes import Shapes
from deltafuse.sites import prove_sites
from deltafuse.targets import TargetOptions
from deltafuse.trial import Trial
from deltafuse.wire import scan
from deltafuse.worker import Worker
from exports import export


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker() as one:
        yield one


def planned(path: Path, worker: Worker) -> tuple[Plan, Trial, int]:
    model = scan(path)
    kinds, shapes, rule = classify(model), Shapes(model), graphs.pattern()
    sites, trials = prove_sites(model, kinds, shapes, (rule,), worker, Finder(model, kinds, shapes, rule), str)
    plan = targets.get("ascend-310p").plan(sites[0], TargetOptions())
    assert isinstance(plan, Plan), plan
    return plan, trials[sites[0].class_key], model.opset_imports[""]


@pytest.fixture(scope="module")
def step(worker: Worker, tmp_path_factory: pytest.TempPathFactory) -> tuple[Plan, Trial, int]:
    # Key and value size agree, so that a forgotten transpose stays legal.
    square = (("[1,1,4,3]", "[1,1,4,5]"), ("[1,4,5,3]", "[1,4,5,5]"))
    return planned(graphs.save(graphs.step(*square), tmp_path_factory.mktemp("step")), worker)


@pytest.fixture(scope="module")
def chunk(worker: Worker) -> tuple[Plan, Trial, int]:
    return planned(export("chunk_dy20_dynBT").path, worker)


def test_what_the_target_emits_is_equal(step, chunk, worker: Worker) -> None:
    for plan, trial, opset in (step, chunk):
        assert prove_emitted(plan, trial, worker, opset) <= BAR


def changed(plan: Plan, change: Callable[[list[onnx.NodeProto]], None]) -> Plan:
    nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in plan.nodes]
    change(nodes)
    return replace(plan, nodes=tuple(nodes))


def custom(nodes: list[onnx.NodeProto]) -> onnx.NodeProto:
    return next(node for node in nodes if fused_type(node))


def swap(first: int, second: int) -> Callable[[list[onnx.NodeProto]], None]:
    def change(nodes: list[onnx.NodeProto]) -> None:
        inputs = custom(nodes).input
        inputs[first], inputs[second] = inputs[second], inputs[first]

    return change


def scaled(port: int, factor: float) -> Callable[[list[onnx.NodeProto]], None]:
    """One operand times a factor."""

    def change(nodes: list[onnx.NodeProto]) -> None:
        node = custom(nodes)
        place = nodes.index(node)
        source = node.input[port]
        node.input[port] = f"{source}.scaled"
        dtype = np.float32 if port == 6 else np.float16
        value = numpy_helper.from_array(np.array(factor, dtype))
        nodes.insert(place, helper.make_node("Mul", [source, f"{source}.factor"], [f"{source}.scaled"]))
        nodes.insert(place, helper.make_node("Constant", [], [f"{source}.factor"], value=value))

    return change


def without_transpose(nodes: list[onnx.NodeProto]) -> None:
    """Each Transpose of a state becomes an Identity."""
    found = [
        n for n in nodes if n.op_type == "Transpose" and list(helper.get_node_attr_value(n, "perm")) == [0, 1, 3, 2]
    ]
    assert found
    for node in found:
        node.op_type = "Identity"
        del node.attribute[:]


WRONG = {
    "query and key exchanged": swap(0, 1),
    "g a little less": scaled(6, 0.9),
    "beta a little less": scaled(3, 0.97),
    "value a little more": scaled(2, 1.01),
    "state a little less": scaled(4, 0.99),
    "state not transposed": without_transpose,
}


@pytest.mark.parametrize("how", WRONG)
def test_wrong_nodes_are_noticed(how: str, step, worker: Worker) -> None:
    plan, trial, opset = step
    with pytest.raises(InternalError) as error:
        prove_emitted(changed(plan, WRONG[how]), trial, worker, opset)
    assert plan.match.name in str(error.value)
    assert plan.op in str(error.value)


@pytest.mark.parametrize("how", ["", *WRONG])
def test_a_child_that_died_since_does_not_have_nodes_compared_with_themselves(how: str, tmp_path: Path) -> None:
    with Worker() as own:
        plan, trial, opset = planned(graphs.save(graphs.step(), tmp_path), own)
        own._child.kill()
        own._child.wait()
        if not how:
            assert prove_emitted(plan, trial, own, opset, batch=1) <= BAR
            return
        with pytest.raises(InternalError):
            prove_emitted(changed(plan, WRONG[how]), trial, own, opset)


@pytest.mark.parametrize("factor", [1.0000001, 0.5, 4.0, -1.0])
def test_a_wrong_scale_is_noticed(factor: float, step, worker: Worker) -> None:
    plan, trial, opset = step
    wrong = replace(plan, match=replace(plan.match, scale=plan.match.scale * factor))
    with pytest.raises(InternalError):
        prove_emitted(wrong, trial, worker, opset)


@pytest.mark.parametrize("factor", [1.001, 0.5, -1.0])
def test_a_wrong_scale_of_the_node_is_noticed(factor: float, step, worker: Worker) -> None:
    plan, trial, opset = step

    def change(nodes: list[onnx.NodeProto]) -> None:
        (attribute,) = (one for node in nodes for one in node.attribute if one.name == "scale_value")
        attribute.f *= factor

    with pytest.raises(InternalError, match="the scale of"):
        prove_emitted(changed(plan, change), trial, worker, opset)


def test_another_eps_is_noticed(chunk, worker: Worker) -> None:
    plan, trial, opset = chunk

    def change(nodes: list[onnx.NodeProto]) -> None:
        done = 0
        for node in nodes:
            for attribute in node.attribute:
                if attribute.name == "value" and attribute.t.data_type == onnx.TensorProto.FLOAT:
                    array = numpy_helper.to_array(attribute.t)
                    if array.size == 1 and 0 < array < 1e-5:
                        attribute.t.CopyFrom(numpy_helper.from_array(array * np.float32(1.01)))
                        done += 1
        assert done

    with pytest.raises(InternalError):
        prove_emitted(changed(plan, change), trial, worker, opset)


def test_nodes_that_do_not_run_are_our_bug(step, worker: Worker) -> None:
    plan, trial, opset = step

    def change(nodes: list[onnx.NodeProto]) -> None:
        nodes[0].op_type = "Nothing"

    with pytest.raises(InternalError) as error:
        prove_emitted(changed(plan, change), trial, worker, opset)
    assert "Nothing" in str(error.value)
