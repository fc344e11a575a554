"""How counts and names are worded, and that no table of a narrow screen breaks a number or a word."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from deltafuse.commands import show
from deltafuse.tables_fit import NAME, fitting, hanging, print_table
from deltafuse.wording import grouped, number, of_sites, size_text, some

TENSOR = "/model/layers.0/linear_attn/norm/Cast_output_0"
HEADINGS = ("output", "verdict", "type", "cosine", "nrmse", "worst: unfused, fused")
ROWS = [
    ("logits", "passes", "float32 [1, 24, 64]", "1.0000000", "1.9e-04", "[0, 1, 54]: 0.809372, 0.808819"),
    (TENSOR, "passes", "float32 [3, 1, 4, 16, 16]", "0.9999999", "4.5e-04", "[2, 0, 3, 1, 6]: 0.0876517, 0.0880127"),
]


def printed(width: int, rows: list[tuple[str, ...]] = ROWS, headings: tuple[str, ...] = HEADINGS) -> str:
    sink = io.StringIO()
    print_table(headings, rows, Console(file=sink, width=width, highlight=False, markup=False))
    return sink.getvalue()


@pytest.mark.parametrize(
    ("count", "what", "said"),
    [
        (0, "site", "0 sites"), (1, "model", "1 model"), (2, "node", "2 nodes"), (1, "axis of x", "1 axis of x"),
        (3, "fault of structure", "3 faults of structure"), (2, "entry", "2 entries"), (2, "array", "2 arrays"),
    ],
)  # fmt: skip
def test_counts(count: int, what: str, said: str) -> None:
    assert number(count, what) == said


def test_many_names_are_a_few_and_how_many_more() -> None:
    names = [f"layers.{n}" for n in range(24)]
    assert some(names[:3]) == "layers.0, layers.1, layers.2"
    assert some(names) == "layers.0, layers.1, layers.2 and 21 more"
    assert some(names, 23).endswith("layers.22 and 1 more")


def test_of_whom_a_note_is() -> None:
    names = [f"layers.{n}" for n in range(24)]
    assert of_sites(names, 24) == "all 24 sites"
    assert of_sites(names[:3], 3) == "layers.0, layers.1, layers.2"
    assert of_sites(names[:1], 24) == "layers.0"
    assert of_sites(names[:2], 24) == "layers.0, layers.1 (2 of 24 sites)"
    assert of_sites(names[:18], 24) == "18 of 24 sites, layers.0 … layers.17"


def test_what_is_said_of_several_is_said_once() -> None:
    assert grouped([("x", "a"), ("y", "b"), ("x", "c")]) == [("x", ["a", "c"]), ("y", ["b"])]


@pytest.mark.parametrize(
    ("count", "said"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (999_999, "1 MB"), (7_150_000_000, "7.15 GB"), (5e13, "5e+04 GB")],
)
def test_sizes_have_a_unit(count: float, said: str) -> None:
    assert size_text(count) == said


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_no_number_and_no_word_is_broken(width: int) -> None:
    shown = printed(width)
    assert max(map(len, shown.splitlines())) <= width
    words = [word for row in ROWS for cell in row for word in cell.split() if len(word) <= NAME]
    for word in words:
        assert re.search(rf"(?<!\S){re.escape(word)}(?!\S)", shown), word


def test_what_does_not_fit_is_a_block_with_the_headings_beside_the_values() -> None:
    lines = printed(80).splitlines()
    assert lines[:3] == [
        "logits",
        "  verdict passes  type float32 [1, 24, 64]  cosine 1.0000000  nrmse 1.9e-04",
        "  worst: unfused, fused [0, 1, 54]: 0.809372, 0.808819",
    ]
    assert printed(200).splitlines()[0].split() == " ".join(HEADINGS).split()


def test_a_long_line_is_folded_and_set_in() -> None:
    assert hanging("  note: a b", 80) == "  note: a b"
    assert hanging("  note: one two three", 14) == "  note: one\n    two three"
    assert hanging("note: layers.0-1 x", 16) == "note: layers.0-1\n  x"


class Terminal(io.StringIO):
    """A terminal."""

    def isatty(self) -> bool:
        return True


def test_small_results_are_folded_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    for screen, fold, lines in (
        (Terminal(), True, ["  S  limit: what it", "    is about"]),
        (Terminal(), False, ["  S  limit: what it is about"]),
        (io.StringIO(), True, ["  S  limit: what it is about"]),
    ):
        monkeypatch.setattr("sys.stdout", screen)
        assert show(False, {}, ["  S  limit: what it is about"], fold=fold) == 0
        assert screen.getvalue().splitlines() == lines


def test_a_name_folds_before_a_table_is_given_up() -> None:
    rows = [("a" * 34, "equal", "1.3e-15")]
    headings = ("site", "verdict", "error")
    assert fitting(headings, rows, 80) == [34, 7, 7]
    assert fitting(headings, rows, 44) == [26, 7, 7]
    assert fitting(headings, rows, 30) is None
    assert [line.rstrip() for line in printed(44, rows, headings).splitlines()[1:]] == [
        f"{'a' * 26}  equal    1.3e-15",
        "a" * 8,
    ]
