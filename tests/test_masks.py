"""Padded draws: both models on them, and which outputs the mask reaches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from deltafuse import pipeline
from deltafuse.inputs import Inputs
from deltafuse.inputs_roles import InputRole
from deltafuse.masks import _faint, padded
from deltafuse.options import FuseOptions, SilentProgress
from deltafuse.verify import verify
from exports import export

PREFILL = "full_prefill_ts17"


@pytest.fixture(scope="module")
def fused(tmp_path_factory):
    """Unfused and fused path by fixture name; each fixture is fused once."""
    folder = tmp_path_factory.mktemp("fused")

    def of(name: str) -> tuple[Path, Path]:
        output = folder / f"{name}.onnx"
        if not output.exists():
            assert pipeline.fuse(FuseOptions(export(name).path, output), SilentProgress()).exit == 0
        return export(name).path, output

    return of


@pytest.fixture
def edited(fused, tmp_path):
    """Both files of the prefill after edits: of both, and of the fused one alone."""

    def of(change, fused_change=None) -> tuple[Path, Path]:
        paths = []
        for path in fused(PREFILL):
            model = onnx.load(path)
            change(model.graph)
            if paths and fused_change is not None:
                fused_change(model.graph)
            paths.append(tmp_path / f"{len(paths)}.onnx")
            onnx.save(model, paths[-1])
        return paths[0], paths[1]

    return of


def inputs(**arrays) -> Inputs:
    roles = {name: InputRole("mask" if name.startswith("mask") else "ids") for name in arrays}
    return Inputs(arrays, {}, roles, ())


def test_a_third_of_the_tokens_is_masked_at_either_end():
    found = padded(inputs(mask=np.ones((1, 7), np.int64), ids=np.arange(7)))
    assert list(found) == ["right", "left"]
    assert found["right"]["mask"].tolist() == [[1, 1, 1, 1, 1, 0, 0]]
    assert found["left"]["mask"].tolist() == [[0, 0, 1, 1, 1, 1, 1]]
    assert found["left"]["ids"].tolist() == list(range(7))


@pytest.mark.parametrize(
    "mask", [np.ones((1, 2), np.int64), np.ones(7, np.int64), np.zeros((1, 7), np.int64), np.zeros((1, 7), np.float32)]
)
def test_what_is_no_mask_of_several_ones_is_left(mask):
    assert padded(inputs(mask=mask)) == {}


def test_the_recurrent_state_does_not_see_the_mask(fused):
    report = verify(*fused(PREFILL))
    masks = report.network.masks
    assert (report.exit, [draw.verdict for draw in masks.draws]) == (0, ["passes", "passes"])
    assert [draw.padding for draw in masks.draws] == ["right", "left"]
    for draw in masks.draws:
        assert (draw.tokens, draw.silent) == ((8, 24), ())
        assert [output.name for output in draw.outputs] == [output.name for output in report.network.outputs]
    reach = {one.output: one for one in masks.reach}
    assert reach["logits"].depends
    assert reach["logits"].left > 0.01
    assert not reach["present_recurrent_states"].depends


def test_the_reach_is_what_onnxruntime_gives(fused, tmp_path):
    from deltafuse.inputs import InputOptions

    report = verify(*fused(PREFILL), inputs=InputOptions(save=tmp_path / "in.npz"))
    with np.load(tmp_path / "in.npz") as arrays:
        feeds = {name: arrays[name] for name in arrays.files}
    session = onnxruntime.InferenceSession(fused(PREFILL)[0], providers=["CPUExecutionProvider"])
    (ones,) = session.run(["logits"], feeds)
    feeds["attention_mask"][:, :8] = 0
    (left,) = session.run(["logits"], feeds)
    wanted = np.sqrt(((left - ones) ** 2).sum() / (ones**2).sum())
    assert report.network.masks.reach[0].left == pytest.approx(wanted, rel=1e-3)


def test_a_graph_without_a_mask_has_no_padded_draws(fused):
    assert verify(*fused("chunk_dy20_dynBT")).network.masks is None


def masked_state(graph):
    """A state that is scaled by the mask."""
    graph.initializer.append(numpy_helper.from_array(np.array([0, 1]), "both"))
    for info in graph.output:
        info.name = "before" if info.name == "present_conv_states" else info.name
    for node in graph.node:
        node.output[:] = ["before" if name == "present_conv_states" else name for name in node.output]
    graph.node.append(helper.make_node("Cast", ["attention_mask"], ["mask_numbers"], to=TensorProto.FLOAT))
    graph.node.append(helper.make_node("ReduceMean", ["mask_numbers"], ["share"], keepdims=0))
    graph.node.append(helper.make_node("Mul", ["before", "share"], ["present_conv_states"]))
    info = next(info for info in graph.output if info.name == "before")
    info.name = "present_conv_states"


def test_a_state_that_sees_the_mask_is_told(edited, fuse):
    paths = edited(masked_state)
    report = verify(*paths, level="network")
    reach = {one.output: one for one in report.network.masks.reach}
    assert report.exit == 0
    assert reach["present_conv_states"].right == reach["present_conv_states"].left == pytest.approx(1 / 3, rel=1e-3)
    out = fuse("verify", *paths, "--level", "network").out
    assert "right-padded by 8 of 24 tokens: 4 of 4 outputs within the bar" in out
    assert "the mask reaches logits, present_conv_states; it does not reach present_recurrent_states" in out


def test_a_fault_that_only_padding_shows(edited):
    def blind(graph):
        """The fused model takes ones for whatever mask it gets."""
        at = next(i for i, node in enumerate(graph.node) if "attention_mask" in node.input)
        for node in graph.node:
            node.input[:] = ["no_mask" if name == "attention_mask" else name for name in node.input]
        graph.initializer.append(numpy_helper.from_array(np.array(1), "one"))
        graph.node.insert(at, helper.make_node("Max", ["attention_mask", "one"], ["no_mask"]))

    report = verify(*edited(lambda graph: None, blind), level="network")
    network = report.network
    assert (report.exit, network.verdict) == (5, "differs")
    assert {output.verdict for output in network.outputs} == {"passes"}
    # What stands behind the padding on the right does not reach the tokens before it.
    assert [draw.verdict for draw in network.masks.draws] == ["passes", "differs"]
    wrong = [output for output in network.masks.draws[1].outputs if output.verdict == "differs"]
    assert [output.name for output in wrong] == ["logits"]
    assert wrong[0].reason.code == "output-beyond-bar"


def test_what_padding_makes_infinite_is_named_and_not_held_against_anyone(edited):
    def infinite(graph):
        """Logarithms of the mask: minus infinity where there is padding."""
        graph.node.append(helper.make_node("Cast", ["attention_mask"], ["mask_numbers"], to=TensorProto.FLOAT))
        graph.node.append(helper.make_node("Log", ["mask_numbers"], ["logs"]))
        graph.output.append(helper.make_tensor_value_info("logs", TensorProto.FLOAT, [1, "seq_len"]))

    report = verify(*edited(infinite), level="network")
    assert report.exit == 0
    assert [draw.silent for draw in report.network.masks.draws] == [("logs",), ("logs",)]


@pytest.mark.parametrize(
    ("unfused", "fused", "faint"), [(1e-8, 2e-8, True), (0.0, 1e-9, True), (0.1, 0.2, False), (1e-8, 0.1, False)]
)
def test_what_padding_wears_down_to_nothing_is_not_held_against_anyone(unfused, fused, faint, tmp_path):
    paths = [tmp_path / f"{name}.npy" for name in ("unfused", "fused", "without")]
    for path, number in zip(paths, (unfused, fused, 2.0), strict=True):
        np.save(path, np.array([0.0, number], np.float32))
    assert _faint(*paths) is faint
