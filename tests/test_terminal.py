"""What a terminal shows: sites as a tree, one in detail, operator counts, progress; and plain text elsewhere."""

from __future__ import annotations

import io
import json
import sys
import types
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from rich.console import Console
from rich.progress import Progress as RichBars

import deltafuse
from conftest import Outcome
from deltafuse import console, tables
from deltafuse.match import FuseReport, SiteReport
from deltafuse.patterns import loaded
from deltafuse.probing import title
from deltafuse.tables import print_fuse, site_row
from deltafuse.tables_sites import recurrence_text
from deltafuse.wording import number
from exports import export

Fuse = Callable[..., Outcome]
DECODE, PREFILL, FOUR = (export(name).path for name in ("full_decode_ts17", "full_prefill_ts17", "rec_ts17_B4"))
BOXES = "─│├└━"


def terminal(model: Path, width: int = 100, **options: object) -> str:
    """What a terminal of that width gets of an inspection."""
    out = io.StringIO()
    screen = Console(file=out, force_terminal=True, width=width, highlight=False, markup=False, _environ={})
    print_fuse(deltafuse.inspect(model, **options), screen, tree=True)
    return out.getvalue()


def test_a_terminal_gets_a_tree_by_layer() -> None:
    shown = terminal(DECODE, target="ort")
    for layer in ("layers.0", "layers.1", "layers.2"):
        assert shown.count(layer) >= 1
    assert "├── " in shown
    assert "gated_delta_rule recurrent" in shown
    assert "with LinearAttention" in shown
    assert "layers.1.causal_conv causal_conv expression" in shown
    assert "layers.1 gated_delta_rule recurrent" in shown
    assert "\x1b[" in shown


def test_why_a_site_is_refused_stands_beneath_it() -> None:
    shown = terminal(FOUR, 200).splitlines()
    (at,) = (i for i, line in enumerate(shown) if "refused" in line and "gated_delta_rule" in line)
    beneath = "\n".join(shown[at + 1 : at + 4])
    assert "static-batch: the batch is fixed to 4" in beneath
    assert "fix: give --batch 4" in beneath


@pytest.mark.parametrize("width", [50, 80, 160])
def test_a_tree_keeps_to_the_width(width: int) -> None:
    shown = terminal(DECODE, width).splitlines()
    assert max(len(line) for line in map(_plain, shown)) <= width


@pytest.mark.parametrize("width", [40, 50, 80, 200])
@pytest.mark.parametrize(("model", "target"), [(DECODE, "ort"), (FOUR, "ascend-310p")])
def test_a_tree_tells_all_that_the_table_tells(model: Path, target: str, width: int) -> None:
    shown = "\n".join(map(_plain, terminal(model, width, target=target).splitlines()))
    one_line = " ".join(shown.translate(str.maketrans(dict.fromkeys(BOXES))).split())
    for site in deltafuse.inspect(model, target=target).sites:
        *_, rule, form, operator, _, dims, scale, norm, tokens, error = map(str, site_row(site))
        for text in (site.name, rule, form, operator, dims, scale, norm, tokens):
            assert "".join(text.split()) in "".join(one_line.split())
        # A number stays with its name, in one line.
        assert f"error {error}" in shown


def _plain(line: str) -> str:
    return "".join(part.partition("m")[2] if index else part for index, part in enumerate(line.split("\x1b[")))


def test_no_colour_where_it_is_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setenv("NO_COLOR", "1")
    screen = Console(file=out, force_terminal=True, width=100, highlight=False, markup=False)
    print_fuse(deltafuse.inspect(DECODE), screen, tree=True)
    assert "├── " in out.getvalue()
    assert "\x1b[3" not in out.getvalue()


def test_a_pipe_gets_plain_lines(fuse: Fuse) -> None:
    shown = fuse("inspect", DECODE).out
    assert not set(BOXES) & set(shown)
    assert "\x1b" not in shown
    assert len([line for line in shown.splitlines() if line.startswith("layers.1 ")]) == 1


# One site in detail


def test_a_site_in_detail_has_its_rule_in_its_own_names(fuse: Fuse) -> None:
    (site,) = (one for one in fuse("inspect", DECODE, "--json").document["sites"] if one["name"] == "layers.1")
    shown = fuse("inspect", DECODE, "--site", "layers.1").out
    assert shown.splitlines()[0] == "layers.1"
    names = {role: value["value"] for role, value in site["roles"].items()}
    for role, name in names.items():
        assert f"  {role}: {name} float32 [" in shown
    assert f"S = S * exp({names['g']}[t])" in shown
    assert f"d = {names['beta']}[t] * ({names['value']}[t] - S^T l2norm({names['key']})[t])" in shown
    assert f"S = {names['state']}\n" in shown
    assert f"{site['outputs']['final_state']} = S" in shown
    assert f"scale: {site['scale']:.9g}; l2 norm: eps 1e-06" in shown
    assert "valid tokens: 1; below: no fault found; above: wrong" in shown
    assert "1 Custom RecurrentGatedDeltaRule" in shown
    assert "layers.0" not in shown.splitlines()
    assert "; shared with layers.0, which is equal up to names\n" in shown
    assert f"  status: match, {site['nodes']} nodes become 40 with RecurrentGatedDeltaRule\n" in shown


def test_details_take_globs_and_json(fuse: Fuse) -> None:
    done = fuse("inspect", DECODE, "--target", "ort", "--site", "layers.[02]*", "--json").document
    assert {"layers.0", "layers.0.causal_conv", "layers.2"} <= set(done["recurrences"])
    assert "S^T" in done["recurrences"]["layers.0"]
    assert [site["emitted"] for site in done["sites"] if site["name"] == "layers.1"] == [{}]
    shown = fuse("inspect", DECODE, "--target", "ort", "--site", "layers.0*").out
    assert "width: 4" in shown
    assert "then SiLU where silu is 1" in shown
    assert fuse("inspect", DECODE, "--site", "layers.9").exit == 1


def test_a_refused_site_in_detail_says_why(fuse: Fuse) -> None:
    (name,) = (site["name"] for site in fuse("inspect", FOUR, "--json").document["sites"])
    shown = fuse("inspect", FOUR, "--site", name).out
    assert "static-batch: the batch is fixed to 4" in shown
    assert "fix: give --batch 4" in shown


def test_what_a_site_does_not_have_is_left_out(fuse: Fuse) -> None:
    report = deltafuse.inspect(export("rec_ts17_T4_noinit").path)
    (site,) = report.sites
    assert site.match is not None
    assert site.match.state is None
    formulas = {entry.name: entry.pattern.formula for entry in loaded()}
    assert recurrence_text(site.match, formulas[site.match.rule]).splitlines()[0] == "S = 0"
    assert recurrence_text(site.match, "") == ""
    assert recurrence_text(site.match, "{nothing_of_the_sort}\n{value}") == site.match.value.name


def test_every_shipped_pattern_has_a_formula() -> None:
    found = {entry.name: getattr(entry.pattern, "formula", "") for entry in loaded()}
    assert len(found) == 7
    assert all("{" in text for text in found.values())


# Operators before and after


@pytest.mark.parametrize(
    ("model", "target"), [(PREFILL, "ascend-310p"), (DECODE, "ort"), (DECODE, "onnx"), (PREFILL, "onnx")]
)
def test_counts_are_those_of_the_files(fuse: Fuse, tmp_path: Path, model: Path, target: str) -> None:
    output = tmp_path / "out.onnx"
    document = fuse(model, "-o", output, "--target", target, "--json").document
    for key, path in (("before", model), ("after", output)):
        nodes = onnx.load(path).graph.node
        kinds = [next((a.s.decode() for a in node.attribute if a.name == "type"), "") for node in nodes]
        named = (
            title(node.op_type, node.domain, kind if node.op_type == "Custom" else "")
            for node, kind in zip(nodes, kinds, strict=True)
        )
        counted = Counter(named)
        assert {op: both[key] for op, both in document["operators"].items() if both[key]} == counted
    assert all(both["change"] == both["after"] - both["before"] for both in document["operators"].values())


def test_the_largest_changes_are_told(fuse: Fuse, tmp_path: Path) -> None:
    lines = fuse(PREFILL, "-o", tmp_path / "out.onnx").out.splitlines()
    (at,) = (i for i, line in enumerate(lines) if line.split() == ["operator", "before", "after", "change"])
    rows = [line.rsplit(maxsplit=3) for line in lines[at + 1 : at + tables.OPERATORS + 1]]
    assert rows[0] == ["Custom ChunkGatedDeltaRule", "0", "3", "+3"]
    new = [op for op, before, _, _ in rows if before == "0"]
    assert [op for op, *_ in rows[: len(new)]] == new
    op, before, after, change = rows[len(new)]
    assert (op, int(after) - int(before)) == ("Constant", int(change))
    changes = [abs(int(change)) for *_, change in rows[len(new) :]]
    assert changes == sorted(changes, reverse=True)
    assert lines[at + tables.OPERATORS + 1].endswith("see --json")
    assert "operator  before" not in fuse("inspect", PREFILL).out


def test_what_sites_became_and_what_is_new_is_always_told() -> None:
    counts = {f"Op{number}": (100, 20 + number) for number in range(20)}
    new = {f"New{number}": (0, 1) for number in range(10)}
    ops = {**counts, **new, "com.microsoft.LinearAttention": (2, 3), "Same": (0, 0)}
    site = SiteReport("layers.0", "fused", None, "LinearAttention")
    report = FuseReport("a", "b", "ort", 1, 1, (site,), (), (), {}, 0, (), ops)
    out = io.StringIO()
    print_fuse(report, Console(file=out, width=100))
    rows = out.getvalue().partition("change\n")[2].splitlines()
    assert [row.split() for row in rows[:11]] == [
        ["com.microsoft.LinearAttention", "2", "3", "+1"], *([f"New{n}", "0", "1", "+1"] for n in range(10)),
    ]  # fmt: skip
    assert rows[11].split() == ["20", "more", "see", "--json"]


# Tables of nodes


def test_nodes_are_listed_with_the_shapes_of_what_they_write(fuse: Fuse) -> None:
    done = fuse("inspect", DECODE, "--nodes", "layers.1/linear_attn/Sigmoid_1", "--json").document
    assert done["nodes"][0]["shapes"] == [["batch", "step", 4]]
    shown = fuse("inspect", DECODE, "--nodes", "layers.1/linear_attn/Sigmoid_1").out
    assert "[batch, step, 4]" in shown
    assert f"; {number(len(done['nodes']), 'node')} listed; " in shown


def test_shapes_are_left_out_where_they_would_take_long(fuse: Fuse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltafuse.probing._MANY_TENSORS", 1)
    monkeypatch.setattr("deltafuse.probing._MANY_NODES", 1)
    done = fuse("inspect", DECODE, "--nodes", "--json").document
    assert {json.dumps(row["shapes"]) for row in done["nodes"]} == {"null"}
    assert any("list fewer with --nodes REGEX" in note for note in done["notes"])


# Progress


def test_progress_is_a_bar_with_how_much_is_done() -> None:
    out = io.StringIO()
    with RichBars(*console._columns(), console=Console(file=out, force_terminal=True, width=100)) as bars:
        shown = console.Bars(bars)
        shown.start("finding and proving")
        shown.advance(1, 4)
        bars.refresh()
    assert "finding and proving" in out.getvalue()
    assert "25%" in out.getvalue()


def test_what_is_said_in_between_goes_with_the_line() -> None:
    out = io.StringIO()
    screen = Console(file=out, force_terminal=True, width=100)
    with RichBars(*console._columns(), console=screen, transient=True) as bars:
        shown = console.Bars(bars)
        shown.start("finding and proving")
        shown.note("causal_conv")
        bars.refresh()
    assert "finding and proving: causal_conv " in out.getvalue()
    assert "causal_conv\n" not in out.getvalue()


def test_no_progress_where_nobody_watches(fuse: Fuse) -> None:
    assert fuse("inspect", DECODE).err == ""


class Heard:
    """Progress that remembers what it was told: stages, each with its steps and what was said in it."""

    def __init__(self) -> None:
        self.stages: list[tuple[str, list[tuple[int, int]], list[str]]] = []

    def start(self, stage: str) -> None:
        self.stages.append((stage, [], []))

    def advance(self, n: int, total: int) -> None:
        self.stages[-1][1].append((n, total))

    def note(self, text: str) -> None:
        self.stages[-1][2].append(text)


def test_a_run_tells_how_many_sites_are_proven() -> None:
    heard = Heard()
    deltafuse.inspect(DECODE, progress=heard)
    (proving,) = (told for told in heard.stages if told[0] == "finding and proving" and told[2])
    # What is being proven is not done.
    assert proving[1:] == ([(0, 3), (1, 3), (2, 3), (3, 3)], ["layers.0", "layers.1", "layers.2"])


@pytest.mark.parametrize("name", ["nm_decay_sign", "nm_chunk_decay_sign"])
def test_a_run_tells_that_and_how_far_a_near_miss_is_measured(name: str) -> None:
    heard = Heard()
    deltafuse.inspect(export(name).path, progress=heard)
    names = [stage for stage, _, _ in heard.stages]
    at = names.index("measuring what site.0 is instead")
    assert names.count(names[at]) == 1
    before, after = heard.stages[at - 1], heard.stages[at + 1]
    assert before == ("finding and proving", [(0, 1)], ["site.0"])
    assert (after[0], after[1][0], after[1][-1], after[2]) == ("finding and proving", (0, 1), (1, 1), ["site.0"])
    steps = [n for n, _ in heard.stages[at][1]]
    ((first, *_, last), (of,)) = steps, {total for _, total in heard.stages[at][1]}
    assert (first, last, steps == sorted(steps)) == (0, of, True)
    assert len(set(steps)) > 10


def test_verify_tells_how_many_sites_are_compared_of_all(tmp_path: Path) -> None:
    assert deltafuse.fuse(DECODE, tmp_path / "fused.onnx", target="ort").exit == 0
    heard = Heard()
    assert deltafuse.verify(DECODE, tmp_path / "fused.onnx", level="site", progress=heard).exit == 0
    (steps,) = (steps for stage, steps, _ in heard.stages if stage == "running sites")
    assert steps == [(n, 6) for n in range(1, 7)]


# netron


def test_netron_opens_the_first_site_before_and_after(
    fuse: Fuse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    viewer = types.ModuleType("netron")
    viewer.__spec__ = types.SimpleNamespace()  # type: ignore[assignment]
    viewer.start, viewer.wait = opened.append, lambda: opened.append("waited")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "netron", viewer)
    assert fuse("inspect", DECODE, "--extract", tmp_path, "--netron", "--site", "layers.1").exit == 0
    assert opened == [str(tmp_path / f"layers.1.{kind}.onnx") for kind in ("before", "after")] + ["waited"]
    assert fuse("inspect", export("nm_softmax").path, "--extract", tmp_path, "--netron").err.startswith(
        "fuse: there is"
    )


def test_without_netron_the_fix_is_told_before_the_work(fuse: Fuse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "netron", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    done = fuse("inspect", DECODE, "--netron", "--json")
    assert (done.exit, done.document["error"]["code"]) == (1, "netron-missing")
    assert "pip install 'deltafuse[netron]'" in done.document["error"]["text"]


def test_extracted_sites_are_small_enough_for_a_viewer(fuse: Fuse, tmp_path: Path) -> None:
    before = export("chunk_ts17_dynBT").path
    done = fuse("inspect", before, "--extract", tmp_path, "--json").document
    sizes = {Path(path).name.split(".", 2)[-1]: Path(path).stat().st_size for path in done["extracted"]}
    assert max(sizes.values()) < 5_000_000
    assert len(onnx.load(next(path for path in done["extracted"] if path.endswith("after.onnx"))).graph.node) < 100
