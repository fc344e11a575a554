"""Which models of a folder are a pair, and whether the states that they hand on fit."""

from __future__ import annotations

import pytest
from onnx import TensorProto

from deltafuse.folder_pairing import paired
from deltafuse.folder_pairs import Interface, Tensor, interface, with_pins
from deltafuse.match import Pinned
from deltafuse.wire import scan
from exports import export
from folders import DEMO

FLOAT, HALF = int(TensorProto.FLOAT), int(TensorProto.FLOAT16)


def model(inputs=(), outputs=()):
    """An interface: name -> shape, or (type, shape)."""

    def tensors(given):
        return {
            name: Tensor(*value) if isinstance(value[0], int) and isinstance(value[-1], tuple) else Tensor(FLOAT, value)
            for name, value in dict(given).items()
        }

    return Interface(tensors(inputs), tensors(outputs), frozenset())


def pairs(models):
    """The pairs, where every model that hands a state on has its partner."""
    found = paired(models)
    assert found.alone == ()
    return found.pairs


def joined(prefill, decode):
    (pair,) = pairs({"prefill/m.onnx": prefill, "decode/m.onnx": decode})
    return pair


def codes(pair):
    return [reason.code for reason in pair.differences]


NAMES = [
    ("present_states", "past_states"),
    ("present.0.key", "past_key_values.0.key"),
    ("present_key_values.0.key", "past_key_values.0.key"),
    ("output.cache.layers.0.keys", "input.cache.layers.0.keys"),
    ("cache.layers.0.keys", "input.cache.layers.0.keys"),
    ("recurrent_states", "past_recurrent_states"),
]


@pytest.mark.parametrize(("output", "taken"), NAMES)
def test_names_that_belong_together(output, taken):
    prefill = model({"input_ids": (1,)}, {output: (1, 4), "logits": (1,)})
    pair = joined(prefill, model({taken: (1, 4)}, {output: (1, 4), "logits": (1,)}))
    assert [(state.output, state.input) for state in pair.states] == [(output, taken)]
    assert (pair.prefill, pair.decode) == ("prefill/m.onnx", "decode/m.onnx")
    assert codes(pair) == []


@pytest.mark.parametrize(
    ("given", "taken"),
    [((1, 4), (1, 4)), (("batch", 4), (1, 4)), ((1, 4), ("batch", 4)), (("a", "b"), ("c", "d")), (None, (1, 4))],
)
def test_shapes_that_fit(given, taken):
    prefill = model({}, {"present_x": (FLOAT, given) if given is None else given})
    prefill = prefill if given else Interface({}, {"present_x": Tensor(FLOAT, None)}, frozenset())
    assert codes(joined(prefill, model({"past_x": taken}))) == []


@pytest.mark.parametrize(("given", "taken", "axis"), [((2, 4), (1, 4), "0"), ((1, 4), (1, 5), "1"), ((1,), (1, 4), "1"),
                                                      (("b",), ("b", "c"), "count")])  # fmt: skip
def test_shapes_that_do_not_fit(given, taken, axis):
    pair = joined(model({}, {"present_x": given}), model({"past_x": taken}))
    assert codes(pair) == ["pair-shape"]
    text = pair.differences[0].text
    shown = [f"[{', '.join(map(str, shape))}]" for shape in (given, taken)]
    assert f"prefill/m.onnx gives present_x as {shown[0]} and decode/m.onnx takes past_x as {shown[1]}" in text
    assert f"axis {axis} differs" in text


def test_types_that_do_not_fit():
    pair = joined(model({}, {"present_x": (FLOAT, (1, 4))}), model({"past_x": (HALF, (1, 4))}))
    assert codes(pair) == ["pair-dtype"]


def test_states_without_a_counterpart():
    pair = joined(model({}, {"present_x": (1,), "present_y": (1,)}), model({"past_x": (1,), "past_z": (1,)}))
    assert codes(pair) == ["pair-unread", "pair-missing"]
    assert "present_y" in pair.differences[0].text
    assert "past_z" in pair.differences[1].text


def test_the_nearest_prefill_is_taken():
    prefill, decode = model({}, {"present_x": (1,)}), model({"past_x": (1,)}, {"present_x": (1,)})
    found = pairs({"a/prefill/m.onnx": prefill, "a/decode/m.onnx": decode, "b/prefill/m.onnx": prefill,
                   "b/decode/m.onnx": decode, "vision/m.onnx": model({"pixels": (1,)}, {"image": (1,)})})  # fmt: skip
    assert [(pair.prefill, pair.decode) for pair in found] == [
        ("a/prefill/m.onnx", "a/decode/m.onnx"),
        ("b/prefill/m.onnx", "b/decode/m.onnx"),
    ]


def test_both_in_one_folder():
    prefill, decode = model({}, {"present_x": (1,)}), model({"past_x": (1,)}, {"present_x": (1,)})
    assert len(pairs({"prefill.onnx": prefill, "decode.onnx": decode})) == 1
    assert pairs({"decode.onnx": decode}) == ()


def of(size, dtype=FLOAT):
    """A prefill and a decode whose state has this size."""
    state = (dtype, (1, size))
    return model({}, {"present_x": state}), model({"past_x": state}, {"present_x": state})


def folder(**sizes):
    """A folder of models: name, with ``__`` for a folder -> size of the state; decodes are told by name."""
    return {f"{name.replace('__', '/')}.onnx": of(size)["decode" in name] for name, size in sizes.items()}


def told(models):
    found = paired(models)
    return {(pair.prefill.removesuffix(".onnx"), pair.decode.removesuffix(".onnx")) for pair in found.pairs}, [
        (reason.code, reason.args["model"].removesuffix(".onnx")) for reason in found.alone
    ]


BELONGING = [
    # The same name but for the part that says which of the two it is, wherever that stands.
    ({"qwen_prefill_a": 4, "qwen_prefill_b": 4, "qwen_decode_a": 4, "qwen_decode_b": 4},
     {("qwen_prefill_a", "qwen_decode_a"), ("qwen_prefill_b", "qwen_decode_b")}),
    ({"prefill__a": 4, "prefill__b": 4, "decode__a": 4, "decode__b": 4},
     {("prefill/a", "decode/a"), ("prefill/b", "decode/b")}),
    ({"a_prefill__m": 4, "b_prefill__m": 4, "a_decode__m": 4, "b_decode__m": 4},
     {("a_prefill/m", "a_decode/m"), ("b_prefill/m", "b_decode/m")}),
    ({"PrefillA": 4, "PrefillB": 4, "decodeA": 4, "decodeB": 4}, {("PrefillA", "decodeA"), ("PrefillB", "decodeB")}),
    ({"prefill32": 4, "prefill64": 4, "decode32": 4, "decode64": 4},
     {("prefill32", "decode32"), ("prefill64", "decode64")}),
    # Names that say nothing: the states do.
    ({"prefill_x": 4, "prefill_y": 8, "decode_u": 8, "decode_v": 4},
     {("prefill_x", "decode_v"), ("prefill_y", "decode_u")}),
    # Several lengths of the one beside a single other one.
    ({"prefill_32": 4, "prefill_128": 4, "decode": 4}, {("prefill_32", "decode"), ("prefill_128", "decode")}),
    ({"prefill": 4, "prefill_128": 4, "decode": 4}, {("prefill", "decode"), ("prefill_128", "decode")}),
    ({"prefill": 4, "decode_1": 4, "decode_4": 4}, {("prefill", "decode_1"), ("prefill", "decode_4")}),
    ({"prefill": 4, "decode": 4, "decode_4": 4}, {("prefill", "decode"), ("prefill", "decode_4")}),
]  # fmt: skip


@pytest.mark.parametrize(("sizes", "wanted"), BELONGING)
def test_several_of_each_are_joined_by_what_belongs_together(sizes, wanted):
    assert told(folder(**sizes)) == (wanted, [])


def test_names_that_belong_together_are_compared_though_others_fit():
    found = paired(folder(prefill_a=4, prefill_b=8, decode_a=8, decode_b=4))
    assert {(pair.prefill, pair.decode): codes(pair) for pair in found.pairs} == {
        ("prefill_a.onnx", "decode_a.onnx"): ["pair-shape"],
        ("prefill_b.onnx", "decode_b.onnx"): ["pair-shape"],
    }


@pytest.mark.parametrize("sizes", [{"prefill_32": 4, "prefill_128": 8, "decode": 6}, {"prefill": 4, "decode_1": 6,
                                                                                     "decode_4": 8}])  # fmt: skip
def test_where_none_fits_the_only_partner_is_compared(sizes):
    assert [codes(pair) for pair in pairs(folder(**sizes))] == [["pair-shape"], ["pair-shape"]]


def test_each_that_fits_several_alike_is_told_in_one_sentence():
    models = folder(prefill_x=4, prefill_y=4, prefill_z=4, decode_1=4, decode_2=4, decode_3=4, decode_4=4)
    found, alone = told(models)
    assert (found, alone) == (set(), [("pair-unsure", f"prefill_{name}") for name in "xyz"])
    text = paired(models).alone[0].text
    assert text.startswith("prefill_x.onnx has no partner of its own: its states fit decode_1.onnx, decode_2.onnx, ")
    assert "decode_3.onnx and 1 more alike; give the two of a pair a folder of their own" in text


def test_one_that_fits_none_of_several_is_told_in_one_sentence():
    models = folder(prefill_a=4, prefill_b=8, decode_b=8, decode_c=6)
    assert told(models) == ({("prefill_b", "decode_b")}, [("pair-none", "prefill_a")])
    text = paired(models).alone[0].text
    assert text.startswith("prefill_a.onnx has no partner among decode_b.onnx, decode_c.onnx: prefill_a.onnx gives ")
    assert "present_x as [1, 4] and decode_b.onnx takes past_x as [1, 8]: axis 1 differs; export" in text


def test_a_decode_that_no_sentence_names_has_one_of_its_own():
    models = folder(prefill_a=4, decode_a=4, decode_b=8)
    assert told(models) == ({("prefill_a", "decode_a")}, [("pair-none", "decode_b")])


def test_what_files_declare():
    files = {part: interface(scan(DEMO / f"{part}.onnx")) for part in ("prefill", "decode")}
    assert files["decode"].inputs["past_recurrent_states"] == Tensor(FLOAT, (3, "batch", 4, 16, 16))
    assert {"batch", "step", "past_seq_len", "total_seq_len"} <= files["decode"].symbols
    assert codes(pairs(files)[0]) == []
    pinned = with_pins(files["decode"], [Pinned("past_recurrent_states", 1, "batch", 1)])
    assert pinned.inputs["past_recurrent_states"].shape == (3, 1, 4, 16, 16)
    assert pinned.inputs["past_conv_states"].shape == (3, "batch", 128, 4)


def test_names_of_the_exporter_of_transformers():
    parts = {"prefill": "full_prefill_transformers", "decode": "full_decode_transformers"}
    files = {part: interface(scan(export(name).path)) for part, name in parts.items()}
    assert files["decode"].inputs["input.cache.layers.0.recurrent_states.0"].shape == ("s17", 4, 16, 16)
    (pair,) = pairs(files)
    # The two fixtures are of models of different depth.
    fitting = [state.output for state in pair.states if state.difference is None]
    assert fitting == ["cache.layers.0.conv_states.0", "cache.layers.0.recurrent_states.0"]
    assert set(codes(pair)) == {"pair-unread", "pair-missing"}
