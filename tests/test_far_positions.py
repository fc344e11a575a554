"""Constants in positions, masks and rows that act beyond all token counts that are tried, and sequences mixed there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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


#: Sizes that are far from multiples of the tokens: where two such places are one, no trial goes, or only by chance.
FAR_SIZES = """s0 = Mul(trips, two)
  s1 = Add(s0, w3)
  s2 = Add(s1, trips)
  s1u = Unsqueeze(s1, ax0)
  s2u = Unsqueeze(s2, ax0)
  s4 = Mul(trips, four)
  s5 = Add(s4, trips)
  s4u = Unsqueeze(s4, ax0)
  s5u = Unsqueeze(s5, ax0)
  s6 = Add(trips, w6)
  s6u = Unsqueeze(s6, ax0)
  s10 = Mul(trips, ten)
  s11 = Add(s10, far)
  long_p = Range(zero, s11, one)
  r0 = Add(trips, w63)
  r1 = Div(r0, whole)
  r2 = Mul(r1, whole)
  rest = Sub(r2, trips)
  """
FURTHER = NUMBERS + (
    ", int64 two = {2}, int64 four = {4}, int64 ten = {10}, int64 w3 = {3000}, int64 w6 = {6000}, int64 w63 = {63}, "
    "int64 fifty = {50}, int64 sixty = {60}, int64 near = {100}, int64[1] c37 = {37}, int64[1] c38 = {38}, "
    "int64[2] front37 = {37, 0}, int64[2] back37 = {0, 37}, int64[6] rows37 = {0, 37, 0, 0, 0, 0}, "
    "int64[6] ends37 = {0, 0, 0, 0, 37, 0}, int64[6] end1 = {0, 0, 0, 0, 1, 0}, int64[2] end2 = {0, 1}, "
    "int64 w9 = {900}, int64 w15 = {1500}, int64[1] c1500 = {1500}"
)


def further(model: Callable[[], onnx.ModelProto]) -> onnx.ModelProto:
    """A case with more constants."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{__name__}.NUMBERS", FURTHER)
        return model()


MEETING_MASKS = {
    "a mask read at a far size": "e = Equal(long_p, s4)\n mask = Slice(e, s1u, s2u, ax0)",
    "positions read at a far size": "q = Slice(long_p, s1u, s2u, ax0)\n mask = Equal(q, s4)",
    "positions that begin at one": "q = Range(s1, s2, one)\n mask = Equal(q, s4)",
    "the position at one": "q = Gather<axis = 0>(long_p, s6)\n l = LessOrEqual(q, s4)\n e = Equal(p, zero)\n"
    " mask = And(l, e)",
    "positions behind as many": "w = Concat<axis = 0>(s6u, ax0)\n q = Pad(long_p, w)\n r = Slice(q, s1u, s2u, ax0)\n"
    " mask = Greater(r, p)",
    "from the end": "n = Neg(s1u)\n q = Slice(long_p, n, most, ax0)\n r = Slice(q, ax0, t1, ax0)\n"
    " mask = Less(r, s4)",
    "ones behind far zeros": "o = ConstantOfShape<value = int64[1] {1}>(s1u)\n"
    " z = ConstantOfShape<value = int64[1] {0}>(s4u)\n w = Concat<axis = 0>(z, o)\n q = Slice(w, s1u, s2u, ax0)\n"
    " r = Sub(one, q)\n mask = Greater(r, zero)",
    "one remainder": "a = Mul(rest, two)\n b = Sub(a, one)\n d = Add(rest, one)\n e1 = Equal(p, b)\n"
    " e2 = Equal(p, d)\n mask = And(e1, e2)",
    "masks that are moved": "a1 = Equal(p, zero)\n a2 = Cast<to = 7>(a1)\n a3 = Pad(a2, front37)\n"
    " a4 = Slice(a3, ax0, t1, ax0)\n z0 = Add(p, one)\n z1 = Equal(z0, trips)\n z2 = Cast<to = 7>(z1)\n"
    " z3 = Pad(z2, back37)\n z4 = Slice(z3, c37, most, ax0)\n mask = Mul(a4, z4)",
}


@pytest.mark.parametrize("name", MEETING_MASKS)
def test_masks_that_meet_at_a_far_or_single_size_are_refused(name: str, tmp_path: Path) -> None:
    model = further(lambda: masked(FAR_SIZES + MEETING_MASKS[name]))
    report = graphs.fuse(graphs.save(model, tmp_path), tmp_path / "out.onnx")
    assert (report.exit, graphs.codes(report)) == (3, ["position-gate"])


def test_a_mask_that_is_empty_behind_far_zeros_is_the_rule(tmp_path: Path) -> None:
    """Only the first zeros are read: how many there are makes no difference."""
    text = "z = ConstantOfShape<value = int64[1] {0}>(s1u)\n q = Slice(z, ax0, t1, ax0)\n mask = Greater(q, zero)"
    model = further(lambda: masked(FAR_SIZES + text))
    report = graphs.fuse(graphs.save(model, tmp_path), tmp_path / "out.onnx")
    assert (report.exit, graphs.codes(report)) == (0, [""])


ZEROS = "z{0} = Concat<axis = 0>(n1, {1}, heads)\n o{0} = ConstantOfShape(z{0})\n "
FAR_ROWS = {
    "a pad of a far size": "w = Concat<axis = 0>(ax0, s6u, ax0, ax0, s5u, ax0)\n l = Pad(decays, w)\n"
    " x = Slice(l, s4u, s5u, ax1)",
    "zeros of a far size": ZEROS.format(1, "s6u") + ZEROS.format(2, "s5u")
    + "l = Concat<axis = 1>(o1, decays, o2)\n x = Slice(l, s4u, s5u, ax1)",
    "parts of a far size": "w = Concat<axis = 0>(ax0, s6u, ax0, ax0, ax0, ax0)\n l = Pad(decays, w)\n"
    " parts2 = Concat<axis = 0>(t1, s6u)\n x, other = Split<axis = 1>(l, parts2)",
    "positions moved and spread": "f = Mul(trips, sixty)\n e = Add(f, w6)\n u = Unsqueeze(e, ax0)\n"
    " w = Concat<axis = 0>(ax0, ax0, ax0, ax0, u, ax0)\n l = Pad(decays, w)\n a = Add(p, near)\n b = Mul(a, fifty)\n"
    " x = Gather<axis = 1>(l, b)",
}  # fmt: skip

#: What a step of a loop makes of a shape has no elements that are known.
ELEMENTS = "a constant for each element"
#: Rows of which most are zeros, read at a constant that is an index of its own or stands beside positions.
SPREAD = "f = Mul(trips, w9)\n u = Unsqueeze(f, ax0)\n w = Concat<axis = 0>(ax0, ax0, ax0, ax0, u, ax0)\n"
SPREAD += " l = Pad(decays, w)\n "
BUT_ONE = "some = Sub(t1, ax1)\n first_p = Slice(p, ax0, some, ax0)\n "
OTHERS = "y0 = Slice(decays, ax0, some, ax1)\n y1 = Pad(y0, end1)\n x = Sub(y, y1)"
FAR_ROWS |= {
    "a constant spread out": f"{SPREAD}b = Expand(c1500, t1)\n x = Gather<axis = 1>(l, b)",
    "a constant made in full": f"{SPREAD}b = ConstantOfShape<value = int64[1] {{1500}}>(t1)\n"
    " x = Gather<axis = 1>(l, b)",
    ELEMENTS: f"{SPREAD}s = Shape(decays)\n b = Expand(c1500, s)\n"
    " x = GatherElements<axis = 1>(l, b)",
    "a constant behind positions": f"{SPREAD}{BUT_ONE}b = Concat<axis = 0>(first_p, c1500)\n"
    f" y = Gather<axis = 1>(l, b)\n {OTHERS}",
    "positions that are padded": f"{SPREAD}{BUT_ONE}b = Pad(first_p, end2, w15)\n"
    f" y = Gather<axis = 1>(l, b)\n {OTHERS}",
    "a constant behind a size": f"{SPREAD}b = Concat<axis = 0>(t1, c1500)\n y = Gather<axis = 1>(l, b)\n"
    " y2 = Gather<axis = 1>(y, ax1)\n s = Shape(decays)\n x = Expand(y2, s)",
}
CASES = [(name, inside) for name in FAR_ROWS for inside in (False, True) if not inside or name != ELEMENTS]


@pytest.mark.parametrize(("name", "inside"), CASES)
def test_rows_read_at_far_sizes_are_refused(name: str, inside: bool, tmp_path: Path) -> None:
    step = "e1st = Exp(g0)\n x0 = Gather<axis = 1>(x, i)\n e0 = Add(e1st, x0)"
    before, text = (FAR_SIZES, f"{FAR_ROWS[name]}\n {step}") if inside else (FAR_SIZES + FAR_ROWS[name], step)
    model = further(lambda: built(before, "e0 = Exp(g0)", text))
    report = graphs.fuse(graphs.save(model, tmp_path), tmp_path / "out.onnx")
    assert (report.exit, graphs.codes(report)) == (3, ["position-gate"])


def crops(number: int, amount: str, *, front: bool) -> str:
    """Rows that are moved by an amount and cut to as many as there were, as ONNX text."""
    ends = (amount, f"neg{number}") if front else (f"neg{number}", amount)
    return (
        f"neg{number} = Neg({amount})\n amounts{number} = Concat<axis = 0>(ax0, {ends[0]}, ax0, ax0, {ends[1]}, ax0)\n "
        f"win{number} = Pad(decays, amounts{number})\n "
    )


PRODUCT = "both1 = Mul(win1, win2)\n both2 = Mul(win3, win4)\n x = Mul(both1, both2)"


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        # Each is zero but for tokens from 37 on, up to 37, from T - 38 on, up to T - 38.
        ("u1 = Pad(decays, rows37)\n win1 = Slice(u1, ax0, t1, ax1)\n s38 = Sub(t1, c38)\n "
         + crops(2, "s38", front=False) + crops(3, "s38", front=True)
         + "u4 = Pad(decays, ends37)\n win4 = Slice(u4, c37, most, ax1)\n ", 75),
        # The same for c and 2 c - 2 where c tokens are missing in the last chunk.
        ("rest1 = Unsqueeze(rest, ax0)\n left2 = Sub(t1, rest1)\n left3 = Sub(left2, ax1)\n "
         "more1 = Mul(rest1, ax2)\n more2 = Sub(more1, ax2)\n less3 = Sub(t1, more2)\n less4 = Sub(less3, ax1)\n "
         + crops(1, "rest1", front=True) + crops(2, "left3", front=False)
         + crops(3, "more2", front=True) + crops(4, "less4", front=False), 62),
    ],
)  # fmt: skip
def test_rows_that_meet_at_a_single_size_are_tried_there(text: str, tokens: int, tmp_path: Path) -> None:
    model = further(lambda: moved(FAR_SIZES + text + PRODUCT))
    report = graphs.fuse(graphs.save(model, tmp_path), tmp_path / "out.onnx")
    assert (report.exit, graphs.codes(report)) == (3, ["some-tokens-only"])
    (reason,) = [site.reason for site in report.sites if site.reason is not None]
    assert reason.args["tokens"] == tokens


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
