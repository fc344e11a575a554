"""How counts and names are worded, and that no table of a narrow screen breaks a number or a word."""

from __future__ import annotations

import ast
import io
import re
from collections.abc import Iterator

import pytest
from rich.console import Console

from deltafuse.commands import show
from deltafuse.explaining import sources
from deltafuse.reasons import filled, plain
from deltafuse.tables_fit import NAME, fitting, hanging, print_table
from deltafuse.wording import grouped, number, of_sites, size_text, some, span

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
        (2, "more axis", "2 more axes"), (1, "more axis", "1 more axis"), ("n", "token", "n tokens"),
    ],
)  # fmt: skip
def test_counts(count: object, what: str, said: str) -> None:
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


#: What is counted in a message, each as it is called when there are several.
PLURALS = (
    "arguments|arrays|attributes|axes|batches|blocks|bytes|channels|characters|chunks|columns|copies|dimensions|draws|"
    "elements|entries|files|graphs|groups|heads|indices|initializers|inputs|layers|models|nodes|numbers|operands|"
    "operators|others|outputs|parts|records|results|rows|runs|sequences|sites|sizes|states|steps|subgraphs|tensors|tokens|"
    "values|weights|words"
)
#: Words of a sentence in which the placeholder is no number of what follows.
APART = (
    "a|and|are|as|at|below|but|calls|for|gives|go|has|have|holds|in|is|its|keep|lies|names|no|none|of|on|or|other|"
    "stands|than|that|the|their|times|to|two|was|were|where|with|writes"
)
#: A placeholder in front of a plural, a word or two between them; a constant of the code is never one.
BARE = re.compile(rf"\{{(?![A-Z_]+\}})[^{{}}]*\}} (?:(?!(?:{APART})\b)[a-zA-Z]+ ){{0,2}}(?:{PLURALS})\b")


def shown_texts() -> Iterator[tuple[str, str]]:
    """Every text of the code, where it stands and with its placeholders in braces."""
    for path, tree in sources().items():
        # What is no text of its own: pieces of another one, and docstrings.
        parts = {
            id(part)
            for node in ast.walk(tree)
            if isinstance(node, ast.JoinedStr | ast.Expr)
            for part in ast.walk(node)
            if part is not node
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr) and id(node) not in parts:
                yield f"{path.name}:{node.lineno}", "".join(
                    str(one.value) if isinstance(one, ast.Constant) else f"{{{ast.unparse(one.value)}}}"
                    for one in node.values
                    if isinstance(one, ast.Constant | ast.FormattedValue)
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
                yield f"{path.name}:{node.lineno}", node.value


def bare(text: str) -> bool:
    """Whether a number stands in front of a noun that is not worded for one: what is, is in the placeholder."""
    return any("number(" not in found and ":#" not in found for found in BARE.findall(text))


def test_no_text_says_1_tokens() -> None:
    assert [(where, text) for where, text in shown_texts() if bare(text)] == []


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("right for {tokens} tokens", True), ("it has {len(shape)} axes", True), ("{count} Custom nodes", True),
        ("{a} of {b} query heads", True), ("{low} to {high} tokens", True), ("{size} removed bytes", True),
        ("right for {tokens:# token}", False), ("{path} names others", False), ("{op} of nodes", False),
        ("more than {LARGEST} nodes", False), ("{option} is for models", False),
    ],
)  # fmt: skip
def test_a_number_before_a_plural_is_noticed(text: str, wrong: bool) -> None:
    assert bare(text) == wrong


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (1, "1 node of m differs, with 1 axis, right for 1 token"),
        (3, "3 nodes of m differ, with 3 axes, right for 3 tokens"),
        ("n", "n nodes of m differ, with n axes, right for n tokens"),
    ],
)
def test_a_reason_words_its_numbers(count: object, said: str) -> None:
    template = "{n:# node of {m} differs|nodes of {m} differ}, with {n:# axis}, right for {n:# token}"
    assert filled(template.replace("{m}", "m"), {"n": count}) == said


def test_a_text_without_its_numbers_speaks_of_several() -> None:
    assert plain("{n:# axis} and {k:# node is|nodes are} in {model!r}, {x:.1e}") == (
        "{n} axes and {k} nodes are in {model!r}, {x:.1e}"
    )


@pytest.mark.parametrize(("low", "high", "said"), [(1, 1, "1 token"), (17, 32, "17 to 32 tokens")])
def test_a_span(low: int, high: int, said: str) -> None:
    assert span(low, high, "token") == said
