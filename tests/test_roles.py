"""Which root plays which role: readings that sizes allow, and which one explains the outputs."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

import graphs
from deltafuse import layouts
from deltafuse.draws import DRAWS, Array, draw
from deltafuse.match import Norm
from deltafuse.roles import Assignment, Explained, Screen, assignments, finite
from deltafuse.rule import Preparation, run_rule

#: Value ids of the operands, as a cut would have them.
Q, K, V, G, BETA, S, OUT, FINAL = range(1, 9)
IDS = {"query": Q, "key": K, "value": V, "g": G, "beta": BETA, "state": S}
ORDERS = {"query": "BTNK", "key": "BTNK", "value": "BTHV", "g": "BTH", "beta": "BTH", "state": "BHKV"}
PLAIN = {"query": "BTNK", "key": "BTNK", "value": "BTHV", "g": "BTH", "beta": "BTH", "state": "BHKV"}
SIZES = {"B": 1, "T": 3, "N": 2, "H": 4, "K": 5, "V": 6}


def explain(assignment: Assignment, feeds: Mapping[int, Array], outputs: Mapping[int, Array]) -> Explained | None:
    return Screen(assignment, feeds, finite(outputs)).explain(graphs.pattern().recurrence)


def site(
    sizes: Mapping[str, int] = SIZES,
    written: Mapping[str, str] = PLAIN,
    scale: float = 0.3,
    out: str = "BTHV",
    final: str = "BHKV",
    norm: Norm | None = None,
    stateless: bool = False,
) -> tuple[dict[int, Array], dict[int, Array]]:
    """Feeds and outputs of a cut that is the rule."""
    operands = draw(DRAWS[0], dict(sizes), 5, normed=norm is not None)
    how = Preparation(query_norm=norm, key_norm=norm, stateless=stateless)
    results = run_rule(graphs.pattern().recurrence, operands, how)
    roles = [role for role in IDS if not (stateless and role == "state")]
    feeds = {IDS[role]: layouts.pack(getattr(operands, role), ORDERS[role], written[role]) for role in roles}
    packed = layouts.pack(results[0] * scale, "BTHV", out), layouts.pack(results[1], "BHKV", final)
    return feeds, {OUT: packed[0], FINAL: packed[1]}


def found(
    feeds: Mapping[int, Array], outputs: Mapping[int, Array], norms: Mapping[int, Norm] | None = None
) -> list[Explained]:
    tried = (explain(one, feeds, outputs) for one in assignments(feeds, G, norms or {}))
    return [one for one in tried if one is not None and one.outs and one.finals]


@pytest.mark.parametrize(
    "written",
    [
        PLAIN,
        {"query": "BNTK", "key": "BNTK", "value": "BHTV", "g": "BHT", "beta": "BHT", "state": "BHKV"},
        {"query": "BT(NK)", "key": "BT(NK)", "value": "BT(HV)", "g": "BTH", "beta": "BTH", "state": "BHVK"},
        {"query": "BTNK", "key": "BNTK", "value": "BT(HV)", "g": "BHT", "beta": "BTH", "state": "BHVK"},
        {"query": "(BT)NK", "key": "(BT)(NK)", "value": "(BT)HV", "g": "BTH", "beta": "(BT)H", "state": "BHKV"},
    ],
)
def test_roles_and_layouts_are_found(written: dict[str, str]) -> None:
    feeds, outputs = site(written=written)
    (one,) = found(feeds, outputs)
    assert one.assignment.values == IDS
    assert one.assignment.layouts == written
    assert {letter: one.assignment.sizes[letter] for letter in "BTNHKV"} == SIZES
    assert one.assignment.scale == pytest.approx(0.3, rel=1e-12)
    assert (one.outs, one.finals) == ({OUT: "BTHV"}, {FINAL: "BHKV"})


@pytest.mark.parametrize(
    ("out", "final"), [("BHTV", "BHVK"), ("BT(HV)", "BHKV"), ("(BTH)V", "BHVK"), ("(BT)HV", "BHKV")]
)
def test_layouts_of_results_are_found(out: str, final: str) -> None:
    (one,) = found(*site(out=out, final=final))
    assert (one.outs, one.finals) == ({OUT: out}, {FINAL: final})


def test_equal_head_sizes_do_not_hide_a_transposed_state() -> None:
    sizes = SIZES | {"K": 6, "H": 2, "N": 1}
    (one,) = found(*site(sizes, PLAIN | {"state": "BHVK"}, final="BHVK"))
    assert one.assignment.layouts["state"] == "BHVK"
    assert one.finals == {FINAL: "BHVK"}


def test_query_and_key_are_told_apart() -> None:
    feeds, outputs = site()
    feeds[Q], feeds[K] = feeds[K], feeds[Q]
    (one,) = found(feeds, outputs)
    assert (one.assignment.values["query"], one.assignment.values["key"]) == (K, Q)


def test_query_and_key_may_be_one_value() -> None:
    operands = draw(DRAWS[0], SIZES, 1, normed=False)
    operands = type(operands)(operands.key, operands.key, operands.value, operands.g, operands.beta, operands.state)
    out, final = run_rule(graphs.pattern().recurrence, operands, Preparation(None, None, stateless=False))
    feeds = {IDS[role]: getattr(operands, role) for role in IDS if role != "query"}
    (one,) = found(feeds, {OUT: out, FINAL: final})
    assert one.assignment.values["query"] == one.assignment.values["key"] == K


def test_g_and_beta_are_told_apart_by_who_is_g() -> None:
    feeds, outputs = site()
    assert all(one.values["g"] == G and one.values["beta"] != G for one in assignments(feeds, G, {}))
    assert [explain(one, feeds, outputs) for one in assignments(feeds, BETA, {})].count(
        None
    ) > 0
    swapped = (explain(one, feeds, outputs) for one in assignments(feeds, BETA, {}))
    assert not [one for one in swapped if one is not None]


def test_no_state_is_a_zero_state() -> None:
    (one,) = found(*site(stateless=True))
    assert "state" not in one.assignment.values
    assert one.assignment.preparation().stateless


def test_fewer_key_heads_are_repeated_interleaved() -> None:
    feeds, outputs = site()
    (one,) = found(feeds, outputs)
    assert (one.assignment.sizes["N"], one.assignment.sizes["H"]) == (2, 4)
    # Tiled: value head h reads key head h % N. No kernel does that.
    tiled = dict(feeds)
    operands = draw(DRAWS[0], SIZES, 5, normed=False)
    spread = {role: np.tile(getattr(operands, role), (1, 1, 2, 1)) for role in ("query", "key")}
    wide = type(operands)(spread["query"], spread["key"], operands.value, operands.g, operands.beta, operands.state)
    out, final = run_rule(graphs.pattern().recurrence, wide, Preparation(None, None, stateless=False))
    assert found(tiled, {OUT: out, FINAL: final}) == []


@pytest.mark.parametrize("kind", ["rsqrt", "max"])
def test_a_norm_belongs_to_its_root(kind: str) -> None:
    norm = Norm(kind, 1e-3, 1, (), ())
    feeds, outputs = site(norm=norm)
    assert found(feeds, outputs) == []
    (one,) = found(feeds, outputs, {Q: norm, K: norm})
    assert one.assignment.preparation() == Preparation(norm, norm, stateless=False)
    other = Norm(kind, 1.01e-3 if kind == "rsqrt" else 2.0, 1, (), ())
    assert found(feeds, outputs, {Q: other, K: other}) == []


def test_a_normed_root_is_no_value() -> None:
    norm = Norm("rsqrt", 1e-6, 1, (), ())
    assert all(one.values["value"] != Q for one in assignments(site()[0], G, {Q: norm}))


@pytest.mark.parametrize("scale", [1.0, -2.0, 1e-3, 1 / np.sqrt(128)])
def test_any_scale_is_found_exactly(scale: float) -> None:
    (one,) = found(*site(scale=scale))
    assert one.assignment.scale == pytest.approx(scale, rel=1e-13)


def test_an_output_that_is_off_is_not_explained() -> None:
    feeds, outputs = site()
    off = outputs[OUT].copy()
    off[0, -1, -1, -1] += 1e-6
    assert found(feeds, outputs | {OUT: off}) == []
    assert found(feeds, outputs | {FINAL: outputs[FINAL] * (1 + 1e-6)}) == []


@pytest.mark.parametrize("number", [0.0, np.nan, np.inf])
def test_zeros_and_infinities_explain_nothing(number: float) -> None:
    feeds, outputs = site()
    assert found(feeds, {name: np.full_like(array, number) for name, array in outputs.items()}) == []


def test_every_output_that_is_the_rule_s_is_told() -> None:
    feeds, outputs = site()
    more = outputs | {20: layouts.pack(outputs[OUT], "BTHV", "BHTV"), 21: outputs[OUT] * 2, 22: outputs[FINAL] + 1}
    (one,) = found(feeds, more)
    assert one.outs == {OUT: "BTHV", 20: "BHTV"}
    assert one.finals == {FINAL: "BHKV"}


def test_too_few_or_too_many_roots_have_no_reading() -> None:
    feeds, _ = site()
    few = {value: feeds[value] for value in (G, BETA, V)}
    many = feeds | {30: feeds[V], 31: feeds[V]}
    assert list(assignments(few, G, {})) == []
    assert list(assignments(many, G, {})) == []


def test_reading_and_writing_are_inverse() -> None:
    written = {"query": "BT(NK)", "key": "BNTK", "value": "BHTV", "g": "BHT", "beta": "BTH", "state": "BHVK"}
    one = Assignment(IDS, written, SIZES)
    feeds, _ = site(written=written)
    operands = one.read(feeds)
    assert operands.query.shape == (1, 3, 2, 5)
    assert operands.state.shape == (1, 4, 5, 6)
    again = one.write(operands)
    assert all(np.array_equal(again[value], array) for value, array in feeds.items())
