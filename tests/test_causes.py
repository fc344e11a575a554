"""Causes: the first tensor that parts, sites bisected, decisions undone, reproductions; every wrong fusion is named."""

from __future__ import annotations

import shlex
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import bodied
import sabotage
from deltafuse import pipeline
from deltafuse.bisecting import bisect
from deltafuse.errors import UserError
from deltafuse.inputs import InputOptions
from deltafuse.options import FuseOptions, SilentProgress
from deltafuse.reasons import Reason
from deltafuse.verify import Settings, check
from deltafuse.verify_bars import Overrides, bar_of
from deltafuse.verify_causes import Causes, find_causes
from exports import export

DECODE = "full_decode_ts17"


@pytest.fixture(scope="module")
def fused(tmp_path_factory):
    """Unfused and fused path by fixture name and target; each fixture is fused once."""
    folder = tmp_path_factory.mktemp("fused")

    def of(name: str = DECODE, target: str = "ascend-310p") -> tuple[Path, Path]:
        output = folder / f"{name}.{target}.onnx"
        if not output.exists():
            assert pipeline.fuse(FuseOptions(export(name).path, output, target=target), SilentProgress()).exit == 0
        return export(name).path, output

    return of


@pytest.fixture(scope="module")
def wrong(fused, tmp_path_factory):
    """What is checked of a wrong fusion: both files' sites and the network level; each once."""
    folder, known = tmp_path_factory.mktemp("wrong"), {}

    def of(change, name: str = DECODE):
        key = change.__name__, name
        if key not in known:
            source, output = fused(name)
            model = onnx.load(output)
            change(model.graph)
            path = folder / f"{change.__name__}.{name}.onnx"
            onnx.save(model, path)
            known[key] = check(source, path, Settings(level="network")), path
        return known[key]

    return of


def bisected(checked):
    stage = checked.stage
    close = bar_of(stage.after.shapes)
    return bisect(stage, stage.inputs(InputOptions()), close, 600, None, SilentProgress())


def nothing(graph):
    """A right fusion."""


# Every wrong fusion is caught at its site, by the mathematics or by the structure.

MOVING = [
    sabotage.state_transpose_dropped, sabotage.final_transpose_dropped, sabotage.state_zeroed, sabotage.tiled_heads,
    sabotage.q_and_k_swapped,
]  # fmt: skip
HIDDEN = [sabotage.scale_off, sabotage.g_rounded]


@pytest.mark.parametrize("change", [*MOVING, *HIDDEN], ids=lambda change: change.__name__)
def test_a_wrong_fusion_is_caught_at_the_right_site(wrong, change):
    checked, _ = wrong(change)
    report = checked.report
    assert report.exit == 5
    by_mathematics = [site.name for site in report.sites if site.verdict == "differs"]
    by_structure = [node.site for node in report.structure if node.findings]
    assert set(by_mathematics) | set(by_structure) == {"layers.0"}
    assert bool(by_mathematics) == (change is not sabotage.g_rounded)


def test_exchanged_layers_are_caught_at_both(wrong):
    checked, _ = wrong(sabotage.layers_exchanged)
    assert [site.verdict for site in checked.report.sites] == ["differs", "differs", "equal"]


@pytest.mark.parametrize("change", MOVING, ids=lambda change: change.__name__)
def test_bisecting_names_the_site_that_moves_an_output(wrong, change):
    checked, _ = wrong(change)
    found = bisected(checked)
    (culprit,) = found.culprits
    assert culprit.sites == ("layers.0",)
    assert culprit.output in ("logits", "present_recurrent_states")
    assert culprit.reason.code == "output-beyond-bar"
    assert culprit.nrmse > 0.02
    # The unfused model, all sites, both halves, and no more of the half that is right.
    assert found.runs == 4


def test_bisecting_names_exchanged_layers(wrong):
    found = bisected(wrong(sabotage.layers_exchanged)[0])
    assert [culprit.sites for culprit in found.culprits] == [("layers.0",), ("layers.1",)]
    assert {culprit.reason.code for culprit in found.culprits} == {"output-beyond-bar"}


@pytest.mark.parametrize("change", [nothing, *HIDDEN], ids=lambda change: change.__name__)
def test_bisecting_finds_nothing_where_no_output_moves(wrong, change):
    found = bisected(wrong(change)[0])
    assert (found.runs, found.culprits) == (2, ())


def last_final_transpose_dropped(graph):
    """Of the last layer, and the first one's state is not read."""
    sabotage.state_zeroed(graph)
    node = sabotage.custom(graph, 2)
    transpose = next(item for item in graph.node if node.output[1] in item.input)
    after = next(item for item in graph.node if transpose.output[0] in item.input)
    after.input[0] = node.output[1]
    graph.node.remove(transpose)


def test_two_culprits_are_both_named(wrong):
    found = bisected(wrong(last_final_transpose_dropped)[0])
    assert [culprit.sites for culprit in found.culprits] == [("layers.0",), ("layers.2",)]
    assert found.culprits[1].output == "present_recurrent_states"


def test_sites_that_are_wrong_together_only_are_named_together(wrong, monkeypatch):
    from deltafuse import bisecting

    checked, _ = wrong(nothing)
    whole = bisecting._Search._broken

    def broken(self, regions, reference):
        """Two halves that are right alone."""
        whole(self, regions, reference)
        found = bisecting.Finding("output-beyond-bar", "both")
        return bisecting._Broken("logits", 1.0, found) if len(regions) > 1 else None

    monkeypatch.setattr(bisecting._Search, "_broken", broken)
    (culprit,) = bisected(checked).culprits
    assert culprit.sites == ("layers.1", "layers.2")


def does_not_run(graph):
    node = sabotage.custom(graph)
    slots = next(item for item in graph.node if node.input[sabotage.port(node, "ssm_state_indices")] in item.output)
    slots.attribute[0].t.CopyFrom(numpy_helper.from_array(np.array([7], np.int32)))


def test_a_site_that_does_not_run_is_named(wrong):
    checked, _ = wrong(does_not_run)
    assert checked.report.network.reason.code == "fused-does-not-run"
    assert "indices element out of data bounds" in checked.report.network.reason.text
    (culprit,) = bisected(checked).culprits
    assert (culprit.sites, culprit.output, culprit.reason.code) == (("layers.0",), None, "bisect-does-not-run")


def test_a_prefill_of_another_target_is_bisected_too(fused, tmp_path):
    source, output = fused("full_prefill_ts17", "onnx")
    model = onnx.load(output)
    node = [item for item in model.graph.node if item.op_type == "LinearAttention"][1]
    node.input[0], node.input[1] = node.input[1], node.input[0]
    onnx.save(model, tmp_path / "wrong.onnx")
    checked = check(source, tmp_path / "wrong.onnx", Settings(level="network"))
    (culprit,) = bisected(checked).culprits
    assert culprit.sites == ("layers.1",)
    first = checked.report.network.divergence.first
    assert (first.site, first.blame) == ("layers.1", "site")


def test_weights_beside_the_model_are_found_and_nothing_is_left_there(wrong, tmp_path):
    paths = []
    for label, path in (("unfused", export(DECODE).path), ("fused", wrong(sabotage.state_zeroed)[1])):
        (tmp_path / label).mkdir()
        paths.append(tmp_path / label / "model.onnx")
        onnx.save(
            onnx.load(path), paths[-1], save_as_external_data=True, location="weights.bin", size_threshold=64
        )
    before = sorted(tmp_path.rglob("*"))
    checked = check(*paths, Settings(level="network"))
    (culprit,) = bisected(checked).culprits
    assert culprit.sites == ("layers.0",)
    assert sorted(tmp_path.rglob("*")) == before


# The first tensor that parts.


def test_a_right_fusion_parts_nowhere(wrong):
    report = wrong(nothing)[0].report
    divergence = report.network.divergence
    assert divergence.first is None
    assert [site.name for site in divergence.sites] == ["layers.0", "layers.1", "layers.2"]
    for site in divergence.sites:
        assert 1e-6 < site.isolated.nrmse < 2e-3
        assert 1e-6 < site.accumulated.nrmse < 2e-3
    # Nothing came before the first site.
    assert divergence.sites[0].isolated == divergence.sites[0].accumulated


def test_isolated_errors_tell_the_site_from_what_follows(wrong):
    divergence = wrong(sabotage.tiled_heads)[0].report.network.divergence
    one, two, three = divergence.sites
    assert one.isolated.nrmse == pytest.approx(one.accumulated.nrmse)
    assert one.isolated.nrmse > 0.5
    for site in (two, three):
        assert site.isolated.nrmse < 2e-3
        assert site.accumulated.nrmse > 0.02
    first = divergence.first
    assert (first.site, first.blame) == ("layers.0", "site")
    assert first.tensor.startswith("/model/layers.0/linear_attn/")
    assert "NRMSE" in first.failed
    assert "(at most 0.02)" in first.failed


def test_what_came_before_is_to_blame_for_what_a_site_reads(wrong):
    def gate_changed(graph):
        """Another activation behind the first layer: no site is wrong, and all later ones read other numbers."""
        nodes = [node for node in graph.node if node.op_type == "Sigmoid" and "layers.0" in node.name]
        nodes[-1].op_type = "Tanh"

    report = wrong(gate_changed)[0].report
    first = report.network.divergence.first
    assert {finding.code for finding in report.findings} == {"changed-outside"}
    assert first.blame == "before"
    isolated = [site.isolated.nrmse for site in report.network.divergence.sites]
    assert max(isolated) < 2e-3


def test_bars_of_the_user_move_the_tolerance(fused):
    tight = Settings(level="network", bars=Overrides(nrmse=1e-6))
    report = check(*fused(), tight).report
    assert report.exit == 5
    assert report.sites[0].reason.code == "site-rounding"
    assert "at most 1e-06" in report.sites[0].reason.text
    assert report.sites[0].failed == ("nrmse",)
    logits = report.network.outputs[0]
    assert (logits.failed, "(at most 1e-06)" in logits.reason.text) == (("nrmse",), True)
    assert (report.network.divergence.first.site, report.network.divergence.first.blame) == ("layers.0", "site")


# Decisions undone.


def rows(wrong, change, name: str = DECODE):
    checked, _ = wrong(change, name)
    report = find_causes(checked, Causes(ablate=("layers.0",)), Settings())
    (ablation,) = report.ablations
    assert ablation.site == "layers.0"
    return {row.decision: row for row in ablation.rows}


def test_each_decision_is_one_row(wrong):
    found = rows(wrong, nothing)
    assert list(found) == [
        "as fused", "query, key and value in float16", "l2 norm in float32", "beta in float16", "state in float16",
        "g in float32", "output in float16", "all of these", "scale 0.25", "consecutive value heads share a key head",
    ]  # fmt: skip
    assert 1e-4 < found["as fused"].nrmse < 2e-3
    assert found["all of these"].nrmse < 1e-12
    assert found["state in float16"].nrmse < found["as fused"].nrmse
    assert found["scale 0.25"].instead.startswith("0.25, ")
    assert found["consecutive value heads share a key head"].nrmse > 0.1


def test_a_lost_scale_is_the_row_that_helps(wrong):
    found = rows(wrong, sabotage.scale_off)
    assert found["as fused"].nrmse == pytest.approx(0.01, rel=0.05)
    assert found["all of these"].nrmse == pytest.approx(0.01, rel=0.05)
    assert found["scale 0.252499998"].nrmse < 1e-3
    assert found["scale 0.252499998"].instead == "0.25, which fits best"


def test_a_wrong_head_map_is_the_row_that_helps(wrong):
    found = rows(wrong, sabotage.tiled_heads)
    assert found["as fused"].nrmse > 0.5
    assert found["consecutive value heads share a key head"].nrmse < 2e-3


def test_a_rounded_g_is_a_row(wrong):
    found = rows(wrong, sabotage.g_rounded)
    assert found["g in float16"].nrmse < found["as fused"].nrmse


def test_what_is_measured_is_what_the_lowered_site_gives(wrong):
    """The roundings put in by hand are those of the site at the target's precision."""
    site = wrong(nothing)[0].report.sites[0]
    assert rows(wrong, nothing)["as fused"].nrmse == pytest.approx(site.rounding.nrmse, rel=0.02)


@pytest.mark.parametrize("target", ["ort", "onnx"])
def test_linear_attention_has_rows_too(fused, target):
    checked = check(*fused(DECODE, target), Settings(level="site"))
    (ablation,) = find_causes(checked, Causes(ablate=("layers.1",)), Settings()).ablations
    found = {row.decision: row for row in ablation.rows}
    assert found["as fused"].nrmse < 1e-6
    assert found["all of these"].nrmse < 1e-12
    heads = found.get("consecutive value heads share a key head")
    # The standard operator takes as many key heads as value heads: they are repeated before it.
    assert (heads is None) == (target == "onnx")
    assert heads is None or heads.nrmse > 0.1


def test_a_site_that_is_not_there_is_told(wrong):
    with pytest.raises(UserError) as error:
        find_causes(wrong(nothing)[0], Causes(ablate=("layers.7",)), Settings())
    assert error.value.code == "no-such-site"
    assert "layers.0, layers.1, layers.2" in str(error.value)


# Reproductions.


@pytest.mark.parametrize("change", [sabotage.scale_off, sabotage.g_scaled], ids=lambda change: change.__name__)
@pytest.mark.parametrize("name", [DECODE, "full_prefill_ts17"])
def test_a_reproduction_shows_the_fault_by_itself(wrong, fuse, tmp_path, change, name):
    folder = tmp_path / "reproduction"
    report = find_causes(wrong(change, name)[0], Causes(minimize=folder), Settings(level="network"))
    found = report.reproduction
    assert (found.site, found.values, found.note) == ("layers.0", "model", None)
    assert sorted(Path(file).name for file in found.files) == sorted(path.name for path in folder.iterdir())
    assert (folder / "command.txt").read_text() == f"{found.command}\n"
    command = shlex.split(found.command)
    done = fuse(*command[1:], "--json")
    assert done.exit == 5
    assert [site["verdict"] for site in done.document["sites"]] == ["differs"]
    assert done.document["sites"][0]["error"] > 1e-4
    assert done.document["network"]["inputs"][0]["role"] == "given"
    with np.load(folder / "inputs.npz") as arrays:
        assert {info.name for info in onnx.load(folder / "unfused.onnx").graph.input} == set(arrays.files)


def test_a_reproduction_has_the_values_of_the_unfused_model(wrong, tmp_path):
    checked, _ = wrong(sabotage.scale_off)
    find_causes(checked, Causes(minimize=tmp_path), Settings(level="network"))
    given = checked.stage.inputs(InputOptions()).arrays
    with np.load(tmp_path / "inputs.npz") as arrays:
        state = arrays["/Gather_3_output_0"]
    assert np.array_equal(state, given["past_recurrent_states"][0])


def test_without_weights_values_are_drawn(wrong, tmp_path):
    paths = []
    for label, path in (("unfused", export(DECODE).path), ("fused", wrong(sabotage.scale_off)[1])):
        (tmp_path / label).mkdir()
        paths.append(tmp_path / label / "model.onnx")
        onnx.save(onnx.load(path), paths[-1], save_as_external_data=True, location="w.bin", size_threshold=1024)
        (paths[-1].parent / "w.bin").unlink()
    checked = check(*paths, Settings(level="site"))
    found = find_causes(checked, Causes(minimize=tmp_path / "out"), Settings()).reproduction
    assert (found.site, found.values) == ("layers.0", "drawn")
    with pytest.raises(UserError) as error:
        find_causes(checked, Causes(bisect=True), Settings())
    assert error.value.code == "network-data-missing"


def test_nothing_is_written_where_nothing_is_wrong(wrong, tmp_path):
    found = find_causes(wrong(nothing)[0], Causes(minimize=tmp_path / "none"), Settings()).reproduction
    assert (found.site, found.files) == (None, ())
    assert "no site is to blame" in found.note
    assert not (tmp_path / "none").exists()


def test_what_cannot_be_cut_out_is_told(wrong, tmp_path):
    found = find_causes(wrong(sabotage.layers_exchanged)[0], Causes(minimize=tmp_path / "none"), Settings())
    assert "cannot be cut out of both files" in found.reproduction.note


# The command.


def test_the_command_finds_and_tells(fuse, wrong, tmp_path):
    _, path = wrong(sabotage.tiled_heads)
    options = ["--bisect", "--ablate", "layers.0", "--minimize", tmp_path / "mini"]
    done = fuse("verify", export(DECODE).path, path, *options)
    assert done.exit == 5
    lines = done.out.splitlines()
    assert any(line.startswith("first beyond tolerance (FP16 boundary, ascend-310p): ") for line in lines)
    assert any("layers.0 itself is to blame" in line for line in lines)
    assert any(line.startswith("bisected in 4 runs: layers.0 breaks it: ") for line in lines)
    assert any(line.startswith("consecutive value heads share a key head") for line in lines)
    assert f"  fuse verify {tmp_path}/mini/unfused.onnx" in done.out.replace("\n", " ")
    document = fuse("verify", export(DECODE).path, path, *options, "--json").document
    assert document["bisect"]["culprits"][0]["sites"] == ["layers.0"]
    assert document["ablations"][0]["rows"][0]["decision"] == "as fused"
    assert document["reproduction"]["site"] == "layers.0"
    assert document["network"]["divergence"]["first"]["blame"] == "site"


# Sites beside those of a rule in the main graph.


def of_type(graph, op):
    """The first node of an operator, in bodies too."""
    for node in graph.node:
        inner = (of_type(item.g, op) for item in node.attribute if item.HasField("g"))
        found = node if node.op_type == op else next(filter(None, inner), None)
        if found is not None:
            return found
    return None


@pytest.fixture
def wrong_convolution(fused, tmp_path):
    """The convolution in front of the first site has no activation."""
    source, output = fused(DECODE, "ort")
    model = onnx.load(output)
    attribute = sabotage.attribute(of_type(model.graph, "CausalConvWithState"), "activation")
    attribute.s = b"none"
    onnx.save(model, tmp_path / "wrong.onnx")
    return source, tmp_path / "wrong.onnx"


def test_a_convolution_that_moves_an_output_is_bisected_and_written_alone(fuse, wrong_convolution, tmp_path):
    name, mini = "layers.0.causal_conv", tmp_path / "mini"
    done = fuse("verify", *wrong_convolution, "--bisect", "--ablate", name, "--minimize", mini, "--json")
    document = done.document
    assert [culprit["sites"] for culprit in document["bisect"]["culprits"]] == [[name]]
    assert document["bisect"]["untried"] == []
    assert [one["reason"]["code"] for one in document["ablations"]] == ["cause-expression"]
    assert document["reproduction"]["site"] == name
    alone = fuse(*shlex.split(document["reproduction"]["command"])[1:], "--json")
    assert (alone.exit, [site["verdict"] for site in alone.document["sites"]]) == (5, ["differs"])


@pytest.mark.parametrize("target", ["ort", "onnx"])
def test_a_right_convolution_is_no_culprit(fused, target):
    checked = check(*fused(DECODE, target), Settings(level="network"))
    assert len(checked.stage.expressions) == 3
    assert bisected(checked).culprits == ()


@pytest.fixture
def wrong_in_a_body(tmp_path):
    """A branch of an If with a fused step whose scale is twice what it must be."""
    source, output = tmp_path / "branch.onnx", tmp_path / "wrong.onnx"
    onnx.save(bodied.chosen(), source)
    assert pipeline.fuse(FuseOptions(source, output, target="ort"), SilentProgress()).exit == 0
    model = onnx.load(output)
    sabotage.attribute(of_type(model.graph, "LinearAttention"), "scale").f *= 2
    onnx.save(model, output)
    return source, output


def test_sites_inside_bodies_are_told_as_not_looked_at(fuse, wrong_in_a_body, tmp_path):
    options = ["--bisect", "--ablate", "*", "--minimize", tmp_path / "mini"]
    document = fuse("verify", *wrong_in_a_body, *options, "--json").document
    (site,) = document["sites"]
    assert site["verdict"] == "differs"
    assert (document["bisect"]["culprits"], document["bisect"]["untried"]) == ([], [site["name"]])
    assert [one["reason"]["code"] for one in document["ablations"]] == ["cause-inside-body"]
    assert "--minimize looks at sites of the main graph only" in document["reproduction"]["note"]
    assert not (tmp_path / "mini").exists()
    done = fuse("verify", *wrong_in_a_body, *options, "--html", tmp_path / "page.html")
    told = f"not bisected, inside bodies of If, Loop or Scan: {site['name']}; read their own verdicts"
    assert done.exit == 5
    assert "no site of the main graph moves an output beyond tolerance" in done.out
    assert told in done.out.replace("\n", " ")
    assert told.capitalize().replace("if, loop or scan", "If, Loop or Scan") in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    "options", [["u", "f", "--bisect", "--level", "site"], ["--decode", "u", "f", "--ablate", "x"]]
)
def test_slips_are_exit_1(fuse, options):
    done = fuse("verify", *options, "--json")
    assert (done.exit, done.document["error"]["code"]) == (1, "usage")


def test_an_unfused_model_that_does_not_run_cannot_be_bisected(fused, tmp_path):
    paths = []
    for path in fused():
        model = onnx.load(path)
        model.graph.node.append(helper.make_node("MatMul", ["logits", "logits", "logits"], ["more"], "three"))
        paths.append(tmp_path / f"{len(paths)}.onnx")
        onnx.save(model, paths[-1])
    checked = check(*paths, Settings(level="site"))
    found = bisected(checked)
    assert isinstance(found, Reason)
    with pytest.raises(UserError):
        find_causes(checked, Causes(bisect=True), Settings())
