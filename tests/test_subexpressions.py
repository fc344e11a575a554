"""What a model computes twice is left out; all else stays."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import parser

from deltafuse.subexpressions import without_repeats

HEAD = '<ir_version: 10, opset_import: ["" : 17, "own" : 1]>\n'


def made(text: str) -> onnx.ModelProto:
    model = parser.parse_model(HEAD + text)
    for node in model.graph.node:
        node.name = f"named {node.output[0]}"
    return model


def ops(model: onnx.ModelProto) -> list[tuple[str, list[str], list[str]]]:
    return [(node.op_type, list(node.input), list(node.output)) for node in model.graph.node]


def test_equal_nodes_become_one_through_what_they_read() -> None:
    model = made(
        """agraph (float[2, 3] x, float[2, 3] y) => (float[2, 3] out) {
        one = Constant <value = float[1] {1.0}> ()
        again = Constant <value = float[1] {1.0}> ()
        other = Constant <value = float[1] {2.0}> ()
        a = Add (x, one)
        b = Add (x, again)
        c = Add (again, x)
        d = Mul (a, b)
        e = Mul (b, a)
        f = Mul (e, other)
        g = Mul (c, d)
        out = Add (f, g)
    }"""
    )
    result = without_repeats(model)
    assert [output for _, _, (output,) in ops(result)] == ["one", "other", "a", "c", "d", "f", "g", "out"]
    assert ops(result)[-4:] == [
        ("Mul", ["a", "a"], ["d"]),
        ("Mul", ["d", "other"], ["f"]),
        ("Mul", ["c", "d"], ["g"]),
        ("Add", ["f", "g"], ["out"]),
    ]
    feeds = {name: np.random.default_rng(0).random((2, 3), np.float32) for name in "xy"}
    before, after = (ort.InferenceSession(one.SerializeToString()).run(None, feeds) for one in (model, result))
    np.testing.assert_array_equal(before, after)
    # The given model is as it was.
    assert len(model.graph.node) == 11


def test_names_of_constants_say_nothing_and_their_types_do() -> None:
    model = made(
        """agraph () => (float[1] a, float[1] d) {
        a = Constant <value = float[1] {1.0}> ()
        b = Constant <value = float[1] {1.0}> ()
        c = Constant <value = int32[1] {1065353216}> ()
        d = Neg (b)
    }"""
    )
    model.graph.node[1].attribute[0].t.name = "named"
    assert ops(without_repeats(model)) == [
        ("Constant", [], ["a"]),
        ("Constant", [], ["c"]),
        ("Neg", ["a"], ["d"]),
    ]


@pytest.mark.parametrize(
    "twice",
    [
        "a = RandomNormalLike (x)\n b = RandomNormalLike (x)",
        "a = own.Neg (x)\n b = own.Neg (x)",
        "a = Cast <to = 11> (x)\n b = Cast <to = 7> (x)",
        "a = Neg (x)\n b = Abs (x)",
        "a = Slice (x, one, two)\n b = Slice (x, two, one)",
        "a, n = TopK (x, one)\n b = TopK (x, one)",
    ],
)
def test_what_may_differ_stays(twice: str) -> None:
    model = made(f"agraph (float[2, 3] x, int64[1] one, int64[1] two) => (float out) {{ {twice}\n out = Add (a, b) }}")
    assert ops(without_repeats(model)) == ops(model)


def test_results_keep_their_names() -> None:
    negated = "a = Neg (x)\n c = Neg (x)\n b = Neg (x)\n d = Abs (c)"
    model = made(f"agraph (float[2] x) => (float[2] a, float[2] b) {{ {negated} }}")
    assert ops(without_repeats(model)) == [("Neg", ["x"], ["a"]), ("Neg", ["x"], ["b"]), ("Abs", ["a"], ["d"])]


def test_what_subgraphs_read_keeps_its_name() -> None:
    model = made(
        """agraph (bool c, float[2] x) => (float[2] out) {
        a = Neg (x)
        b = Neg (x)
        d = Neg (x)
        e = Abs (d)
        out = If (c) <
            then_branch = then () => (float[2] t) { t = Add (b, a) },
            else_branch = else () => (float[2] f) { f = Identity (e) }
        >
        again = If (c) <
            then_branch = then () => (float[2] t) { t = Add (b, a) },
            else_branch = else () => (float[2] f) { f = Identity (e) }
        >
    }"""
    )
    result = without_repeats(model)
    assert [(op, outputs) for op, _, outputs in ops(result)] == [
        ("Neg", ["a"]),
        ("Neg", ["b"]),
        ("Abs", ["e"]),
        ("If", ["out"]),
        ("If", ["again"]),
    ]


def test_an_input_that_is_another_is_not_asked_for() -> None:
    text = """agraph (int64[2] s, int64[2] t, float[4] x) => (float out) {
        a = Reshape (x, s)
        b = Reshape (x, t)
        out = Add (a, b)
    }"""
    result = without_repeats(made(text), {"t": "s"})
    assert [one.name for one in result.graph.input] == ["s", "x"]
    assert ops(result) == [("Reshape", ["x", "s"], ["a"]), ("Add", ["a", "a"], ["out"])]
    assert result.opset_import == made(text).opset_import
    # One that is a result too, or that a subgraph reads, is asked for still.
    given = made("agraph (float[2] s, float[2] t) => (float[2] t) { a = Add (s, t) }")
    assert [one.name for one in without_repeats(given, {"t": "s"}).graph.input] == ["s", "t"]
