"""Files whose nodes are out of order: read in order, written back where they were."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnxruntime as ort
import pytest

import graphs
from deltafuse import pipeline
from deltafuse.errors import UserError
from deltafuse.lowering import lower_model
from deltafuse.options import FuseOptions, SilentProgress
from deltafuse.ordering import in_order
from deltafuse.rollback import rollback
from deltafuse.wire import scan
from exports import export
from tolerances import assert_close

pytestmark = pytest.mark.usefixtures("one_worker")


def last_node_first(source: Path, path: Path) -> Path:
    """The same graph with its nodes in the opposite order."""
    model = onnx.load(source)
    nodes = list(model.graph.node)[::-1]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    onnx.save(model, path)
    return path


def test_a_file_in_order_is_left_alone() -> None:
    model = scan(export("rec_ts14").path)
    same, order = in_order(model)
    assert same is model
    assert order is None


def test_each_node_comes_after_what_it_reads(tmp_path: Path) -> None:
    model, order = in_order(scan(last_node_first(export("rec_ts14").path, tmp_path / "back.onnx")))
    assert order is not None
    assert sorted(order) == list(range(len(model.graph.op)))
    producer = model.graph.producer
    assert all(producer[value] < node for node in range(len(order)) for value in model.graph.reads(node))


def test_a_file_out_of_order_fuses_and_rolls_back(tmp_path: Path) -> None:
    one = export("rec_ts14")
    path = last_node_first(one.path, tmp_path / "back.onnx")
    report = pipeline.fuse(FuseOptions(path, tmp_path / "fused.onnx"), SilentProgress())
    assert report.exit == 0
    lowered = lower_model(onnx.load(tmp_path / "fused.onnx"))
    session = ort.InferenceSession(lowered.SerializeToString(), providers=["CPUExecutionProvider"])
    for found, wanted in zip(session.run(None, one.inputs), one.expected, strict=True):
        assert_close(found, wanted, "float16")
    rollback(tmp_path / "fused.onnx", tmp_path / "again.onnx")
    assert (tmp_path / "again.onnx").read_bytes() == path.read_bytes()


def test_a_cycle_is_a_user_error(tmp_path: Path) -> None:
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        circle (float[1] x) => (float[1] y) { a = Add(x, b) b = Neg(a) y = Neg(b) }
    """)
    onnx.save(model, tmp_path / "circle.onnx")
    with pytest.raises(UserError, match=r"in .*circle.onnx the node .* reads what is computed from it") as error:
        in_order(scan(tmp_path / "circle.onnx"))
    assert error.value.code == "cyclic"


@pytest.mark.parametrize(
    "body",
    ["a = Neg(x)\n a = Abs(x)\n y = Neg(a)", "x = Neg(y)\n y = Abs(c)", "c = Neg(x)\n y = Abs(c)"],
)
def test_a_value_that_is_written_twice_is_told(body: str, tmp_path: Path) -> None:
    text = f'<ir_version: 8, opset_import: ["" : 17]> g (float[2] x) => (float[2] y) <float c = {{1}}> {{ {body} }}'
    path = graphs.save(graphs.parse(text), tmp_path)
    with pytest.raises(UserError, match="is given more than once") as error:
        graphs.fuse(path)
    assert error.value.code == "value-written-twice"


def test_a_circle_by_a_value_that_is_written_twice_is_told_as_that(tmp_path: Path) -> None:
    text = '<ir_version: 8, opset_import: ["" : 17]> g (float[2] x) => (float[2] y) '
    text += "{ a = Neg(x) b = Neg(a) a = Neg(b) y = Neg(a) }"
    with pytest.raises(UserError) as error:
        in_order(graphs.scanned(graphs.parse(text), tmp_path))
    assert error.value.code == "value-written-twice"
