"""The page of ``fuse verify --html``: alone, well formed, in light and dark, with all that the report has."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import onnx
import pytest

import sabotage
from deltafuse import pipeline
from deltafuse.html_verify import page
from deltafuse.options import FuseOptions, SilentProgress
from deltafuse.plots import HEIGHT, WIDTH, Series, log_plot
from deltafuse.verify import VerifyReport
from deltafuse.verify_trial import Finding, SiteVerdict
from exports import export

PREFILL, DECODE = "full_prefill_ts17", "full_decode_ts17"
VOID = {"meta", "br", "line", "circle", "polyline", "text"}


class Checker(HTMLParser):
    """Every element is closed in the order it was opened."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.tags: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def read(path: Path) -> tuple[str, Checker]:
    text = path.read_text()
    return text, Checker(text)


@pytest.fixture(scope="module")
def fused(tmp_path_factory):
    """Unfused and fused path by fixture name; each fixture is fused once."""
    folder = tmp_path_factory.mktemp("fused")

    def of(name: str) -> tuple[Path, Path]:
        output = folder / f"{name}.onnx"
        if not output.exists():
            assert pipeline.fuse(FuseOptions(export(name).path, output), SilentProgress()).exit == 0
        return export(name).path, output

    return of


def test_a_pair_has_errors_per_site_and_drift_per_step(fuse, fused, tmp_path):
    options = ["--prefill", *fused(PREFILL), "--decode", *fused(DECODE), "--rollout", 6]
    done = fuse("verify", *options, "--html", tmp_path / "page.html", "--json")
    assert done.exit == 0
    text, found = read(tmp_path / "page.html")
    assert found.tags.count("svg") == 3
    # A line for each of both errors and graphs, and one a state and precision.
    assert found.tags.count("polyline") == 2 * 2 + 2 * 3
    assert "fuse verify: passed" in "".join(found.text).replace("\n", " ")
    words = ("layers.2", "past_recurrent_states[1], rounded", "7 of 7", "bar 0.02", "present_kv_cache=past_kv_cache")
    for word in words:
        assert word in text
    rows = done.document["decode"]["network"]["divergence"]["sites"]
    assert f"{rows[0]['name']}, isolated: {rows[0]['isolated']['nrmse']:.3g}" in text


def test_the_page_needs_nothing_else_and_follows_the_scheme(fuse, fused, tmp_path):
    done = fuse("verify", *fused(DECODE), "--html", tmp_path / "page.html")
    assert f"the page is {tmp_path / 'page.html'}" in done.out.replace("\n", "")
    text, _ = read(tmp_path / "page.html")
    assert re.findall(r"(?:https?:)?//|@import|url\(|<script|<link|<img|src=", text) == []
    assert "prefers-color-scheme: dark" in text
    assert '<meta name="color-scheme" content="light dark">' in text
    names = set(re.findall(r"--([a-z]+):", text.split("</style>")[0].split("@media")[0]))
    dark = set(re.findall(r"--([a-z]+):", text.split("@media")[1].split("}\n}")[0]))
    assert names == dark >= {"first", "second", "ground", "text"}


def test_what_the_terminal_sums_up_stands_on_the_page_too(fuse, fused, tmp_path):
    shown = fuse("verify", *fused(DECODE), "--html", tmp_path / "page.html").out.splitlines()
    text, found = read(tmp_path / "page.html")
    words = "".join(found.text)
    assert shown[-1] in words
    (fed,) = (line for line in shown if line.startswith("inputs (seed 0): "))
    (chosen,) = (line for line in shown if "same most likely token" in line)
    assert fed in words
    assert chosen in words
    # A site whose error is the same in both has both dots to be seen.
    first = min(site for site in re.findall(r"<title>([^<,]*), isolated: ", text))
    dots = re.findall(rf'r="([0-9.]+)"><title>{first}, (accumulated|isolated)', text)
    assert [(kind, float(radius)) for radius, kind in dots] == [("accumulated", 5.5), ("isolated", 3.5)]


def test_what_is_wrong_is_on_the_page(fuse, fused, tmp_path):
    source, output = fused(DECODE)
    model = onnx.load(output)
    sabotage.tiled_heads(model.graph)
    sabotage.g_rounded(model.graph)
    onnx.save(model, tmp_path / "wrong.onnx")
    options = ["--bisect", "--ablate", "layers.0", "--html", tmp_path / "page.html"]
    assert fuse("verify", source, tmp_path / "wrong.onnx", *options).exit == 5
    _, found = read(tmp_path / "page.html")
    words = " ".join("".join(found.text).split())
    for word in (
        "fuse verify: differs", "site-differs", "structure-rounded", "output-beyond-bar", "layers.0 itself is to blame",
        "Bisected in 4 runs", "consecutive value heads share a key head", "the mask reaches it",
    ):  # fmt: skip
        assert word in words, word


def test_names_of_a_model_cannot_break_the_page():
    evil = '<script>alert("x")</script>'
    site = SiteVerdict(evil, "differs", None, None, 0, (), reason=Finding("site-differs", evil))
    text = page(VerifyReport(evil, evil, (site,), (Finding("x", evil),), 5))
    assert "<script>" not in text
    Checker(text)


def test_without_a_network_level_there_is_no_plot(fuse, fused, tmp_path):
    assert fuse("verify", *fused(DECODE), "--level", "site", "--html", tmp_path / "page.html").exit == 0
    text, found = read(tmp_path / "page.html")
    assert found.tags.count("svg") == 0
    assert "layers.1" in text


def test_a_page_is_not_written_over_a_model(fuse, fused):
    source, output = fused(DECODE)
    before = output.read_bytes()
    done = fuse("verify", source, output, "--html", output, "--json")
    assert (done.exit, done.document["error"]["code"]) == (1, "output-is-input")
    assert output.read_bytes() == before
    done = fuse("verify", source, output, "--html", "/nowhere/page.html", "--json")
    assert done.document["error"]["code"] == "output-folder-missing"


# Plots.


def points(svg: str) -> list[list[tuple[float, float]]]:
    found = re.findall(r'points="([^"]*)"', svg)
    return [[tuple(map(float, pair.split(","))) for pair in line.split()] for line in found]


def test_a_decade_is_as_high_everywhere():
    (line,) = points(log_plot("t", [Series("a", [1e-6, 1e-4, 1e-2], "first")], ["0", "1", "2"]))
    (x0, y0), (x1, y1), (x2, y2) = line
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.2)
    assert 0 < y2 < y1 < y0 < HEIGHT
    assert 0 < x0 < x2 < WIDTH


@pytest.mark.parametrize("values", [[0.0, 0.0], [float("inf"), 1.0], [float("nan"), 1e-3], [5.0, 5.0], [1e-3]])
def test_no_value_leaves_the_plot(values):
    svg = log_plot("t", [Series("a", values, "first", dot=3.5)], [str(i) for i in range(len(values))], bar=0.02)
    for x, y in points(svg)[0]:
        assert 0 <= x <= WIDTH
        assert 0 <= y <= HEIGHT
    assert svg.count("<circle") == len(values)


def test_many_places_have_few_labels():
    svg = log_plot("t", [Series("a", [1e-3] * 200, "first")], [str(i) for i in range(200)])
    assert svg.count("tick-x") <= 16
    assert "bar-label" not in svg


def test_texts_are_escaped():
    svg = log_plot('a "b"', [Series("<x>", [1.0], "first", dot=3.5)], ["<y>"])
    assert "<x>" not in svg
    assert "<y>" not in svg
