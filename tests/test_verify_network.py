"""Network level of ``fuse verify``: whole models, what stands in the way of running them, and how outputs compare."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from deltafuse import network_diff, network_run, pipeline
from deltafuse.errors import UserError
from deltafuse.inputs import InputOptions
from deltafuse.lowering import fused_type
from deltafuse.network_diff import Top1, Worst, compare_outputs
from deltafuse.network_model import Runnable, runnable
from deltafuse.network_run import run_model
from deltafuse.options import FuseOptions, SilentProgress
from deltafuse.reasons import Reason
from deltafuse.tables import console
from deltafuse.tables_verify import print_verify
from deltafuse.verify import verify
from deltafuse.wire import scan
from exports import export
from tolerances import cosine, nrmse

FULL = [
    "full_decode_transformers", "full_decode_ts17", "full_decode_ts17_half", "full_prefill_transformers",
    "full_prefill_ts17", "full_prefill_ts17_half",
]  # fmt: skip
DECODE = "full_decode_ts17"


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
def both(fused, tmp_path):
    """Copies of a fixture's two files, edited; where `weights` says so, with their data in a file beside them."""

    def of(change=None, name: str = DECODE, fused_change=None, weights: bool = False) -> tuple[Path, Path]:
        paths = []
        for label, path in zip(("unfused", "fused"), fused(name), strict=True):
            model = onnx.load(path)
            for edit in (change, fused_change if label == "fused" else None):
                if edit is not None:
                    edit(model.graph)
            folder = tmp_path / label
            folder.mkdir()
            paths.append(folder / "model.onnx")
            if weights:
                onnx.save(model, paths[-1], save_as_external_data=True, location="weights.bin", size_threshold=64)
            else:
                onnx.save(model, paths[-1])
        return paths[0], paths[1]

    return of


def files_of(*paths: Path) -> set[Path]:
    return {file for path in paths for file in path.parent.iterdir()}


def refused(*arguments, **options) -> UserError:
    with pytest.raises(UserError) as error:
        verify(*arguments, **options)
    return error.value


def add(*nodes: onnx.NodeProto, tensors=()):
    """An edit that makes both models compute more."""

    def change(graph):
        graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in tensors)
        graph.node.extend(nodes)
        graph.output.append(helper.make_tensor_value_info(nodes[-1].output[0], TensorProto.FLOAT, None))

    return change


# Right fusions.


#: A rule alone: the operands are the inputs, each with its own symbol for the tokens.
ALONE = "chunk_dy20_dynBT"


@pytest.mark.parametrize("name", [*FULL, ALONE])
def test_a_right_fusion_passes(fused, name):
    report = verify(*fused(name))
    assert (report.exit, report.skipped, report.network.verdict) == (0, None, "passes")
    outputs = [info.name for info in onnx.load(fused(name)[0]).graph.output]
    assert [output.name for output in report.network.outputs] == outputs
    for output in report.network.outputs:
        assert (output.verdict, output.reason) == ("passes", None)
        assert output.cosine > 0.999999
        assert output.nrmse < 2e-3
        assert output.max_abs < 0.01
        assert output.rms > 1e-3
        assert (output.top1 is not None) == (output.name == "logits")
    assert any(output.max_abs > 0 for output in report.network.outputs)
    assert [run.model for run in report.network.runs] == ["unfused", "fused"]


def test_what_is_measured_is_what_onnxruntime_gives(fused, tmp_path):
    source, output = fused(DECODE)
    saved = tmp_path / "inputs.npz"
    report = verify(source, output, inputs=InputOptions(save=saved))
    subprocess.run([sys.executable, "-m", "deltafuse", "lower", output, "-o", tmp_path / "low.onnx"], check=True,
                   capture_output=True)  # fmt: skip
    with np.load(saved) as arrays:
        feeds = {name: arrays[name] for name in arrays.files}
    unfused, lowered = (
        onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, feeds)
        for path in (source, tmp_path / "low.onnx")
    )
    for verdict, want, got in zip(report.network.outputs, unfused, lowered, strict=True):
        assert (verdict.shape, verdict.dtype) == (got.shape, str(got.dtype))
        assert verdict.nrmse == pytest.approx(nrmse(got, want), rel=0.05, abs=1e-6)
        assert verdict.cosine == pytest.approx(cosine(got, want), abs=1e-9)
        assert verdict.max_abs == pytest.approx(np.abs(got - want).max(), rel=0.05, abs=1e-6)
    logits = report.network.outputs[0]
    two = np.sort(unfused[0].reshape(-1, 64))[:, -2:]
    assert logits.top1.margin == pytest.approx(float((two[:, 1] - two[:, 0]).min()), rel=1e-3)


def test_the_network_level_is_left_out_on_demand(fused):
    report = verify(*fused(DECODE), level="site")
    assert (report.exit, report.network, report.skipped) == (0, None, None)


def test_inputs_without_the_network_level_are_a_mistake(fused, tmp_path):
    for options in (
        InputOptions(dims={"past_seq_len": 3}), InputOptions(save=tmp_path / "in.npz"), InputOptions(path=tmp_path)
    ):  # fmt: skip
        assert refused(*fused(DECODE), level="site", inputs=options).code == "usage"
    assert refused(*fused(DECODE), inputs=InputOptions(seed=-1)).code == "usage"
    assert refused(*fused(DECODE), inputs=InputOptions(path=tmp_path / "no.npz")).code == "inputs-missing"


def test_inputs_are_not_saved_over_a_model(fused):
    source, output = fused(DECODE)
    assert refused(source, output, inputs=InputOptions(save=output)).code == "output-is-input"


# Wrong fusions: what the bar lets pass, the site level does not.


def attribute(node, name):
    return next(item for item in node.attribute if item.name == name)


def kernel(graph):
    return next(node for node in graph.node if fused_type(node))


def scale_forgotten(graph):
    kernel(graph).attribute.remove(attribute(kernel(graph), "scale_value"))


def scale_off(graph):
    attribute(kernel(graph), "scale_value").f *= 1.01


def test_a_lost_scale_meets_the_bar_and_is_found_all_the_same(both):
    report = verify(*both(fused_change=scale_forgotten))
    assert report.network.verdict == "passes"
    assert report.exit == 5
    assert [site.verdict for site in report.sites] == ["differs", "equal", "equal"]


def swapped(graph):
    node = kernel(graph)
    node.input[0], node.input[1] = node.input[1], node.input[0]


@pytest.mark.parametrize("change", [scale_off, swapped], ids=lambda change: change.__name__)
def test_a_wrong_site_is_exit_5_whatever_the_network_says(both, change):
    report = verify(*both(fused_change=change), level="network")
    assert report.exit == 5
    assert report.sites[0].verdict == "differs"
    assert report.network is not None


def test_an_output_beyond_the_bar_is_exit_5(both):
    def change(graph):
        node = next(node for node in graph.node if "logits" in node.output)
        node.output[0] = "before"
        graph.node.append(helper.make_node("Neg", ["before"], ["logits"]))

    report = verify(*both(fused_change=change))
    assert (report.exit, report.network.verdict) == (5, "differs")
    logits = report.network.outputs[0]
    assert (logits.verdict, logits.reason.code) == ("differs", "output-beyond-bar")
    assert logits.cosine == pytest.approx(-1)
    assert logits.nrmse == pytest.approx(2, rel=1e-3)
    assert logits.worst.fused == pytest.approx(-logits.worst.unfused, rel=1e-2)
    assert logits.top1.agree == 0
    assert logits.top1.lost >= logits.top1.margin


def test_a_state_that_the_fused_model_no_longer_gives_is_exit_5(both):
    def change(graph):
        graph.output.remove(next(item for item in graph.output if item.name == "present_recurrent_states"))

    report = verify(*both(fused_change=change))
    assert report.exit == 5
    assert "changed-inputs" in {finding.code for finding in report.findings}
    assert [(one.name, one.reason.code) for one in report.network.outputs if one.verdict == "differs"] == [
        ("present_recurrent_states", "output-missing")
    ]
    for draw in report.network.masks.draws:
        assert [one.name for one in draw.outputs if one.verdict == "differs"] == ["present_recurrent_states"]


def test_a_fused_model_that_does_not_run_is_a_difference(both):
    def change(graph):
        slots = kernel(graph).input[6]
        node = next(node for node in graph.node if slots in node.output)
        array = numpy_helper.to_array(node.attribute[0].t)
        node.attribute[0].t.CopyFrom(numpy_helper.from_array(array + 7))

    report = verify(*both(fused_change=change))
    assert (report.exit, report.network.verdict) == (5, "differs")
    assert (report.network.outputs, report.network.reason.code) == ((), "fused-does-not-run")


def test_a_fused_node_that_cannot_be_lowered(both, tmp_path):
    def change(graph):
        kernel(graph).attribute.remove(attribute(kernel(graph), "input_names"))

    paths = both(fused_change=change)
    report = verify(*paths)
    assert report.exit == 5
    assert report.network.reason.code == "fused-does-not-run"
    assert "cannot be turned into what onnxruntime runs" in report.network.reason.text
    with runnable(scan(paths[1]), tmp_path) as source:
        assert source.code == "network-not-lowered"


# What keeps whole models from being run.


def site_level_only(report, code: str) -> str:
    assert (report.exit, report.network, report.skipped.code) == (0, None, code)
    assert {site.verdict for site in report.sites} == {"equal"}
    return report.skipped.text


def test_weights_outside_the_file_are_used_and_nothing_is_left_beside_them(both):
    paths = both(weights=True)
    before = files_of(*paths)
    assert verify(*paths).network.verdict == "passes"
    assert files_of(*paths) == before


@pytest.mark.parametrize("which", [0, 1])
def test_missing_weights_leave_the_site_level(both, which, capsys):
    paths = both(weights=True)
    (paths[which].parent / "weights.bin").unlink()
    report = verify(*paths)
    text = site_level_only(report, "network-data-missing")
    assert f"{paths[which].parent}/weights.bin is missing; put the file beside the model" in text
    print_verify(report, console())
    assert f"site level only (network-data-missing): {text}" in " ".join(capsys.readouterr().out.split())


def test_missing_weights_are_an_error_where_the_network_level_is_wanted(both):
    paths = both(weights=True)
    (paths[1].parent / "weights.bin").unlink()
    error = refused(*paths, level="network")
    assert error.code == "network-data-missing"
    assert f"{paths[1].parent}/weights.bin is missing" in str(error)


def test_inputs_are_saved_although_weights_are_missing(both, tmp_path):
    paths = both(weights=True)
    (paths[0].parent / "weights.bin").unlink()
    site_level_only(verify(*paths, inputs=InputOptions(save=tmp_path / "in.npz")), "network-data-missing")
    with np.load(tmp_path / "in.npz") as arrays:
        assert arrays["attention_mask"].shape == (1, 9)


def test_a_file_of_weights_that_is_cut_short(both):
    paths = both(weights=True)
    weights = paths[1].parent / "weights.bin"
    weights.write_bytes(weights.read_bytes()[:-8])
    assert str(weights) in site_level_only(verify(*paths), "network-data-short")


def test_weights_that_are_all_zero_leave_nothing_to_compare(both):
    def forget(graph):
        table = next(tensor for tensor in graph.initializer if "embed_tokens" in tensor.name)
        table.raw_data = bytes(len(table.raw_data))

    paths = both(forget, name="full_prefill_ts17_half")
    assert "fill in the weights" in site_level_only(verify(*paths), "network-silent")


def test_custom_nodes_of_others_leave_the_site_level(both):
    paths = both(add(helper.make_node("Custom", ["logits"], ["more"], "theirs", type="IncreFlashAttention")))
    text = site_level_only(verify(*paths), "network-foreign-operator")
    assert "theirs" in text


def test_an_operator_that_onnxruntime_lacks_leaves_the_site_level(both):
    def change(graph):
        add(helper.make_node("Frobnicate", ["logits"], ["more"], domain="com.microsoft"))(graph)

    paths = both(change)
    for path in paths:
        model = onnx.load(path)
        model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
        onnx.save(model, path)
    assert "Frobnicate" in site_level_only(verify(*paths), "network-operator-missing")


def test_memory_that_runs_out_is_told(both):
    # 2**47 floats: more than any machine gives.
    huge = add(helper.make_node("ConstantOfShape", ["huge"], ["more"]), tensors=[("huge", np.array([1 << 47]))])
    error = refused(*both(huge))
    assert error.code == "network-memory"
    assert "--level site" in str(error)


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """Runs one model that a child of our own stands in for."""

    def call(code: str, seconds: float = 60):
        monkeypatch.setattr(network_run, "COMMAND", (sys.executable, "-c", code))
        return run_model(Runnable(tmp_path / "model.onnx", 5 * 10**9), "model.onnx", {}, tmp_path / "run", seconds)

    return call


@pytest.mark.parametrize(
    ("code", "reason", "says"),
    [
        ("import os; os.kill(os.getpid(), 9)", "network-memory", "graph and weights have 5.0 GB"),
        ("import os; os.write(2, b'std::bad_alloc'); os.abort()", "network-memory", "--level site"),
        (
            "import os; os.write(2, b'no such page'); os.kill(os.getpid(), 11)",
            "network-crash",
            "signal 11.*no such page",
        ),
        ("raise SystemExit(7)", "network-crash", "exit status 7"),
    ],
)
def test_a_child_that_dies_is_told(alone, code, reason, says):
    found = alone(code)
    assert isinstance(found, Reason)
    assert found.code == reason
    assert re.search(says, found.text)


def test_a_run_that_takes_too_long_is_ended(alone, tmp_path):
    mark = f"{tmp_path}/late"
    found = alone(f"import time; time.sleep(1); open({mark!r}, 'w')", seconds=0.3)
    assert (found.code, "--timeout" in found.text) == ("network-timeout", True)
    time.sleep(1.5)
    assert not Path(mark).exists()


def test_a_memory_limit_holds(tmp_path):
    """2 GB of zeros where 1 GB is allowed: far more than the limit leaves, whatever the machine's libraries take."""
    size = helper.make_tensor_value_info("size", TensorProto.INT64, [1])
    zeros = helper.make_tensor_value_info("zeros", TensorProto.FLOAT, ["n"])
    graph = helper.make_graph([helper.make_node("ConstantOfShape", ["size"], ["zeros"])], "zeros", [size], [zeros])
    onnx.save(helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)]), tmp_path / "m.onnx")
    np.save(tmp_path / "size.npy", np.array([1 << 29]))
    model, inputs = Runnable(tmp_path / "m.onnx", 0), {"size": tmp_path / "size.npy"}
    found = run_model(model, "m.onnx", inputs, tmp_path / "run", 60, memory=1 << 30)
    assert isinstance(found, Reason)
    assert found.code == "network-memory"
    assert "m.onnx" in found.text


def test_a_child_that_dies_is_an_error_of_the_command(fused, monkeypatch):
    monkeypatch.setattr(network_run, "COMMAND", (sys.executable, "-c", "raise SystemExit(7)"))
    assert refused(*fused(DECODE)).code == "network-crash"


def test_a_site_that_differs_is_reported_although_the_models_cannot_be_run(both, monkeypatch):
    paths = both(fused_change=scale_off)
    monkeypatch.setattr(network_run, "COMMAND", (sys.executable, "-c", "raise SystemExit(7)"))
    report = verify(*paths)
    assert (report.exit, report.network, report.skipped.code) == (5, None, "network-crash")


def test_a_size_that_does_not_run_names_the_node_and_the_symbol(both):
    """How many ones a mask has is known by running it: no tie tells that the sum below needs a past of one token."""
    paths = both(
        add(
            helper.make_node("NonZero", ["attention_mask"], ["ones"]),
            helper.make_node("Cast", ["ones"], ["numbers"], to=TensorProto.FLOAT),
            helper.make_node("ReduceSum", ["past_kv_cache", "rest"], ["lengths"], keepdims=0),
            helper.make_node("Add", ["numbers", "lengths"], ["more"], "joined"),
            tensors=[("rest", np.array([0, 1, 2, 4]))],
        )
    )
    error = refused(*paths)
    assert error.code == "network-sizes"
    for text in ("The node joined (Add)", "lengths [past_seq_len]", "--dim past_seq_len=N", str(paths[0])):
        assert text in str(error)
    assert verify(*paths, inputs=InputOptions(dims={"past_seq_len": 1})).exit == 0


@pytest.mark.parametrize(
    ("name", "code", "says"),
    [("lookup", "network-sizes", "lookup (Gather) reads two [2, 3], five [1]"), ("", "network-does-not-run", "Gather")],
)
def test_values_that_do_not_run_point_at_the_node(both, name, code, says):
    table = np.ones((2, 3), np.float32)
    node = helper.make_node("Gather", ["two", "five"], ["more"], name)
    error = refused(*both(add(node, tensors=[("two", table), ("five", np.array([5]))])))
    assert error.code == code
    assert says in str(error)


def test_a_model_that_onnxruntime_cannot_load(both):
    paths = both(add(helper.make_node("MatMul", ["logits", "logits", "logits"], ["more"], "three")))
    error = refused(*paths)
    assert error.code == "network-does-not-load"
    assert "three" in str(error)


# Memory of the process that waits.


def test_weights_never_come_into_this_process(both, tmp_path):
    size = 600 << 20

    def with_big_table(path: Path) -> None:
        """A table of 600 MB in a file of holes, of which one row is used."""
        model = onnx.load(path)
        table = TensorProto(name="big", data_type=TensorProto.FLOAT, dims=[size // 256, 64])
        table.data_location = TensorProto.EXTERNAL
        for key, value in (("location", "big.bin"), ("offset", "0"), ("length", str(size))):
            table.external_data.add(key=key, value=value)
        model.graph.initializer.append(table)
        model.graph.initializer.append(numpy_helper.from_array(np.array([0]), "row"))
        add(
            helper.make_node("Gather", ["big", "row"], ["picked"]),
            helper.make_node("Add", ["logits", "picked"], ["more"]),
        )(model.graph)
        onnx.save(model, path)
        with (path.parent / "big.bin").open("wb") as file:
            file.truncate(size)

    paths = both()
    for path in paths:
        with_big_table(path)
    code = (
        "import sys\nfrom deltafuse.cli import main\ncode = main(sys.argv[1:])\n"
        "lines = open('/proc/self/status').read().splitlines()\n"
        "print('peak', next(line.split()[1] for line in lines if line.startswith('VmHWM:')))\nsys.exit(code)"
    )
    command = [sys.executable, "-c", code, "verify", *map(str, paths), "--level", "network"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    peak = int(done.stdout.splitlines()[-1].split()[1])
    assert peak << 10 < size // 2


# Outputs.


@pytest.fixture
def compared(tmp_path):
    """The verdict on two arrays."""

    def call(unfused, fused, vocabulary: int = 0, name: str = "out"):
        paths = []
        for label, array in (("a", unfused), ("b", fused)):
            paths.append(tmp_path / f"{label}.npy")
            np.save(paths[-1], np.asarray(array))
        (verdict,) = compare_outputs({name: paths[0]}, {name: paths[1]}, vocabulary)
        return verdict

    return call


@pytest.mark.parametrize("piece", [7, 1 << 20])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_measures_are_those_of_the_whole_output(compared, monkeypatch, dtype, piece):
    monkeypatch.setattr(network_diff, "_PIECE", piece)
    monkeypatch.setattr(network_diff, "_MAPPED", 0)
    rng = np.random.default_rng(0)
    a = rng.standard_normal((3, 5, 4)).astype(dtype)
    b = (a + rng.standard_normal(a.shape) * 1e-2).astype(dtype)
    b[1, 4, 2] = a[1, 4, 2] + 0.5
    verdict = compared(a, b)
    assert verdict.cosine == pytest.approx(cosine(b, a))
    assert verdict.nrmse == pytest.approx(nrmse(b, a))
    assert verdict.rms == pytest.approx(np.sqrt(np.mean(a.astype(np.float64) ** 2)))
    assert verdict.max_abs == pytest.approx(0.5, abs=2e-3)
    assert verdict.worst == Worst((1, 4, 2), float(a[1, 4, 2]), float(b[1, 4, 2]))
    assert (verdict.shape, verdict.dtype) == ((3, 5, 4), np.dtype(dtype).name)


@pytest.mark.parametrize(
    ("change", "passes"),
    [
        (lambda a: a * 1.01, True),
        (lambda a: a * 1.03, False),  # NRMSE
        (lambda a: a + np.where(np.arange(a.size) == 5, 1.5, 0), False),  # one element by more than 1.0
        (lambda a: np.roll(a, 1), False),  # cosine
    ],
)
def test_the_bar_has_three_parts(compared, change, passes):
    a = 5 * np.random.default_rng(0).standard_normal(1000)
    verdict = compared(a, change(a))
    assert verdict.verdict == ("passes" if passes else "differs")
    assert (verdict.reason is None) == passes
    if not passes:
        assert verdict.reason.code == "output-beyond-bar"


@pytest.mark.parametrize(
    ("unfused", "fused", "code", "says"),
    [
        (np.zeros((2, 3)), np.zeros((3, 2)), "output-shape", r"\[3, 2\] in the fused model, \[2, 3\]"),
        (np.zeros(2, np.float32), np.zeros(2, np.float16), "output-type", "float16 in the fused model"),
        (np.array([[1.0, 2.0]]), np.array([[1.0, np.nan]]), "output-not-finite", r"fused model, at \[0, 1\]"),
        (np.array([np.inf]), np.array([np.inf]), "output-not-finite", "unfused model"),
        (np.array([1, 2, 3]), np.array([1, 5, 4]), "output-values", r"2 of 3 elements.* \[1\]"),
    ],
)
def test_outputs_that_cannot_be_measured_differ(compared, unfused, fused, code, says):
    verdict = compared(unfused, fused)
    assert (verdict.verdict, verdict.reason.code, verdict.cosine) == ("differs", code, None)
    assert re.search(says, verdict.reason.text)


@pytest.mark.parametrize(
    "array", [np.zeros((2, 3)), np.zeros((0, 4)), np.array(2.5), np.array([True, False]), np.arange(3)]
)
def test_the_same_output_passes(compared, array):
    verdict = compared(array, array)
    assert (verdict.verdict, verdict.max_abs) == ("passes", 0)


def test_zeros_against_others_differ(compared):
    verdict = compared(np.zeros(3), np.full(3, 1e-6))
    assert (verdict.verdict, verdict.cosine, verdict.nrmse) == ("differs", 0.0, float("inf"))


def test_an_output_that_one_model_lacks(tmp_path):
    np.save(tmp_path / "a.npy", np.ones(2))
    file = {"x": tmp_path / "a.npy"}
    for pair in ((file, {}), ({}, file)):
        (verdict,) = compare_outputs(*pair, 0)
        assert (verdict.verdict, verdict.reason.code) == ("differs", "output-missing")


@pytest.mark.parametrize("piece", [4, 1 << 20])
def test_top1_counts_rows_and_tells_the_lead(compared, monkeypatch, piece):
    monkeypatch.setattr(network_diff, "_PIECE", piece)
    a = np.array([[[5.0, 1.0, 4.0], [0.0, 2.0, 1.9], [3.0, 2.5, 0.0]]])
    b = a.copy()
    b[0, 1] = [0.0, 1.9, 2.0]
    assert compared(a, b, 3).top1 == Top1(3, 2, pytest.approx(0.1), pytest.approx(0.1))
    assert compared(a, a, 3).top1 == Top1(3, 3, pytest.approx(0.1), None)
    assert compared(a, b, 7).top1 is None
    assert compared(a, b, 7, "logits").top1.agree == 2


# The command.


def test_options_reach_the_run_and_the_document(fuse, fused, tmp_path):
    source, output = fused(DECODE)
    saved = tmp_path / "in.npz"
    options = ["--dim", "past_seq_len=5", "--seed", "3", "--save-inputs", saved, "--level", "network"]
    done = fuse("verify", source, output, *options, "--json")
    assert (done.exit, done.err) == (0, "")
    network = done.document["network"]
    assert (network["verdict"], network["seed"]) == ("passes", 3)
    assert network["sizes"] == {"past_seq_len": 5, "total_seq_len": 6}
    assert network["outputs"][0]["name"] == "logits"
    assert set(network["outputs"][0]) >= {"shape", "dtype", "cosine", "nrmse", "max_abs", "worst", "top1", "verdict"}
    again = fuse("verify", source, output, "--inputs", saved, "--json").document["network"]
    assert again["outputs"] == network["outputs"]
    alone = fuse("verify", source, output, "--level", "site", "--json").document
    assert (alone["network"], alone["skipped"], alone["exit"]) == (None, None, 0)


def test_people_get_both_tables_and_one_last_line(fuse, fused):
    lines = fuse("verify", *fused(DECODE)).out.splitlines()
    headings = next(line for line in lines if line.startswith("output")).split()
    assert headings[:2] == ["output", "verdict"]
    row = next(line for line in lines if line.startswith("logits  ")).split()
    assert row[1:3] == ["passes", "float32"]
    assert any("logits: same most likely token in 1 of 1 row;" in line for line in lines)
    assert lines[-1] == "3 of 3 fused sites equal; 4 of 4 outputs of the whole model within the bar"
    values = "cosine at least 0.999, NRMSE at most 0.02, largest difference at most 1"
    assert lines[-2] == f"the bar (FP16 boundary, ascend-310p): {values}"
    assert lines[-3].startswith("isolated: ")
    assert "; accumulated: in the fused run" in lines[-3]


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["--dim", "past_seq_len"], "usage"),
        (["--level", "all of it"], "usage"),
        (["--seed", "x"], "usage"),
        (["--seed", "-1"], "usage"),
        (["--level", "site", "--dim", "past_seq_len=3"], "usage"),
        (["--dim", "no=3"], "unknown-dim"),
        (["--inputs", "/nowhere.npz"], "inputs-missing"),
        (["--save-inputs", "/nowhere/in.npz"], "output-folder-missing"),
    ],
)
def test_mistakes_are_exit_1(fuse, fused, options, code):
    done = fuse("verify", *fused(DECODE), *options, "--json")
    assert (done.exit, done.document["error"]["code"]) == (1, code)
    assert "Traceback" not in done.err


def test_sizes_that_are_edited_in_the_fused_file_are_no_fault_of_the_unfused_one(fused, tmp_path):
    source, output = fused("full_decode_ts17")
    model = onnx.load(output)
    sizes = {"attention_mask": (1, 7), "past_kv_cache": (3, 40)}
    for info in model.graph.input:
        if info.name in sizes:
            axis, size = sizes[info.name]
            info.type.tensor_type.shape.dim[axis].dim_value = size
    onnx.save(model, tmp_path / "edited.onnx")
    report = verify(source, tmp_path / "edited.onnx")
    assert (report.exit, report.skipped.code) == (5, "network-axes")
    text = report.skipped.text
    assert text.startswith(f"whole models are run at the sizes that {tmp_path / 'edited.onnx'} declares, which is")
    assert "axis 1 of the graph input attention_mask is total_seq_len in the unfused file and 7 in the fused" in text
