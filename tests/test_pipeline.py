"""The whole way: every fixture fused, run and rolled back, and what each option changes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import graphs
from deltafuse import pipeline
from deltafuse.errors import InternalError, UserError
from deltafuse.lowering import fused_type, lower_model, read_call
from deltafuse.match import FuseReport
from deltafuse.options import FuseOptions, SilentProgress
from deltafuse.rollback import rollback
from deltafuse.shapes import Shapes
from deltafuse.wire import scan
from exports import Export, export, exports
from tolerances import assert_close

MATCHES = [one for one in exports(expect="match") if one.truth["exit"] == 0]
STATIC = [one for one in exports(expect="match") if one.truth["why"] == "a static batch above one"]


@pytest.fixture(scope="module", autouse=True)
def _worker() -> Iterator[None]:
    with graphs.one_worker():
        yield


@dataclass(frozen=True)
class Fused:
    """A fixture that was fused."""

    source: Export
    path: Path
    report: FuseReport

    @property
    def model(self) -> onnx.ModelProto:
        return onnx.load(self.path, load_external_data=False)

    def nodes(self) -> list[onnx.NodeProto]:
        return [node for node in self.model.graph.node if fused_type(node)]


@pytest.fixture(scope="module")
def fused(tmp_path_factory: pytest.TempPathFactory):
    """Fixtures by name, each fused once."""
    folder = tmp_path_factory.mktemp("fused")
    known: dict[str, Fused] = {}

    def of(name: str) -> Fused:
        if name not in known:
            path = folder / f"{name}.onnx"
            known[name] = Fused(export(name), path, graphs.fuse(export(name).path, path))
        return known[name]

    return of


def ids(one: Export) -> str:
    return one.name


def pinned_rows(report: FuseReport, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Arrays by name, cut to the sizes that were pinned."""
    cut = dict(arrays)
    for pin in report.pinned:
        if pin.value in cut:
            cut[pin.value] = cut[pin.value].take(range(pin.now), axis=pin.axis)
    return cut


@pytest.mark.parametrize("one", MATCHES, ids=ids)
def test_each_match_becomes_one_custom_node(one: Export, fused) -> None:
    done = fused(one.name)
    assert done.report.exit == 0
    assert [site.status for site in done.report.sites] == ["fused"] * one.truth["n_sites"]
    nodes = done.nodes()
    assert sorted(fused_type(node) for node in nodes) == sorted(site.op for site in done.report.sites)
    assert done.report.nodes_before == one.truth["nodes"]
    assert done.report.nodes_after == len(done.model.graph.node)
    for site in done.report.sites:
        assert site.match.proof.max_error <= 1e-12
        assert site.match.proof.emitted_error <= 1e-12


@pytest.mark.parametrize("one", MATCHES, ids=ids)
def test_the_lowered_file_meets_what_torch_gave(one: Export, fused) -> None:
    done = fused(one.name)
    names = one.truth["outputs"]
    feeds = pinned_rows(done.report, one.inputs)
    want = pinned_rows(done.report, dict(zip(names, one.expected, strict=True)))
    session = graphs.session(lower_model(done.model))
    got = dict(zip(names, session.run(None, {i.name: feeds[i.name] for i in session.get_inputs()}), strict=True))
    for name in names:
        assert_close(got[name], want[name], "float16")
    for info in done.model.graph.output:
        for axis, dim in enumerate(info.type.tensor_type.shape.dim):
            assert not dim.HasField("dim_value") or dim.dim_value == got[info.name].shape[axis], (info.name, axis)


@pytest.mark.parametrize("one", MATCHES, ids=ids)
def test_what_the_match_says_is_true(one: Export, fused) -> None:
    truth = one.truth
    dims = truth["dims"] if isinstance(truth["dims"], list) else [truth["dims"]] * truth["n_sites"]
    scales = truth["scale"] if isinstance(truth["scale"], list) else [truth["scale"]] * truth["n_sites"]
    for site, sizes, scale in zip(fused(one.name).report.sites, dims, scales, strict=True):
        found = site.match
        for name in ("key_heads", "value_heads", "key_dim", "value_dim"):
            assert getattr(found.dims, name) == sizes[name], name
        assert found.scale == pytest.approx(scale, rel=1e-6)
        assert found.form == truth["kind"]
        # In front of the exported function or inside of it: both are in the graph.
        assert (found.query_norm is not None) == (truth["l2norm"] != "none")
        assert (found.key_norm is not None) == (truth["l2norm"] != "none")
        if truth["valid_tokens"] is not None:
            assert [found.valid_tokens.low, found.valid_tokens.high] == truth["valid_tokens"]
        for role, name in (truth["roles"] or {}).items():
            assert getattr(found, role).name == name


@pytest.mark.parametrize("one", MATCHES, ids=ids)
def test_rollback_gives_the_original_back(one: Export, fused, tmp_path: Path) -> None:
    rollback(fused(one.name).path, tmp_path / "back.onnx")
    assert (tmp_path / "back.onnx").read_bytes() == one.path.read_bytes()


@pytest.mark.parametrize("one", MATCHES, ids=ids)
def test_a_second_run_writes_the_same_bytes(one: Export, fused, tmp_path: Path) -> None:
    graphs.fuse(one.path, tmp_path / "again.onnx")
    assert (tmp_path / "again.onnx").read_bytes() == fused(one.name).path.read_bytes()


@pytest.mark.parametrize("one", [export("rec_dy18"), export("two_sizes_ts17")], ids=ids)
def test_a_fused_file_is_not_fused_again(one: Export, fused, tmp_path: Path) -> None:
    report = graphs.fuse(fused(one.name).path, tmp_path / "twice.onnx")
    assert report.exit == 3
    assert report.sites == ()
    assert any(note.startswith("already-fused: ") for note in report.notes)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("one", STATIC, ids=ids)
def test_a_static_batch_above_one_is_refused(one: Export, tmp_path: Path) -> None:
    report = graphs.fuse(one.path, tmp_path / "out.onnx")
    assert report.exit == one.truth["exit"] == 4
    assert graphs.codes(report) == ["static-batch"]
    assert str(one.truth["dims"]["batch"]) in report.sites[0].reason.text
    assert list(tmp_path.iterdir()) == []


def test_two_sizes_have_their_own_scales_and_shapes(fused) -> None:
    done = fused("two_sizes_ts17")
    scales = [next(a.f for a in node.attribute if a.name == "scale_value") for node in done.nodes()]
    assert scales == pytest.approx([64**-0.5, 128**-0.5])
    declared = {info.name: info for info in done.model.graph.value_info}
    sizes = [declared[node.output[1]].type.tensor_type.shape.dim[-1].dim_value for node in done.nodes()]
    assert sizes == [64, 128]
    assert [site.match.proof.shared_with for site in done.report.sites] == [None, None]


def test_equal_layers_share_a_proof(fused) -> None:
    sites = fused("full_prefill_ts17").report.sites
    # The exporter computes some sizes in the first layer only: it may be a class of its own.
    shared = {site.name: site.match.proof.shared_with for site in sites}
    assert shared["layers.2"] in ("layers.0", "layers.1")
    keys = {site.name: site.match.class_key for site in sites}
    assert all(keys[name] == keys[first] for name, first in shared.items() if first is not None)
    assert len(set(keys.values())) == list(shared.values()).count(None)


HALVES = ["rec_ts17_half", "rec_ts17_half_norm_outside", "chunk_ts17_half", "chunk_dy20_half"]


@pytest.mark.parametrize("name", HALVES)
def test_half_stays_half_and_the_decay_is_single(name: str, fused) -> None:
    done = fused(name)
    (node,) = done.nodes()
    shapes = Shapes(scan(done.path))
    made = {output: other for other in done.model.graph.node for output in other.output}
    types = {port: shapes.dtype(shapes.graph.find(value)) for port, value in read_call(node).ports.items()}
    floats = {port: kind for port, kind in types.items() if kind in (TensorProto.FLOAT, TensorProto.FLOAT16)}
    state = "initial_state" if fused_type(node) == "ChunkGatedDeltaRule" else "state"
    assert floats == {
        **dict.fromkeys(["query", "key", "value", "beta", state], TensorProto.FLOAT16),
        "g": TensorProto.FLOAT,
    }
    declared = {info.name: info.type.tensor_type.elem_type for info in done.model.graph.value_info}
    assert [declared[output] for output in node.output] == [TensorProto.FLOAT16] * 2
    # From the kernel's output to the graph's: moves and, at most, no-op casts to half; single precision nowhere.
    value = done.model.graph.output[0].name
    while value != node.output[0]:
        writer = made[value]
        assert writer.op_type in ("Reshape", "Transpose", "Unsqueeze", "Squeeze", "Cast", "Identity")
        assert writer.op_type != "Cast" or helper.get_node_attr_value(writer, "to") == TensorProto.FLOAT16
        value = writer.input[0]


def test_a_value_read_outside_survives_where_it_can(fused) -> None:
    # The decay summed up in a chunk is made in front of the rule: it stays, and the run above compares it.
    assert fused("leak_chunk").report.exit == 0
    assert len(fused("leak_chunk").model.graph.output) == 2


def test_a_value_inside_that_is_an_output_refuses_the_site(tmp_path: Path) -> None:
    report = graphs.fuse(export("leak_ts17").path, tmp_path / "out.onnx")
    assert (report.exit, graphs.codes(report)) == (4, ["inner-value-used"])
    assert "decayed_state" in report.sites[0].reason.text
    assert list(tmp_path.iterdir()) == []


# Options


def two_forms(tmp_path: Path) -> Path:
    """A prefill and a decode model as one: chunk sites and recurrent ones."""
    parts = []
    for name in ("chunk_ts20_eqheads_nofinal", "rec_ts17_eqheads_nofinal"):
        model = onnx.load(export(name).path)
        model = onnx.compose.add_prefix(model, f"{name[:3]}.")
        model.ir_version = 8
        del model.opset_import[:]
        model.opset_import.append(helper.make_opsetid("", 17))
        parts.append(model)
    merged = onnx.compose.merge_models(*parts, io_map=[])
    return graphs.save(merged, tmp_path, "two_forms.onnx")


def test_form_takes_sites_of_that_form(tmp_path: Path) -> None:
    model = two_forms(tmp_path)
    for form in ("chunk", "recurrent"):
        report = graphs.fuse(model, tmp_path / f"{form}.onnx", form=form)
        assert report.exit == 0
        by_form = {site.match.form: site for site in report.sites}
        assert by_form.pop(form).status == "fused"
        (other,) = by_form.values()
        assert (other.status, other.reason.code) == ("match", "left-out")
        written = f"left out: written as {other.match.form}, --form asks for another"
        assert other.reason.text == f"{written}; change --form to take the site"
        assert len([node for node in onnx.load(tmp_path / f"{form}.onnx").graph.node if fused_type(node)]) == 1


def test_sites_and_skip_sites_are_globs(tmp_path: Path, fused) -> None:
    source = export("two_sizes_ts17").path
    names = [site.name for site in fused("two_sizes_ts17").report.sites]
    assert names == ["layers.0", "layers.1"]
    for options, taken in (
        ({"sites": ("*.1",)}, names[1:]),
        ({"sites": ("layers.[01]",)}, names),
        ({"skip_sites": ("layers.1", "*.1")}, names[:1]),
        ({"sites": ("*",), "skip_sites": ("*.0",)}, names[1:]),
    ):
        report = graphs.fuse(source, tmp_path / "out.onnx", **options)
        assert report.exit == 0
        assert [site.name for site in report.sites if site.status == "fused"] == taken
        left = [site.reason for site in report.sites if site.status == "match"]
        assert {reason.code for reason in left} <= {"left-out"}
        assert len(left) == len(names) - len(taken)


def test_nothing_left_to_fuse_is_no_site(tmp_path: Path) -> None:
    report = graphs.fuse(export("rec_dy18").path, tmp_path / "out.onnx", skip_sites=("*",))
    assert (report.exit, graphs.codes(report)) == (3, ["left-out"])
    assert list(tmp_path.iterdir()) == []


def test_what_was_left_out_can_be_fused_later(tmp_path: Path) -> None:
    first = graphs.fuse(export("two_sizes_ts17").path, tmp_path / "first.onnx", sites=("layers.0",))
    second = graphs.fuse(tmp_path / "first.onnx", tmp_path / "second.onnx")
    assert [report.exit for report in (first, second)] == [0, 0]
    assert len([node for node in onnx.load(tmp_path / "second.onnx").graph.node if fused_type(node)]) == 2
    rollback(tmp_path / "second.onnx", tmp_path / "back.onnx")
    assert (tmp_path / "back.onnx").read_bytes() == (tmp_path / "first.onnx").read_bytes()


def test_op_overrides_within_the_limits(tmp_path: Path) -> None:
    decode, prefill = export("rec_dy18").path, export("chunk_dy18").path
    assert [site.op for site in graphs.fuse(decode).sites] == ["RecurrentGatedDeltaRule"]
    report = graphs.fuse(decode, tmp_path / "cgdr.onnx", op="cgdr")
    assert (report.exit, [site.op for site in report.sites]) == (0, ["ChunkGatedDeltaRule"])
    refused = graphs.fuse(prefill, tmp_path / "rgdr.onnx", op="rgdr")
    assert (refused.exit, graphs.codes(refused)) == (4, ["rgdr-tokens"])
    assert "40" in refused.sites[0].reason.text
    assert not (tmp_path / "rgdr.onnx").exists()


def mixed(tmp_path: Path) -> Path:
    """A model with a site that can be fused and one that cannot."""
    names = ("steps_ts17", "leak_ts17")
    parts = [onnx.compose.add_prefix(onnx.load(export(name).path), f"{name[:4]}.") for name in names]
    return graphs.save(onnx.compose.merge_models(*parts, io_map=[]), tmp_path, "mixed.onnx")


def test_keep_going_writes_what_can_be_fused(tmp_path: Path) -> None:
    model = mixed(tmp_path)
    stopped = graphs.fuse(model, tmp_path / "stopped.onnx")
    assert (stopped.exit, sorted(graphs.codes(stopped))) == (4, ["", "inner-value-used"])
    assert not (tmp_path / "stopped.onnx").exists()
    kept = graphs.fuse(model, tmp_path / "kept.onnx", keep_going=True)
    assert (kept.exit, sorted(graphs.codes(kept))) == (0, ["", "inner-value-used"])
    assert len([node for node in onnx.load(tmp_path / "kept.onnx").graph.node if fused_type(node)]) == 1


def test_a_run_that_writes_nothing_says_why_and_shows_matches(tmp_path: Path) -> None:
    model = mixed(tmp_path)
    stopped = graphs.fuse(model, tmp_path / "out.onnx")
    assert sorted(site.status for site in stopped.sites) == ["match", "refused"]
    refused = next(site.name for site in stopped.sites if site.status == "refused")
    (note,) = [note for note in stopped.notes if note.startswith("nothing was written")]
    assert f"1 of 2 sites can be fused and {refused} cannot" in note
    assert "--keep-going" in note
    strict = graphs.fuse(export("steps_ts17").path, tmp_path / "out.onnx", strict=True)
    assert (strict.exit, [site.status for site in strict.sites]) == (4, ["match"])
    assert any("--strict" in note for note in strict.notes)


def test_a_refused_site_that_was_left_out_blocks_nothing(tmp_path: Path) -> None:
    model = mixed(tmp_path)
    (refused,) = (site.name for site in graphs.fuse(model).sites if site.status == "refused")
    report = graphs.fuse(model, tmp_path / "out.onnx", skip_sites=(refused,))
    assert (report.exit, sorted(site.status for site in report.sites)) == (0, ["fused", "refused"])
    (other,) = (site.name for site in report.sites if site.status == "fused")
    assert graphs.fuse(model, tmp_path / "again.onnx", sites=(other,)).exit == 0
    assert (tmp_path / "out.onnx").stat().st_size == (tmp_path / "again.onnx").stat().st_size


@pytest.mark.parametrize("option", ["sites", "skip_sites"])
def test_a_name_that_no_site_has_is_an_error(tmp_path: Path, option: str) -> None:
    with pytest.raises(UserError, match=r"nope.*layers\.0, layers\.1") as error:
        graphs.fuse(export("two_sizes_ts17").path, tmp_path / "out.onnx", **{option: ("layers.1", "nope")})
    assert error.value.code == "site-unknown"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("name", "size"), [("chunk_ts17_dynBT", 4), ("chunk_ts17_dynBT", 65), ("rec_ts17_dynBT", 5)])
def test_a_pin_outside_the_proven_range_refuses(tmp_path: Path, name: str, size: int) -> None:
    report = graphs.fuse(export(name).path, tmp_path / "out.onnx", pins=(("tokens", size),))
    assert (report.exit, graphs.codes(report)) == (4, ["pin-out-of-range"])
    assert f"tokens={size}" in report.sites[0].reason.text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("size", [1, 5, 8])
def test_nodes_for_a_pinned_token_count_are_proven_at_that_count(tmp_path: Path, size: int) -> None:
    report = graphs.fuse(export("loop_list").path, tmp_path / "out.onnx", pins=(("tokens", size),))
    assert (report.exit, graphs.codes(report)) == (0, [""])
    assert report.sites[0].match.proof.emitted_error < 1e-9


def test_keep_going_with_nothing_to_fuse_writes_nothing(tmp_path: Path) -> None:
    report = graphs.fuse(export("leak_ts17").path, tmp_path / "out.onnx", keep_going=True)
    assert report.exit == 4
    assert list(tmp_path.iterdir()) == []


def test_strict_takes_a_note_for_a_refusal(tmp_path: Path) -> None:
    source = export("chunk_ts17_dynBT").path
    assert graphs.fuse(source).sites[0].notes
    report = graphs.fuse(source, tmp_path / "out.onnx", strict=True)
    assert report.exit == 4
    assert list(tmp_path.iterdir()) == []
    plain = export("chunk_dy23_noinit_nofinal").path
    quiet = graphs.fuse(plain)
    assert graphs.fuse(plain, tmp_path / "out.onnx", strict=True).exit == (4 if quiet.sites[0].notes else 0)


def test_dry_run_does_everything_but_write(tmp_path: Path) -> None:
    report = graphs.fuse(export("rec_dy18").path, tmp_path / "out.onnx", dry_run=True)
    assert (report.exit, [site.status for site in report.sites]) == (0, ["fused"])
    assert list(tmp_path.iterdir()) == []


def dims_of(path: Path) -> dict[str, list[int | str]]:
    graph = onnx.load(path).graph
    return {
        info.name: [dim.dim_param or dim.dim_value for dim in info.type.tensor_type.shape.dim]
        for info in (*graph.input, *graph.output)
    }


def test_no_pin_leaves_the_axes_and_says_what_that_assumes(tmp_path: Path) -> None:
    source = export("chunk_dy20_dynB").path
    report = graphs.fuse(source, tmp_path / "free.onnx", pin=False)
    assert (report.exit, report.pinned) == (0, ())
    assert dims_of(tmp_path / "free.onnx") == dims_of(source)
    assert any("batch" in note for note in report.sites[0].notes)
    pinned = graphs.fuse(source, tmp_path / "pinned.onnx")
    assert {(pin.value, pin.axis, pin.now) for pin in pinned.pinned} >= {("query", 0, 1), ("out", 0, 1)}
    assert all(shape[0] == 1 for shape in dims_of(tmp_path / "pinned.onnx").values())


def test_pins_put_a_symbol_to_a_number(tmp_path: Path) -> None:
    source = export("chunk_ts17_dynBT").path
    report = graphs.fuse(source, tmp_path / "out.onnx", pins=(("tokens", 40),))
    assert report.exit == 0
    shapes = dims_of(tmp_path / "out.onnx")
    assert [shapes[name][:2] for name in ("query", "g", "out")] == [[1, 40]] * 3
    assert {(pin.value, pin.axis, pin.was, pin.now) for pin in report.pinned} >= {
        ("query", 0, "batch", 1), ("query", 1, "tokens", 40), ("state", 0, "batch", 1), ("g", 1, "tokens", 40),
    }  # fmt: skip


def test_a_pinned_token_count_allows_the_other_operator() -> None:
    source = export("rec_ts17_dynBT").path
    assert [site.op for site in graphs.fuse(source).sites] == ["RecurrentGatedDeltaRule"]
    assert [site.op for site in graphs.fuse(source, pin=False).sites] == ["ChunkGatedDeltaRule"]


def test_a_pin_of_an_unknown_symbol_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no axis of that name") as caught:
        graphs.fuse(export("chunk_ts17_dynBT").path, tmp_path / "out.onnx", pins=(("nothing", 4),))
    assert caught.value.code == "pin-unknown-symbol"
    assert list(tmp_path.iterdir()) == []


def test_inspect_writes_nothing_and_calls_a_match_a_match(tmp_path: Path) -> None:
    source = export("rec_dy18")
    before = hashlib.sha256(source.path.read_bytes()).digest()
    report = pipeline.inspect(FuseOptions(model=source.path), SilentProgress())
    assert (report.exit, [site.status for site in report.sites]) == (0, ["match"])
    assert hashlib.sha256(source.path.read_bytes()).digest() == before
    extracted = pipeline.inspect(FuseOptions(model=source.path, extract=tmp_path / "parts"), SilentProgress()).extracted
    assert sorted(Path(path).name for path in extracted) == sorted(p.name for p in (tmp_path / "parts").iterdir())
    assert len(extracted) == 3


def test_rules_are_chosen_by_name(tmp_path: Path) -> None:
    source = export("rec_dy18").path
    assert graphs.fuse(source, rules=("gated_delta_rule",)).exit == 0
    with pytest.raises(UserError) as error:
        graphs.fuse(source, rules=("no_such_rule",))
    assert error.value.code == "unknown-rule"
    assert "gated_delta_rule" in str(error.value)


def test_the_output_may_not_be_the_input(tmp_path: Path) -> None:
    model = graphs.save(graphs.step(), tmp_path)
    before = model.read_bytes()
    with pytest.raises(UserError):
        graphs.fuse(model, model)
    assert model.read_bytes() == before


def test_a_model_without_a_site_says_what_was_looked_at(tmp_path: Path) -> None:
    report = graphs.fuse(export("nm_softmax").path, tmp_path / "out.onnx")
    assert (report.exit, report.sites) == (3, ())
    (note,) = (note for note in report.notes if note.startswith("no site: "))
    assert "export it with plain operators" in note


def test_emitted_nodes_that_are_wrong_are_our_bug(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(plan: Any, *_: object) -> float:
        raise InternalError(f"{plan.match.name} differs")

    monkeypatch.setattr(pipeline, "prove_emitted", broken)
    with pytest.raises(InternalError):
        graphs.fuse(export("rec_dy18").path, tmp_path / "out.onnx")
    assert list(tmp_path.iterdir()) == []


def test_readers_in_front_of_the_last_operand_move_behind_the_new_nodes(tmp_path: Path) -> None:
    # The final state does not need the query: its reader may stand in front of what makes the query.
    model = graphs.step(
        ("  q0 = Squeeze(query, time)\n", ""),
        ("  q1 = Mul(q0, scale)", "  early = Mul(final_state, two)\n  q0 = Sigmoid(query0)\n  q1 = Mul(q0, scale)"),
        ("float[1,1,4,5] query", "float[1,4,5] query0"),
        ("float scale =", "float two = {2}, float scale ="),
        outputs=["early"],
    )
    report = graphs.fuse(graphs.save(model, tmp_path), tmp_path / "out.onnx")
    assert (report.exit, graphs.codes(report)) == (0, [""])
    done = onnx.load(tmp_path / "out.onnx")
    known = {"", *(i.name for i in done.graph.input), *(i.name for i in done.graph.initializer)}
    for node in done.graph.node:
        assert known.issuperset(node.input), node.name
        known.update(node.output)
    feeds = {i.name: np.random.default_rng(3).standard_normal(i.shape) for i in graphs.double(model).get_inputs()}
    assert graphs.difference(graphs.lowered_double(done, report), graphs.double(model), feeds) < 1e-12
