"""Constants in positions, masks and rows that act beyond all token counts that are tried, and sequences mixed there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest

import graphs
import loops

#: Constants of the cases; `far` is more tokens than any trial has.
NUMBERS = (
    "int64 one = {1}, int64 zero = {0}, int64 three = {3}, int64 five = {5}, int64 seven = {7}, int64 far = {5000}, "
    "int64 wide = {128}, int64 whole = {64}, int64[1] far1 = {5000}, int64[1] ax0 = {0}, int64[1] ax1 = {1}, "
    "int64[1] ax2 = {2}, int64[1] most = {9223372036854775807}, int64[1] back = {-1}, int64[2] front = {5000, 0}, "
    "int64[2] parts = {-1, 5000}, int64[6] front3 = {0, 300, 0, 0, 0, 0}, int64[1] heads = {4}, int64[1] size = {5}, "
    "int64[4] none4 = {0, 0, 0, 0}, float unit = {1}"
)
SIZES = """trips = Gather<axis = 0>(shape, one)
  batches = Gather<axis = 0>(shape, zero)
  t1 = Unsqueeze(trips, ax0)
  n1 = Unsqueeze(batches, ax0)
  p = Range(zero, trips, one)
  more = Add(trips, far)
  longer = Range(zero, more, one)
  decays = Exp(g)
"""


@pytest.fixture(scope="module", autouse=True)
def _worker() -> Iterator[None]:
    with graphs.one_worker():
        yield


def built(before: str, old: str, new: str) -> onnx.ModelProto:
    """The loop with nodes in front of it, and another piece of a step."""
    return loops.loop(
        ("int64 one = {1}", NUMBERS), ("trips = Gather<axis = 0>(shape, one)", SIZES + before), (old, new)
    )


def masked(text: str) -> onnx.ModelProto:
    """Tokens that ``mask`` says have twice their value."""
    step = "plain = Gather<axis = 1>(value, i)\n m0 = Gather<axis = 0>(factor, i)\n m1 = Mul(plain, m0)\n "
    step += "v0 = Add(plain, m1)"
    return built(f"{text}\n  factor = Cast<to = 1>(mask)", "v0 = Gather<axis = 1>(value, i)", step)


def moved(text: str, same: str = "") -> onnx.ModelProto:
    """A decay to which ``x`` less what it is at all sizes that are tried is added: zero, or the decay of a token."""
    step = "e1st = Gather<axis = 1>(decays, i)\n x0 = Gather<axis = 1>(x, i)\n "
    step += f"e2nd = Gather<axis = 1>(decays, {same})\n x1 = Sub(x0, e2nd)\n " if same else "x1 = Identity(x0)\n "
    return built(text, "e0 = Exp(g0)", step + "e0 = Add(e1st, x1)")


MASKS = {
    "rest of a longer range": "q = Slice(longer, far1, most, ax0)\n mask = Less(q, trips)",
    "one of a longer range": "q = Gather<axis = 0>(longer, far1)\n mask = Greater(p, q)",
    "padded positions": "q = Pad(p, front)\n r = Slice(q, ax0, t1, ax0)\n mask = Greater(r, zero)",
    "padded ones": "o = ConstantOfShape<value = int64[1] {1}>(t1)\n q = Pad(o, front)\n r = Slice(q, ax0, t1, ax0)\n"
    " mask = Greater(r, zero)",
    "padded mask": "o = Equal(p, zero)\n c = Cast<to = 7>(o)\n q = Pad(c, front)\n r = Slice(q, ax0, t1, ax0)\n"
    " mask = Greater(r, zero)",
    "a size of another axis": "q = Mul(batches, far)\n mask = GreaterOrEqual(p, q)",
    "every 5000th": "n = Mul(trips, far)\n r = Range(zero, n, one)\n s = Reshape(r, parts)\n"
    " q = Gather<axis = 1>(s, zero)\n l = Less(q, trips)\n e = Equal(p, zero)\n n2 = Not(e)\n mask = And(l, n2)",
}


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_that_begins_far_away_is_refused(name: str, tmp_path: Path) -> None:
    report = graphs.fuse(graphs.save(masked(MASKS[name]), tmp_path), tmp_path / "out.onnx")
    assert (report.exit, graphs.codes(report)) == (3, ["position-gate"])


def test_a_mask_that_is_empty_at_all_sizes_is_the_rule(tmp_path: Path) -> None:
    report = graphs.fuse(graphs.save(masked("mask = Greater(p, trips)"), tmp_path), tmp_path / "out.onnx")
    assert (report.exit, graphs.codes(report)) == (0, [""])


LONG = "w = Mul(t1, far1)\n pads = Concat<axis = 0>(none4, w, ax0)\n long = Pad(decays, pads)\n "
ROWS = {
    "rows in front": (
        "b = Slice(shape, ax0, ax1, ax0)\n s = Concat<axis = 0>(b, far1, heads)\n o = ConstantOfShape(s)\n"
        " both = Concat<axis = 1>(o, decays)\n x = Slice(both, ax0, t1, ax1)",
        "",
    ),
    "divided twice": ("q = Div(p, wide)\n y = Gather<axis = 1>(decays, q)\n x = Gather<axis = 1>(y, q)", "zero"),
    "a position divided twice": (
        "q = Div(p, wide)\n r = Gather<axis = 0>(q, q)\n x = Gather<axis = 1>(decays, r)", "zero"
    ),
    "every 5000th": (f"{LONG}q = Mul(p, far)\n x = Gather<axis = 1>(long, q)", "zero"),
    "a number spread out": (f"{LONG}s = Expand(far1, t1)\n q = Add(p, s)\n x = Gather<axis = 1>(long, q)", ""),
    "a number made in full": (
        f"{LONG}s = ConstantOfShape<value = int64[1] {{5000}}>(t1)\n q = Add(p, s)\n x = Gather<axis = 1>(long, q)", ""
    ),
    "positions behind zeros": (
        "z = ConstantOfShape<value = int64[1] {0}>(far1)\n r = Concat<axis = 0>(z, p)\n q = Slice(r, ax0, t1, ax0)\n"
        " x = Gather<axis = 1>(decays, q)",
        "zero",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_rows_that_come_from_far_away_are_refused(name: str, tmp_path: Path) -> None:
    report = graphs.fuse(graphs.save(moved(*ROWS[name]), tmp_path), tmp_path / "out.onnx")
    assert (report.exit, graphs.codes(report)) == (3, ["position-gate"])


#: A log decay that is laid out [T, B] in place of [B, T]: the same for one sequence.
MIXED = "s = Concat<axis = 0>(t1, n1, heads)\n r = Reshape(g, s)\n mixed = Transpose<perm = [1, 0, 2]>(r)\n "


@pytest.mark.parametrize(
    ("text", "factor"),
    [
        # A row that there is 300 tokens later.
        ("w = Pad(g, front3)\n back_g = Slice(w, ax0, t1, ax1)",
         "f0 = Gather<axis = 1>(back_g, i)\n f1 = Exp(f0)\n f = Sub(f1, unit)"),
        # One that there is at whole chunks.
        ("n = Sub(zero, trips)\n m = Mod(n, whole)\n m1 = Unsqueeze(m, ax0)\n ends = Concat<axis = 0>(none4, m1, ax0)\n"
         " w = Pad(g, ends)\n tail = Slice(w, back, most, ax1)",
         "f0 = Gather<axis = 1>(tail, zero)\n f1 = Exp(f0)\n f = Sub(f1, unit)"),
    ],
)  # fmt: skip
def test_sequences_that_are_mixed_at_some_sizes_are_refused(text: str, factor: str, tmp_path: Path) -> None:
    step = f"own = Exp(g0)\n o0 = Gather<axis = 1>(mixed, i)\n o1 = Exp(o0)\n d = Sub(o1, own)\n {factor}\n "
    step += "fd = Mul(f, d)\n"
    model = built(MIXED + text, "e0 = Exp(g0)", f"{step} e0 = Add(own, fd)")
    report = graphs.fuse(graphs.save(model, tmp_path), tmp_path / "out.onnx")
    assert (report.exit, graphs.codes(report)) == (3, ["some-tokens-only"])


def choice(name: str, size: str, then: str, otherwise: str) -> str:
    """A branch for token counts that a number divides, as ONNX text."""
    return (
        f"m_{name} = Mod(trips, {size})\n c_{name} = Equal(m_{name}, zero)\n {name} = If(c_{name})"
        f"<then_branch = t_{name} () => (y_{name}) {{ {then} }}, else_branch = e_{name} () => (z_{name}) "
        f"{{ {otherwise} }}>\n "
    )


def test_two_choices_are_tried_where_both_are_made(tmp_path: Path) -> None:
    """Each turns the channels of the query round; what both change times each other is zero but for 15, 30, ..."""
    text = "r = Transpose<perm = [0, 1, 3, 2]>(query)\n s = Shape(query)\n "
    for name, size in (("u", "three"), ("w", "five")):
        text += choice(name, size, f"y_{name} = Reshape(r, s)", f"z_{name} = Identity(query)")
    step = "own = Gather<axis = 1>(query, i)\n "
    step += "".join(f"{n}0 = Gather<axis = 1>({n}, i)\n {n}1 = Sub({n}0, own)\n " for n in "uw")
    model = built(text, "q0 = Gather<axis = 1>(query, i)", f"{step} both = Mul(u1, w1)\n q0 = Add(own, both)")
    report = graphs.fuse(graphs.save(model, tmp_path), tmp_path / "out.onnx")
    assert (report.exit, graphs.codes(report)) == (3, ["position-gate"])


def test_a_choice_that_mixes_sequences_is_refused(tmp_path: Path) -> None:
    """For one sequence, both branches are the same."""
    text = "s = Concat<axis = 0>(t1, n1, heads, size)\n "
    text += choice(
        "chosen", "seven", "r = Reshape(query, s)\n y_chosen = Transpose<perm = [1, 0, 2, 3]>(r)",
        "z_chosen = Identity(query)",
    )  # fmt: skip
    model = built(text, "q0 = Gather<axis = 1>(query, i)", "q0 = Gather<axis = 1>(chosen, i)")
    report = graphs.fuse(graphs.save(model, tmp_path), tmp_path / "out.onnx")
    assert (report.exit, graphs.codes(report)) == (3, ["position-gate"])
