"""Which models of a folder are a pair, and whether the states that they hand on fit."""

from __future__ import annotations

import pytest
from onnx import TensorProto

from deltafuse.folder_pairs import Interface, Tensor, interface, pairs, with_pins
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
