"""Branches that a size chooses: looked through where the choice comes round again, refused where it does not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, parser

import graphs
import loops
from deltafuse.bench import Binding
from deltafuse.dims import symbol
from deltafuse.match import Validity
from deltafuse.reasons import Reason
from deltafuse.shapes import Shapes
from deltafuse.size_choices import Turns, ends_fail, period, turn_steps
from deltafuse.size_flow import Sizes
from exports import export

if TYPE_CHECKING:
    from deltafuse.trial import Trial

ZOO = Path(__file__).parent / "zoo"

TEXT = """
<ir_version: 8, opset_import: ["" : 17]>
choice (float[batch,tokens,4] x) => (bool y)
<int64 one = {{1}}, int64 four = {{4}}, int64 zero = {{0}}, int64 three = {{3}}, int64 many = {{2000}}>
{{
  shape = Shape(x)
  t = Gather(shape, one)
  b = Gather(shape, zero)
  {body}
}}
"""


@pytest.fixture(scope="module", autouse=True)
def _worker() -> Iterator[None]:
    with graphs.one_worker():
        yield


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("m = Mod(t, four)\n  y = Greater(m, zero)", (4, "tokens")),
        ("m = Mod(t, four)\n  d = Sub(four, m)\n  p = Mod(d, four)\n  g = Greater(p, zero)\n  y = Cast<to = 9>(g)",
         (4, "tokens")),
        ("m = Mod(b, three)\n  y = Equal(m, one)", (3, "batch")),
        ("m = Mod(t, many)\n  y = Equal(m, one)", (0, "")),
        ("y = Greater(t, many)", (0, "")),
        ("y = Less(many, t)", (0, "")),
        ("y = Greater(t, zero)", (1, "tokens")),
        ("y = Equal(t, b)", (0, "")),
        # False for most sizes.
        ("y = Equal(t, many)", (0, "")),
        ("q = Div(t, many)\n  y = Equal(q, one)", (0, "")),
        ("q = Mul(t, t)\n  m = Mul(t, many)\n  y = Less(q, m)", (0, "")),
        # True for all.
        ("d = Add(t, many)\n  y = Greater(d, t)", (1, "tokens")),
    ],
)  # fmt: skip
def test_a_choice_that_comes_round_again_is_known_by_its_period(
    body: str, found: tuple[int, str], tmp_path: Path
) -> None:
    model = graphs.scanned(graphs.parse(TEXT.format(body=body)), tmp_path)
    assert period(model.graph, Shapes(model), model.graph.find("y")) == found


#: What a branch makes of the log decay ``x`` [B, T, 4], in ONNX text.
SCALED = "scaled = Mul(x, factor)"
SHIFTED = "back = Pad(x, pads) scaled = Slice(back, first, most, time)"
TURNED = "turned = Transpose<perm = [0, 2, 1]>(x) scaled = Reshape(turned, s)"
PADDED = "scaled = Pad(x, no_pads)"
FILLED = "scaled = Pad(x, no_pads, factor)"


def chosen_where(condition: list[onnx.NodeProto], made: str = SCALED, factor: float = 2.0) -> onnx.ModelProto:
    """A chunk rule for 17 to 32 tokens whose log decay is another one where a condition ``c`` on the tokens holds."""
    model = onnx.load(export("chunk_dy20_dynBT").path)

    def make(x: str, y: str) -> graphs.Nodes:
        def branch(name: str, text: str, result: str) -> onnx.GraphProto:
            nodes = parser.parse_graph(f"{name} (float x) => (float {result}) {{ {text} }}").node
            for node in nodes:
                node.input[:] = [x if read == "x" else read for read in node.input]
            return helper.make_graph(nodes, name, [], [helper.make_tensor_value_info(result, TensorProto.FLOAT, None)])

        choice = helper.make_node(
            "If", ["c"], [y], name="choice",
            then_branch=branch("then", made, "scaled"), else_branch=branch("else", "same = Identity(x)", "same"),
        )  # fmt: skip
        size = [helper.make_node("Shape", [x], ["s"]), helper.make_node("Gather", ["s", "one"], ["t"])]
        numbers = {
            "one": 1, "three": 3, "four": 4, "far": 3000, "pads": [0, 1, 0, 0, 0, 0], "no_pads": [0] * 6,
            "first": [0], "most": [-1], "time": [1],
        }  # fmt: skip
        constants = [graphs.constant(name, number, np.int64) for name, number in numbers.items()]
        return [*size, *condition, choice], [*constants, graphs.constant("factor", factor)]

    return graphs.insert(model, "g", make)


@pytest.mark.parametrize(
    ("made", "factor", "code"),
    [
        (PADDED, 0.0, ""),
        (FILLED, 0.0, ""),
        # Each turn is tried.
        (TURNED, 0.0, "position-gate"),
        # What a branch computes, or reads farther away, says little at the few sizes that are tried.
        (SCALED, 1.0, "position-gate"),
        (SCALED, 2.0, "position-gate"),
        (SHIFTED, 0.0, "position-gate"),
        (FILLED, 1.0, "position-gate"),
    ],
)
def test_a_choice_that_comes_round_again_may_lay_out_only(made: str, factor: float, code: str, tmp_path: Path) -> None:
    condition = [helper.make_node("Mod", ["t", "four"], ["m"]), helper.make_node("Equal", ["m", "three"], ["c"])]
    report = graphs.fuse(graphs.save(chosen_where(condition, made, factor), tmp_path), tmp_path / "out.onnx")
    assert (report.exit, graphs.codes(report)) == (3 if code else 0, [code])
    assert (tmp_path / "out.onnx").exists() == (not code)


def test_a_choice_beyond_a_size_is_refused(tmp_path: Path) -> None:
    condition = [helper.make_node("Greater", ["t", "far"], ["c"])]
    report = graphs.fuse(graphs.save(chosen_where(condition), tmp_path), tmp_path / "out.onnx")
    assert (report.exit, graphs.codes(report)) == (3, ["position-gate"])


def spoiled_at(tokens: int) -> onnx.ModelProto:
    """A loop whose last step is no step where its number is ``tokens - 1``: wrong for that many tokens only."""
    model = onnx.load(ZOO / "loop_joined.onnx")
    loop = next(node for node in model.graph.node if node.op_type == "Loop")
    body = next(attribute.g for attribute in loop.attribute if attribute.name == "body")
    decay = next(node for node in body.node if node.op_type == "Exp")
    decayed, decay.output[0] = decay.output[0], "decay.plain"
    place = list(body.node).index(decay) + 1
    counter, trips = body.input[0].name, loop.input[0]
    numbers = {"one": np.int64(1), "last": np.int64(tokens - 1)}
    added = [helper.make_node("Constant", [], [f"n.{name}"], value=graphs.constant(name, number, np.int64))
             for name, number in numbers.items()]  # fmt: skip
    added += [
        helper.make_node("Equal", [counter, "n.last"], ["n.there"]),
        helper.make_node("Add", [counter, "n.one"], ["n.next"]),
        helper.make_node("Equal", ["n.next", trips], ["n.end"]),
        helper.make_node("And", ["n.there", "n.end"], ["n.both"]),
        helper.make_node("Not", ["n.both"], ["n.kept"]),
        helper.make_node("Cast", ["n.kept"], ["n.factor"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["decay.plain", "n.factor"], [decayed]),
    ]
    for node in reversed(added):
        body.node.insert(place, node)
    return model


@pytest.mark.parametrize(("tokens", "codes"), [(2, "few-tokens-only"), (37, "position-gate")])
def test_a_loop_that_is_wrong_for_one_number_of_tokens_is_refused(tokens: int, codes: str, tmp_path: Path) -> None:
    report = graphs.fuse(graphs.save(spoiled_at(tokens), tmp_path), tmp_path / "out.onnx")
    assert (report.exit, graphs.codes(report)) == (3, [codes])
    assert not (tmp_path / "out.onnx").exists()


class Wrong:
    """Stands for a trial that is right but for one number of tokens."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.tried: list[int | None] = []

    def error(self, binding: Binding, how: object, seed: int) -> float:
        self.tried.append(binding.tokens)
        return 1.0 if binding.tokens == self.tokens else 0.0


@pytest.mark.parametrize("tokens", [2, 15, 16, 17, 32])
def test_ends_and_whole_chunks_are_tried(tokens: int) -> None:
    binding = Binding({"T": 100}, None, 100, (), (symbol("T"),))
    validity = Validity(1, 1024, None, None, (1, 100, 1024))
    sizes = Sizes(chunks={16}, masks=True)
    found = ends_fail(cast("Trial", Wrong(tokens)), binding, validity, sizes)
    assert found == Reason("some-tokens-only", {"tokens": tokens, "low": 1, "high": 1024})
    right = Wrong(0)
    assert ends_fail(cast("Trial", right), binding, validity, sizes) is None
    assert right.tried == [2, 3, 15, 16, 17, 32, 33]
    assert ends_fail(cast("Trial", Wrong(tokens)), binding, validity, Sizes()) is None


@pytest.mark.parametrize(
    ("sizes", "tried"),
    [
        (Sizes(farthest=2), [2, 3, 4, 5, 6]),
        (Sizes(farthest=1, chunks={16}), [2, 3, 4, 15, 16, 17, 32, 33, 48, 64]),
        (Sizes(farthest=15, chunks={16}), [n for n in (*range(2, 49), *range(64, 513, 16)) if n != 100]),
    ],
)
def test_where_two_places_may_meet_is_tried(sizes: Sizes, tried: list[int]) -> None:
    binding = Binding({"T": 100}, None, 100, (), (symbol("T"),))
    right = Wrong(0)
    assert ends_fail(cast("Trial", right), binding, Validity(1, 1024, None, None, (1, 100, 1024)), sizes) is None
    assert right.tried == tried


def prefix(graph: onnx.GraphProto, text: str) -> None:
    """Puts a text before all names, those that branches read from around too."""
    for named in (*graph.input, *graph.output, *graph.value_info, *graph.initializer):
        named.name = text + named.name
    for node in graph.node:
        node.input[:] = [name and text + name for name in node.input]
        node.output[:] = [name and text + name for name in node.output]
        for attribute in node.attribute:
            prefix(attribute.g, text)


@pytest.mark.parametrize("bounds", [(0, 3000), (3000, 0), (0, 0)])
def test_a_choice_is_not_covered_by_the_proof_of_a_layer_with_another_bound(
    bounds: tuple[int, int], tmp_path: Path
) -> None:
    """Both branches are the same, so that no run tells the layers apart; there always are more than 0 tokens."""
    whole = onnx.ModelProto()
    for index, bound in enumerate(bounds):
        part = chosen_where([helper.make_node("Greater", ["t", "far"], ["c"])], PADDED)
        (far,) = (one for one in part.graph.initializer if one.name == "far")
        far.CopyFrom(graphs.constant("far", bound, np.int64))
        prefix(part.graph, f"p{index}/")
        if not index:
            whole.CopyFrom(part)
            continue
        for field in ("node", "input", "output", "value_info", "initializer"):
            getattr(whole.graph, field).extend(getattr(part.graph, field))
    report = graphs.fuse(graphs.save(whole, tmp_path), tmp_path / "out.onnx", keep_going=True)
    assert graphs.codes(report) == ["position-gate" if bound else "" for bound in bounds]


#: What a step of a loop makes of all values: nothing, as long as there are at most 2,000 tokens.
FAR = "far_part = Slice(all, far, end, time)\n    extra = ReduceSum<keepdims = 0>(far_part)\n    "


@pytest.mark.parametrize(
    "all_values",
    [
        "all = Identity(value)",
        "all = Reshape(value, sizes)",
        "all = Expand(value, sizes)",
        "nought = Sub(i, i)\n    head = Unsqueeze(nought, first)\n    all = Gather<axis = 2>(value, head)",
        "all = If(yes)<then_branch = t () => (x) { x = Identity(value) }, else_branch = e () => (y) { y = Neg(value) }"
        ">",
    ],
)
def test_a_step_that_reads_far_tokens_is_refused(all_values: str, tmp_path: Path) -> None:
    constants = "int64[1] far = {2000}, int64[1] end = {9223372036854775807}, int64[1] time = {1}, int64[1] first = {0}"
    model = loops.loop(
        ("float scale = {0.25}", f"{constants}, float scale = {{0.25}}"),
        ("shape = Shape(query)", "shape = Shape(query)\n  sizes = Shape(value)"),
        ("delta = Mul(missing, b1)", f"{all_values}\n    {FAR}plain = Mul(missing, b1)\n    delta = Add(plain, extra)"),
    )
    report = graphs.fuse(graphs.save(model, tmp_path), tmp_path / "out.onnx")
    assert (report.exit, graphs.codes(report)) == (3, ["position-gate"])
    assert not (tmp_path / "out.onnx").exists()


def test_turns_that_are_too_many_are_not_begun() -> None:
    binding = Binding({"T": 5}, 2, 5, (), (symbol("T"),))
    validity = Validity(1, 1024, None, None, (5,))

    def tokens(length: int) -> list[int | None]:
        found = turn_steps(binding, validity, [Turns("if", length, "T")], Sizes())
        return [step.binding.tokens for step in found]

    assert tokens(3) == [1, 1, 2, 2, 3, 3]
    assert tokens(257) == []
    assert turn_steps(binding, validity, [], Sizes()) == []
