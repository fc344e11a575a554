"""The page in a real browser: it opens, is searched and expanded, lays pictures out, and asks the network for nothing.

These tests need a Chromium and are left out unless ``-m browser`` asks for them; without a Chromium they fail then.
"""

from __future__ import annotations

import re
from dataclasses import replace

import onnx
import pytest
from onnx import TensorProto, helper

import deltafuse
from browser import browser
from deltafuse import pipeline
from deltafuse.demo import MODELS
from deltafuse.html_fuse import page
from deltafuse.match import FuseReport, SiteReport
from deltafuse.options import FuseOptions, SilentProgress
from deltafuse.picture import DRAWN
from deltafuse.reasons import Reason
from exports import export
from test_page import evidence

pytestmark = pytest.mark.browser

#: What a page must be ready within, however many sites it has.
SECONDS = 3
PICTURE = "document.querySelectorAll('.picture')"


@pytest.fixture(scope="module")
def chromium():
    with browser() as tab:
        yield tab


@pytest.fixture
def tab(chromium):
    """A tab that must not have had anything to complain of, nor asked for anything but files and what they hold."""
    chromium.errors.clear()
    chromium.requests.clear()
    yield chromium
    chromium.dark(False)
    assert chromium.errors == []
    assert [url for url in chromium.requests if not url.startswith(("file:///", "blob:null/", "data:"))] == []


@pytest.fixture(scope="module")
def prefill(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "page.html"
    deltafuse.inspect(MODELS / "prefill.onnx", html=path)
    return path


def expand(tab, site: int = 0) -> None:
    tab.run(f"document.getElementById('site-{site}').open = true")
    tab.wait(f"document.querySelector('#site-{site} .inside')")


def lay_out(tab, number: int = 0) -> None:
    tab.run(f"{PICTURE}[{number}].open = true")
    tab.wait(f"{PICTURE}[{number}].querySelector('.pane svg, .pane .bad')")


def type_into(tab, selector: str, text: str) -> None:
    tab.run(f"document.querySelector({selector!r}).focus()")
    tab.run(f"document.querySelector({selector!r}).select()")
    tab.send("Input.insertText", text=text)


def shown(tab) -> list[str]:
    """Names of the sites in the list."""
    return tab.run(
        "[...document.querySelectorAll('.site:not([hidden]) summary > .path:first-child')].map(e => e.textContent)"
    )


def view(tab) -> list[float]:
    """What is seen of the first picture: left, top, width, height."""
    return [float(x) for x in tab.run("document.querySelector('.pane svg').getAttribute('viewBox')").split()]


def test_a_site_is_made_when_it_is_opened_and_its_pictures_then(tab, prefill):
    tab.open(prefill)
    assert tab.run("document.querySelectorAll('.site').length") == 3
    assert tab.run("document.querySelectorAll('.site .inside, .picture').length") == 0
    expand(tab)
    assert tab.run("document.querySelectorAll('.pane svg').length") == 0
    text = tab.run("document.querySelector('#site-0').textContent")
    for word in ("Split_output_0", "BT(HD)", "17 to 32; fails below, wrong above", "float64, over 5 draws",
                 "Custom, type ChunkGatedDeltaRule", "initial_state", "float16 [1, 4, 16, 16]"):  # fmt: skip
        assert word in text
    for number in (0, 1):
        lay_out(tab, number)
        boxes = tab.run(f"{PICTURE}[{number}].querySelectorAll('svg .node').length")
        told = tab.run(f"{PICTURE}[{number}].querySelector('summary').textContent")
        assert f"in {boxes} boxes with operands and results" in told
        drawn, every = re.findall(r"([0-9,]+) of ([0-9,]+) nodes drawn", told)[0]
        assert 10 < int(drawn) < int(every.replace(",", ""))
        assert 10 < boxes <= DRAWN
    assert tab.run(f"{PICTURE}[1].querySelectorAll('.target').length") == 1
    # Boxes that stand for more nodes than one say so.
    assert re.search("\u00d7[0-9]+", tab.run(f"{PICTURE}[0].querySelector('svg').textContent"))


def test_sites_are_found_by_words_and_by_status(tab, prefill):
    tab.open(prefill)
    assert shown(tab) == ["layers.0", "layers.1", "layers.2"]
    type_into(tab, "#filter", "chunk layers.1")
    assert shown(tab) == ["layers.1"]
    assert tab.run("document.getElementById('found').textContent") == "1 of 3 sites"
    type_into(tab, "#filter", "nothing of that name")
    assert shown(tab) == []


def test_a_picture_is_searched_moved_and_zoomed(tab, prefill):
    tab.open(prefill)
    expand(tab)
    lay_out(tab)
    assert tab.run("document.querySelectorAll('.nodes')[0].children.length") == 100
    type_into(tab, ".picture input", "trilu")
    found = tab.run("[...document.querySelectorAll('.nodes')[0].querySelectorAll('button')].map(b => b.textContent)")
    assert found
    assert all(text.startswith("Trilu") for text in found)
    assert tab.run("[...document.querySelectorAll('.hit text')].every(e => e.textContent.startsWith('Trilu'))")
    tab.run("document.querySelector('.nodes button').click()")
    assert tab.run("document.querySelectorAll('.pane .chosen').length") == 1
    assert tab.run("document.querySelector('.told').textContent").startswith("Trilu")
    tab.run("document.querySelector('.pane').focus()")
    before = view(tab)
    tab.press("ArrowDown")
    moved = view(tab)
    assert moved[1] > before[1]
    assert moved[2:] == before[2:]
    tab.press("+")
    assert view(tab)[2] < moved[2]
    tab.run("document.querySelector('button[aria-label=fit]').click()")
    size = tab.run(
        "(() => { const b = document.querySelector('.pane .graph').getBBox(); return [b.width, b.height]; })()"
    )
    assert view(tab)[2] >= size[0]
    assert view(tab)[3] >= size[1]


def test_all_is_reached_by_keys_and_the_focus_is_seen(tab, prefill):
    tab.open(prefill)
    tab.run("document.getElementById('filter').focus()")
    tab.press("Tab")
    assert tab.run("document.activeElement.id") == "status"
    tab.press("Tab")
    assert tab.run("document.activeElement.parentNode.id") == "site-0"
    assert tab.run("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    tab.press("Enter")
    tab.wait("document.querySelector('#site-0 .inside')")
    tab.press("Tab")
    assert tab.run("document.activeElement.parentNode.className") == "picture"
    tab.press("Enter")
    tab.wait("document.querySelector('.pane svg')")
    reached = []
    for _ in range(5):
        tab.press("Tab")
        reached.append(tab.run("document.activeElement.getAttribute('aria-label')"))
    assert reached[1:4] == ["zoom in", "zoom out", "fit"]
    assert reached[4].endswith("arrow keys move, + and - zoom, 0 fits")


def test_links_of_the_layer_map_open_their_site(tab, prefill):
    tab.open(prefill)
    tab.run("[...document.querySelectorAll('.layers a')].find(a => a.textContent === 'layers.2').click()")
    tab.wait("document.querySelector('#site-2 .inside')")
    assert tab.run("document.activeElement.parentNode.id") == "site-2"
    tab.open(prefill, "#site-1")
    tab.wait("document.querySelector('#site-1 .inside')")


def test_the_page_follows_the_scheme(tab, prefill):
    grounds = []
    for dark in (False, True):
        tab.dark(dark)
        tab.open(prefill)
        grounds.append(tab.run("getComputedStyle(document.body).backgroundColor"))
    assert grounds == ["rgb(255, 255, 255)", "rgb(20, 24, 28)"]
    expand(tab)
    lay_out(tab, 1)
    fill = tab.run("getComputedStyle(document.querySelector('.target path')).fill")
    assert fill == "rgb(28, 49, 72)"


def test_a_near_miss_says_what_it_is_close_to(tab, tmp_path):
    deltafuse.inspect(export("nm_stale_read").path, html=tmp_path / "page.html")
    tab.open(tmp_path / "page.html")
    expand(tab)
    text = tab.run("document.querySelector('.why').textContent")
    assert "It is the neighbour read-before-update of gated_delta_rule" in text
    assert "the rule itself" in text
    assert "Target node" not in tab.run("document.querySelector('#site-0').textContent")
    lay_out(tab)
    assert "input 1" in tab.run("document.querySelector('.pane svg').textContent")


def test_the_rule_stands_in_the_models_own_names(tab, prefill):
    tab.open(prefill)
    expand(tab)
    text = tab.run("document.querySelector('#site-0 pre').textContent")
    assert text.startswith("S = 0\nfor each token t:\n    S = S * exp(/model/layers.0/")


def test_a_site_that_is_left_out_is_found_by_that_and_has_no_tick(tab, tmp_path):
    deltafuse.inspect(MODELS / "decode.onnx", skip_sites=["layers.1"], html=tmp_path / "page.html")
    tab.open(tmp_path / "page.html")
    tab.run("document.getElementById('status').value = 'left out'")
    tab.run("document.getElementById('status').dispatchEvent(new Event('change'))")
    assert shown(tab) == ["layers.1"]
    marks = "[...document.querySelectorAll('#list .status')].map(e => getComputedStyle(e, '::before').content)"
    assert tab.run(marks) == ['"\u2713"', "none", '"\u2713"']


def test_no_column_is_cut_off_on_a_narrow_screen(tab, tmp_path):
    deltafuse.inspect(export("chunk_ts14").path, html=tmp_path / "page.html")
    tab.send("Emulation.setDeviceMetricsOverride", width=420, height=900, deviceScaleFactor=1, mobile=False)
    try:
        tab.open(tmp_path / "page.html")
        assert tab.run("(e => e.scrollWidth - e.clientWidth)(document.querySelector('.ends').parentNode)") == 0
    finally:
        tab.send("Emulation.clearDeviceMetricsOverride")


def test_where_nothing_can_be_laid_out_the_nodes_are_listed(tab, prefill):
    tab.open(prefill)
    tab.run("window.Worker = class { constructor() { throw new Error('no workers here'); } }; 1")
    expand(tab)
    lay_out(tab)
    assert "no workers here" in tab.run("document.querySelector('.pane .bad').textContent")
    assert tab.run("document.querySelectorAll('.nodes button').length") == 100


def test_a_thousand_sites_open_at_once_and_are_small(tab, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr("deltafuse.html_fuse.write_page", lambda *given: seen.append(given))
    pipeline.inspect(FuseOptions(MODELS / "decode.onnx", html=tmp_path / "page.html"), SilentProgress())
    ((_, report, known, formulas),) = seen
    sites = tuple(replace(report.sites[n % 3], name=f"layers.{n}") for n in range(1000))
    text = page(replace(report, sites=sites), known, formulas)
    path = tmp_path / "page.html"
    path.write_text(text)
    assert path.stat().st_size < 5_000_000
    assert tab.open(path) < SECONDS
    assert tab.run("document.querySelectorAll('.site').length") == 1000
    assert tab.run("document.querySelectorAll('.site .inside').length") == 0
    type_into(tab, "#filter", "layers.998")
    assert shown(tab) == ["layers.998"]
    expand(tab, 998)
    lay_out(tab)
    assert tab.run("document.querySelectorAll('.pane svg .node').length") > 10


def test_names_that_mean_harm_do_none(tab, tmp_path):
    evil = '"];</script><script>window.harm = 1</script><img src=x onerror="window.harm = 1">\\'
    nodes = [
        helper.make_node("Exp", ["x"], ["y"], name=evil),
        helper.make_node(evil, ["y"], [evil], domain='a"b\\'),
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in ("x", evil)]
    imports = [helper.make_opsetid("", 17), helper.make_opsetid('a"b\\', 1)]
    model = helper.make_model(helper.make_graph(nodes, "g", ends[:1], ends[1:]), opset_imports=imports)
    assert onnx.ModelProto.FromString(model.SerializeToString()) == model
    known = evidence(model, tmp_path)
    graph = known.model.graph
    known.candidates[evil] = _Looked((graph.find("x"),), (0,), (0, 1), (graph.find(evil),))
    site = SiteReport(evil, "near-miss", None, None, Reason("no-output"), (evil,), 2)
    path = tmp_path / "page.html"
    path.write_text(page(FuseReport(evil, None, evil, 2, 2, (site,), (), (evil,), {}, 3), known))
    tab.open(path)
    assert shown(tab) == [evil]
    expand(tab)
    lay_out(tab)
    assert tab.run("document.querySelectorAll('.pane svg .node').length") == 4
    assert tab.run("[...document.querySelectorAll('.nodes button')][0].textContent").endswith(evil)
    tab.run("document.querySelector('.nodes button').click()")
    assert tab.run("window.harm") is None


class _Looked:
    """What the page reads of a candidate."""

    def __init__(self, roots, core, nodes, frontier) -> None:
        self.roots, self.core, self.nodes, self.frontier, self.sizes = roots, core, nodes, frontier, ()


def test_the_only_site_of_a_page_is_open_and_no_command_is_told_to_be_next(tab, tmp_path):
    page = tmp_path / "page.html"
    deltafuse.inspect(export("nm_chunk_decay_sign").path, html=page)
    tab.open(page)
    tab.wait("document.querySelector('#site-0 .inside')")
    assert "Why not" in tab.run("document.querySelector('#site-0').textContent")
    assert tab.run("document.querySelector('#site-0 .picture summary').textContent").startswith("As it is (site.0): ")
    widths = "[...document.querySelectorAll('.bars .bar')].map((bar) => bar.getBoundingClientRect().width)"
    first, *others = tab.run(widths)
    assert first > 100
    assert all(first >= width > 0 for width in others)
    assert "next: " not in tab.run("document.querySelector('main').textContent")


def test_why_not_comes_before_the_operators_and_the_neighbour_that_fits_stands_out(tab, tmp_path):
    page = tmp_path / "page.html"
    deltafuse.inspect(export("nm_chunk_decay_sign").path, html=page)
    tab.open(page)
    tab.wait("document.querySelector('#site-0 .why table')")
    headings = tab.run("[...document.querySelectorAll('h2, h3')].map((heading) => heading.textContent)")
    assert headings.index("Why not") < headings.index("What was looked at") < headings.index("Operators")
    rows = tab.run(
        "[...document.querySelectorAll('.why tr')].slice(1).map((row) => [row.cells[0].textContent, "
        "Number(row.cells[2].textContent), row.querySelector('.bar').getBoundingClientRect().width, "
        "row.querySelectorAll('strong').length])"
    )
    names, differences, widths, strong = zip(*rows, strict=True)
    assert names[0] == "decay-turned"
    assert differences[0] < 1e-12 < differences[1]
    assert list(differences) == sorted(differences)
    assert 0 < widths[0] < 10 < 80 < widths[1] <= widths[-1]
    assert strong == (3, *[0] * (len(rows) - 1))
    first = "document.querySelector('.bar').getBoundingClientRect().top"
    assert tab.run(f"{first} > document.querySelector('.why h3').getBoundingClientRect().top")


def test_a_fused_file_shows_its_nodes(tab, tmp_path):
    fused, page = tmp_path / "fused.onnx", tmp_path / "page.html"
    deltafuse.fuse(MODELS / "decode.onnx", fused)
    deltafuse.inspect(fused, html=page)
    tab.open(page)
    assert shown(tab) == ["layers.0", "layers.1", "layers.2"]
    expand(tab, 1)
    text = tab.run("document.querySelector('#site-1').textContent")
    assert "Fused before this run" in text
    assert "RecurrentGatedDeltaRule (ai.onnx)" in text
    assert "query from float32 to float16" in text
    assert "layers.1/gated_delta_rule/query/cast" in text
    assert "scale_value" in text
    assert "undefined" not in text
    assert re.search(r"\d+ Constant, \d+ Unsqueeze", text)
