"""Rollback: byte for byte where nothing was edited, site by site where something was."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from deltafuse import edits, wire
from deltafuse.edits import Changes, Insertion
from deltafuse.errors import UserError
from deltafuse.record import KEY, Mode, publish, sidecar_path
from deltafuse.rollback import rollback
from wire_forms import FORMS, SITES, edited, random_changes, step_model, write

_PLAIN = {"plain": None, **FORMS}


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 1 << 32),
    form=st.sampled_from(list(_PLAIN)),
    mode=st.sampled_from(["embed", "sidecar"]),
)
def test_random_changes_come_back_byte_for_byte(tmp_path: Path, seed: int, form: str, mode: Mode) -> None:
    scanned = write(tmp_path / "m.onnx", step_model(), _PLAIN[form])
    changes = random_changes(scanned, random.Random(seed))
    receipt = publish(scanned, edits.build(scanned, changes), tmp_path / "fused.onnx", mode)
    report = rollback(tmp_path / "fused.onnx", tmp_path / "back.onnx")
    assert (tmp_path / "back.onnx").read_bytes() == (tmp_path / "m.onnx").read_bytes()
    assert report.mode == "bytes"
    assert report.sha256 == receipt.original_sha256
    assert set(report.restored) == set(SITES)
    assert (report.remaining, report.refused, report.records) == ((), (), 1)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1 << 32), form=st.sampled_from(list(_PLAIN)))
def test_random_changes_after_a_save_by_another_tool(tmp_path: Path, seed: int, form: str) -> None:
    """Saved anew by Python's protobuf with a node appended: every message comes back, the node stays."""
    original = step_model()
    scanned = write(tmp_path / "m.onnx", original, _PLAIN[form])
    changes = random_changes(scanned, random.Random(seed), moves=False)
    publish(scanned, edits.build(scanned, changes), tmp_path / "fused.onnx")
    new = helper.make_node("Neg", ["out"], ["mine"])
    edited(tmp_path / "fused.onnx", lambda model: model.graph.node.append(new))
    report = rollback(tmp_path / "fused.onnx", tmp_path / "back.onnx")
    assert set(report.restored) == set(SITES)
    assert (report.mode, report.remaining, report.sha256) == ("in-place", (), "")
    back = onnx.load(tmp_path / "back.onnx", load_external_data=False)
    back.DiscardUnknownFields()
    assert list(back.graph.node) == [*original.graph.node, new]
    assert list(back.graph.input) == list(original.graph.input)
    assert list(back.graph.output) == list(original.graph.output)
    assert sorted(map(str, back.graph.value_info)) == sorted(map(str, original.graph.value_info))
    assert back.metadata_props == original.metadata_props


# one chain of four nodes, two sites of which are fused; the second reads what the first writes
_CHAIN = """
<ir_version: 9, opset_import: ["" : 18]>
chain (float[batch, 2] x) => (float[batch, 2] y) <float[batch, 2] a, float[batch, 2] b, float[batch, 2] c>
{
  a = Neg (x)
  b = Abs (a)
  between = Relu (b)
  c = Neg (between)
  y = Abs (c)
}
"""


def _chain(path: Path) -> wire.Model:
    model = onnx.parser.parse_model(_CHAIN)
    for node in model.graph.node:
        node.name = f"/{node.output[0]}"
    return write(path, model)


def _fuse_chain(scanned: wire.Model, output: Path, mode: Mode = "embed") -> None:
    def fused(site: str, source: str, target: str, before: int) -> Insertion:
        nodes = (
            helper.make_node("Custom", [source], [f"{site}/raw"], name=f"{site}/custom", type="Fused"),
            helper.make_node("Identity", [f"{site}/raw"], [target], name=f"{site}/out"),
        )
        return Insertion(site, before, nodes, (helper.make_tensor_value_info(f"{site}/raw", 10, [1, 2]),))

    def pinned(name: str) -> tuple[int, onnx.ValueInfoProto]:
        value = scanned.graph.find(name)
        assert value is not None
        return value, helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 2])

    changes = Changes(
        removed=(("one", (0, 1)), ("two", (3, 4))),
        inserted=(fused("one", "x", "b", 0), fused("two", "between", "y", 3)),
        retyped=(pinned("x"), pinned("y"), pinned("b")),
    )
    publish(scanned, edits.build(scanned, changes), output, mode)


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    _fuse_chain(_chain(tmp_path / "m.onnx"), tmp_path / "fused.onnx")
    return tmp_path


def _ops(path: Path) -> list[str]:
    return wire.scan(path).graph.op


def _dims(path: Path, name: str) -> list[int | str]:
    graph = wire.scan(path).graph
    value = graph.find(name)
    assert value is not None
    info = graph.value_info(value)
    assert info is not None
    return [dim.dim_param or dim.dim_value for dim in info.type.tensor_type.shape.dim]


def test_some_sites(chain: Path) -> None:
    report = rollback(chain / "fused.onnx", chain / "some.onnx", sites=["t*"])
    assert (report.mode, report.restored, report.remaining) == ("bytes", ("two",), ("one",))
    assert _ops(chain / "some.onnx") == ["Custom", "Identity", "Relu", "Neg", "Abs"]
    # axes stay pinned while a fused site remains
    assert _dims(chain / "some.onnx", "x") == [1, 2]
    assert _dims(chain / "some.onnx", "c") == ["batch", 2]
    rest = rollback(chain / "some.onnx", chain / "back.onnx")
    assert (rest.mode, rest.restored) == ("bytes", ("one",))
    assert (chain / "back.onnx").read_bytes() == (chain / "m.onnx").read_bytes()


def test_some_sites_with_a_sidecar(tmp_path: Path) -> None:
    _fuse_chain(_chain(tmp_path / "m.onnx"), tmp_path / "fused.onnx", "sidecar")
    rollback(tmp_path / "fused.onnx", tmp_path / "some.onnx", sites=["two"])
    assert sidecar_path(tmp_path / "some.onnx").exists()
    rollback(tmp_path / "some.onnx", tmp_path / "back.onnx", sites=["one"])
    assert (tmp_path / "back.onnx").read_bytes() == (tmp_path / "m.onnx").read_bytes()
    assert not sidecar_path(tmp_path / "back.onnx").exists()


@pytest.mark.parametrize("given_by_hand", [False, True])
def test_sidecar(tmp_path: Path, given_by_hand: bool) -> None:
    _fuse_chain(_chain(tmp_path / "m.onnx"), tmp_path / "fused.onnx", "sidecar")
    side = sidecar_path(tmp_path / "fused.onnx")
    if given_by_hand:
        side = side.rename(tmp_path / "elsewhere")
    rollback(tmp_path / "fused.onnx", tmp_path / "back.onnx", sidecar=side if given_by_hand else None)
    assert (tmp_path / "back.onnx").read_bytes() == (tmp_path / "m.onnx").read_bytes()


def _code(call: Callable[[], object]) -> str:
    with pytest.raises(UserError) as caught:
        call()
    return caught.value.code


def test_unknown_site_lists_those_there_are(chain: Path) -> None:
    with pytest.raises(UserError, match="one, two") as caught:
        rollback(chain / "fused.onnx", chain / "back.onnx", sites=["layers.*"])
    assert caught.value.code == "no-such-site"


def test_sites_and_all_exclude_each_other(chain: Path) -> None:
    call = lambda: rollback(chain / "fused.onnx", chain / "back.onnx", sites=["one"], all_records=True)  # noqa: E731
    assert _code(call) == "bad-options"


def test_output_may_not_be_the_input(chain: Path) -> None:
    assert _code(lambda: rollback(chain / "fused.onnx", chain / "fused.onnx")) == "output-is-input"
    (chain / "side").write_bytes(b"")
    assert _code(lambda: rollback(chain / "fused.onnx", chain / "side", sidecar=chain / "side")) == "output-is-input"


@pytest.mark.parametrize("mode", ["embed", "sidecar"])
def test_records_stack(tmp_path: Path, mode: Mode) -> None:
    scanned = _chain(tmp_path / "0.onnx")
    _fuse_chain(scanned, tmp_path / "1.onnx", mode)
    once = wire.scan(tmp_path / "1.onnx")
    relu = once.graph.op.index("Relu")
    node = helper.make_node("Elu", ["b"], ["between"])
    changes = Changes(removed=(("three", (relu,)),), inserted=(Insertion("three", relu, (node,)),))
    publish(once, edits.build(once, changes), tmp_path / "2.onnx", mode)
    last = rollback(tmp_path / "2.onnx", tmp_path / "last.onnx")
    assert (last.records, last.restored) == (1, ("three",))
    assert (tmp_path / "last.onnx").read_bytes() == (tmp_path / "1.onnx").read_bytes()
    first = rollback(tmp_path / "2.onnx", tmp_path / "first.onnx", all_records=True)
    assert (first.records, first.restored, first.mode) == (2, ("three", "one", "two"), "bytes")
    assert (tmp_path / "first.onnx").read_bytes() == (tmp_path / "0.onnx").read_bytes()
    edited(tmp_path / "2.onnx", lambda model: model.graph.node.append(helper.make_node("Neg", ["y"], ["mine"])))
    both = rollback(tmp_path / "2.onnx", tmp_path / "edited.onnx", all_records=True)
    assert (both.records, both.restored, both.mode) == (2, ("three", "one", "two"), "in-place")
    assert _ops(tmp_path / "edited.onnx") == ["Neg", "Abs", "Relu", "Neg", "Abs", "Neg"]
    assert KEY not in wire.scan(tmp_path / "edited.onnx").metadata


def test_nothing_is_left_behind(chain: Path) -> None:
    rollback(chain / "fused.onnx", chain / "back.onnx")
    rollback(chain / "fused.onnx", chain / "some.onnx", sites=["one"])
    assert {path.name for path in chain.iterdir()} == {"m.onnx", "fused.onnx", "back.onnx", "some.onnx"}


# --- edited since


def _append(chain: Path, *nodes: onnx.NodeProto) -> None:
    edited(chain / "fused.onnx", lambda model: model.graph.node.extend(nodes))


def test_edits_are_kept(chain: Path) -> None:
    def change(model: onnx.ModelProto) -> None:
        model.doc_string = "mine"
        model.graph.node[2].op_type = "Elu"
        model.graph.node.append(helper.make_node("Neg", ["y"], ["mine"]))
        model.graph.output.append(helper.make_tensor_value_info("mine", TensorProto.FLOAT, [1, 2]))

    edited(chain / "fused.onnx", change)
    report = rollback(chain / "fused.onnx", chain / "back.onnx")
    back = onnx.load(chain / "back.onnx")
    assert (report.mode, report.restored, report.notes) == ("in-place", ("one", "two"), ())
    assert [node.op_type for node in back.graph.node] == ["Neg", "Abs", "Elu", "Neg", "Abs", "Neg"]
    assert back.doc_string == "mine"
    assert [info.name for info in back.graph.output] == ["y", "mine"]
    assert {info.name for info in back.graph.value_info} == {"a", "b", "c"}
    assert _dims(chain / "back.onnx", "x") == ["batch", 2]
    assert _dims(chain / "back.onnx", "b") == ["batch", 2]
    onnx.checker.check_model(back, full_check=True)


def test_some_sites_of_an_edited_file(chain: Path) -> None:
    _append(chain, helper.make_node("Neg", ["y"], ["mine"]))
    report = rollback(chain / "fused.onnx", chain / "some.onnx", sites=["one"])
    assert (report.mode, report.restored, report.remaining) == ("in-place", ("one",), ("two",))
    assert _ops(chain / "some.onnx") == ["Neg", "Abs", "Relu", "Custom", "Identity", "Neg"]
    assert _dims(chain / "some.onnx", "x") == [1, 2]
    rest = rollback(chain / "some.onnx", chain / "back.onnx")
    assert (rest.mode, rest.restored, rest.remaining) == ("in-place", ("two",), ())
    assert _ops(chain / "back.onnx") == ["Neg", "Abs", "Relu", "Neg", "Abs", "Neg"]
    assert _dims(chain / "back.onnx", "x") == ["batch", 2]
    assert KEY not in wire.scan(chain / "back.onnx").metadata


def test_some_sites_of_an_edited_file_with_a_sidecar(tmp_path: Path) -> None:
    _fuse_chain(_chain(tmp_path / "m.onnx"), tmp_path / "fused.onnx", "sidecar")
    _append(tmp_path, helper.make_node("Neg", ["y"], ["mine"]))
    rollback(tmp_path / "fused.onnx", tmp_path / "some.onnx", sites=["two"])
    assert sidecar_path(tmp_path / "some.onnx").exists()
    assert rollback(tmp_path / "some.onnx", tmp_path / "back.onnx").restored == ("one",)
    assert _ops(tmp_path / "back.onnx") == ["Neg", "Abs", "Relu", "Neg", "Abs", "Neg"]


def test_changed_site_is_refused_and_the_other_restored(chain: Path) -> None:
    def change(model: onnx.ModelProto) -> None:
        model.graph.node[0].attribute[0].s = b"Other"

    edited(chain / "fused.onnx", change)
    report = rollback(chain / "fused.onnx", chain / "back.onnx")
    assert report.refused == (("one", "the node that writes one/raw was changed"),)
    assert (report.restored, report.remaining) == (("two",), ("one",))
    assert _ops(chain / "back.onnx") == ["Custom", "Identity", "Relu", "Neg", "Abs"]
    with pytest.raises(UserError, match="one: the node that writes one/raw was changed") as caught:
        rollback(chain / "fused.onnx", chain / "none.onnx", sites=["one"])
    assert caught.value.code == "site-changed"
    assert not (chain / "none.onnx").exists()


def _change_output(model: onnx.ModelProto) -> None:
    model.graph.node[0].output[0] = model.graph.node[1].input[0] = "renamed"


def _read_inside(model: onnx.ModelProto) -> None:
    model.graph.node.append(helper.make_node("Neg", ["one/raw"], ["mine"]))


def _write_inner(model: onnx.ModelProto) -> None:
    model.graph.node.append(helper.make_node("Neg", ["b"], ["a"]))


def _rename_input(model: onnx.ModelProto) -> None:
    model.graph.input[0].name = "other"
    model.graph.node[0].input[0] = "other"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_change_output, "the node that wrote one/raw is no longer there"),
        (_read_inside, "its inner value one/raw is read by what was added since"),
        (_write_inner, "another node writes its value a now"),
        (_rename_input, "the node that writes one/raw was changed"),
    ],
)
def test_sites_that_cannot_be_restored_in_place(
    chain: Path, change: Callable[[onnx.ModelProto], None], why: str
) -> None:
    edited(chain / "fused.onnx", change)
    assert rollback(chain / "fused.onnx", chain / "back.onnx").refused == (("one", why),)


def test_site_whose_source_is_gone(tmp_path: Path) -> None:
    """The original read a mask that the fused node does not; a tool has cleaned it away."""
    model = onnx.parser.parse_model(_CHAIN)
    model.graph.initializer.append(helper.make_tensor("mask", TensorProto.FLOAT, [2], [0.0, 1.0]))
    model.graph.node[1].CopyFrom(helper.make_node("Mul", ["a", "mask"], ["b"]))
    _fuse_chain(write(tmp_path / "m.onnx", model), tmp_path / "fused.onnx")
    edited(tmp_path / "fused.onnx", lambda fused: fused.graph.initializer.pop())
    report = rollback(tmp_path / "fused.onnx", tmp_path / "back.onnx")
    assert report.refused == (("one", "it needs the value mask, which is no longer there"),)


def test_declaration_that_was_changed_since_is_left(chain: Path) -> None:
    def change(model: onnx.ModelProto) -> None:
        model.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 3

    edited(chain / "fused.onnx", change)
    report = rollback(chain / "fused.onnx", chain / "back.onnx")
    assert _dims(chain / "back.onnx", "x") == [1, 3]
    assert _dims(chain / "back.onnx", "y") == ["batch", 2]
    (note,) = report.notes
    assert "declaration of x was changed" in note


def test_shuffled_nodes_are_put_in_order_again(chain: Path) -> None:
    """A tool has moved a kept node in front of where the original of a site goes."""

    def change(model: onnx.ModelProto) -> None:
        nodes = list(model.graph.node)
        order = [nodes[0], nodes[1], nodes[2], nodes[3], nodes[4]]
        user = helper.make_node("Neg", ["b"], ["mine"])
        del model.graph.node[:]
        model.graph.node.extend([order[0], order[1], user, *order[2:]])

    edited(chain / "fused.onnx", change)
    rollback(chain / "fused.onnx", chain / "back.onnx")
    onnx.checker.check_model(onnx.load(chain / "back.onnx"), full_check=True)
    assert sorted(_ops(chain / "back.onnx")) == ["Abs", "Abs", "Neg", "Neg", "Neg", "Relu"]


def test_edits_that_make_a_circle_are_refused(chain: Path) -> None:
    """What the fused node no longer read now depends on its result."""
    model = onnx.parser.parse_model(_CHAIN)
    model.graph.node.insert(0, helper.make_node("Exp", ["x"], ["side"]))
    model.graph.node[2].CopyFrom(helper.make_node("Mul", ["a", "side"], ["b"]))
    scanned = write(chain / "m.onnx", model)
    changes = Changes(
        removed=(("one", (1, 2)),), inserted=(Insertion("one", 1, (helper.make_node("Elu", ["x"], ["b"]),)),)
    )
    publish(scanned, edits.build(scanned, changes), chain / "fused.onnx")

    def change(fused: onnx.ModelProto) -> None:
        del fused.graph.node[0]
        fused.graph.node.append(helper.make_node("Exp", ["b"], ["side"]))

    edited(chain / "fused.onnx", change)
    assert _code(lambda: rollback(chain / "fused.onnx", chain / "back.onnx")) == "site-changed"
    assert not (chain / "back.onnx").exists()


def _fuse_with_shared_node(tmp_path: Path) -> None:
    """Shape arithmetic that both sites read goes with the first one."""
    model = onnx.parser.parse_model(_CHAIN)
    shape = helper.make_node("Shape", ["x"], ["shape"], name="shape")
    cast = helper.make_node("Identity", ["shape"], ["same"], name="same")
    model.graph.node.insert(0, shape)
    model.graph.node.insert(1, cast)
    model.graph.node[3].CopyFrom(helper.make_node("Reshape", ["a", "same"], ["b"]))
    model.graph.node[6].CopyFrom(helper.make_node("Reshape", ["c", "same"], ["y"]))
    model.graph.value_info.append(helper.make_tensor_value_info("same", TensorProto.INT64, [2]))
    scanned = write(tmp_path / "m.onnx", model)
    first, second = helper.make_node("Elu", ["x"], ["b"]), helper.make_node("Selu", ["between"], ["y"])
    changes = Changes(
        removed=(("one", (0, 1, 2, 3)), ("two", (5, 6))),
        inserted=(Insertion("one", 3, (first,)), Insertion("two", 6, (second,))),
    )
    publish(scanned, edits.build(scanned, changes), tmp_path / "fused.onnx")


@pytest.mark.parametrize("edit", [False, True])
def test_a_site_comes_back_with_what_it_shared(tmp_path: Path, edit: bool) -> None:
    _fuse_with_shared_node(tmp_path)
    if edit:
        _append(tmp_path, helper.make_node("Neg", ["y"], ["mine"]))
    mine = ["Neg"] if edit else []
    report = rollback(tmp_path / "fused.onnx", tmp_path / "some.onnx", sites=["two"])
    assert (report.restored, report.remaining, report.refused) == (("two",), ("one",), ())
    assert sorted(_ops(tmp_path / "some.onnx")) == sorted(["Shape", "Identity", "Elu", "Relu", "Neg", "Reshape", *mine])
    onnx.checker.check_model(onnx.load(tmp_path / "some.onnx"), full_check=True)
    rest = rollback(tmp_path / "some.onnx", tmp_path / "back.onnx")
    assert (rest.restored, rest.remaining, rest.refused) == (("one",), (), ())
    original = onnx.load(tmp_path / "m.onnx")
    assert list(onnx.load(tmp_path / "back.onnx").graph.node)[:7] == list(original.graph.node)
    if not edit:
        assert (tmp_path / "back.onnx").read_bytes() == (tmp_path / "m.onnx").read_bytes()


# --- external data


def _with_data(folder: Path) -> wire.Model:
    folder.mkdir()
    np.zeros(16, np.float32).tofile(folder / "step.data")
    return write(folder / "m.onnx", step_model())


@pytest.mark.parametrize("edit", [False, True])
def test_data_is_copied_to_another_folder(tmp_path: Path, edit: bool) -> None:
    scanned = _with_data(tmp_path / "in")
    # the fused file does not name the data, its original does
    mask = scanned.graph.find("mask")
    assert mask is not None
    node = scanned.graph.producer[mask]
    fused = helper.make_node("Neg", ["q"], ["fused"])
    changes = Changes(removed=(("s", (node,)),), inserted=(Insertion("s", node, (fused,)),))
    publish(scanned, edits.build(scanned, changes), tmp_path / "in" / "fused.onnx")
    if edit:
        edited(
            tmp_path / "in" / "fused.onnx", lambda model: model.graph.node.append(helper.make_node("Neg", ["q"], ["w"]))
        )
    (tmp_path / "out").mkdir()
    report = rollback(tmp_path / "in" / "fused.onnx", tmp_path / "out" / "back.onnx")
    assert report.mode == ("in-place" if edit else "bytes")
    assert report.copied == (tmp_path / "out" / "step.data",)
    assert not (tmp_path / "out" / "step.data").is_symlink()
    assert (tmp_path / "out" / "step.data").stat().st_nlink == 1


@pytest.mark.parametrize("sites", [None, ["layers.0"]])
def test_data_of_another_size_is_reported(tmp_path: Path, sites: list[str] | None) -> None:
    scanned = _with_data(tmp_path / "in")
    changes = random_changes(scanned, random.Random(2), moves=False)
    publish(scanned, edits.build(scanned, changes), tmp_path / "in" / "fused.onnx")
    np.zeros(17, np.float32).tofile(tmp_path / "in" / "step.data")
    report = rollback(tmp_path / "in" / "fused.onnx", tmp_path / "in" / "back.onnx", sites=sites)
    assert report.notes == ("the external data file step.data has 68 bytes, it had 64 when the model was fused",)


def test_missing_data_is_a_note_beside_the_model_and_an_error_elsewhere(tmp_path: Path) -> None:
    scanned = _with_data(tmp_path / "in")
    publish(scanned, (), tmp_path / "in" / "fused.onnx")
    (tmp_path / "in" / "step.data").unlink()
    (tmp_path / "out").mkdir()
    assert "step.data is missing" in rollback(tmp_path / "in" / "fused.onnx", tmp_path / "in" / "back.onnx").notes[0]
    call = lambda: rollback(tmp_path / "in" / "fused.onnx", tmp_path / "out" / "back.onnx")  # noqa: E731
    assert _code(call) == "external-data-missing"
    assert list((tmp_path / "out").iterdir()) == []
