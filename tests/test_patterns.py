"""Pattern files: shipped ones and a user's own, loaded by path."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

import graphs
from deltafuse import patterns
from deltafuse.errors import UserError
from deltafuse.reasons import TEXTS, Reason

SHIPPED = ["delta_rule", "gated_delta_rule", "kimi_delta_attention"]


def test_the_shipped_folder_holds_a_file_for_each_rule() -> None:
    assert [pattern.name for pattern in patterns.load()] == SHIPPED
    assert all((patterns.shipped_folder() / f"{name}.py").is_file() for name in SHIPPED)


def test_rules_with_a_decay_are_looked_for_first_and_in_the_same_places_together() -> None:
    families = [[rule.name for rule in family] for family in patterns.families(patterns.load())]
    assert families == [["gated_delta_rule", "kimi_delta_attention"], ["delta_rule"]]


@pytest.mark.parametrize("rule", patterns.load(), ids=lambda rule: rule.name)
def test_a_pattern_is_complete(rule: patterns.Pattern) -> None:
    assert rule.anchors & (rule.contractions if rule.decay == "none" else {"Exp"})
    assert {"Sigmoid", "Softplus", "Conv"} <= rule.fence
    assert {"MatMul", "ReduceSum", "Einsum"} <= rule.contractions
    assert rule.least_roots >= 4
    assert set(rule.neighbours) == set(rule.texts)
    assert all(Reason(code).text == text for code, text in rule.texts.items())


def own(folder: Path, name: str, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.py").write_text(text)
    return folder


def copy(folder: Path, file: str, change: tuple[str, str]) -> Path:
    text = (patterns.shipped_folder() / "gated_delta_rule.py").read_text()
    assert change[0] in text
    return own(folder, file, text.replace(*change))


def test_a_user_s_folder_comes_beside_the_shipped_one(tmp_path: Path) -> None:
    folder = copy(tmp_path / "mine", "another", ('name = "gated_delta_rule"', 'name = "my_rule"'))
    shutil.copy(folder / "another.py", folder / "_helper.py")
    assert [pattern.name for pattern in patterns.load([folder])] == [*SHIPPED, "my_rule"]
    assert [pattern.name for pattern in patterns.load([folder], ["my_rule"])] == ["my_rule"]


def test_a_user_s_pattern_of_the_same_name_replaces_the_shipped_one(tmp_path: Path) -> None:
    folder = copy(tmp_path / "mine", "anything", ("least_roots = ", "least_roots = 10 + "))
    found = {pattern.name: pattern for pattern in patterns.load([folder])}
    assert sorted(found) == SHIPPED
    assert [name for name, pattern in found.items() if pattern.least_roots > 10] == ["gated_delta_rule"]


def test_a_user_s_pattern_is_used(tmp_path: Path) -> None:
    # The same rule under another name, without the shipped one: the report tells whose it is.
    folder = copy(tmp_path / "mine", "another", ('name = "gated_delta_rule"', 'name = "my_rule"'))
    model = graphs.save(graphs.step(), tmp_path)
    with graphs.one_worker():
        report = graphs.fuse(model, patterns=(folder,), rules=("my_rule",))
    assert [site.match.rule for site in report.sites] == ["my_rule"]


def test_its_texts_are_known_once_it_is_loaded(tmp_path: Path) -> None:
    text = """
class _Rule:
    name = "other"
    decay = "head"
    anchors = fence = contractions = frozenset()
    least_roots = 1
    neighbours = {}
    texts = {"my-code": "what {x} is"}

    @staticmethod
    def recurrence(query, key, value, g, beta, state):
        return value, state


PATTERN = _Rule()
"""
    patterns.load([own(tmp_path / "mine", "other", text)])
    assert Reason("my-code", {"x": 3}).text == "what 3 is"
    del TEXTS["my-code"]


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("bad-pattern", "x = 1\n"),
        ("bad-pattern", "def broken(:\n"),
        ("bad-pattern", "import nothing_of_that_name\n"),
        ("bad-pattern", "raise ValueError('no')\n"),
        ("bad-pattern", "PATTERN = None\n"),
        ("bad-pattern", "class P:\n    name = 'half'\n\n\nPATTERN = P()\n"),
    ],
)
def test_a_file_that_is_no_pattern_is_the_user_s_to_mend(code: str, text: str, tmp_path: Path) -> None:
    folder = own(tmp_path / "mine", "bad", text)
    with pytest.raises(UserError) as error:
        patterns.load([folder])
    assert error.value.code == code
    assert "bad.py" in str(error.value)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        patterns.load([tmp_path / "nowhere"])
    assert error.value.code == "no-such-folder"
    assert "nowhere" in str(error.value)


def test_an_unknown_rule_is_named_with_the_known_ones() -> None:
    with pytest.raises(UserError) as error:
        patterns.load(names=["delta"])
    assert error.value.code == "unknown-rule"
    assert "delta" in str(error.value)
    assert "gated_delta_rule" in str(error.value)


def test_loading_twice_gives_patterns_that_compute_the_same() -> None:
    first, second = graphs.pattern(), graphs.pattern()
    rng = np.random.default_rng(0)
    operands = [rng.standard_normal(shape) for shape in ((1, 3, 2, 4), (1, 3, 2, 4), (1, 3, 2, 5))]
    gates = [-rng.uniform(size=(1, 3, 2)), rng.uniform(size=(1, 3, 2))]
    state = rng.standard_normal((1, 2, 4, 5))
    for got, want in zip(
        first.recurrence(*operands, *gates, state), second.recurrence(*operands, *gates, state), strict=True
    ):
        assert np.array_equal(got, want)
