"""What the page of ``fuse --html`` and ``fuse inspect --html`` holds, before a browser makes anything of it."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

import deltafuse
import graphs
from deltafuse import axis_names, drafting, pipeline
from deltafuse.adjusting import Adjustments
from deltafuse.classes import classify
from deltafuse.demo import MODELS
from deltafuse.evidence import Evidence
from deltafuse.html_base import asset, embedded_json, packed
from deltafuse.html_fuse import LAYOUT, page
from deltafuse.layer_map import Layer, layer_map
from deltafuse.match import FuseReport, SiteReport
from deltafuse.options import FuseOptions, SilentProgress
from deltafuse.page_pictures import Pictures
from deltafuse.page_summary import bars, counts
from deltafuse.picture import DRAWN, Part, draw
from deltafuse.reasons import Reason
from deltafuse.report import site_document
from deltafuse.shapes import Shapes
from deltafuse.wire import scan
from exports import export
from test_html import Checker

PREFILL, DECODE = MODELS / "prefill.onnx", MODELS / "decode.onnx"
ROOT = Path(__file__).parents[1]
STYLE = (ROOT / "src/deltafuse/templates/style.css").read_text()


def held(path: Path, name: str) -> str:
    """What a script element of a page holds."""
    (text,) = re.findall(rf'<script type="[a-z/]+" id="{name}">(.*?)</script>', path.read_text())
    return text


def data(path: Path) -> tuple[list, list, list]:
    """Lines, sites and pictures of a page."""
    more = json.loads(gzip.decompress(base64.b64decode(held(path, "details"))))
    return json.loads(held(path, "lines")), more["sites"], more["pictures"]


def evidence(model: onnx.ModelProto, tmp_path: Path) -> Evidence:
    """What a run that found nothing knows of a model."""
    onnx.save(model, tmp_path / "model.onnx")
    scanned = scan(tmp_path / "model.onnx")
    return Evidence(scanned, scanned, classify(scanned), Shapes(scanned), {}, drafting.Part((), (), Adjustments()))


@pytest.fixture(scope="module")
def prefill(tmp_path_factory):
    """The page of the demo's prefill, and the report it is of."""
    path = tmp_path_factory.mktemp("page") / "page.html"
    report = pipeline.inspect(FuseOptions(PREFILL, html=path), SilentProgress())
    return path, report


# The page as a whole.


def test_a_page_is_whole_and_needs_nothing_else(prefill):
    path, report = prefill
    text = path.read_text()
    assert report.notes[-1] == f"the page is {path}"
    body = re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    words = "".join(Checker(re.sub(r"<(meta|link|input)[^>]*>", "", body)).text)
    assert "3 match" in words
    assert "nothing was written" in words
    assert re.findall(r"https?://|@import|url\(|<script[^>]*src|<img|<iframe", body) == []
    assert "default-src 'none'" in text
    own = [asset(name).decode() for name in ("elements.js", "layout.js", "page.js", "picture.js", "sites.js")]
    assert not any("https:" in script or "innerHTML" in script or "eval(" in script for script in own)
    assert "8,808 before, 1,259 after: 7,678 go and 129 come with the sites" in words
    named = "query, key, value, beta, out, final_state"
    assert f"note, layers.0, layers.1, layers.2: float16_boundary: {named} rounded to float16" in words
    assert "float32: 44 tensors, 231 kB" in words


@pytest.mark.parametrize("name", ["nm_decay_sign", "rec_ts17_B4", "nm_softmax"])
def test_a_page_of_what_stays_shows_what_is_there_once(name, tmp_path):
    model = export(name).path
    report = deltafuse.inspect(model, html=tmp_path / "page.html")
    assert [site.op for site in report.sites if site.op] == []
    body = (tmp_path / "page.html").read_text().partition("<main>")[2].partition("</main>")[0]
    words = "".join(Checker(re.sub(r"<(meta|link|input)[^>]*>", "", body)).text)
    assert "before" not in words.partition("Operators")[2].partition("Layers")[0]
    assert "nothing is changed: all stay" in words
    assert "the same" not in words
    counts = Counter(node.op_type for node in onnx.load(model).graph.node)
    assert f"nodes{counts.total()}" in re.sub(r"\s", "", words)
    shown = dict(re.findall(r'<td class="path">(\w+)</td><td class="count">(\d+)</td>', body))
    assert {op: int(count) for op, count in shown.items()} == {op: counts[op] for op in shown}
    assert len(shown) > 5
    assert body.count('class="bar ') == body.count('class="bar now"') >= len(shown)


def test_the_layouter_is_the_published_file_and_its_licences_are_told():
    code = gzip.decompress(asset(LAYOUT))
    notice = (ROOT / "NOTICE").read_text()
    assert hashlib.sha256(code).hexdigest() in notice
    assert LAYOUT in notice
    for text in ("Eclipse Public License - v 1.0", "Permission is hereby granted, free of", "Expat", "graphviz.org"):
        assert text in notice


def test_a_site_is_told_in_full(prefill):
    path, report = prefill
    lines, sites, _ = data(path)
    assert [(line["name"], line["status"], line["op"], line["reason"]) for line in lines] == [
        (f"layers.{n}", "match", "ChunkGatedDeltaRule", "") for n in (0, 1, 2)
    ]
    first = sites[0]
    match = report.sites[0].match
    roles = dict(first["operands"])
    assert roles["query"] == {
        "value": match.query.name, "shape": ["batch", "tokens (seq_len)", "32"], "dtype": "float32", "layout": "BT(HD)",
    }  # fmt: skip
    assert [name for name, _ in first["results"]] == ["out", "final_state"]
    assert first["norms"] == [["query", "rsqrt", match.query_norm.eps], ["key", "rsqrt", match.key_norm.eps]]
    assert first["proof"]["draws"] == match.proof.draws
    assert 0 < first["proof"]["emitted_error"] < 1e-12
    assert [match.query.name, 0, 1] in first["pins"]
    emitted = first["emitted"]
    assert (emitted["op"], emitted["type"]) == ("ChunkGatedDeltaRule", "Custom, type ChunkGatedDeltaRule")
    assert dict(emitted["attributes"])["scale_value"] == "0.25"
    ports = {port: text for port, _, text in emitted["inputs"]}
    assert ports["query"] == "float16 [?, 2, 16]"
    assert ports["initial_state"] == "float16 [1, 4, 16, 16]"
    assert [port for port, _, _ in emitted["outputs"]] == ["out", "final_state"]
    assert {to for _, _, to in emitted["casts"]} == {"float16", "float32", "int32"}


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("full_prefill_ts17", "ascend-310p"), ("chunk_ts14", "onnx"), ("full_decode_ts17", "ort"),
        ("nm_decay_sign", "ort"),
    ],
)
def test_terminal_document_and_page_count_the_same_nodes(name, target, fuse, tmp_path):
    model, path = export(name).path, tmp_path / "page.html"
    done = fuse("inspect", model, "--target", target, "--html", path, "--json").document
    lines, sites, pictures = data(path)
    removed, added = (sum(site[key] for site in done["sites"]) for key in ("nodes_removed", "nodes_added"))
    assert done["nodes_after"] == done["nodes_before"] - removed + added
    for when in ("before", "after"):
        assert done[f"nodes_{when}"] == sum(count[when] for count in done["operators"].values())
    for line, told, site in zip(lines, sites, done["sites"], strict=True):
        assert (line["nodes"], line["added"]) == (site["nodes"], site["nodes_added"])
        drawn = {when: len(pictures[told[when]["picture"]]["ops"]) for when in ("before", "after") if told.get(when)}
        assert drawn.get("after", 0) == site["nodes_added"] == sum(site["emitted"].values())
        assert drawn["before"] == site["nodes"]
        assert (site["nodes_removed"] == 0) == (site["op"] is None)
    shown = fuse("inspect", model, "--target", target).out.splitlines()
    for site in done["sites"]:
        cell = f"{site['nodes']} to {site['nodes_added']}" if site["op"] else str(site["nodes"])
        (row,) = (line for line in shown if line.startswith(f"{site['name']} ") and "  " in line)
        assert cell in re.split(r"\s{2,}", row)
    if added:
        assert f"{done['nodes_before']} nodes would become {done['nodes_after']}" in shown[-1]
        own = sum(site["nodes"] for site in done["sites"] if site["op"])
        told = f": {own} of the sites and {removed - own} nodes that only fed them would go, {added} would come;"
        assert (told in shown[-1]) == (removed > own)


def test_equal_sites_share_their_pictures_under_their_own_names(prefill):
    path, _ = prefill
    _, sites, pictures = data(path)
    # The first layer reads sizes that the others share with it; the other two are the same.
    assert [site["before"]["picture"] for site in sites] == [0, 2, 2]
    assert [site["after"]["picture"] for site in sites] == [1, 1, 1]
    assert len(pictures) == 3
    assert sites[1]["before"] == {"picture": 2}
    assert sites[2]["before"]["swap"] == ["layers.1", "layers.2"]
    graph = scan(PREFILL).graph
    nodes = Counter((graph.op[node], graph.label(node)) for node in range(len(graph.op)))
    for site in sites:
        picture = pictures[site["before"]["picture"]]
        names = names_of(picture, site["before"])
        shown = Counter(zip((picture["table"][op] for op in picture["ops"]), names, strict=True))
        assert shown <= nodes
        assert any(site["name"] in name for name in names)
    emitted = names_of(pictures[1], sites[2]["after"])
    assert "layers.2/gated_delta_rule/ChunkGatedDeltaRule" in emitted
    assert all(name.startswith("layers.2/") for name in emitted)


def names_of(picture: dict, use: dict) -> list[str]:
    """As the page's own script does it."""
    first, site = use.get("swap", ("", ""))
    pattern = re.compile(re.escape(first) + r"(?!\d)")
    swapped = [pattern.sub(site, name) if first else name for name in picture["names"]]
    return [use.get("names", {}).get(str(i), name) for i, name in enumerate(swapped)]


def test_the_bars_count_what_is_there_and_what_will_be(tmp_path):
    fused = tmp_path / "fused.onnx"
    report = pipeline.fuse(FuseOptions(DECODE, fused), SilentProgress())
    before, after = counts(report)
    assert sum(before.values()) == report.nodes_before
    assert sum(after.values()) == report.nodes_after
    written = Counter(node.op_type for node in onnx.load(fused).graph.node)
    assert after["RecurrentGatedDeltaRule"] == written.pop("Custom") == 3
    assert dict(written) == {op: n for op, n in after.items() if op != "RecurrentGatedDeltaRule"}
    shown = bars(report)
    assert sum(bar.after for bar in shown) == report.nodes_after
    assert "RecurrentGatedDeltaRule" in [bar.op for bar in shown]


def test_an_axis_that_had_its_size_before_is_not_told_as_pinned(tmp_path):
    page = tmp_path / "page.html"
    report = pipeline.inspect(FuseOptions(export("rec_ts17_T4_noinit").path, html=page), SilentProgress())
    assert [site.match.dims.batch for site in report.sites] == [1]
    assert [site["pins"] for site in data(page)[1]] == [[]]


# The commands.


def test_fuse_writes_the_page_of_what_it_did(fuse, tmp_path):
    done = fuse(DECODE, "-o", tmp_path / "fused.onnx", "--html", tmp_path / "page.html", "--json")
    assert done.exit == 0
    text = (tmp_path / "page.html").read_text()
    assert f'written to <span class="path">{tmp_path / "fused.onnx"}</span>' in text
    assert {line["status"] for line in data(tmp_path / "page.html")[0]} == {"fused"}
    assert f"the page is {tmp_path / 'page.html'}" in done.document["notes"]


def test_a_dry_run_writes_the_page_alone(fuse, tmp_path):
    assert fuse(DECODE, "--dry-run", "--html", tmp_path / "page.html").exit == 0
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
    assert "nothing was written" in (tmp_path / "page.html").read_text()


def test_a_near_miss_has_its_page_and_the_closest_neighbours(fuse, tmp_path):
    done = fuse(export("nm_stale_read").path, "-o", tmp_path / "o.onnx", "--html", tmp_path / "page.html", "--json")
    assert done.exit == 3
    (line,), (site,), (picture,) = data(tmp_path / "page.html")
    assert (line["status"], line["reason"]) == ("near-miss", "read-before-update")
    name, text, error = site["nearest"]["differences"][0]
    assert (name, error < 1e-12) == ("read-before-update", True)
    assert text == "the output reads the state before it is updated"
    rule = next(error for name, _, error in site["nearest"]["differences"] if name == "gated_delta_rule")
    assert rule > 0.01
    assert "input 1" in [row[0] for row in site["looked"]]
    (told,) = done.document["sites"]
    ends = [*told["looked"]["inputs"], *told["looked"]["outputs"]]
    assert [end["value"] for end in ends] == [row[1] for row in site["looked"]]
    assert [f"{end['dtype']} [{', '.join(map(str, end['shape']))}]" for end in ends] == [
        row[2] for row in site["looked"]
    ]
    assert told["nearest"]["differences"][0]["name"] == site["nearest"]["differences"][0][0]
    assert site["before"] == {"picture": 0}
    assert "input 1" in [box[0] for box in picture["boxes"]]


def test_why_a_site_stays_stands_at_the_top(tmp_path):
    (site,) = deltafuse.inspect(export("nm_stale_read").path, html=tmp_path / "page.html").sites
    main = "".join(Checker((tmp_path / "page.html").read_text().split("<main>")[1].split("<section")[0]).text)
    assert f"{site.name} ({site.reason.code}): {site.reason.what}" in main
    assert f"fix: {site.reason.fix}" in main
    assert "next: " not in main


def test_what_stands_between_backticks_is_code(tmp_path):
    model = helper.make_model(helper.make_graph([], "g", [], []), opset_imports=[helper.make_opsetid("", 17)])
    note = "a <b> & see `fuse <x>`, then `y`"
    report = FuseReport("m", None, "t", 0, 0, (), (), (note,), {}, 3)
    text = page(report, evidence(model, tmp_path))
    assert "<p>note: a &lt;b&gt; &amp; see <code>fuse &lt;x&gt;</code>, then <code>y</code></p>" in text


def test_a_site_that_is_left_out_is_told_as_on_the_terminal(fuse, tmp_path):
    path = tmp_path / "page.html"
    shown = fuse("inspect", PREFILL, "--skip-sites", "layers.1", "--html", path).out
    lines, _, _ = data(path)
    assert [line["status"] for line in lines] == ["match", "left out", "match"]
    body = re.sub(r"<(?:meta|link|input)[^>]*>|<script.*?</script>", "", path.read_text(), flags=re.DOTALL)
    text = "".join(Checker(body).text)
    assert "fuse: 2 match, 1 left out\n" in text
    assert "2 match, 1 left out; " in shown
    assert text.count("linear attention, left out") == 1
    assert '<span class="status left-out">' in path.read_text()
    assert "<option>left out</option>" in path.read_text()


@pytest.mark.parametrize(("name", "target"), [("full_decode_ts17", "ort"), ("chunk_ts14", "onnx")])
def test_the_rule_in_the_models_own_names_is_that_of_details(name, target, fuse, tmp_path):
    model, path = export(name).path, tmp_path / "page.html"
    told = fuse("inspect", model, "--target", target, "--site", "*", "--html", path, "--json").document["recurrences"]
    lines, sites, _ = data(path)
    assert {line["name"]: site["recurrence"] for line, site in zip(lines, sites, strict=True)} == told
    assert any("for each token t:" in text for text in told.values())


def test_what_fits_no_neighbour_is_measured_too(tmp_path):
    (site,) = deltafuse.inspect(graphs.save(graphs.step(graphs.UNNAMED), tmp_path)).sites
    assert site.reason.code == "not-the-rule"
    errors = [error for _, error in site.reason.nearest.differences]
    assert errors == sorted(errors)
    assert errors[0] > 0.01
    assert site.reason.nearest.tokens == 1


def test_a_page_is_not_written_over_a_model(fuse, tmp_path):
    model = tmp_path / "model.onnx"
    model.write_bytes(DECODE.read_bytes())
    for arguments in (["inspect", model], [model, "-o", tmp_path / "o.onnx"]):
        done = fuse(*arguments, "--html", model, "--json")
        assert (done.exit, done.document["error"]["code"]) == (1, "output-is-input")
    done = fuse(model, "-o", tmp_path / "o.onnx", "--html", tmp_path / "o.onnx", "--json")
    assert (done.exit, done.document["error"]["code"]) == (1, "output-is-input")
    done = fuse("inspect", model, "--html", tmp_path / "none" / "page.html", "--json")
    assert done.document["error"]["code"] == "output-folder-missing"
    assert model.read_bytes() == DECODE.read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]


def test_a_page_is_of_one_model(fuse, tmp_path):
    for arguments in (["inspect", MODELS], [MODELS, "-o", tmp_path / "out"]):
        done = fuse(*arguments, "--html", tmp_path / "page.html", "--json")
        assert (done.exit, done.document["error"]["code"]) == (1, "usage")
        assert "--html is of one model" in done.document["error"]["text"]


def test_tables_and_a_page_can_be_asked_for_together(fuse, tmp_path):
    assert fuse("inspect", DECODE, "--op", "Conv", "--html", tmp_path / "page.html").exit == 0
    assert len(data(tmp_path / "page.html")[0]) == 3


@pytest.mark.parametrize("target", ["ascend-a2", "ort", "onnx"])
def test_every_target_has_its_node_on_the_page(target, tmp_path):
    deltafuse.inspect(DECODE, target=target, html=tmp_path / "page.html")
    lines, sites, _ = data(tmp_path / "page.html")
    for line, site in zip(lines, sites, strict=True):
        emitted = site["emitted"]
        assert line["op"] in emitted["type"]
        assert all(text for _, name, text in emitted["inputs"] + emitted["outputs"] if name), emitted
        assert site["after"] is not None


# Names that mean harm.


def test_texts_of_a_model_cannot_end_a_script():
    evil = "</script><script>alert(1)</script><!--"
    text = embedded_json([evil])
    assert "<" not in text
    assert json.loads(text) == [evil]
    assert json.loads(gzip.decompress(base64.b64decode(packed({"a": evil})))) == {"a": evil}


def test_names_of_a_model_cannot_break_the_page(prefill, tmp_path):
    evil = '"><script>alert("x")</script>'
    node = helper.make_node("Softmax", ["a"], [evil], name=evil)
    graph = helper.make_graph(
        [node, helper.make_node("MatMul", [evil, "b"], ["c"])], "g",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [evil, evil]) for name in ("a", "b")],
        [helper.make_tensor_value_info("c", TensorProto.FLOAT, [evil, evil])],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    report = prefill[1]
    site = SiteReport(evil, "near-miss", None, None, Reason("no-output"), (evil,), 1)
    text = page(deltafuse.FuseReport(evil, None, evil, 1, 1, (site,), (), (evil,), {}, 3), evidence(model, tmp_path))
    assert report.exit == 0
    assert "<script>alert" not in text
    assert "full attention" in text


# What is drawn.


def rows(count: int) -> list[Part]:
    """A recurrence unrolled: each row is cut out, scaled, and added to the row before."""
    parts = [Part("query", (), ("q",), "operand")]
    for row in range(count):
        parts.append(Part("Slice", ("q",), (f"s{row}",)))
        parts.append(Part("Mul", (f"s{row}", f"s{row}"), (f"m{row}",)))
        parts.append(Part("Add", (f"m{row}", f"a{row - 1}" if row else "q"), (f"a{row}",)))
    return [*parts, Part("out", (f"a{count - 1}",), (), "result")]


@pytest.mark.parametrize("count", [1, 3, 64, 3000])
def test_however_many_rows_few_boxes_are_drawn(count):
    parts = rows(count)
    picture = draw(parts)
    assert len(picture.boxes) <= DRAWN
    assert sum(number for _, _, number in picture.boxes) == len(parts)
    assert Counter(picture.box_of) == {box: number for box, (_, _, number) in enumerate(picture.boxes)}
    assert [picture.boxes[picture.box_of[i]][0] for i in range(len(parts))] == [part.op for part in parts]
    wires = 4 * count + count + 1
    assert sum(number for _, _, number in picture.edges) == wires


def test_small_graphs_are_drawn_node_by_node():
    picture = draw(rows(3))
    assert {number for _, _, number in picture.boxes} == {1}
    assert len(picture.boxes) == 11


def test_operands_and_results_are_boxes_of_their_own():
    picture = draw(rows(3000))
    kinds = Counter(kind for _, kind, _ in picture.boxes)
    assert (kinds["operand"], kinds["result"]) == (1, 1)


def test_more_kinds_of_operators_than_boxes_become_one_box():
    parts = [Part(f"Op{i}", (), (i,)) for i in range(400)] + [Part("in", (), ("x",), "operand")]
    picture = draw(parts, 20)
    assert len(picture.boxes) == 20
    assert ("other operators", "node", 382) in picture.boxes
    assert ("in", "operand", 1) in picture.boxes


def test_a_page_has_room_for_so_many_names(monkeypatch, tmp_path):
    monkeypatch.setattr("deltafuse.page_pictures._ROOM", 100)
    text = """<ir_version: 8, opset_import: ["" : 17]>
    g (float[2] a) => (float[2] c) { b = Exp(a) c = Exp(b) d = Exp(a) e = Exp(d) }"""
    known = evidence(onnx.parser.parse_model(text), tmp_path)
    pictures = Pictures(known)
    value = known.model.graph.find
    for site, nodes, result in (("one", (0, 1), "c"), ("two", (2, 3), "e")):
        use = pictures.before(site, nodes, {"x": value("a")}, {"y": value(result)})
    assert use == {"picture": 0, "names": {0: "d", 1: "e"}}
    monkeypatch.setattr("deltafuse.page_pictures._ROOM", 1)
    assert pictures.before("three", (2, 3), {"x": value("a")}, {"y": value("e")}) == {"picture": 0, "foreign": True}


# Layers.


def test_layers_are_told_apart_and_in_order(tmp_path):
    report = deltafuse.inspect(export("full_prefill_ts17").path, html=tmp_path / "page.html")
    entry = r'<li class="([a-z-]+)".*?<span class="path">(?:<a href="#site-\d+">)?([\w.]+)'
    found = re.findall(entry, (tmp_path / "page.html").read_text())
    linear = [name for kind, name in found if kind == "linear"]
    assert linear == [site.name for site in report.sites]
    numbers = [int(name.rpartition(".")[2]) for _, name in found]
    assert numbers == list(range(len(numbers)))
    assert "full" in [kind for kind, _ in found]


def test_without_scopes_layers_are_the_sites_and_the_softmaxes(tmp_path):
    text = """<ir_version: 8, opset_import: ["" : 17]>
    g (float[1, 4, 4] q, float[1, 4, 4] v, float[4, 4] router) => (float[1, 4, 4] o, float[1, 4, 4] r) {
      s = MatMul(q, v)  p = Softmax(s)  h = Cast<to = 1>(p)  o = MatMul(h, v)  z = MatMul(q, router)  r = Softmax(z)
    }"""
    assert layer_map(evidence(onnx.parser.parse_model(text), tmp_path), ()) == (Layer("p", "full", what="Softmax p"),)


def test_a_numbered_layer_in_which_nothing_is_seen_has_its_place(tmp_path):
    nodes = [
        helper.make_node("Attention", ["q", "q", "q"], [f"/layers.{n}/attn"], name=f"/layers.{n}/Attention")
        for n in (0, 2)
    ]
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 4, 4]) for name in ("q", "/layers.2/attn")]
    graph = helper.make_graph(nodes, "g", ports[:1], ports[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)])
    found = layer_map(evidence(model, tmp_path), ())
    assert [(layer.name, layer.kind) for layer in found] == [
        ("layers.0", "full"), ("layers.1", "none"), ("layers.2", "full"),
    ]  # fmt: skip


def test_what_was_fused_before_is_in_the_map(tmp_path):
    deltafuse.fuse(DECODE, tmp_path / "fused.onnx")
    report = deltafuse.inspect(tmp_path / "fused.onnx", html=tmp_path / "page.html")
    assert report.exit == 3
    assert (tmp_path / "page.html").read_text().count('<li class="layer-fused"') == 3


# Colours.


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", [0, 1])
def test_contrast_is_enough_in_light_and_dark(scheme):
    colours = dict(re.findall(r"--([a-z]+): (#[0-9a-f]{6})", STYLE.split("@media")[scheme]))
    for ground in ("ground", "raised"):
        for text in ("text", "soft", "good", "bad", "near", "first", "second"):
            assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
        assert contrast(colours["stroke"], colours[ground]) >= 3, ground
    assert contrast(colours["text"], colours["tint"]) >= 4.5
    assert contrast(colours["first"], colours["tint"]) >= 3


def test_axes_have_what_they_are_beside_the_names_that_an_exporter_made_up(tmp_path):
    path = tmp_path / "page.html"
    report = deltafuse.inspect(export("chunk_dy20_dynBT").path, html=path)
    shapes = {name: role["shape"] for name, role in data(path)[1][0]["operands"]}
    match = report.sites[0].match
    for name in ("query", "key", "value"):
        role = getattr(match, name)
        assert role.layout == "BTHD"
        assert shapes[name] == ["batch", f"tokens ({role.shape[1]})", *map(str, role.shape[2:])]
    text = path.read_text()
    assert f"float32 [batch, tokens ({match.query.shape[1]}), 2, 16]" in text
    # The documents have the model's own names.
    assert site_document(report.sites[0])["roles"]["query"]["shape"][1] == str(match.query.shape[1])


@pytest.mark.parametrize(
    ("size", "role", "shown"), [(4, "tokens", "4"), ("batch", "batch", "batch"), ("s7", "tokens", "tokens (s7)")]
)
def test_a_size_is_told_with_what_its_axis_is(size, role, shown):
    assert axis_names.told(size, role) == shown
    assert axis_names.told(size, "") == str(size)


def test_a_name_that_is_two_things_is_told_alone():
    report = deltafuse.inspect(export("chunk_dy20_dynBT").path)
    (site,) = report.sites
    tokens = site.match.query.shape[1]
    swapped = replace(site.match, key=replace(site.match.key, shape=(tokens, *site.match.key.shape[1:])))
    assert axis_names.symbol_roles(report.sites)[str(tokens)] == "tokens"
    assert str(tokens) not in axis_names.symbol_roles((*report.sites, replace(site, match=swapped)))


def test_why_an_axis_is_pinned_stands_beside_it(tmp_path):
    path = tmp_path / "page.html"
    deltafuse.inspect(DECODE, html=path)
    rows = path.read_text().split("<h3>Pinned axes</h3>")[1].split("</table>")[0]
    assert "<td>batch</td><td>1</td><td>static-batch</td>" in rows
    assert "<td>tokens (step)</td><td>1</td><td>valid_tokens</td>" in rows
