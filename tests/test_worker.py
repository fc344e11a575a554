"""The child process that runs models: answers, limits, and what is left after it was killed."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import onnx
import pytest

import graphs
from deltafuse.children import MEMORY
from deltafuse.reasons import Reason
from deltafuse.worker import Session, Worker, read_message, write_message


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker() as one:
        yield one


SUM = """
<ir_version: 8, opset_import: ["" : 17]>
two (double[n] a, double[n] b) => (double[n] s, double[n] d) {
  s = Add(a, b)
  d = Sub(a, b)
}"""

ENDLESS = """
<ir_version: 8, opset_import: ["" : 17]>
endless (double[1] x) => (double[1] y) <int64 steps = {1000000000}, bool on = {1}> {
  y = Loop(steps, on, x)<body = b (int64 i, bool go, double[1] s) => (bool stay, double[1] t) {
    stay = Identity(go)
    t = Neg(s)
  }>
}"""

HUGE = """
<ir_version: 8, opset_import: ["" : 17]>
huge (int64[1] n) => (float[n] y) { y = ConstantOfShape(n) }"""


def load(worker: Worker, text: str) -> Session:
    session = worker.load(graphs.parse(text).SerializeToString())
    assert isinstance(session, Session), session
    return session


def test_a_model_is_loaded_and_run(worker: Worker) -> None:
    session = load(worker, SUM)
    assert (session.inputs, session.outputs) == (("a", "b"), ("s", "d"))
    feeds = {"a": np.array([1.0, 2.0]), "b": np.array([10.0, 20.0]), "unused": np.array([0.0])}
    s, d = worker.run(session, feeds)
    assert (s.tolist(), d.tolist()) == ([11.0, 22.0], [-9.0, -18.0])


def test_only_what_is_asked_for_comes_back_in_that_order(worker: Worker) -> None:
    session = load(worker, SUM)
    feeds = {"a": np.array([1.0]), "b": np.array([3.0])}
    assert [array.tolist() for array in worker.run(session, feeds, ("d", "s"))] == [[-2.0], [4.0]]
    assert [array.tolist() for array in worker.run(session, feeds, ("d",))] == [[-2.0]]


def test_large_arrays_come_back_whole(worker: Worker) -> None:
    session = load(worker, SUM)
    a = np.random.default_rng(0).standard_normal(700_000)
    s, d = worker.run(session, {"a": a, "b": np.zeros_like(a)})
    assert np.array_equal(s, a)
    assert np.array_equal(d, a)


def test_what_is_run_is_not_optimised(worker: Worker) -> None:
    # Folding would take the node away that divides by zero in integers at run time only.
    session = load(worker, SUM)
    assert worker.run(session, {"a": np.zeros(1), "b": np.zeros(1)}) is not None


@pytest.mark.parametrize("data", [b"", b"nothing", graphs.parse(SUM).SerializeToString()[:-4]])
def test_what_is_no_model_does_not_load(data: bytes, worker: Worker) -> None:
    found = worker.load(data)
    assert isinstance(found, Reason)
    assert found.code == "cut-does-not-load"
    assert found.args["error"]
    assert "\n" not in found.text


def test_an_unknown_operator_does_not_load(worker: Worker) -> None:
    model = graphs.parse(SUM)
    model.graph.node[0].op_type = "Nothing"
    found = worker.load(model.SerializeToString())
    assert isinstance(found, Reason)
    assert found.code == "cut-does-not-load"
    assert "Nothing" in found.text


def test_arrays_that_do_not_fit_do_not_run_and_leave_the_worker_alive(worker: Worker) -> None:
    session = load(worker, SUM)
    for b in (np.zeros(3), np.zeros(2, np.float32)):
        found = worker.run(session, {"a": np.zeros(2), "b": b})
        assert isinstance(found, Reason)
        assert found.code == "cut-does-not-run"
        assert found.text
    assert not isinstance(worker.run(session, {"a": np.zeros(2), "b": np.zeros(2)}), Reason)


def test_an_unloaded_session_is_gone(worker: Worker) -> None:
    session = load(worker, SUM)
    worker.unload(session)
    found = worker.run(session, {"a": np.zeros(1), "b": np.zeros(1)})
    assert isinstance(found, Reason)
    assert found.code == "cut-does-not-run"


def test_a_run_that_does_not_end_is_ended() -> None:
    with Worker(seconds=60) as worker:
        other, endless = load(worker, SUM), load(worker, ENDLESS)
        worker.seconds = 0.2
        found = worker.run(endless, {"x": np.ones(1)})
        assert isinstance(found, Reason)
        assert (found.code, found.args) == ("worker-timeout", {"seconds": 0.2})
        assert "--timeout" in found.text
        worker.seconds = 60
        # The old child's sessions are gone with it; the next load starts another one.
        gone = worker.run(other, {"a": np.zeros(1), "b": np.zeros(1)})
        assert isinstance(gone, Reason)
        assert gone.code == "worker-died"
        again = load(worker, SUM)
        assert not isinstance(worker.run(again, {"a": np.zeros(1), "b": np.zeros(1)}), Reason)


def test_a_child_that_dies_is_told_and_replaced() -> None:
    with Worker() as worker:
        session = load(worker, SUM)
        os.kill(worker._child.pid, signal.SIGKILL)
        worker._child.wait()
        found = worker.run(session, {"a": np.zeros(1), "b": np.zeros(1)})
        assert isinstance(found, Reason)
        assert (found.code, found.args) == ("worker-died", {"status": -signal.SIGKILL})
        assert "-9" in found.text
        load(worker, SUM)


def test_memory_has_a_limit() -> None:
    with Worker(memory=4 << 30) as worker:
        huge = load(worker, HUGE)
        found = worker.run(huge, {"n": np.array([4 << 30])})
        assert isinstance(found, Reason)
        assert found.code in ("cut-does-not-run", "worker-died")
        assert not isinstance(worker.load(graphs.parse(SUM).SerializeToString()), Reason)


def test_a_closed_worker_leaves_no_child() -> None:
    with Worker() as worker:
        child = worker._child
        load(worker, SUM)
    assert child.poll() is not None
    worker.close()


def test_kernels_that_print_do_not_disturb_the_answers(capfd: pytest.CaptureFixture[str]) -> None:
    with Worker() as worker:
        # onnxruntime writes warnings about this model's unused initializer, if to anything, then not to stdout.
        model = graphs.parse(SUM)
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros(2), "unused"))
        session = worker.load(model.SerializeToString())
        assert isinstance(session, Session)
        assert not isinstance(worker.run(session, {"a": np.zeros(1), "b": np.zeros(1)}), Reason)
    assert capfd.readouterr().out == ""


def test_messages_are_read_as_they_were_written() -> None:
    stream = io.BytesIO()
    messages = [("run", 3, {"x": np.arange(4)}, ("y",)), None, "text"]
    for message in messages:
        write_message(stream, message)
    stream.seek(0)
    verb, key, feeds, outputs = read_message(stream)
    assert (verb, key, feeds["x"].tolist(), outputs) == ("run", 3, [0, 1, 2, 3], ("y",))
    assert [read_message(stream) for _ in range(2)] == [None, "text"]
    with pytest.raises(EOFError):
        read_message(stream)


@pytest.mark.parametrize(
    "array",
    [np.zeros((0, 3)), np.array(2.0), np.asfortranarray(np.arange(6.0).reshape(2, 3)), np.arange(12.0)[::3],
     np.array(["a", "b"], object), np.arange(1 << 19)],
    ids=["empty", "scalar", "fortran", "strided", "objects", "larger-than-a-pipe"],
)  # fmt: skip
def test_arrays_of_any_layout_are_read_as_they_were_written(array: npt.NDArray[np.generic]) -> None:
    stream = io.BytesIO()
    write_message(stream, {"x": array})
    stream.seek(0)
    found = read_message(stream)["x"]
    assert (found.dtype, found.shape, found.tolist()) == (array.dtype, array.shape, array.tolist())
    assert found.flags.writeable


def test_what_is_asked_for_meanwhile_is_done_before_the_answer_comes(worker: Worker) -> None:
    session = load(worker, SUM)
    done: list[str] = []
    result = worker.run(session, {"a": np.ones(1), "b": np.ones(1)}, None, lambda: done.append("meanwhile"))
    assert not isinstance(result, Reason)
    assert done == ["meanwhile"]


def test_an_answer_that_nobody_waited_for_is_not_taken_for_the_next(worker: Worker) -> None:
    session = load(worker, SUM)

    def fail() -> None:
        raise KeyError("meanwhile")

    with pytest.raises(KeyError):
        worker.run(session, {"a": np.ones(1), "b": np.ones(1)}, None, fail)
    session = load(worker, SUM)
    assert session.outputs == ("s", "d")
    answer = worker.run(session, {"a": np.zeros(1), "b": np.ones(1)}, ("s",))
    assert not isinstance(answer, Reason)
    assert answer[0].tolist() == [1.0]


def test_a_child_that_computes_ahead_does_not_outlive_who_asks() -> None:
    begun = "from concurrent.futures import ThreadPoolExecutor; ThreadPoolExecutor(1).submit(time.sleep, 250)"
    served = f"from deltafuse import worker_main as child; sys.argv[1:] = ['{MEMORY}']; child.main()"
    script = f"import sys, time; {begun}; {served}"
    # The test's own time limit is 300 s.
    ended = subprocess.run([sys.executable, "-c", script], stdin=subprocess.DEVNULL, check=False, timeout=120)
    assert ended.returncode == 0


def test_a_session_of_an_earlier_child_is_no_session_of_the_next() -> None:
    """Numbers are not given twice: the same names would be read of something else."""
    feeds = {"a": np.ones(1), "b": np.ones(1)}
    with Worker() as worker:
        old = load(worker, SUM)
        assert worker.has(old)
        os.kill(worker._child.pid, signal.SIGKILL)
        worker._child.wait()
        new = load(worker, SUM.replace("Sub", "Mul"))
        assert (worker.has(old), worker.has(new)) == (False, True)
        found = worker.run(old, feeds)
        assert isinstance(found, Reason)
        assert found.code == "cut-does-not-run"
        assert [array.tolist() for array in worker.run(new, feeds)] == [[2.0], [1.0]]
