"""What is left of a layer, as docs/remaining-operators.md tells it."""

from __future__ import annotations

import re

import pytest

import remaining_operators
from remaining_operators import BUILDERS, EXPORTS, HEAVY, PAGE, TARGETS, Region

Found = dict[str, dict[str, Region]]


@pytest.fixture(scope="module")
def found() -> Found:
    return remaining_operators.counted()


def test_the_page_holds_what_is_counted(found: Found) -> None:
    _, tables, _ = remaining_operators.split(PAGE.read_text())
    assert tables == remaining_operators.tables_of(found)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("title", EXPORTS)
def test_nothing_heavy_is_left(found: Found, title: str, target: str) -> None:
    region = found[title][target]
    counts = region.counts()
    assert counts["LinearAttention"] == counts["CausalConvWithState"] == 1
    assert not HEAVY & counts.keys()
    # A choice by data: only the threshold in the gate's Softplus.
    assert counts["Where"] == counts["Greater"] <= 1
    for node in region.nodes:
        if node.op_type == "Gather":
            # One size of a shape, or one layer of the stacked states that go in.
            source = region.producer.get(node.input[0])
            assert source is None or source.op_type == "Shape"


@pytest.mark.parametrize("title", EXPORTS)
def test_heavy_ones_were_there(found: Found, title: str) -> None:
    assert len(HEAVY & found[title]["unfused"].counts().keys()) >= 3


def test_the_builders_that_are_cited_have_the_operators_and_a_commit() -> None:
    links = re.findall(r"^\[(\w+)\]: https://github.com/\S+/blob/[0-9a-f]{40}/\S+$", PAGE.read_text(), re.MULTILINE)
    assert links == ["genai", "mobius"]
    for counts in BUILDERS.values():
        assert counts["LinearAttention"] == counts["CausalConvWithState"] == 1
        assert not HEAVY & counts.keys()
