"""Inputs of whole models: sizes that go together, values as a real run has them, arrays of the user's own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from deltafuse import pipeline
from deltafuse.classes import classify
from deltafuse.dims import symbol
from deltafuse.errors import UserError
from deltafuse.inputs import InputOptions, Inputs, make_inputs
from deltafuse.inputs_file import read_arrays, write_arrays
from deltafuse.inputs_roles import InputRole
from deltafuse.inputs_sizes import SiteSizes
from deltafuse.options import FuseOptions, SilentProgress
from deltafuse.verify import verify
from deltafuse.verify_feeds import Part
from deltafuse.wire import scan
from exports import export

pytestmark = pytest.mark.usefixtures("one_worker")

INT64, FLOAT, HALF = TensorProto.INT64, TensorProto.FLOAT, TensorProto.FLOAT16
VOCABULARY, HIDDEN, IMAGE = 50, 4, 7
ANY = (SiteSizes(symbol("seq"), (3, 12)),)


@pytest.fixture(scope="module")
def fused(tmp_path_factory):
    """The fused file of a fixture; each is fused once."""
    folder = tmp_path_factory.mktemp("fused")

    def of(name: str) -> Path:
        output = folder / f"{name}.onnx"
        if not output.exists():
            assert pipeline.fuse(FuseOptions(export(name).path, output), SilentProgress()).exit == 0
        return output

    return of


def sites_of(path: Path) -> list[SiteSizes]:
    """Token axis and proven range as the fixtures' fused nodes state them."""
    graph = onnx.load(path).graph
    found = []
    for node in graph.node:
        if node.op_type == "Custom":
            info = next(info for info in graph.value_info if info.name == node.output[0])
            dim = info.type.tensor_type.shape.dim[0]
            low, _, high = next(p.value for p in node.metadata_props if p.key == "deltafuse.valid_tokens").partition(
                ".."
            )
            found.append(SiteSizes(dim.dim_value or symbol(dim.dim_param), (int(low), int(high))))
    return found


def made(model_path: Path, sites=(), parts=None, **options) -> Inputs:
    model = scan(model_path)
    return make_inputs(model, classify(model), sites, parts or {}, InputOptions(**options))


@pytest.fixture
def make(tmp_path):
    """Inputs of a model made by hand: what is declared, and nodes and weights that use it."""

    def call(inputs, nodes=(), weights=(), sites=ANY, outputs=(), parts=None, **options) -> Inputs:
        declared = [helper.make_tensor_value_info(name, dtype, shape) for name, (dtype, shape) in inputs.items()]
        results = [helper.make_tensor_value_info(name, dtype, shape) for name, dtype, shape in outputs]
        tensors = [numpy_helper.from_array(array, name) for name, array in weights]
        graph = helper.make_graph(list(nodes), "g", declared, results, tensors)
        path = tmp_path / "model.onnx"
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
        return made(path, sites, parts, **options)

    return call


def embedding(ids: str = "ids") -> dict[str, object]:
    """Nodes and weights that look ids up and tell images from words."""
    table = np.random.default_rng(0).standard_normal((VOCABULARY, HIDDEN)).astype(np.float32)
    nodes = [
        helper.make_node("Gather", ["table", ids], ["words"]),
        helper.make_node("Equal", [ids, "image"], ["is_image"]),
    ]
    return {"nodes": nodes, "weights": [("table", table), ("image", np.array(IMAGE, np.int64))]}


# Sizes.


def test_a_mask_is_as_long_as_past_and_step(fused):
    path = fused("full_decode_ts17")
    inputs = made(path, sites_of(path))
    assert inputs.sizes == {"past_seq_len": 8, "total_seq_len": 9}
    assert {name: array.shape for name, array in inputs.arrays.items()} == {
        "input_ids": (1, 1),
        "attention_mask": (1, 9),
        "position_ids": (4, 1, 1),
        "past_conv_states": (3, 1, 128, 4),
        "past_recurrent_states": (3, 1, 4, 16, 16),
        "past_kv_cache": (2, 1, 1, 8, 32),
    }


@pytest.mark.parametrize(
    ("dims", "expected"),
    [({"past_seq_len": 40}, (40, 41)), ({"total_seq_len": 5}, (4, 5)), ({"past_seq_len": 9999}, (9999, 10000))],
)
def test_what_a_size_is_tied_to_follows_it(fused, dims, expected):
    path = fused("full_decode_ts17")
    sizes = made(path, sites_of(path), dims=dims).sizes
    assert (sizes["past_seq_len"], sizes["total_seq_len"]) == expected


def test_a_mask_that_nothing_ties_is_as_long_as_the_cache_has_grown(fused):
    path = fused("full_decode_transformers")
    inputs = made(path, sites_of(path), dims={"s12": 20})
    assert inputs.arrays["attention_mask"].shape == (1, 21)
    assert inputs.arrays["input.cache.layers.3.keys"].shape[2] == 20


@pytest.mark.parametrize("name", ["full_prefill_ts17", "full_prefill_transformers"])
def test_the_token_count_is_in_the_proven_range(fused, name):
    path = fused(name)
    sites = sites_of(path)
    assert made(path, sites).arrays["input_ids"].shape == (1, 24)
    (count,) = {dim.terms[0][0][0][0] for dim in (site.tokens for site in sites)}
    assert made(path, sites, dims={count: 31}).arrays["attention_mask"].shape == (1, 31)
    with pytest.raises(UserError, match="right for 17 to 32 tokens") as error:
        made(path, sites, dims={count: 33})
    assert error.value.code == "sizes-contradict"


def test_a_token_count_that_no_file_states_is_one_that_the_sites_ran_at(make):
    sites = [SiteSizes(symbol("seq"), None, (5, 70))]
    assert make({"x": (FLOAT, ["seq", 3])}, sites=sites).arrays["x"].shape == (5, 3)


def test_what_else_is_free_in_a_site_is_one_sequence(make):
    sites = [SiteSizes(symbol("seq"), (4, 4), others=(symbol("batch"), symbol("seq"), 16))]
    inputs = make({"x": (FLOAT, ["batch", "seq", 3]), "y": (FLOAT, ["rows", 2])}, sites=sites)
    assert inputs.sizes == {"batch": 1, "seq": 4, "rows": 8}


def test_operands_whose_token_axes_have_names_of_their_own_get_one_count(make):
    alike = symbol("s1"), symbol("s2")
    sites = [SiteSizes(symbol("s1"), (9, 9), alike=alike, others=(*alike, symbol("batch")))]
    inputs = {"x": (FLOAT, ["batch", "s1", 3]), "y": (FLOAT, ["batch", "s2", 3])}
    assert make(inputs, sites=sites).sizes == {"batch": 1, "s1": 9, "s2": 9}


def test_dims_that_contradict_each_other_are_told_with_the_node(fused):
    path = fused("full_decode_ts17")
    with pytest.raises(UserError, match=r"past_seq_len \+ 1 = total_seq_len") as error:
        made(path, sites_of(path), dims={"past_seq_len": 40, "total_seq_len": 40})
    assert error.value.code == "sizes-contradict"


def test_two_names_of_one_axis_get_one_size(make):
    nodes = [helper.make_node("Add", ["x", "y"], ["z"])]
    inputs = {"x": (FLOAT, ["a", "seq"]), "y": (FLOAT, ["b", "seq"])}
    sizes = make(inputs, nodes, dims={"b": 3}).sizes
    assert sizes["a"] == sizes["b"] == 3
    # A site may know the axis by either name.
    assert make(inputs, nodes, sites=[SiteSizes(symbol("b"), (2, 2))]).sizes == {"a": 2, "b": 2, "seq": 8}
    with pytest.raises(UserError, match="a, b are one axis") as error:
        make(inputs, nodes, dims={"a": 2, "b": 3})
    assert error.value.code == "sizes-contradict"


def test_an_unknown_dim_is_told_the_known_ones(fused):
    path = fused("full_decode_ts17")
    with pytest.raises(UserError, match=r"--dim batch.*total_seq_len") as error:
        made(path, sites_of(path), dims={"batch": 1})
    assert error.value.code == "unknown-dim"


def test_sizes_that_cannot_be_found_name_what_stands_against_them(make):
    sites = [SiteSizes(symbol("seq"), (3, 5)), SiteSizes(symbol("seq"), (7, 9))]
    with pytest.raises(UserError, match=r"3 to 5.*7 to 9.*--dim SYMBOL=N") as error:
        make({"x": (FLOAT, ["seq"])}, sites=sites)
    assert error.value.code == "sizes-unsolved"


# Values.


def test_ids_are_below_the_rows_of_the_embedding(make):
    ids = make({"ids": (INT64, [1, "seq"])}, **embedding(), dims={"seq": 12}).arrays["ids"]
    assert ids.dtype == np.int64
    assert 0 <= ids.min() < ids.max() < VOCABULARY
    assert len(set(ids.flatten().tolist())) > 4


def test_ids_are_followed_through_casts_and_layout(make):
    given = embedding("flat")
    given["nodes"] = [
        helper.make_node("Cast", ["ids"], ["wide"], to=INT64),
        helper.make_node("Reshape", ["wide", "shape"], ["flat"]),
        *given["nodes"],
    ]
    given["weights"].append(("shape", np.array([-1])))
    inputs = make({"ids": (TensorProto.INT32, [1, "seq"])}, **given)
    assert inputs.roles["ids"] == InputRole("ids", VOCABULARY, (IMAGE,))
    assert inputs.arrays["ids"].dtype == np.int32


@pytest.mark.parametrize("seed", range(8))
def test_no_id_stands_for_an_image_unless_rows_are_asked_for(make, seed):
    declared = {"ids": (INT64, [1, "seq"]), "image_embeds": (HALF, ["images", HIDDEN])}
    inputs = make(declared, **embedding(), dims={"seq": 12}, seed=seed)
    assert inputs.roles["image_embeds"].role == "image"
    assert IMAGE not in inputs.arrays["ids"]
    inputs = make(declared, **embedding(), dims={"seq": 12, "images": 5}, seed=seed)
    assert np.flatnonzero(inputs.arrays["ids"] == IMAGE).tolist() == [1, 2, 3, 4, 5]
    assert inputs.arrays["image_embeds"].shape == (5, HIDDEN)


def test_image_rows_of_the_user_get_as_many_ids(make, tmp_path):
    declared = {"ids": (INT64, [1, "seq"]), "image_embeds": (FLOAT, ["images", HIDDEN])}
    np.savez(tmp_path / "rows.npz", image_embeds=np.ones((3, HIDDEN), np.float32))
    inputs = make(declared, **embedding(), dims={"seq": 3}, path=tmp_path / "rows.npz")
    assert inputs.arrays["ids"].tolist() == [[IMAGE] * 3]


def test_more_image_rows_than_tokens_are_refused(make):
    declared = {"ids": (INT64, [1, "seq"]), "image_embeds": (FLOAT, ["images", HIDDEN])}
    with pytest.raises(UserError, match="13 image rows do not fit into 12 tokens") as error:
        make(declared, **embedding(), dims={"seq": 12, "images": 13})
    assert error.value.code == "inputs-image"


@pytest.mark.parametrize("shape", [["seq"], [1, "seq"], [3, 1, "seq"], [4, 1, "seq"]])
def test_position_rows_are_equal_and_go_on_from_the_past(make, shape):
    declared = {"position_ids": (INT64, shape), "mask": (INT64, [1, "total"])}
    positions = make(declared, dims={"seq": 4, "total": 10}).arrays["position_ids"]
    assert positions.shape == tuple(4 if size == "seq" else size for size in shape)
    rows = positions.reshape(-1, 4)
    assert [row.tolist() for row in rows] == [[6, 7, 8, 9]] * len(rows)


def test_positions_are_told_by_the_sine_that_is_taken_of_them(make):
    nodes = [
        helper.make_node("Cast", ["where"], ["numbers"], to=FLOAT),
        helper.make_node("Mul", ["numbers", "speed"], ["angle"]),
        helper.make_node("Cos", ["angle"], ["cosine"]),
    ]
    inputs = make({"where": (INT64, [1, "seq"])}, nodes, [("speed", np.ones(1, np.float32))], dims={"seq": 3})
    assert inputs.roles["where"].role == "positions"
    assert inputs.arrays["where"].tolist() == [[0, 1, 2]]


def test_positions_that_are_looked_up_stay_below_the_table(make):
    given = {
        "nodes": [helper.make_node("Gather", ["table", "position_ids"], ["turned"])],
        "weights": [("table", np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32))],
    }
    assert make({"position_ids": (INT64, ["seq"])}, **given, dims={"seq": 9}).arrays["position_ids"].max() == 5


def test_past_is_the_length_of_the_cache_where_there_is_no_mask(make):
    declared = {"position_ids": (INT64, [1, "seq"]), "keys": (FLOAT, [1, 2, "past", 8])}
    inputs = make(declared, dims={"seq": 3, "past": 11})
    assert inputs.arrays["position_ids"].tolist() == [[11, 12, 13]]


def test_masks_are_ones_true_or_zero(make):
    declared = {
        "attention_mask": (INT64, [1, "seq"]),
        "keep": (TensorProto.BOOL, [1, 1, "seq", "seq"]),
        "bias_mask": (FLOAT, [1, 1, "seq", "seq"]),
    }
    arrays = make(declared, dims={"seq": 4}).arrays
    assert (arrays["attention_mask"].dtype, arrays["attention_mask"].tolist()) == (np.int64, [[1] * 4])
    assert arrays["keep"].dtype == np.bool_
    assert arrays["keep"].all()
    assert not arrays["bias_mask"].any()


def test_states_are_drawn_at_the_size_that_real_ones_have(fused):
    path = fused("full_decode_ts17_half")
    part = Part("state", key_dim=16)
    inputs = made(path, sites_of(path), {"past_recurrent_states": part})
    state, cache = inputs.arrays["past_recurrent_states"], inputs.arrays["past_kv_cache"]
    assert (state.dtype, cache.dtype) == (np.float32, np.float16)
    assert state.std() == pytest.approx(0.25, rel=0.05)
    assert cache.astype(np.float64).std() == pytest.approx(1.0, rel=0.15)


def test_operands_of_a_site_that_are_inputs_are_drawn_as_operands(make):
    declared = {"g": (FLOAT, [1, "seq", 2]), "beta": (FLOAT, [1, "seq", 2]), "key": (FLOAT, [1, "seq", 2, 8])}
    parts = {"g": Part("g"), "beta": Part("beta"), "key": Part("key", key_dim=8)}
    arrays = make(declared, parts=parts).arrays
    assert (arrays["g"] < 0).all()
    assert ((arrays["beta"] > 0) & (arrays["beta"] < 1)).all()
    np.testing.assert_allclose(np.linalg.norm(arrays["key"], axis=-1), 1, rtol=1e-6)


def test_a_seed_gives_the_same_arrays_and_another_one_others(make):
    declared = {"x": (FLOAT, ["seq", 3]), "y": (FLOAT, ["seq", 3])}
    first, again, other = (make(declared, seed=seed).arrays for seed in (1, 1, 2))
    np.testing.assert_array_equal(first["x"], again["x"])
    assert not np.array_equal(first["x"], other["x"])
    assert not np.array_equal(first["x"], first["y"])


@pytest.mark.parametrize(
    ("declared", "code"),
    [({"x": (TensorProto.STRING, ["seq"])}, "inputs-type"), ({"x": (FLOAT, None)}, "inputs-rank")],
)
def test_what_cannot_be_drawn_must_be_given(make, declared, code):
    with pytest.raises(UserError, match="--inputs") as error:
        make(declared)
    assert error.value.code == code


# Arrays of the user's own.


def test_some_arrays_are_given_and_the_others_drawn_to_fit(fused, tmp_path):
    path, given = fused("full_decode_ts17"), tmp_path / "given.npz"
    cache = np.full((2, 1, 1, 5, 32), 2, np.float32)
    np.savez(given, past_kv_cache=cache, out0=np.zeros(3))
    inputs = made(path, sites_of(path), path=given)
    assert inputs.given == ("past_kv_cache",)
    np.testing.assert_array_equal(inputs.arrays["past_kv_cache"], cache)
    assert inputs.sizes == {"past_seq_len": 5, "total_seq_len": 6}
    assert inputs.arrays["attention_mask"].shape == (1, 6)


@pytest.mark.parametrize(
    ("arrays", "code", "says"),
    [
        ({"nothing": np.zeros(1)}, "inputs-unknown", "input_ids"),
        ({"input_ids": np.zeros((1, 1), np.int32)}, "inputs-type", "int64"),
        ({"input_ids": np.zeros((2, 1), np.int64)}, "inputs-shape", "size 2 on axis 0"),
        ({"input_ids": np.zeros(1, np.int64)}, "inputs-shape", "1 axis"),
        ({"past_kv_cache": np.zeros((2, 1, 1, 5, 32), np.float32), "attention_mask": np.ones((1, 5), np.int64)},
         "sizes-contradict", "past_seq_len"),
    ],
)  # fmt: skip
def test_arrays_that_do_not_fit_are_told(fused, tmp_path, arrays, code, says):
    np.savez(tmp_path / "given.npz", **arrays)
    path = fused("full_decode_ts17")
    with pytest.raises(UserError, match=says) as error:
        made(path, sites_of(path), path=tmp_path / "given.npz")
    assert error.value.code == code


@pytest.mark.parametrize(
    ("content", "code"),
    [(b"a letter", "inputs-unreadable"), (b"PK\x03\x04", "inputs-unreadable"), (None, "inputs-missing")],
)
def test_a_file_that_holds_no_arrays(tmp_path, content, code):
    path = tmp_path / "given.npz"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=str(path)) as error:
        read_arrays(path)
    assert error.value.code == code


def test_a_single_array_is_no_npz(tmp_path):
    np.save(tmp_path / "one.npy", np.zeros(2))
    with pytest.raises(UserError, match="no arrays by name"):
        read_arrays(tmp_path / "one.npy")


def test_arrays_of_any_name_come_back_as_they_were(tmp_path):
    arrays = {
        "input.cache/0": np.arange(6, dtype=np.float16).reshape(2, 3),
        "file": np.array(True),
        "e": np.zeros((0, 4)),
    }
    write_arrays(tmp_path / "saved.npz", arrays)
    back = read_arrays(tmp_path / "saved.npz")
    assert list(back) == list(arrays)
    for name, array in arrays.items():
        assert (back[name].dtype, back[name].shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(back[name], array)


def test_inputs_that_are_saved_are_those_that_were_used_and_can_be_given_again(fused, tmp_path):
    source, output = export("full_decode_ts17_half").path, fused("full_decode_ts17_half")
    saved = tmp_path / "saved.npz"
    first = verify(source, output, inputs=InputOptions(save=saved, seed=3, dims={"past_seq_len": 6}))
    again = verify(source, output, inputs=InputOptions(path=saved))
    assert first.exit == again.exit == 0
    assert first.network.outputs == again.network.outputs
    assert {item.role for item in again.network.inputs} == {"given"}
    assert verify(source, output, inputs=InputOptions(seed=4)).network.outputs != first.network.outputs
