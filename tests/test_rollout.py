"""Task level of ``fuse verify``: chained steps of a pair and of a decode graph alone, states of any form, losses."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from deltafuse import pipeline, rollout_run
from deltafuse.errors import UserError
from deltafuse.inputs import InputOptions
from deltafuse.options import FuseOptions, SilentProgress
from deltafuse.rollout_child import SAMPLE, clocked, sampled
from deltafuse.rollout_diff import Steps, compare_steps
from deltafuse.verify import Settings
from deltafuse.verify_bars import Overrides, bar
from deltafuse.verify_task import TaskOptions, read_ids, verify_task
from exports import export
from sabotage import custom, g_scaled

PREFILL, DECODE = "full_prefill_ts17", "full_decode_ts17"
STATES = ("conv_states", "recurrent_states", "kv_cache")


@pytest.fixture(scope="module")
def fused(tmp_path_factory):
    """Unfused and fused path by fixture name; each fixture is fused once."""
    folder = tmp_path_factory.mktemp("fused")

    def of(name: str, target: str = "ascend-310p") -> tuple[Path, Path]:
        output = folder / f"{name}.{target}.onnx"
        if not output.exists():
            assert pipeline.fuse(FuseOptions(export(name).path, output, target=target), SilentProgress()).exit == 0
        return export(name).path, output

    return of


@pytest.fixture
def edited(fused, tmp_path):
    """A fixture's two files after an edit of both, or of the fused one alone."""

    def of(name: str, change=None, fused_change=None) -> tuple[Path, Path]:
        paths = []
        for label, path in zip(("unfused", "fused"), fused(name), strict=True):
            model = onnx.load(path)
            for edit in (change, fused_change if label == "fused" else None):
                if edit is not None:
                    edit(model.graph)
            paths.append(tmp_path / f"{name}.{label}.onnx")
            onnx.save(model, paths[-1])
        return paths[0], paths[1]

    return of


def task(prefill, decode, rollout=6, *, bars=None, seed=0, **options):
    settings = Settings(level="task", inputs=InputOptions(seed=seed), bars=bars or Overrides())
    return verify_task(TaskOptions(prefill, decode, rollout, **options), settings)


@pytest.fixture
def saved(tmp_path):
    """Token ids in a file."""

    def of(ids) -> Path:
        np.save(tmp_path / "ids.npy", ids)
        return tmp_path / "ids.npy"

    return of


def refused(*arguments, **options) -> UserError:
    with pytest.raises(UserError) as error:
        task(*arguments, **options)
    return error.value


# Right fusions.


@pytest.mark.parametrize("target", ["ascend-310p", "ort"])
def test_sixty_four_steps_give_the_same_tokens(fused, target):
    report = task(fused(PREFILL, target), fused(DECODE, target), 64)
    rollout = report.task.rollout
    assert (report.exit, report.task.verdict, rollout.reason, rollout.steps) == (0, "passes", None, 64)
    assert len(rollout.tokens) == 65
    assert len(set(rollout.tokens)) > 8
    assert rollout.mapping == tuple(f"present_{state}=past_{state}" for state in STATES)
    assert rollout.fitted == ()
    exact, rounded = rollout.runs
    assert [(run.precision, run.verdict, run.first_difference) for run in rollout.runs] == [
        ("exact", "passes", None), ("rounded", "passes", None),
    ]  # fmt: skip
    assert (exact.equal_tokens, rounded.equal_tokens) == (65, 65)
    assert [drift.name for drift in exact.drift] == [f"past_recurrent_states[{layer}]" for layer in range(3)]
    for run, low, high in ((exact, 1e-9, 1e-5), (rounded, 1e-9 if target == "ort" else 1e-5, 5e-3)):
        assert len(run.logits) == 65
        for drift in run.drift:
            assert len(drift.nrmse) == 65
            assert low < max(drift.nrmse) < high


def test_tokens_are_those_of_a_loop_by_hand(fused, saved):
    """The unfused pair's tokens, told by a plain loop over two sessions."""
    prompt = np.random.default_rng(5).integers(0, 64, 20)
    np_prompt = prompt[None].astype(np.int64)
    first, second = (
        onnxruntime.InferenceSession(fused(name)[0], providers=["CPUExecutionProvider"]) for name in (PREFILL, DECODE)
    )
    feeds = {
        "input_ids": np_prompt,
        "attention_mask": np.ones((1, 20), np.int64),
        "position_ids": np.broadcast_to(np.arange(20), (4, 1, 20)).astype(np.int64),
    }
    logits, *states = first.run(["logits", *(f"present_{state}" for state in STATES)], feeds)
    tokens = [int(logits[0, -1].argmax())]
    for step in range(5):
        feeds = {
            "input_ids": np.array([[tokens[-1]]]),
            "attention_mask": np.ones((1, 21 + step), np.int64),
            "position_ids": np.full((4, 1, 1), 20 + step),
            **{f"past_{state}": array for state, array in zip(STATES, states, strict=True)},
        }
        logits, *states = second.run(["logits", *(f"present_{state}" for state in STATES)], feeds)
        tokens.append(int(logits[0, -1].argmax()))
    found = verify_task(
        TaskOptions(fused(PREFILL), fused(DECODE), 5, saved(prompt)), Settings(level="task")
    )
    assert list(found.task.rollout.tokens) == tokens


ALONE = ["full_decode_ts17", "full_decode_ts17_half", "full_decode_transformers", "rec_ts17_nonorm", "rec_dy20_T3_half"]


@pytest.mark.parametrize("name", ALONE)
def test_a_decode_graph_alone_is_chained_on_drawn_inputs(fused, name):
    report = task(None, fused(name), 12)
    rollout = report.task.rollout
    assert (report.exit, rollout.verdict) == (0, "passes")
    full = name.startswith("full")
    assert len(rollout.tokens) == (12 if full else 0)
    exact, rounded = rollout.runs
    assert max(value for drift in rounded.drift for value in drift.nrmse) > 1e-6
    for run in (exact, rounded):
        states = [drift for drift in run.drift if len(drift.nrmse) == 13]
        assert states
        assert all(drift.nrmse[0] == 0 for drift in states)
        # Without logits what the graph gives is compared in their place, one number less.
        assert any(len(drift.nrmse) == 12 for drift in run.drift) == (not full)


def test_another_seed_draws_other_inputs(fused):
    tokens = [task(None, fused(DECODE), 6, seed=seed).task.rollout.tokens for seed in (0, 0, 1)]
    assert tokens[0] == tokens[1] != tokens[2]


# States of other forms.


def split_states(graph):
    """Recurrent states of a prefill as one output a layer."""
    names = [f"present.{layer}.recurrent" for layer in range(3)]
    parts = [f"part_{layer}" for layer in range(3)]
    graph.initializer.append(numpy_helper.from_array(np.array([0]), "first_axis"))
    graph.node.append(helper.make_node("Split", ["present_recurrent_states"], parts, axis=0))
    for part, name in zip(parts, names, strict=True):
        graph.node.append(helper.make_node("Squeeze", [part, "first_axis"], [name]))
    old = next(info for info in graph.output if info.name == "present_recurrent_states")
    graph.output.remove(old)
    graph.output.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 4, 16, 16]) for name in names)


def join_states(graph):
    """Recurrent states of a decode as one input and one output a layer."""
    split_states(graph)
    for info in graph.output:
        info.name = info.name.replace("present.", "present_layer.")
    for node in graph.node:
        node.output[:] = [name.replace("present.", "present_layer.") for name in node.output]
    names = [f"past_layer.{layer}.recurrent" for layer in range(3)]
    graph.input.remove(next(info for info in graph.input if info.name == "past_recurrent_states"))
    graph.input.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 4, 16, 16]) for name in names)
    graph.node.insert(0, helper.make_node("Concat", ["a0", "a1", "a2"], ["past_recurrent_states"], axis=0))
    for layer, name in enumerate(names):
        graph.node.insert(0, helper.make_node("Unsqueeze", [name, "first_axis"], [f"a{layer}"]))


@pytest.fixture(scope="module")
def plain(fused):
    """Tokens of the pair as it is."""
    return task(fused(PREFILL), fused(DECODE), 4).task.rollout.tokens


def same_as_stacked(plain, prefill, decode, links):
    found = task(prefill, decode, 4)
    assert found.task.rollout.tokens == plain
    assert set(links) <= set(found.task.rollout.mapping)
    return found.task.rollout


def test_states_per_layer_are_stacked(plain, fused, edited):
    links = ["present.0.recurrent,present.1.recurrent,present.2.recurrent=past_recurrent_states"]
    same_as_stacked(plain, edited(PREFILL, split_states), fused(DECODE), links)


def test_stacked_states_are_taken_apart(plain, fused, edited):
    links = ["present_recurrent_states=" + ",".join(f"past_layer.{layer}.recurrent" for layer in range(3))]
    links += [f"present_layer.{layer}.recurrent=past_layer.{layer}.recurrent" for layer in range(3)]
    same_as_stacked(plain, fused(PREFILL), edited(DECODE, join_states), links)


def renamed(old: str, new: str):
    def change(graph):
        for info in (*graph.output, *graph.input):
            info.name = new if info.name == old else info.name
        for node in graph.node:
            node.output[:] = [new if name == old else name for name in node.output]
            node.input[:] = [new if name == old else name for name in node.input]

    return change


def test_a_state_under_another_name_is_told_by_its_sizes(plain, fused, edited):
    prefill = edited(PREFILL, renamed("present_recurrent_states", "memory"))
    same_as_stacked(plain, prefill, fused(DECODE), ["memory=past_recurrent_states"])


def two_of_a_kind(graph):
    """A second output of the same sizes, neither of which is named after the input."""
    renamed("present_recurrent_states", "memory")(graph)
    graph.node.append(helper.make_node("Neg", ["memory"], ["other"]))
    graph.output.append(helper.make_tensor_value_info("other", TensorProto.FLOAT, [3, 1, 4, 16, 16]))


def test_what_is_ambiguous_is_asked_for(plain, fused, edited):
    prefill = edited(PREFILL, two_of_a_kind)
    error = refused(prefill, fused(DECODE))
    assert error.code == "state-ambiguous"
    for line in ("--map memory=past_recurrent_states", "--map other=past_recurrent_states"):
        assert line in str(error)
    found = task(prefill, fused(DECODE), 4, maps=(("memory", "past_recurrent_states"),))
    assert found.task.rollout.tokens == plain
    wrong = task(prefill, fused(DECODE), 4, maps=(("other", "past_recurrent_states"),))
    assert wrong.task.rollout.tokens != plain


def test_a_state_that_a_graph_does_not_give_is_named(fused, edited):
    def change(graph):
        graph.output.remove(next(info for info in graph.output if info.name == "present_kv_cache"))

    pairs = {"prefill": (edited(PREFILL, change), fused(DECODE)), "decode": (fused(PREFILL), edited(DECODE, change))}
    for giver, pair in pairs.items():
        error = refused(*pair)
        assert error.code == "state-missing"
        assert str(error).startswith(f"{giver} has no output for the state past_kv_cache [")
        assert "--map" not in str(error)


def test_a_map_of_unknown_names_is_told(fused):
    error = refused(fused(PREFILL), fused(DECODE), maps=(("nothing", "past_kv_cache"),))
    assert (error.code, "nothing is none of the outputs" in str(error)) == ("unknown-state", True)
    several = ("present_kv_cache,present_conv_states", "past_kv_cache,past_conv_states,past_recurrent_states")
    assert refused(fused(PREFILL), fused(DECODE), maps=(several,)).code == "usage"


def test_a_map_of_what_is_no_state_is_told(fused):
    error = refused(fused(PREFILL), fused(DECODE), maps=(("logits", "past_kv_cache"),))
    assert error.code == "unknown-state"
    says = "--map logits=past_kv_cache: logits is none of the outputs that may be states, which are present_conv_states"
    assert says in str(error)
    error = refused(fused(PREFILL), fused(DECODE), maps=(("present_kv_cache", "attention_mask"),))
    assert "attention_mask is none of the inputs that may be states, which are past_conv_states" in str(error)
    error = refused(fused(PREFILL), fused(DECODE), maps=(("present_conv_states", "past_recurrent_states"),))
    assert error.code == "state-misfit"
    assert "present_conv_states [3, 1, 128, 4] has 4 axes and past_recurrent_states [3, 1, 4, 16, 16] 5" in str(error)


def test_a_wider_conv_state_gives_its_last_columns_and_another_type_is_cast(plain, fused, edited):
    def change(graph):
        """A fifth column in front of the four, and doubles."""
        renamed("present_conv_states", "four")(graph)
        graph.node.append(helper.make_node("Concat", ["four", "four"], ["eight"], axis=3))
        graph.node.append(helper.make_node("Cast", ["eight"], ["present_conv_states"], to=TensorProto.DOUBLE))
        info = next(info for info in graph.output if info.name == "four")
        info.CopyFrom(helper.make_tensor_value_info("present_conv_states", TensorProto.DOUBLE, [3, 1, 128, 8]))

    rollout = same_as_stacked(plain, edited(PREFILL, change), fused(DECODE), [])
    assert rollout.fitted == (
        "present_conv_states -> past_conv_states: kept the last 4 of 8 columns of axis 3",
        "present_conv_states -> past_conv_states: cast from float64 to float32",
    )


def test_a_state_that_cannot_be_made_to_fit(fused, edited):
    def change(graph):
        graph.initializer.append(numpy_helper.from_array(np.array([0, 1, 0]), "three_layers"))
        renamed("present_recurrent_states", "three")(graph)
        graph.initializer.append(numpy_helper.from_array(np.array([0, 0, 1, 2, 3, 3]), "six"))
        graph.node.append(helper.make_node("Gather", ["three", "six"], ["present_recurrent_states"], axis=2))
        info = next(info for info in graph.output if info.name == "three")
        shape = [3, 1, 6, 16, 16]
        info.CopyFrom(helper.make_tensor_value_info("present_recurrent_states", TensorProto.FLOAT, shape))

    # Six heads where four are taken: the last four of them would be as wrong as any.
    error = refused(edited(PREFILL, change), fused(DECODE))
    assert error.code == "state-misfit"
    assert "axis 2 has size 6 and is to have 4" in str(error)


def fixed_cache(graph):
    """A decode graph whose cache holds 40 tokens: the new entries go where the position says, the mask is as long."""
    renamed("present_kv_cache", "grown")(graph)
    renamed("past_kv_cache", "filled")(graph)
    renamed("attention_mask", "short_mask")(graph)
    for name, shape in (("filled", [2, 1, 1, 40, 32]), ("short_mask", [1, 40])):
        info = next(info for info in graph.input if info.name == name)
        info.name = {"filled": "past_kv_cache", "short_mask": "attention_mask"}[name]
        del info.type.tensor_type.shape.dim[:]
        for size in shape:
            info.type.tensor_type.shape.dim.add(dim_value=size)
    tensors = {"zero": [0], "one": [1], "two": [2], "three": [3], "last": [-1], "many": [99]}
    graph.initializer.extend(numpy_helper.from_array(np.array(value), name) for name, value in tensors.items())
    front = [
        helper.make_node("ReduceSum", ["attention_mask", "one"], ["total"], keepdims=0),
        helper.make_node("Sub", ["total", "one"], ["before"]),
        helper.make_node("Slice", ["past_kv_cache", "zero", "before", "three"], ["filled"]),
        helper.make_node("Slice", ["attention_mask", "zero", "total", "one"], ["short_mask"]),
    ]
    for node in reversed(front):
        graph.node.insert(0, node)
    graph.node.append(helper.make_node("Slice", ["grown", "last", "many", "three"], ["new_entry"]))
    graph.node.append(helper.make_node("Slice", ["past_kv_cache", "total", "many", "three"], ["unused"]))
    graph.node.append(helper.make_node("Concat", ["filled", "new_entry", "unused"], ["present_kv_cache"], axis=3))
    info = next(info for info in graph.output if info.name == "grown")
    info.CopyFrom(helper.make_tensor_value_info("present_kv_cache", TensorProto.FLOAT, [2, 1, 1, 40, 32]))


def test_a_cache_of_fixed_size_is_filled(fused, edited, saved):
    prompt = saved(np.arange(20))
    plain = task(fused(PREFILL), fused(DECODE), 6, prompt=prompt).task.rollout
    decode = edited(DECODE, fixed_cache)
    found = task(fused(PREFILL), decode, 6, prompt=prompt)
    assert (found.exit, found.task.rollout.tokens) == (0, plain.tokens)
    assert found.task.rollout.fitted == (
        "present_kv_cache -> past_kv_cache: put 20 entries of axis 3 into a cache of 40, zeros behind",
    )
    error = refused(fused(PREFILL), decode, 21, prompt=prompt)
    assert (error.code, "--rollout 20 or less" in str(error)) == ("cache-full", True)
    assert task(None, decode, 8).exit == 0


# Wrong fusions.


def test_a_wrong_site_shows_in_the_exact_run(fused, edited):
    report = task(edited(PREFILL, None, g_scaled), edited(DECODE, None, g_scaled), 8)
    assert report.exit == 5
    exact = report.task.rollout.runs[0]
    assert exact.verdict == "differs"
    assert exact.reason.code in ("rollout-logits", "rollout-drift", "rollout-token")
    assert "reordered arithmetic" in exact.reason.text


def test_a_state_that_is_not_carried_on_shows_in_the_tokens(fused, edited):
    def change(graph):
        """The first layer's state is forgotten at each step."""
        node = custom(graph)
        names = [name.decode() for item in node.attribute if item.name == "input_names" for name in item.strings]
        at = names.index("state")
        graph.initializer.append(numpy_helper.from_array(np.zeros((1, 4, 16, 16), np.float16), "forgotten"))
        node.input[at] = "forgotten"

    report = task(fused(PREFILL), edited(DECODE, None, change), 8)
    assert report.exit == 5
    for run in report.task.rollout.runs:
        assert run.verdict == "differs"
        assert run.reason.code in ("rollout-token", "rollout-logits", "rollout-drift")
        assert max(run.drift[0].nrmse) > 0.02
    # the prefill's token is right all the same
    assert report.task.rollout.runs[0].logits[0] < 1e-5


def test_a_fused_graph_that_does_not_run_is_a_difference(fused, edited):
    def change(graph):
        slots = custom(graph).input[6]
        node = next(node for node in graph.node if slots in node.output)
        array = numpy_helper.to_array(node.attribute[0].t)
        node.attribute[0].t.CopyFrom(numpy_helper.from_array(array + 7))

    report = task(fused(PREFILL), edited(DECODE, None, change), 3)
    assert (report.exit, report.task.rollout.reason.code) == (5, "task-does-not-run")


def test_an_unfused_graph_that_does_not_run_is_an_error(fused, monkeypatch):
    monkeypatch.setattr(rollout_run, "COMMAND", (sys.executable, "-c", "raise SystemExit(7)"))
    assert refused(fused(PREFILL), fused(DECODE), 3).code == "network-crash"


def test_missing_weights_leave_the_task_level_out(fused, edited):
    prefill = edited(PREFILL)
    for path in prefill:
        folder = path.parent / path.stem
        folder.mkdir()
        model = onnx.load(path)
        onnx.save(model, folder / "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=64)
        (folder / "w.bin").unlink()
    moved = tuple(path.parent / path.stem / "m.onnx" for path in prefill)
    options = TaskOptions(moved, fused(DECODE), 3)
    report = verify_task(options, Settings())
    assert (report.exit, report.task, report.skipped.code) == (0, None, "network-data-missing")
    with pytest.raises(UserError):
        verify_task(options, Settings(level="task"))


# Comparing.


def steps(logits, state, tmp_path, name):
    np.save(tmp_path / f"{name}.npy", np.asarray(state)[:, None])
    return Steps(np.asarray(logits, np.float32), {"state s": tmp_path / f"{name}.npy"})


@pytest.fixture
def compared(tmp_path):
    def of(unfused, fused, states=None, precision="rounded"):
        one, two = states or (np.ones((3, 4)), np.ones((3, 4)))
        pair = steps(unfused, one, tmp_path, "a"), steps(fused, two, tmp_path, "b")
        return compare_steps(*pair, precision, bar("fp16", "ascend-310p"))

    return of


LOGITS = np.array([[9.0, 1, 2], [1, 9, 2], [1, 2, 3.0]])


def test_the_first_token_that_differs_has_both_margins(compared):
    other = LOGITS.copy()
    other[2] = [1, 3.25, 3]
    run = compared(LOGITS, other, precision="exact")
    first = run.first_difference
    assert (run.equal_tokens, first.step, first.unfused, first.fused) == (2, 2, 2, 1)
    assert (first.unfused_margin, first.fused_margin) == (1.0, 0.25)
    assert (run.verdict, run.reason.code) == ("differs", "rollout-token")
    assert "by 1)" in run.reason.text
    assert "by 0.25)" in run.reason.text


def test_with_rounding_the_first_two_tokens_must_be_equal(compared):
    close = LOGITS.copy()
    close[2] = [1, 2.999, 3]
    flipped = close.copy()
    flipped[2] = [1, 3.001, 3]
    late = compared(close, flipped)
    assert (late.verdict, late.first_difference.step) == ("passes", 2)
    assert compared(close, flipped, precision="exact").reason.code == "rollout-token"
    early = compared(close[[2, 0, 1]], flipped[[2, 0, 1]])
    assert (early.verdict, early.reason.code) == ("differs", "rollout-token")


def test_a_tie_is_no_difference(compared):
    tie = LOGITS.copy()
    tie[0] = [9, np.nextafter(np.float32(9), np.float32(0)), 2]
    flipped = tie.copy()
    flipped[0] = [np.nextafter(np.float32(9), np.float32(0)), 9, 2]
    run = compared(tie, flipped, precision="exact")
    assert (run.verdict, run.first_difference.step) == ("passes", 0)


def test_drift_and_logits_beyond_the_bar_name_what_failed(compared):
    drifted = np.ones((3, 4)) * np.array([[1], [1.01], [1.03]])
    run = compared(LOGITS, LOGITS, (np.ones((3, 4)), drifted))
    assert run.reason.code == "rollout-drift"
    wanted = "s drifts beyond the bar (FP16 boundary, ascend-310p) at step 2: NRMSE 0.03 (at most 0.02)"
    assert wanted in run.reason.text
    assert run.drift[0].nrmse == pytest.approx((0, 0.01, 0.03))
    run = compared(LOGITS, LOGITS + np.array([[0, 0, 0], [0, 0, 1.5], [0, 0, 0]]))
    assert run.reason.code == "rollout-logits"
    assert "at step 1" in run.reason.text
    assert "largest difference 1.5 (at most 1)" in run.reason.text


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_numbers_that_are_none(compared, value):
    broken = LOGITS.copy()
    broken[1, 2] = value
    assert compared(LOGITS, broken).reason.code == "rollout-not-finite"
    state = np.ones((3, 4))
    state[2, 1] = value
    run = compared(LOGITS, LOGITS, (np.ones((3, 4)), state))
    assert (run.reason.code, "step 2" in run.reason.text) == ("rollout-not-finite", True)


def test_large_states_are_sampled_alike():
    big = np.arange(2 * SAMPLE * 3).reshape(2, -1)
    found = sampled(big)
    assert found.shape == (2, SAMPLE)
    assert len(set(found[0].tolist())) == SAMPLE
    assert np.array_equal(found[1] - found[0], np.full(SAMPLE, big.shape[1]))
    small = np.ones((3, 5))
    assert np.array_equal(sampled(small), small)


def test_clocks():
    feeds = {
        "p": np.zeros((4, 1, 2), np.int64), "n": np.zeros(1, np.int32), "g": np.ones((1, 3), np.int64),
        "m": np.ones((1, 6), np.int64), "f": np.zeros((1, 1, 1, 6), np.float32),
    }  # fmt: skip
    found = clocked({"p": "past", "n": "total", "g": "grow", "m": "mask", "f": "mask"}, feeds, 3, 2)
    assert found["p"].tolist() == [[[3, 4]]] * 4
    assert (found["n"].tolist(), found["n"].dtype) == ([5], np.int32)
    assert found["g"].tolist() == [[1] * 5]
    assert found["m"].tolist() == [[1, 1, 1, 1, 1, 0]]
    assert (found["f"][0, 0, 0, :5] == 0).all()
    assert found["f"][0, 0, 0, 5] < -1e4


# Losses.


def test_the_loss_is_that_of_the_logits(fused, saved):
    """By hand for the part that goes through the prefill; both pairs agree on the rest."""
    ids = np.random.default_rng(7).integers(0, 64, 32)
    report = task(fused(PREFILL), None, 0, nll=saved(ids))
    loss = report.task.loss
    assert (report.exit, loss.verdict, loss.tokens, loss.prefilled) == (0, "passes", 31, 32)
    session = onnxruntime.InferenceSession(fused(PREFILL)[0], providers=["CPUExecutionProvider"])
    feeds = {
        "input_ids": ids[None], "attention_mask": np.ones((1, 32), np.int64),
        "position_ids": np.broadcast_to(np.arange(32), (4, 1, 32)),
    }  # fmt: skip
    (logits,) = session.run(["logits"], feeds)
    shares = np.exp(logits[0].astype(np.float64))
    wanted = -np.log(shares[np.arange(31), ids[1:]] / shares[:-1].sum(-1)).mean()
    assert loss.unfused == pytest.approx(wanted, abs=1e-6)
    assert loss.exact == pytest.approx(wanted, abs=1e-5)
    assert loss.rounded == pytest.approx(wanted, abs=1e-2)
    # The same ids with half of them through decode: the same model, the same loss.
    both = task(fused(PREFILL), fused(DECODE), 0, nll=saved(ids)).task.loss
    assert (both.tokens, both.prefilled) == (31, 17)
    assert both.unfused == pytest.approx(wanted, abs=1e-4)


def test_a_loss_beyond_the_bar(fused, edited, saved):
    def change(graph):
        node = next(node for node in graph.node if "logits" in node.output)
        node.output[0] = "before"
        graph.node.append(helper.make_node("Neg", ["before"], ["logits"]))

    prefill = edited(PREFILL, None, change)
    report = task(prefill, None, 0, nll=saved(np.arange(20)))
    assert (report.exit, report.task.loss.verdict, report.task.loss.reason.code) == (5, "differs", "loss-beyond-bar")


@pytest.mark.parametrize(
    ("ids", "code"), [(np.arange(1), "prompt-ids"), (np.arange(10), "prompt-ids"), (np.full(20, 64), "prompt-ids")]
)
def test_ids_that_do_not_fit(fused, ids, code, saved):
    assert refused(fused(PREFILL), fused(DECODE), 0, nll=saved(ids)).code == code


def test_a_prompt_outside_the_range_names_it(fused, saved):
    error = refused(fused(PREFILL), fused(DECODE), 3, prompt=saved(np.arange(40)))
    assert "--prompt has 40 tokens and the unfused prefill is right for 17 to 32 tokens" in str(error)
    assert error.code == "prompt-ids"


def test_files_of_ids(tmp_path):
    (tmp_path / "text.npy").write_text("no")
    np.savez(tmp_path / "many.npz", a=np.arange(3))
    np.save(tmp_path / "float.npy", np.ones(3))
    np.save(tmp_path / "table.npy", np.ones((2, 3), np.int64))
    for name in ("text.npy", "many.npz", "float.npy", "table.npy"):
        with pytest.raises(UserError) as error:
            read_ids(tmp_path / name)
        assert error.value.code == "prompt-ids"
    with pytest.raises(UserError) as error:
        read_ids(tmp_path / "none.npy")
    assert error.value.code == "prompt-missing"
    np.save(tmp_path / "row.npy", np.array([[1, 2, 3]], np.int32))
    assert read_ids(tmp_path / "row.npy").tolist() == [1, 2, 3]


def test_a_prompt_needs_ids(fused, saved):
    error = refused(fused("chunk_dy20_dynBT"), fused(DECODE), 3, prompt=saved(np.arange(20)))
    assert error.code == "no-ids"


@pytest.mark.parametrize("which", [0, 1])
def test_a_pair_needs_logits(fused, edited, which):
    def change(graph):
        graph.output.remove(next(info for info in graph.output if info.name == "logits"))

    names = [PREFILL, DECODE]
    pair = [edited(name, change) if index == which else fused(name) for index, name in enumerate(names)]
    error = refused(*pair, 3)
    assert (error.code, "[.., 64] or named logits" in str(error)) == ("no-logits", True)


def test_a_prefill_given_as_decode_is_told(fused):
    error = refused(fused(DECODE), fused(PREFILL), 3)
    assert error.code == "no-states"
    assert "has no input for the states of the tokens before: give with --decode the graph that" in str(error)


# The command.


def test_the_command_prints_tokens_and_drift(fuse, fused):
    options = ["--prefill", *fused(PREFILL), "--decode", *fused(DECODE), "--rollout", 5, "--level", "task"]
    done = fuse("verify", *options)
    assert (done.exit, done.err) == (0, "")
    lines = done.out.splitlines()
    assert "state: present_kv_cache=past_kv_cache" in lines
    assert any(line.startswith("rounded") and "past_recurrent_states[2]" in line and "█" in line for line in lines)
    assert "exact: passes (reordered arithmetic); 6 of 6 tokens equal" in lines
    assert "rounded: passes (FP16 boundary, ascend-310p); 6 of 6 tokens equal" in lines
    document = fuse("verify", *options, "--json").document
    assert (document["exit"], document["unfused"], document["task"]["verdict"]) == (0, None, "passes")
    assert [site["verdict"] for site in document["prefill"]["sites"]] == ["equal"] * 3
    assert set(document["task"]["rollout"]["runs"][0]) >= {"precision", "drift", "logits", "first_difference"}


def test_both_graphs_go_through_all_levels(fuse, fused):
    document = fuse("verify", "--decode", *fused(DECODE), "--rollout", 2, "--json").document
    assert (document["exit"], document["prefill"]) == (0, None)
    assert document["decode"]["network"]["verdict"] == document["task"]["verdict"] == "passes"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], "two files"),
        (["--rollout", "3"], "--prefill U F"),
        (["--decode", "a", "b", "--rollout", "-1"], "1 or more"),
        (["--prefill", "a", "b", "--rollout", "1"], "--decode U F"),
        (["--decode", "a", "b", "--nll", "x.npy"], "--prefill U F"),
        (["--decode", "a", "b", "--level", "task"], "--rollout N or --nll"),
        (["--decode", "a", "b", "--level", "site", "--rollout", "2"], "--level site"),
        (["--decode", "a", "b", "--map", "x"], "OUTPUT=INPUT"),
        (["--decode", __file__, "b", "--level", "task", "--rollout", "2", "--save-inputs", "x"], "--save-inputs"),
        (["--decode", "a", "b", "--rollout", "0"], "'0' is not a whole number of 1 or more"),
        (["--decode", "a", "b", "--nrmse", "-1"], "0 or more"),
        (["--decode", "a", "b", "--nrmse", "nan"], "0 or more"),
        (["--decode", "a", "b", "--max-abs", "inf"], "0 or more"),
        (["--decode", "a", "b", "--cosine", "2"], "from 0 to 1"),
        (["--decode", "a", "b", "--cosine", "nan"], "from 0 to 1"),
        (["u", "f", "--decode", "a", "b"], "not both"),
        (["u", "f", "--rollout", "2"], "by name"),
        (["u", "f", "--map", "a=b"], "by name"),
        (["u"], "UNFUSED FUSED"),
    ],
)
def test_slips_are_exit_1(fuse, options, says):
    done = fuse("verify", *options, "--json")
    assert (done.exit, done.document["error"]["code"]) == (1, "usage")
    assert says in done.document["error"]["text"]
