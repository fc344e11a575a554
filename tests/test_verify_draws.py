"""Draws of ``fuse verify`` go as far as those of a proof: what only extreme operands show is a difference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto

import graphs
from degrees import TERMS, Term, of_nothing
from deltafuse.draws import DRAWS, FAR
from deltafuse.verify import verify
from deltafuse.verify_feeds import Input, Part, feeds

SHAPES = {"query": (1, 6, 2, 5), "key": (1, 6, 2, 5), "value": (1, 6, 2, 3), "g": (1, 6, 2), "beta": (1, 6, 2),
          "state": (1, 2, 5, 3)}  # fmt: skip
(SURGE,) = (how for how in DRAWS if how.surge)


@pytest.fixture(scope="module", autouse=True)
def _worker() -> Iterator[None]:
    with graphs.one_worker():
        yield


def inputs(*roles: str, normed: bool = False) -> list[Input]:
    return [
        Input(role, SHAPES[role], TensorProto.FLOAT, Part(role, normed and role in ("query", "key"))) for role in roles
    ]


def magnitudes(*roles: str, normed: bool = False, corner: int = 0) -> dict[str, int]:
    """By which exponent of two each operand is larger than without a spread."""
    given = inputs(*roles, normed=normed)
    far, near = (feeds(given, {}, 6, replace(DRAWS[0], spread=spread, corner=corner), 3) for spread in (FAR, 0))
    found = {}
    for role in roles:
        ratio = np.log2(np.abs(far[role] / near[role]))
        assert np.ptp(ratio) < 1e-9
        found[role] = round(float(ratio.flat[0]))
    return found


@pytest.mark.parametrize("corner", range(4))
def test_operands_are_taken_apart_as_the_rule_does_not_feel(corner: int) -> None:
    query, key = (FAR if corner & bit else -FAR for bit in (1, 2))
    made_up = {"key": key, "beta": -2 * key, "value": key}
    assert magnitudes(*SHAPES, corner=corner) == {"query": query, **made_up, "g": 0, "state": 0}
    large = {"query": max(query, 0), "key": max(key, 0)}
    assert magnitudes(*SHAPES, normed=True, corner=corner) == {**dict.fromkeys(SHAPES, 0), **large}


def test_operands_that_one_input_holds_together_stay_as_they_are() -> None:
    assert magnitudes("query", "g", "beta", "value", corner=3) == {"query": 0, "g": 0, "beta": 0, "value": 0}
    assert magnitudes("query", "key", "g", "beta", corner=3) == {"query": FAR, "key": 0, "g": 0, "beta": 0}


@pytest.mark.parametrize("tokens", [1, 6])
def test_one_beta_surges(tokens: int) -> None:
    item = Input("beta", (2, tokens, 3), TensorProto.FLOAT, Part("beta"))
    far, near = (feeds([item], {}, tokens, replace(DRAWS[0], surge=surge), 3)["beta"] for surge in (FAR, 0))
    assert np.count_nonzero(far != near) == 6
    assert np.allclose(np.log2((far / near)[far != near]), FAR)


@pytest.mark.parametrize(("times", "little"), [(2, "1e-30"), (16, "1e-20")])
@pytest.mark.parametrize("term", TERMS[:5], ids=lambda term: term.__name__)
def test_a_site_whose_nodes_had_another_term_differs(term: Term, times: int, little: str, tmp_path: Path) -> None:
    right = graphs.save(graphs.step(), tmp_path, "right.onnx")
    assert graphs.fuse(right, tmp_path / "fused.onnx", target="ort").exit == 0
    assert verify(right, tmp_path / "fused.onnx", level="site").exit == 0
    wrong = graphs.save(graphs.step(*term(times, little)), tmp_path, "wrong.onnx")
    (site,) = verify(wrong, tmp_path / "fused.onnx", level="site").sites
    overflows = times == 16 and term is not of_nothing
    assert site.verdict == "differs"
    assert site.reason is not None
    assert site.reason.code == ("higher-degree" if overflows else "site-differs")
