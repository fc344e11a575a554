"""Where a rule could be: anchors, cores, roots, and names."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import graphs
from deltafuse.finder import Candidate
from deltafuse.graph import Graph
from exports import export, exports


def names(graph: Graph, values) -> list[str]:
    return [graph.name(value) for value in values]


def found(model: onnx.ModelProto, folder: Path) -> tuple[Graph, list[Candidate]]:
    scanned = graphs.scanned(model, folder)
    return scanned.graph, graphs.candidates(scanned)


@pytest.mark.parametrize("one", exports(expect="match"), ids=lambda one: one.name)
def test_every_site_of_a_real_export_is_seen_with_its_roots(one, tmp_path: Path) -> None:
    graph, candidates = found(onnx.load(one.path), tmp_path)
    assert len(candidates) == one.truth["n_sites"]
    for candidate in candidates:
        if one.truth["roles"] is not None:
            assert set(names(graph, candidate.roots)) == set(one.truth["roles"].values())
        assert {graph.producer[value] for value in candidate.frontier} <= set(candidate.core) & set(candidate.nodes)
        assert list(candidate.nodes) == sorted(candidate.nodes)
        # Between roots and frontier nothing is read that is not there.
        made = {*candidate.roots, *dict(candidate.sizes), *graph.initializers, 0}
        for node in candidate.nodes:
            assert made.issuperset(graph.node_inputs[node])
            made.update(graph.node_outputs[node])


def test_roots_core_and_frontier_of_a_step(tmp_path: Path) -> None:
    graph, (candidate,) = found(graphs.step(), tmp_path)
    assert names(graph, candidate.roots)[0] == "g"
    assert set(names(graph, candidate.roots)) == {"g", "query", "key", "value", "beta", "state"}
    assert names(graph, candidate.frontier) == ["final_state", "out"]
    first = graph.node_outputs[candidate.core[0]][0]
    assert graph.name(first) == "e0"
    inner = set(names(graph, (v for node in candidate.core for v in graph.node_outputs[node])))
    assert {"decayed", "known", "delta", "update", "out"} <= inner
    assert not {"q0", "k1", "b1", "v0"} & inner


def test_a_climb_stops_at_an_activation(tmp_path: Path) -> None:
    model = graphs.step(("b0 = Squeeze(beta, time)", "gate = Sigmoid(beta)\n  b0 = Squeeze(gate, time)"))
    graph, (candidate,) = found(model, tmp_path)
    assert "gate" in names(graph, candidate.roots)
    assert "beta" not in names(graph, candidate.roots)


def test_a_climb_stops_at_a_weight(tmp_path: Path) -> None:
    weight = ("float scale", "float[5] w = {1, 2, 3, 4, 5}, float scale")
    model = graphs.step(("q0 = Squeeze(query, time)", "qw = Mul(query, w)\n  q0 = Squeeze(qw, time)"), weight)
    graph, (candidate,) = found(model, tmp_path)
    assert "qw" in names(graph, candidate.roots)


def test_a_climb_stops_where_features_are_parted(tmp_path: Path) -> None:
    model = graphs.step(
        ("float[1,1,4,5] query", "float[1,1,4,10] both"),
        ("q0 = Squeeze(query, time)", "query, rest = Split<axis = 3>(both)\n  q0 = Squeeze(query, time)"),
    )
    graph, (candidate,) = found(model, tmp_path)
    assert "query" in names(graph, candidate.roots)
    assert "both" not in names(graph, candidate.roots)


def test_the_output_gate_behind_the_rule_is_outside(tmp_path: Path) -> None:
    model = graphs.step(
        ("float[1,4,5,3] state)", "float[1,4,5,3] state, float[1,1,4,3] z)"),
        ("=> (float[1,1,4,3] out,", "=> (float[1,1,4,3] gated,"),
        ("out = Unsqueeze(o, time)", "out = Unsqueeze(o, time)\n  gate = Mul(z, sz)\n  gated = Mul(out, gate)"),
        ("  q0 =", "  sz = Sigmoid(z)\n  q0 ="),
    )  # fmt: skip
    report = graphs.fuse(graphs.save(model, tmp_path), tmp_path / "out.onnx")
    assert (report.exit, report.sites[0].match.out.name) == (0, "out")
    assert "gate" in {name for node in onnx.load(tmp_path / "out.onnx").graph.node for name in node.output}


@pytest.mark.parametrize(
    "change",
    [
        ("e0 = Exp(g0)", "e0 = Sigmoid(g0)"),
        ("e0 = Exp(g0)", "e9 = Exp(g0)\n  one = Constant<value_float = 1.0>()\n  e8 = Add(e9, one)\n  e0 = Log(e8)"),
        ("e0 = Exp(g0)", "e0 = Identity(g0)"),
    ],
)
def test_without_a_decay_there_is_nothing_to_find(change: tuple[str, str], tmp_path: Path) -> None:
    assert found(graphs.step(change), tmp_path)[1] == []


def test_an_exponential_without_a_contraction_is_nothing_to_find(tmp_path: Path) -> None:
    model = graphs.parse(
        """
        <ir_version: 8, opset_import: ["" : 17]>
        plain (float[2,3] x, float[2,3] z) => (float[2,3] y) {
          e = Exp(x)
          y = Mul(e, z)
        }"""
    )
    assert found(model, tmp_path)[1] == []


def test_layers_are_called_what_the_exporter_calls_them(tmp_path: Path) -> None:
    for name, expected in (
        ("full_prefill_ts17", ["layers.0", "layers.1", "layers.2"]),
        ("full_decode_transformers", ["layers.0", "layers.1", "layers.2"]),
        ("rec_dy18", ["site.0"]),
    ):
        _, candidates = found(onnx.load(export(name).path), tmp_path)
        assert [candidate.name for candidate in candidates] == expected, name


def test_two_sites_of_one_scope_are_numbered(tmp_path: Path) -> None:
    prefixes = ("/model/layers.3/a/", "/model/layers.3/b/")
    parts = [onnx.compose.add_prefix(graphs.step(), prefix) for prefix in prefixes]
    _, candidates = found(onnx.compose.merge_models(*parts, io_map=[]), tmp_path)
    assert [candidate.name for candidate in candidates] == ["site.0", "site.1"]


def test_a_site_whose_state_is_another_s_final_state_is_not_mixed_up_with_it(tmp_path: Path) -> None:
    first, second = (onnx.compose.add_prefix(graphs.step(), prefix) for prefix in ("a.", "b."))
    chained = onnx.compose.merge_models(first, second, io_map=[("a.final_state", "b.state")])
    chained.graph.output.append(onnx.helper.make_tensor_value_info("a.final_state", 1, [1, 4, 5, 3]))
    report = graphs.fuse(graphs.save(chained, tmp_path), tmp_path / "out.onnx")
    fused = [site for site in report.sites if site.status == "fused"]
    assert (report.exit == 0) == bool(fused)
    if fused:
        rng = np.random.default_rng(2)
        unfused = graphs.double(chained)
        feeds = {i.name: -rng.uniform(size=i.shape) for i in unfused.get_inputs()}
        assert (
            graphs.difference(graphs.lowered_double(onnx.load(tmp_path / "out.onnx"), report), unfused, feeds) < 1e-12
        )
