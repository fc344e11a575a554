"""All sites of a model: shared proofs, and what is never shared."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import graphs
from deltafuse.classes import classify
from deltafuse.finder import Finder
from deltafuse.match import Match, NoMatch
from deltafuse.shapes import Shapes
from deltafuse.sites import Site, prove_sites
from deltafuse.worker import Worker
from exports import export


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker() as one:
        yield one


def all_sites(model: onnx.ModelProto, worker: Worker, folder: Path) -> tuple[list[Site], dict, list[str]]:
    scanned = graphs.scanned(model, folder)
    kinds, shapes, rule = classify(scanned), Shapes(scanned), graphs.pattern()
    told: list[str] = []
    finder = Finder(scanned, kinds, shapes, rule)
    sites, trials = prove_sites(scanned, kinds, shapes, (rule,), worker, finder, lambda one: told.append(one.name))
    return list(sites), trials, told


def two(first: onnx.ModelProto, second: onnx.ModelProto) -> onnx.ModelProto:
    parts = [onnx.compose.add_prefix(model, prefix) for model, prefix in ((first, "a."), (second, "b."))]
    return onnx.compose.merge_models(*parts, io_map=[])


def test_equal_sites_share_one_proof(worker: Worker, tmp_path: Path) -> None:
    sites, trials, told = all_sites(two(graphs.step(), graphs.step()), worker, tmp_path)
    first, second = sites
    assert isinstance(first, Match)
    assert isinstance(second, Match)
    assert (first.proof.shared_with, second.proof.shared_with) == (None, "site.0")
    assert first.class_key == second.class_key
    assert list(trials) == [first.class_key]
    assert told == ["site.0", "site.1"]
    assert [role.name for role in second.operands()] == [role.name.replace("a.", "b.") for role in first.operands()]
    assert [role.name for role in second.results()] == ["b.out", "b.final_state"]
    assert first.scale == second.scale
    assert {first: "a", second: "b"}[second] == "b"


CHANGES = {
    "another scale": [("scale = {0.25}", "scale = {0.5}")],
    "other heads": [("[1,1,4", "[1,1,6"), ("[1,4,5,3]", "[1,6,5,3]")],
    "another key size": [("[1,1,4,5]", "[1,1,4,7]"), ("[1,4,5,3]", "[1,4,7,3]")],
    "another operator": [("Mul(q0, scale)", "Div(q0, scale)")],
    "operands exchanged": [("Mul(k1, delta_row)", "Mul(delta_row, k1)")],
    "another attribute": [
        ("out = Unsqueeze(o, time)", "o9 = Unsqueeze(o, time)\n  out = Transpose<perm = [0, 2, 1, 3]>(o9)")
    ],
    "another result read": [(", float[1,4,5,3] final_state)", ")")],
}


@pytest.mark.parametrize("change", CHANGES)
def test_sites_that_differ_share_nothing(change: str, worker: Worker, tmp_path: Path) -> None:
    sites, trials, _ = all_sites(two(graphs.step(), graphs.step(*CHANGES[change])), worker, tmp_path)
    assert [site.proof.shared_with for site in sites] == [None, None]
    assert len(trials) == 2
    alone, _, _ = all_sites(graphs.step(*CHANGES[change]), worker, tmp_path)
    assert (sites[1].scale, sites[1].dims, sites[1].out.layout) == (alone[0].scale, alone[0].dims, alone[0].out.layout)


def test_a_constant_of_the_same_shape_counts_by_its_bytes(worker: Worker, tmp_path: Path) -> None:
    model = two(graphs.step(), graphs.step())
    next(t for t in model.graph.initializer if t.name == "b.scale").CopyFrom(
        numpy_helper.from_array(np.array(0.125, np.float32), "b.scale")
    )
    sites, _, _ = all_sites(model, worker, tmp_path)
    assert [site.scale for site in sites] == [0.25, 0.125]


def test_a_constant_outside_the_file_counts_by_its_bytes_too(worker: Worker, tmp_path: Path) -> None:
    model = two(graphs.step(), graphs.step())
    for name, number in (("a.scale", 0.5), ("b.scale", 0.125)):
        tensor = next(t for t in model.graph.initializer if t.name == name)
        (tmp_path / name).write_bytes(np.array(number, np.float32).tobytes())
        tensor.Clear()
        tensor.name, tensor.data_type, tensor.data_location = name, TensorProto.FLOAT, TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value=name)
    sites, _, _ = all_sites(model, worker, tmp_path)
    assert [site.scale for site in sites] == [0.5, 0.125]


def test_another_element_type_is_another_class(worker: Worker, tmp_path: Path) -> None:
    half = graphs.step()
    for info in (*half.graph.input, *half.graph.output):
        info.type.tensor_type.elem_type = TensorProto.FLOAT16
    for tensor in half.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float16), tensor.name))
    sites, _, _ = all_sites(two(graphs.step(), half), worker, tmp_path)
    assert [site.proof.shared_with for site in sites] == [None, None]
    assert [site.query.dtype for site in sites] == [TensorProto.FLOAT, TensorProto.FLOAT16]
    assert [site.out.dtype for site in sites] == [TensorProto.FLOAT, TensorProto.FLOAT16]


def test_a_reason_is_shared_as_well(worker: Worker, tmp_path: Path) -> None:
    wrong = [("Mul(final_state, q2)", "Mul(decayed, q2)")]
    sites, trials, _ = all_sites(two(graphs.step(*wrong), graphs.step(*wrong)), worker, tmp_path)
    assert all(isinstance(site, NoMatch) and site.near_miss for site in sites)
    assert [site.reason.code for site in sites] == ["read-before-update"] * 2
    assert trials == {}


def test_a_refusal_is_no_near_miss(worker: Worker, tmp_path: Path) -> None:
    sites, _, _ = all_sites(graphs.step(outputs=["delta"]), worker, tmp_path)
    assert isinstance(sites[0], NoMatch)
    assert (sites[0].near_miss, sites[0].reason.code) == (False, "inner-value-used")


def test_what_a_site_writes_is_known_for_the_next_one(worker: Worker, tmp_path: Path) -> None:
    # TorchScript declares nothing: the second layer's sizes follow from the first layer's output.
    sites, _, _ = all_sites(onnx.load(export("two_sizes_ts17").path), worker, tmp_path)
    assert [(site.dims.key_dim, site.dims.value_dim, site.dims.tokens) for site in sites] == [
        (64, 64, 12),
        (128, 128, 12),
    ]
    assert [site.out.shape[-1] for site in sites] == [64, 128]


@pytest.mark.parametrize(
    ("name", "form"),
    [("chunk_dy18", "chunk"), ("chunk_ts14", "chunk"), ("rec_dy18", "recurrent"), ("steps_ts17", "recurrent")],
)
def test_the_form_is_how_it_is_written(name: str, form: str, worker: Worker, tmp_path: Path) -> None:
    sites, _, _ = all_sites(onnx.load(export(name).path), worker, tmp_path)
    assert [site.form for site in sites] == [form]


def test_a_match_says_what_it_is(worker: Worker, tmp_path: Path) -> None:
    (site,), _, _ = all_sites(onnx.load(export("chunk_dy20_dynBT").path), worker, tmp_path)
    assert site.rule == "gated_delta_rule"
    assert [role.layout for role in site.operands()] == ["BTHD", "BTHD", "BTHD", "BTH", "BTH", "BHKV"]
    assert [role.layout for role in site.results()] == ["BTHD", "BHKV"]
    assert [str(dim) for dim in site.query.shape] == [str(site.dims.batch), str(site.query.shape[1]), "2", "16"]
    assert [str(dim) for dim in site.final_state.shape] == [str(site.dims.batch), "4", "16", "24"]
    assert site.out.dtype == site.g.dtype == TensorProto.FLOAT
    assert (site.query_norm.kind, site.key_norm.kind) == ("rsqrt", "rsqrt")


#: A scale of 2**-14 in single precision and of 0 in bfloat16, from constants that both hold as they are.
ROUNDED = [
    ("  q1 = Mul(q0, scale)", "  m = Mul(c, c)\n  d = Sub(m, c2)\n  scale = Cast<to = 1>(d)\n  q1 = Mul(q0, scale)"),
    ("float scale = {0.25}", "float c = {1.0078125}, float c2 = {1.015625}"),
]


def test_constants_of_another_type_are_not_covered_by_a_proof(worker: Worker, tmp_path: Path) -> None:
    other = graphs.step(*ROUNDED)
    for tensor in other.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT:
            number = float(numpy_helper.to_array(tensor)[()])
            tensor.CopyFrom(helper.make_tensor(tensor.name, TensorProto.BFLOAT16, [], [number]))
    for model in (two(graphs.step(*ROUNDED), other), two(other, graphs.step(*ROUNDED))):
        sites, _, _ = all_sites(model, worker, tmp_path)
        outcomes = [site.reason.code if isinstance(site, NoMatch) else "match" for site in sites]
        assert sorted(outcomes) == ["constant-rounds", "match"]
