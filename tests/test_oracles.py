"""Two oracles for a fused site: its lowered form on onnxruntime, and the recurrence in numpy. Both in double."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from deltafuse import pipeline
from deltafuse.fused import call, kernel, lower_exact
from deltafuse.lowering import Call
from deltafuse.lowering_attention import LINEAR_ATTENTION
from deltafuse.options import FuseOptions, SilentProgress
from deltafuse.ordering import in_order
from deltafuse.patterns import load
from deltafuse.probe import Worker, to_double
from deltafuse.reasons import Reason
from deltafuse.rule import relative
from deltafuse.verify_bars import EXACT
from deltafuse.verify_cut import Pair, Side, cut_pair
from deltafuse.verify_diff import compare
from deltafuse.verify_draws import PairDraws, drawn
from deltafuse.wire import scan
from exports import exports

MATCHES = [one.name for one in exports(expect="match", exit=0)]
(RULE,) = [pattern for pattern in load() if pattern.name == "gated_delta_rule"]


def sites(source: Path, fused: Path) -> list[Pair]:
    before, after = (in_order(scan(path))[0] for path in (source, fused))
    found = [cut_pair(Side.of(before), Side.of(after), region) for region in compare(before, after).regions]
    assert not any(isinstance(pair, Reason) for pair in found)
    return found


def disagreement(pair: Pair, worker: Worker) -> float:
    """Largest relative error between both oracles, over all draws, results and fused nodes of a site."""
    model = to_double(lower_exact(pair.fused))
    nodes = [node for node in pair.fused.graph.node if kernel(node)]
    calls = [found for node in nodes if isinstance(found := call(node), Call)]
    assert len(calls) == len(nodes) > 0
    names = dict.fromkeys(n for one in calls for n in (*one.ports.values(), one.out, one.state) if n)
    known = {info.name for info in (*model.graph.input, *model.graph.output)}
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in known)
    unfused, session = (worker.load(m.SerializeToString()) for m in (to_double(pair.unfused), model))
    draws = PairDraws(pair, lambda run: worker.run(unfused, drawn(pair, run), pair.outputs))
    worst = 0.0
    for run in draws.runs(draws.sizes()[0]):
        feeds = drawn(pair, run)
        values = dict(zip(session.outputs, worker.run(session, feeds), strict=True)) | feeds
        for node, one in zip(nodes, calls, strict=True):
            worst = max(worst, *errors(node, one, values))
    return worst


def errors(node: onnx.NodeProto, one: Call, values: dict) -> list[float]:
    """Of both results of a fused node, against the recurrence on its own operands."""
    operands = {port: np.asarray(values[name]) for port, name in one.ports.items()}
    packed = one.op == LINEAR_ATTENTION
    query, key, value, beta, g, state = (plain(node, operands, packed, port) for port in (
        "query", "key", "value", "beta", "g", "state",
    ))  # fmt: skip
    group = value.shape[2] // query.shape[2]
    repeated = (np.repeat(x, value.shape[2] // x.shape[2], axis=2) for x in (query, key))
    assert group >= 1
    out, final = RULE.recurrence(*repeated, value, g, beta, state)
    out = out * one.scale
    if packed:
        found = np.reshape(values[one.out], out.shape), values.get(one.state)
    else:
        found = values[one.out][None], None if not one.state else np.swapaxes(values[one.state], 2, 3)
    pairs = [(found[0], out), (found[1], final)]
    return [relative(np.asarray(a), b) for a, b in pairs if a is not None and np.isfinite(b).all() and b.any()]


def plain(node: onnx.NodeProto, operands: dict, packed: bool, port: str) -> np.ndarray:
    """An operand in plain axes: [B, T, H, D], gates [B, T, H], the state [B, H, K, V]."""
    attributes = {item.name: item.i for item in node.attribute}
    if port == "state":
        found = operands.get("state", operands.get("initial_state"))
        if found is None:
            value, key = (plain(node, operands, packed, name) for name in ("value", "key"))
            return np.zeros((value.shape[0], value.shape[2], key.shape[3], value.shape[3]))
        return found if packed else np.swapaxes(found, 2, 3)
    array = operands[port]
    if not packed:
        return array[None]
    if port in ("beta", "g"):
        return array
    heads = attributes["q_num_heads" if port in ("query", "key") else "kv_num_heads"]
    return np.reshape(array, (*array.shape[:2], heads, -1))


@pytest.mark.parametrize(
    ("name", "target"),
    [(name, "ascend-310p") for name in MATCHES] + [("chunk_ts17_dynBT", "ort"), ("rec_dy20_T3_half", "onnx")],
)
def test_both_oracles_agree(tmp_path, name, target):
    source = Path(__file__).parent / "fixtures" / f"{name}.onnx"
    report = pipeline.fuse(FuseOptions(source, tmp_path / "fused.onnx", target=target), SilentProgress())
    assert report.exit == 0
    with Worker() as worker:
        found = [disagreement(pair, worker) for pair in sites(source, tmp_path / "fused.onnx")]
    assert len(found) == sum(site.status == "fused" for site in report.sites)
    assert max(found) <= EXACT
