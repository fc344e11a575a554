"""``fuse verify``: right fusions pass, wrong ones patched into a fused file and other edits do not."""

from __future__ import annotations

import random
import shutil
from hashlib import sha256
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from deltafuse import pipeline, targets
from deltafuse.dims import symbol
from deltafuse.errors import UserError
from deltafuse.lowering import lower_model
from deltafuse.options import FuseOptions, SilentProgress
from deltafuse.record import KEY
from deltafuse.targets import TargetOptions
from deltafuse.verify import verify
from deltafuse.verify_cut import Pair, Side, axis_dims, cut_pair
from deltafuse.verify_diff import compare
from deltafuse.verify_feeds import Input, Part
from deltafuse.verify_trial import judge
from deltafuse.wire import scan
from deltafuse.worker import Worker
from hand_match import HALF, Site, match
from sabotage import (
    attribute,
    beta_scaled,
    constant,
    custom,
    final_transpose_dropped,
    g_gone,
    g_scaled,
    insert,
    port,
    q_and_k_swapped,
    scale_forgotten,
    scale_off,
    scale_one,
    state_transpose_dropped,
    tiled_heads,
    undecayed_delta,
)

pytestmark = pytest.mark.usefixtures("one_worker")

FIXTURES = Path(__file__).parent / "fixtures"


@pytest.fixture(scope="module")
def fused(tmp_path_factory):
    """Unfused and fused path by fixture name; each fixture is fused once."""
    folder = tmp_path_factory.mktemp("fused")
    known: dict[str, tuple[Path, Path]] = {}

    def of(name: str) -> tuple[Path, Path]:
        if name not in known:
            source, output = FIXTURES / f"{name}.onnx", folder / f"{name}.onnx"
            report = pipeline.fuse(FuseOptions(model=source, output=output), SilentProgress())
            assert report.exit == 0
            known[name] = source, output
        return known[name]

    return of


@pytest.fixture
def patched(fused, tmp_path):
    """The report after a change to the fused (and, if asked, the unfused) file."""

    def of(name: str, change, unfused_change=None):
        source, output = fused(name)
        paths = []
        for path, edit in ((source, unfused_change), (output, change)):
            model = onnx.load(path, load_external_data=False)
            if edit is not None:
                edit(model.graph if edit.__code__.co_varnames[0] == "graph" else model)
            paths.append(tmp_path / f"{path.stem}.{len(paths)}.onnx")
            onnx.save(model, paths[-1])
        return verify(*paths, level="site")

    return of


def codes(report) -> set[str]:
    return {finding.code for finding in report.findings} | {site.reason.code for site in report.sites if site.reason}


# Right fusions.

RIGHT = [
    "chunk_dy18", "chunk_ts17_dynBT", "chunk_dy20_half", "chunk_dy23_noinit_nofinal", "chunk_ts17_half_norm_outside",
    "chunk_ts17_nonorm", "rec_dy20_T3_half", "rec_dy20_dynB", "rec_ts17_T4_noinit", "rec_ts17_Dv24", "rec_ts17_dynBT",
    "rec_ts17_nonorm", "full_decode_ts17_half", "full_prefill_transformers",
]  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_fusion_is_equal(fused, name):
    report = verify(*fused(name), level="site")
    assert (report.exit, report.findings) == (0, ())
    assert report.sites
    for site in report.sites:
        assert site.verdict == "equal"
        assert site.reason is None
        assert 0 <= site.error <= 1e-12
        assert site.draws >= 4
        assert site.rounding.cosine > 0.99999
        assert 0 < site.rounding.nrmse < 2e-3
        assert site.rounding.max_abs > 0


def test_equal_sites_share_a_verdict(fused):
    sites = verify(*fused("full_decode_transformers"), level="site").sites
    assert [site.name for site in sites] == ["layers.0", "layers.1", "layers.2"]
    assert [site.shared_with for site in sites] == [None, "layers.0", "layers.0"]
    assert len({site.error for site in sites}) == 1


def test_sites_of_other_sizes_do_not_share(fused):
    report = verify(*fused("two_sizes_ts17"), level="site")
    assert (report.exit, [site.shared_with for site in report.sites]) == (0, [None, None])


def test_token_counts_lie_inside_the_range_that_the_file_states(fused):
    (site,) = verify(*fused("chunk_ts17_dynBT"), level="site").sites
    assert site.tokens == (33, 48)


def test_without_a_stated_range_a_size_is_searched_where_the_unfused_file_runs(patched):
    def forget(graph):
        node = custom(graph)
        kept = [item for item in node.metadata_props if item.key != "deltafuse.valid_tokens"]
        del node.metadata_props[:]
        node.metadata_props.extend(kept)

    report = patched("chunk_ts17_dynBT", forget)
    assert report.exit == 0
    assert report.sites[0].tokens == (33,)


def test_the_order_of_nodes_does_not_matter(patched):
    def shuffle(graph):
        nodes = list(graph.node)
        random.Random(3).shuffle(nodes)
        done, written = [], {item.name for item in (*graph.input, *graph.initializer)} | {""}
        while nodes:
            ready = next(node for node in nodes if set(node.input) <= written)
            nodes.remove(ready)
            done.append(ready)
            written |= set(ready.output)
        del graph.node[:]
        graph.node.extend(done)

    assert patched("full_decode_ts17", shuffle).exit == 0


def test_verify_reads_files_and_needs_no_record(fused, tmp_path):
    source, output = fused("rec_ts17_nonorm")
    model = onnx.load(output)
    del model.metadata_props[:]
    onnx.save(model, tmp_path / "bare.onnx")
    assert verify(source, tmp_path / "bare.onnx", level="site").exit == 0


def test_a_scale_is_compared_to_the_last_digit_that_its_attribute_holds(patched):
    def next_float(graph):
        scale = attribute(custom(graph, 1), "scale_value")
        scale.f = float(np.nextafter(np.float32(scale.f), np.float32(1)))

    # 1/sqrt(128) is no float32: equal all the same, but one unit in the last place off is not.
    report = patched("two_sizes_ts17", next_float)
    assert [site.verdict for site in report.sites] == ["equal", "differs"]


# Wrong fusions.


WRONG = [
    scale_forgotten, scale_one, scale_off, g_scaled, g_gone, beta_scaled, q_and_k_swapped, undecayed_delta,
    state_transpose_dropped, final_transpose_dropped, tiled_heads,
]  # fmt: skip


@pytest.mark.parametrize("change", WRONG, ids=lambda change: change.__name__)
def test_a_wrong_decode_fusion_differs(patched, change):
    report = patched("full_decode_ts17", change)
    assert report.exit == 5
    assert report.findings == ()
    assert [site.verdict for site in report.sites] == ["differs", "equal", "equal"]
    assert report.sites[0].reason.code == "site-differs"
    assert report.sites[0].error > 1e-4
    assert "fuse the model again" in report.sites[0].reason.text


PREFILL = [scale_forgotten, scale_off, g_scaled, beta_scaled, q_and_k_swapped, final_transpose_dropped]


@pytest.mark.parametrize("change", PREFILL, ids=lambda change: change.__name__)
def test_a_wrong_prefill_fusion_differs(patched, change):
    report = patched("full_prefill_ts17", change)
    assert report.exit == 5
    assert report.sites[0].verdict == "differs"
    assert [site.verdict for site in report.sites[1:]] == ["equal", "equal"]


def test_a_wrong_eps_differs(patched):
    def change(graph):
        for node in graph.node:
            if (
                node.op_type == "Constant"
                and "query/l2norm" in node.name
                and node.attribute[0].t.data_type == TensorProto.FLOAT
            ):
                tensor = node.attribute[0].t
                array = numpy_helper.to_array(tensor)
                if array.size == 1 and 0 < array.item() < 1e-3:
                    tensor.CopyFrom(numpy_helper.from_array((array * 2).astype(np.float32)))

    report = patched("full_decode_ts17", change)
    assert report.exit == 5
    assert report.sites[0].reason.code == "site-differs"


def test_a_malformed_custom_node_is_a_difference_and_no_crash(patched):
    def change(graph):
        node = custom(graph)
        node.attribute.remove(attribute(node, "input_names"))

    report = patched("rec_ts17_nonorm", change)
    assert (report.exit, codes(report)) == (5, {"custom-malformed"})


def test_a_fused_node_that_does_not_run_is_a_difference(patched):
    def change(graph):
        node = custom(graph)
        slots = next(item for item in graph.node if node.input[port(node, "ssm_state_indices")] in item.output)
        slots.attribute[0].t.CopyFrom(numpy_helper.from_array(np.array([7, 7, 7], np.int32)))

    report = patched("rec_ts17_nonorm", change)
    assert (report.exit, codes(report)) == (5, {"cut-does-not-run"})


# Other differences.


def test_a_changed_node_outside_of_any_site(patched):
    def change(graph):
        node = next(node for node in graph.node if node.op_type == "Sigmoid")
        node.op_type = "Tanh"

    report = patched("full_decode_ts17", change)
    assert (report.exit, codes(report)) == (5, {"changed-outside"})


@pytest.mark.parametrize("name", ["full_decode_ts17", "loop_list"])
def test_labels_that_no_operator_reads_are_no_difference(patched, name):
    def change(graph):
        for node in graph.node:
            node.name, node.doc_string = "", "seen by people"
            node.metadata_props.add(key="of", value="another tool")
            for item in node.attribute:
                if item.type == onnx.AttributeProto.GRAPH:
                    change(item.g)

    report = patched(name, change)
    assert (report.exit, codes(report)) == (0, set())
    assert all(site.verdict == "equal" for site in report.sites)


def test_a_constant_far_away_that_is_said_to_be_of_a_site(patched):
    def change(graph):
        node = next(node for node in graph.node if node.output[0] == "/model/norm/Constant_2_output_0")
        tensor = node.attribute[0].t
        tensor.CopyFrom(numpy_helper.from_array(np.float32(10) * numpy_helper.to_array(tensor)))
        node.metadata_props.add(key="deltafuse.site", value="layers.0")

    report = patched("full_decode_ts17", change)
    (far,) = (site for site in report.sites if site.reason)
    assert (report.exit, far.reason.code, far.error) == (5, "expression-site-differs", pytest.approx(9))
    assert "in double on no inputs; fuse the model again" in far.reason.text


def test_a_node_added_outside_of_any_site(patched):
    def change(graph):
        graph.node.append(helper.make_node("Neg", [graph.input[0].name], ["patch"]))

    assert codes(patched("full_decode_ts17", change)) == {"changed-outside"}


def test_a_removed_node_whose_result_is_needed(patched):
    def change(graph):
        graph.node.remove(next(node for node in graph.node if node.op_type == "Sigmoid"))

    report = patched("full_decode_ts17", change)
    assert report.exit == 5
    assert "missing-value" in codes(report)


def test_a_value_that_comes_from_elsewhere(patched):
    def change(graph):
        node = next(node for node in graph.node if node.op_type == "Constant" and node.attribute[0].t.dims)
        tensor = TensorProto()
        tensor.CopyFrom(node.attribute[0].t)
        tensor.name = node.output[0]
        graph.initializer.append(tensor)
        graph.node.remove(node)

    report = patched("full_decode_ts17", change)
    assert (report.exit, codes(report)) == (5, {"changed-source"})


def test_a_value_written_twice(patched):
    def change(graph):
        sigmoid = next(node for node in graph.node if node.op_type == "Sigmoid")
        graph.node.append(helper.make_node("Neg", [sigmoid.input[0]], [sigmoid.output[0]]))

    report = patched("full_decode_ts17", change)
    assert report.exit == 5
    assert "written-twice" in codes(report)


def test_a_changed_weight(patched):
    def change(graph):
        tensor = next(t for t in graph.initializer if t.data_type == TensorProto.FLOAT and len(t.dims) == 2)
        array = numpy_helper.to_array(tensor).copy()
        array[0, 0] += 1
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))

    assert codes(patched("full_decode_ts17", change)) == {"changed-initializer"}


@pytest.mark.parametrize("number", [2.0, 3.0])
def test_a_changed_sparse_weight(number, patched):
    def sparse(graph, number):
        values = numpy_helper.from_array(np.array([number], np.float32), "sparse")
        graph.sparse_initializer.append(
            helper.make_sparse_tensor(values, numpy_helper.from_array(np.array([1])), [4])
        )

    def change(graph):
        sparse(graph, number)

    def before(graph):
        sparse(graph, 2.0)

    report = patched("full_decode_ts17", change, before)
    assert codes(report) == ({"changed-initializer"} if number != 2.0 else set())


def test_an_initializer_in_another_encoding_is_the_same(patched):
    def change(graph):
        tensor = next(t for t in graph.initializer if t.data_type == TensorProto.FLOAT and len(t.dims) == 2)
        # The name field last: what onnx.load gives back is the same message.
        tensor.CopyFrom(TensorProto.FromString(tensor.SerializeToString(deterministic=True)))

    assert patched("full_decode_ts17", change).exit == 0


def test_changed_inputs(patched):
    def change(graph):
        graph.input.append(helper.make_tensor_value_info("more", TensorProto.FLOAT, [1]))

    assert codes(patched("full_decode_ts17", change)) == {"changed-inputs"}


def test_a_new_output_of_the_site_is_told_apart(patched):
    def change(graph):
        graph.output.append(helper.make_tensor_value_info(custom(graph).output[0], TensorProto.FLOAT16, None))

    assert codes(patched("full_decode_ts17", change)) == {"changed-inputs", "changed-source", "verify-not-in-unfused"}


@pytest.mark.parametrize(
    "change",
    [
        lambda graph: setattr(graph.input[0].type.tensor_type.shape.dim[1], "dim_value", 7),
        lambda graph: setattr(graph.input[0].type.tensor_type, "elem_type", TensorProto.DOUBLE),
        lambda graph: graph.input[0].type.tensor_type.shape.dim.add(dim_value=1),
    ],
    ids=["size", "type", "rank"],
)
def test_a_declared_type_that_differs_by_more_than_pins(patched, change):
    report = patched("rec_ts17_nonorm", change)
    assert report.exit == 5
    assert "changed-type" in codes(report)


def test_pinned_axes_are_no_difference(fused):
    source, output = fused("rec_ts17_dynBT")
    shapes = [
        [
            [dim.dim_param or dim.dim_value for dim in info.type.tensor_type.shape.dim]
            for info in onnx.load(path).graph.input
        ]
        for path in (source, output)
    ]
    assert shapes[0] != shapes[1]
    assert verify(source, output, level="site").exit == 0


@pytest.mark.parametrize("record", [True, False], ids=["record", "no record"])
def test_an_axis_that_no_fuse_renamed_or_pinned(fused, tmp_path, record):
    """Of a pin by hand only the record can tell."""
    source, output = fused("full_decode_ts17")
    changes = {"renamed": {"dim_param": "other"}, "pinned": {"dim_value": 7}}
    for name, change in changes.items():
        model = onnx.load(output)
        dims = model.graph.input[1].type.tensor_type.shape.dim
        old = dims[1].dim_param
        dims[1].CopyFrom(onnx.TensorShapeProto.Dimension(**change))
        if not record:
            del model.metadata_props[:]
        onnx.save(model, tmp_path / "edited.onnx")
        report = verify(source, tmp_path / "edited.onnx", level="site")
        texts = [found.text for found in report.findings if found.code == "changed-axis"]
        (new,) = change.values()
        says = f"axis 1 of the graph input {model.graph.input[1].name} is {old} in the unfused file and {new} in"
        assert [text.startswith(says) for text in texts] == [True] * (record or name == "renamed")
        assert report.exit == (5 if texts else 0)


@pytest.mark.parametrize(
    ("text", "told"),
    [("1 AAAA", ["nothing can be rolled back, record-damaged: "]), ("9 AAAA", ["nothing can be rolled back, record-"]),
     (None, [])],
)  # fmt: skip
def test_a_record_that_cannot_be_read_is_noted(fused, tmp_path, text, told):
    source, output = fused("full_decode_ts17")
    model = onnx.load(output)
    for entry in model.metadata_props:
        if entry.key == KEY and text is not None:
            entry.value = text
    if text is None:
        del model.metadata_props[:]
    onnx.save(model, tmp_path / "damaged.onnx")
    report = verify(source, tmp_path / "damaged.onnx", level="site")
    assert (report.exit, report.findings) == (0, ())
    found = [note for note in report.notes if "rolled back" in note]
    assert [note.startswith(start) for note, start in zip(found, told, strict=True)] == [True] * len(told)


def test_a_record_of_another_file(fused, tmp_path):
    (source, output), (_, other) = fused("full_decode_ts17"), fused("rec_ts17_nonorm")
    model = onnx.load(output)
    del model.metadata_props[:]
    model.metadata_props.extend(onnx.load(other).metadata_props)
    onnx.save(model, tmp_path / "other.onnx")
    report = verify(source, tmp_path / "other.onnx", level="site")
    assert (report.exit, [found.code for found in report.findings]) == (5, ["record-of-another"])
    assert "has 0; fuse" in report.findings[0].text


def test_a_file_that_was_saved_anew_is_not_of_another(fused, tmp_path):
    paths = [tmp_path / name for name in ("unfused.onnx", "fused.onnx")]
    for path, given in zip(paths, fused("full_decode_ts17"), strict=True):
        model = onnx.load(given)
        model.producer_version = "saved anew"
        onnx.save(model, path)
    report = verify(*paths, level="site")
    assert (report.exit, report.findings) == (0, ())


def test_another_opset(patched):
    def change(model):
        model.opset_import[0].version += 1

    assert codes(patched("rec_ts17_nonorm", change)) == {"changed-opset"}


def test_another_local_function(patched):
    def change(model):
        node = helper.make_node("Neg", ["x"], ["y"])
        model.functions.append(helper.make_function("local", "F", ["x"], ["y"], [node], list(model.opset_import)))
        model.opset_import.append(helper.make_opsetid("local", 1))

    assert codes(patched("rec_ts17_nonorm", change)) == {"changed-functions"}


def test_labels_inside_a_local_function_are_no_difference(patched):
    def function(model, label: str, op: str):
        node = helper.make_node(op, ["x"], ["y"], name=label, doc_string=label)
        model.functions.append(
            helper.make_function("own", "F", ["x"], ["y"], [node], [helper.make_opsetid("", 17)], doc_string=label)
        )

    def of(label: str, op: str):
        return lambda model: function(model, label, op)

    assert codes(patched("rec_ts17_nonorm", of("two", "Neg"), of("one", "Neg"))) == set()
    assert codes(patched("rec_ts17_nonorm", of("one", "Abs"), of("one", "Neg"))) == {"changed-functions"}


def test_a_file_that_was_not_made_from_the_other(fused, fuse, tmp_path):
    (unfused, _), (source, output) = fused("rec_ts17_nonorm"), fused("full_decode_ts17")
    report = verify(unfused, output)
    assert (report.exit, report.unrelated, report.network) == (5, report.findings[0], None)
    assert report.skipped == report.unrelated
    text = report.findings[0].text
    assert text.startswith(f"{output} was not made from {unfused}: ")
    assert "0 of 6 graph inputs and 0 of 4 graph outputs are the same in both" in text
    assert f"its record is of another file (sha256 {sha256(source.read_bytes()).hexdigest()}); give the file" in text
    done = fuse("verify", unfused, output)
    assert done.exit == 5
    assert done.out.startswith("unrelated-files: ")
    lines = done.out.splitlines()
    assert lines[-1] == f"what follows from that is in --json: {len(report.findings) - 1} findings"
    assert "changed-" not in done.out
    page = tmp_path / "page.html"
    assert fuse("verify", unfused, output, "--html", page).exit == 5
    shown = page.read_text()
    assert shown.count("unrelated-files") == 1
    assert "changed-" not in shown
    assert "<h3>" not in shown
    assert f"what follows from that is in --json: {len(report.findings) - 1} findings" in shown
    listed = fuse("verify", unfused, output, "--json").document["findings"]
    assert [found["code"] for found in listed] == [found.code for found in report.findings]
    assert {"unrelated-files", "changed-inputs", "changed-source"} <= {found["code"] for found in listed}


def test_two_unfused_files_of_different_models(fused):
    (unfused, _), (other, _) = fused("rec_ts17_nonorm"), fused("full_decode_ts17")
    report = verify(unfused, other, level="site")
    assert (report.exit, report.findings[0].code) == (5, "unrelated-files")
    assert "sha256" not in report.findings[0].text


def test_another_graph_of_the_same_model_is_told_by_its_record(fused):
    (unfused, _), (_, output) = fused("full_decode_ts17"), fused("full_prefill_ts17")
    assert verify(unfused, output, level="site").findings[0].code == "unrelated-files"


def test_an_edited_file_is_still_of_the_file_in_its_record(patched):
    def change(graph):
        for node in graph.node:
            node.input[:] = [name and f"{name}/renamed" for name in node.input]
            node.output[:] = [name and f"{name}/renamed" for name in node.output]
        for value in (*graph.input, *graph.output, *graph.initializer):
            value.name += "/renamed"

    report = patched("full_decode_ts17", change)
    assert (report.exit, report.unrelated) == (5, None)
    assert "changed-inputs" in codes(report)


def test_a_site_that_nothing_reads(patched):
    def change(graph):
        del graph.output[:]

    report = patched("rec_ts17_nonorm", change)
    assert {"site-unread", "changed-inputs"} <= codes(report)


def test_a_site_that_leaves_out_what_the_unfused_nodes_read(patched):
    def change(graph):
        node = custom(graph)
        at = port(node, "g")
        shape = [1, graph.input[0].type.tensor_type.shape.dim[1].dim_value, 4]
        insert(graph, node, constant("no_decay", np.zeros((shape[1], 4), np.float32)))
        old = custom(graph).input[at]
        custom(graph).input[at] = "no_decay"
        graph.node.remove(next(item for item in graph.node if old in item.output))

    report = patched("rec_ts17_nonorm", change)
    assert (report.exit, codes(report)) == (5, {"verify-reads-more"})
    assert "the values of g," in report.sites[0].reason.text


def test_files_without_a_difference_are_a_user_error(fused, tmp_path):
    source, output = fused("rec_ts17_nonorm")
    for path in (source, output):
        shutil.copy(path, tmp_path / "copy.onnx")
        with pytest.raises(UserError, match="unfused model first") as caught:
            verify(path, tmp_path / "copy.onnx")
        assert caught.value.code == "nothing-fused"


def test_a_file_that_cannot_be_read_is_a_user_error(fused, tmp_path):
    source, _ = fused("rec_ts17_nonorm")
    (tmp_path / "text.onnx").write_text("not a model")
    with pytest.raises(UserError):
        verify(source, tmp_path / "text.onnx")


def test_constants_of_a_site_that_lie_outside_the_file(tmp_path):
    source, output = tmp_path / "unfused.onnx", tmp_path / "fused.onnx"
    model = onnx.load(FIXTURES / "chunk_ts17_c64.onnx")
    moved = 0
    with (tmp_path / "masks.bin").open("wb") as file:
        for node in model.graph.node:
            tensor = node.attribute[0].t if node.op_type == "Constant" else None
            if tensor is not None and len(tensor.dims) == 2:
                offset = file.tell()
                file.write(tensor.raw_data)
                place = {"location": "masks.bin", "offset": str(offset), "length": str(len(tensor.raw_data))}
                tensor.external_data.extend(onnx.StringStringEntryProto(key=k, value=v) for k, v in place.items())
                tensor.data_location = TensorProto.EXTERNAL
                tensor.ClearField("raw_data")
                moved += 1
    assert moved
    source.write_bytes(model.SerializeToString())
    assert pipeline.fuse(FuseOptions(model=source, output=output), SilentProgress()).exit == 0
    assert verify(source, output, level="site").exit == 0
    (tmp_path / "masks.bin").unlink()
    with pytest.raises(UserError, match=r"masks\.bin") as caught:
        verify(source, output)
    assert caught.value.code == "external-data-missing"


# Parts that real files do not reach.


def test_a_state_without_axes_has_no_batch():
    inputs = [
        Input("g", (symbol("n"), symbol("t"), 2), TensorProto.FLOAT, Part("g")),
        Input("index", (), TensorProto.INT64, Part("state")),
    ]
    scalar = Pair("site", onnx.ModelProto(), onnx.ModelProto(), tuple(inputs), (), symbol("t"), None, b"")
    assert axis_dims(scalar, "batch") == [symbol("n")]


def pair(unfused, fused_model, tokens=5):
    inputs = tuple(
        Input(info.name, sizes(info), info.type.tensor_type.elem_type, part)
        for info, part in zip(fused_model.graph.input, PARTS, strict=True)
    )
    outputs = tuple(info.name for info in fused_model.graph.output)
    return Pair("site", unfused, fused_model, inputs, outputs, tokens, None, b"")


def sizes(info):
    return tuple(symbol(dim.dim_param) if dim.dim_param else dim.dim_value for dim in info.type.tensor_type.shape.dim)


PARTS = [Part("query"), Part("key"), Part("value"), Part("g"), Part("beta"), Part("state")]


def emitted(site: Site):
    """A site's nodes as a model whose inputs are its roles."""
    found = match(site)
    nodes = targets.get("ascend-310p").plan(found, TargetOptions()).nodes
    inputs = [declare(role) for role in (found.query, found.key, found.value, found.g, found.beta, found.state)]
    outputs = [declare(role) for role in (found.out, found.final_state)]
    graph = helper.make_graph(nodes, "site", inputs, outputs)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)


def declare(role):
    return helper.make_tensor_value_info(
        role.name, role.dtype, [d if isinstance(d, int) else str(d) for d in role.shape]
    )


def test_values_beyond_the_targets_range_are_a_difference():
    site = Site(tokens=5, batch=1, scale=2.0**22)
    model = emitted(site)
    with Worker() as worker:
        verdict = judge(pair(lower_model(model), model), worker)
    assert verdict.error <= 1e-12
    assert (verdict.verdict, verdict.reason.code) == ("differs", "site-rounding")
    assert verdict.rounding.nrmse > 0.02


def test_a_free_token_axis_at_which_nothing_runs():
    model = emitted(Site(tokens="n", batch=1))
    broken = onnx.ModelProto()
    broken.CopyFrom(lower_model(model))
    # Traced at six tokens, which is none of the counts that are tried.
    value = next(info for info in broken.graph.input if info.name.endswith("/v"))
    broken.graph.node.insert(0, constant("six", np.array([6, 4, 32])))
    broken.graph.node.insert(1, helper.make_node("Reshape", [value.name, "six"], ["traced"]))
    for node in list(broken.graph.node)[2:]:
        node.input[:] = ["traced" if name == value.name else name for name in node.input]
    for info in (*broken.graph.input, *broken.graph.output):
        info.type.tensor_type.ClearField("shape")
    del broken.graph.value_info[:]
    with Worker() as worker:
        verdict = judge(pair(broken, model, symbol("n")), worker)
    assert (verdict.verdict, verdict.error, verdict.reason.code) == ("differs", None, "no-size-runs")


def test_an_input_of_unknown_type_cannot_be_run(tmp_path):
    site = Site(tokens=2, batch=1, dtype=HALF)
    model = emitted(site)
    before = onnx.ModelProto()
    before.CopyFrom(model)
    # Something of another domain writes v: neither file says what it is.
    for graph in (model.graph, before.graph):
        value = next(info for info in graph.input if info.name.endswith("/v"))
        graph.node.insert(0, helper.make_node("Unknown", [value.name], ["hidden"], domain="elsewhere"))
        for node in list(graph.node)[1:]:
            node.input[:] = ["hidden" if name == value.name else name for name in node.input]
    for proto in (model, before):
        proto.opset_import.append(helper.make_opsetid("elsewhere", 1))
    kernel = custom(before.graph)
    before.graph.node.remove(kernel)
    before.graph.node.insert(
        len(before.graph.node) - 3, helper.make_node("Split", [kernel.input[0]], list(kernel.output))
    )
    for name, proto in (("before", before), ("after", model)):
        (tmp_path / f"{name}.onnx").write_bytes(proto.SerializeToString())
    files = scan(tmp_path / "before.onnx"), scan(tmp_path / "after.onnx")
    (region,) = compare(*files).regions
    reason = cut_pair(*map(Side.of, files), region)
    assert (reason.code, reason.args) == ("verify-type-unknown", {"value": region.inputs[2]})
