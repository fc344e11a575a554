"""Chunks with one fault: each is told by its name and by how many tokens a chunk has, of every delta rule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest

import graphs
from deltafuse import patterns
from deltafuse.chunk_faults import FAULTS, Fault, beginnings, chunked
from deltafuse.match import SiteReport
from deltafuse.rule import relative

CHUNK, TOKENS, HEADS, KEYS, VALUES = 4, 12, 2, 4, 8

#: Three chunks of the gated rule; the log decay has a number a head, or one a key channel.
_HEAD = f"""
<ir_version: 8, opset_import: ["" : 17]>
chunks (float[1,{TOKENS},{HEADS},{KEYS}] query, float[1,{TOKENS},{HEADS},{KEYS}] key,
        float[1,{TOKENS},{HEADS},{VALUES}] value, float[1,{TOKENS},{HEADS}] g, float[1,{TOKENS},{HEADS}] beta,
        float[1,{HEADS},{KEYS},{VALUES}] state)
  => (float[1,{TOKENS},{HEADS},{VALUES}] out, float[1,{HEADS},{KEYS},{VALUES}] final_state)
<float[4,4] eye = {{1,0,0,0, 0,1,0,0, 0,0,1,0, 0,0,0,1}}, float[4,4] upto = {{1,0,0,0, 1,1,0,0, 1,1,1,0, 1,1,1,1}},
 float[4,4] before = {{0,0,0,0, 1,0,0,0, 1,1,0,0, 1,1,1,0}}, float[4,1] others = {{1, 1, 1, 0}},
 float[4,1] closing = {{0, 0, 0, 1}}, float scale = {{0.5}},
 int64 two = {{2}}, int64[1] row = {{2}}, int64[1] last = {{-1}}, int64 end = {{3}}, int64 begin = {{0}}>
{{
  q0 = Mul(query, scale)
  q = Transpose<perm = [0, 2, 1, 3]>(q0)
  k = Transpose<perm = [0, 2, 1, 3]>(key)
  v = Transpose<perm = [0, 2, 1, 3]>(value)
  d0 = Transpose<perm = [0, 2, 1]>(g)
  d = Unsqueeze(d0, last)
  b0 = Transpose<perm = [0, 2, 1]>(beta)
  b = Unsqueeze(b0, last)
  s0 = Identity(state)
"""
#: One chunk; ``N`` is its number, ``M`` that of the next one. The inverse is exact for four tokens.
_CHUNK = """
  total_N = CumSum(d_N, two)
  grown_N = Exp(total_N)
  column_N = Transpose<perm = [0, 1, 3, 2]>(total_N)
  gap_N = Sub(total_N, column_N)
  inner_N = Mul(gap_N, upto)
  power_N = Exp(inner_N)
  apart_N = Mul(power_N, upto)
  turned_N = Transpose<perm = [0, 1, 3, 2]>(k_N)
  kb_N = Mul(k_N, b_N)
  kk_N = MatMul(kb_N, turned_N)
  lower_N = Mul(kk_N, apart_N)
  strict_N = Mul(lower_N, before)
  minus_N = Neg(strict_N)
  square_N = MatMul(minus_N, minus_N)
  one_N = Add(eye, minus_N)
  more_N = Add(eye, square_N)
  inverse_N = MatMul(one_N, more_N)
  vb_N = Mul(v_N, b_N)
  plain_N = MatMul(inverse_N, vb_N)
  reader_N = Mul(kb_N, grown_N)
  reads_N = MatMul(inverse_N, reader_N)
  known_N = MatMul(reads_N, s_N)
  new_N = Sub(plain_N, known_N)
  asked_N = Mul(q_N, grown_N)
  far_N = MatMul(asked_N, s_N)
  qk_N = MatMul(q_N, turned_N)
  score_N = Mul(qk_N, apart_N)
  scores_N = Mul(score_N, upto)
  near_N = MatMul(scores_N, new_N)
  o_N = Add(far_N, near_N)
  whole_N = Gather<axis = 2>(total_N, end)
  sum_N = Unsqueeze(whole_N, row)
  rest_N = Sub(sum_N, total_N)
  left_N = Exp(rest_N)
  kept_N = Exp(sum_N)
  kw_N = Mul(k_N, left_N)
  written_N = Transpose<perm = [0, 1, 3, 2]>(kw_N)
  update_N = MatMul(written_N, new_N)
  held_N = Mul(s_N, kept_N)
  s_M = Add(held_N, update_N)
"""
_TAIL = """
  o = Concat<axis = 2>(o_0, o_1, o_2)
  out = Transpose<perm = [0, 2, 1, 3]>(o)
  final_state = Identity(s_3)
}
"""
_KEPT = (
    "inverse_N = MatMul(one_N, more_N)",
    "whole_inverse_N = MatMul(one_N, more_N)\n  own_N = Mul(lower_N, eye)\n  left_over_N = Sub(eye, own_N)\n"
    "  inverse_N = MatMul(whole_inverse_N, left_over_N)",
)
_DROPPED = ("scores_N = Mul(score_N, upto)", "scores_N = Mul(score_N, before)")
#: What is wrong, and the code that tells it.
EDITS: list[tuple[str, list[tuple[str, str]]]] = [
    ("diagonal-kept", [_KEPT]),
    ("masks-exchanged", [_KEPT, _DROPPED]),
    ("read-before-update", [_DROPPED]),
    ("inverse-sign", [("minus_N = Neg(strict_N)", "minus_N = Identity(strict_N)")]),
    ("inverse-missing", [("inverse_N = MatMul(one_N, more_N)", "inverse_N = Add(eye, minus_N)")]),
    ("identity-missing", [
        ("inverse_N = MatMul(one_N, more_N)", "right_N = MatMul(one_N, more_N)\n  inverse_N = Sub(right_N, eye)")]),
    ("decay-turned", [("gap_N = Sub(total_N, column_N)", "gap_N = Sub(column_N, total_N)")]),
    ("undecayed-correction", [("reads_N = MatMul(inverse_N, reader_N)", "reads_N = MatMul(inverse_N, kb_N)")]),
    ("uncorrected-write", [("update_N = MatMul(written_N, new_N)", "update_N = MatMul(written_N, plain_N)")]),
    ("chunk-decay", [
        ("kept_N = Exp(sum_N)", "first_N = Gather<axis = 2>(total_N, begin)\n  start_N = Unsqueeze(first_N, row)\n"
         "  kept_N = Exp(start_N)")]),
    ("key-read", [("asked_N = Mul(q_N, grown_N)", "asked_N = Mul(k_N, grown_N)")]),
    ("inverse-short", [
        ("more_N = Add(eye, square_N)\n  inverse_N = MatMul(one_N, more_N)",
         "more_N = Add(eye, square_N)\n  right_N = MatMul(one_N, more_N)\n  upper_N = Mul(right_N, others)\n"
         "  lowest_N = Mul(one_N, closing)\n  inverse_N = Add(upper_N, lowest_N)")]),
    ("decay-across", [("total_N = CumSum(d_N, two)", "total_N = Add(total_L, d_N)")]),
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _worker() -> Iterator[None]:
    with graphs.one_worker():
        yield


#: Without a decay: what has one is gone.
PLAIN = [
    (line, "") for line in (
        "  total_N = CumSum(d_N, two)\n", "  grown_N = Exp(total_N)\n",
        "  column_N = Transpose<perm = [0, 1, 3, 2]>(total_N)\n", "  gap_N = Sub(total_N, column_N)\n",
        "  inner_N = Mul(gap_N, upto)\n", "  power_N = Exp(inner_N)\n", "  whole_N = Gather<axis = 2>(total_N, end)\n",
        "  sum_N = Unsqueeze(whole_N, row)\n", "  rest_N = Sub(sum_N, total_N)\n", "  left_N = Exp(rest_N)\n",
        "  kept_N = Exp(sum_N)\n",
    )
] + [
    ("Mul(power_N, upto)", "Identity(upto)"), ("Mul(kb_N, grown_N)", "Identity(kb_N)"),
    ("Mul(q_N, grown_N)", "Identity(q_N)"), ("Mul(k_N, left_N)", "Identity(k_N)"),
    ("Mul(s_N, kept_N)", "Identity(s_N)"),
]  # fmt: skip
#: A decay of each key channel, in front of the products.
CHANNELS = [
    ("Mul(power_N, upto)", "Identity(upto)"),
    ("  column_N = Transpose<perm = [0, 1, 3, 2]>(total_N)\n  gap_N = Sub(total_N, column_N)\n"
     "  inner_N = Mul(gap_N, upto)\n  power_N = Exp(inner_N)\n",
     "  back_N = Neg(total_N)\n  shrunk_N = Exp(back_N)\n"),
    ("turned_N = Transpose<perm = [0, 1, 3, 2]>(k_N)",
     "ks_N = Mul(k_N, shrunk_N)\n  turned_N = Transpose<perm = [0, 1, 3, 2]>(ks_N)"),
    ("kk_N = MatMul(kb_N, turned_N)", "kg_N = Mul(kb_N, grown_N)\n  kk_N = MatMul(kg_N, turned_N)"),
    ("qk_N = MatMul(q_N, turned_N)", "qg_N = Mul(q_N, grown_N)\n  qk_N = MatMul(qg_N, turned_N)"),
    ("Mul(s_N, kept_N)", "Mul(s_N, stays_N)"),
    ("  kept_N = Exp(sum_N)\n", "  kept_N = Exp(sum_N)\n  stays_N = Transpose<perm = [0, 1, 3, 2]>(kept_N)\n"),
]  # fmt: skip
#: Rule -> edits of a chunk, and of what stands in front of them.
RULES = {
    "gated_delta_rule": ([], []),
    "delta_rule": (PLAIN, []),
    "kimi_delta_attention": (CHANNELS, [
        (f"float[1,{TOKENS},{HEADS}] g", f"float[1,{TOKENS},{HEADS},{KEYS}] g"),
        ("d0 = Transpose<perm = [0, 2, 1]>(g)", "d0 = Transpose<perm = [0, 2, 1, 3]>(g)"),
        ("d = Unsqueeze(d0, last)", "d = Identity(d0)"),
    ]),
}  # fmt: skip


def model(
    rule: str, edits: Sequence[tuple[str, str]] = (), whole: Sequence[tuple[str, str]] = ()
) -> onnx.ModelProto:
    """A rule in three chunks of four tokens, each with the same edits, and with edits of the text as a whole."""
    own, first = RULES[rule]
    text, count = edited(_HEAD, first), TOKENS // CHUNK
    for name in "qkvdb":
        text += f"  {', '.join(f'{name}_{n}' for n in range(count))} = Split<axis = 2>({name})\n"
    text = text.replace("s0 =", "s_0 =") + "  total_L = Sub(d_0, d_0)\n"
    body = edited(_CHUNK, [*own, *edits])
    for n in range(count):
        chunk = body.replace("_N", f"_{n}").replace("_M", f"_{n + 1}")
        text += chunk.replace("total_L", f"total_{n - 1}" if n else "total_L")
    return graphs.parse(edited(text + _TAIL, whole))


def edited(text: str, edits: Sequence[tuple[str, str]]) -> str:
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new)
    return text


def site(tmp_path: Path, rule: str = "gated_delta_rule", edits: Sequence[tuple[str, str]] = ()) -> SiteReport:
    report = graphs.fuse(graphs.save(model(rule, edits), tmp_path), rules=(rule,), dry_run=True, target="ort")
    (found,) = report.sites
    return found


@pytest.mark.parametrize("rule", RULES)
def test_the_chunks_themselves_are_the_rule(rule: str, tmp_path: Path) -> None:
    found = site(tmp_path, rule)
    assert (found.status, found.match.rule, found.match.form) == ("fused", rule, "chunk")


@pytest.mark.parametrize(("code", "edits"), EDITS, ids=[code for code, _ in EDITS])
def test_a_chunk_with_a_fault_says_what_is_wrong(code: str, edits: list[tuple[str, str]], tmp_path: Path) -> None:
    found = site(tmp_path, edits=edits)
    assert (found.status, found.reason.code) == ("near-miss", code)
    first, error = found.reason.nearest.differences[0]
    assert (first, error < 1e-12) == (code, True)
    assert found.reason.args.get("tokens", CHUNK) == CHUNK
    assert found.reason.fix


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("code", "edits"), EDITS[:2], ids=[code for code, _ in EDITS[:2]])
def test_masks_are_told_of_every_delta_rule(
    rule: str, code: str, edits: list[tuple[str, str]], tmp_path: Path
) -> None:
    found = site(tmp_path, rule, edits)
    assert (found.status, found.reason.code) == ("near-miss", code)


def test_a_chunk_of_all_tokens_is_told_too(tmp_path: Path) -> None:
    text = edited(_CHUNK, [_KEPT]).replace("_N", "_0").replace("_M", "_1").replace("s_0", "state")
    for name in "qkvdb":
        text = text.replace(f"{name}_0", name)
    head = _HEAD.replace(f"[1,{TOKENS},", f"[1,{CHUNK},").replace("  s0 = Identity(state)\n", "")
    end = _TAIL.replace("  o = Concat<axis = 2>(o_0, o_1, o_2)\n", "").replace("(o)", "(o_0)").replace("s_3", "s_1")
    report = graphs.fuse(graphs.save(graphs.parse(head + text + end), tmp_path), dry_run=True)
    assert [(site.reason.code, site.reason.args["tokens"]) for site in report.sites] == [("diagonal-kept", CHUNK)]


def test_a_chunk_that_is_skipped_is_told(tmp_path: Path) -> None:
    skipped = [("s_1 = Add(held_0, update_0)", "s_1 = Identity(s_0)\n  o_skipped = Sub(o_0, o_0)"),
               ("Concat<axis = 2>(o_0,", "Concat<axis = 2>(o_skipped,")]  # fmt: skip
    report = graphs.fuse(graphs.save(model("gated_delta_rule", whole=skipped), tmp_path), dry_run=True)
    assert [(site.reason.code, site.reason.args["tokens"]) for site in report.sites] == [("tokens-skipped", CHUNK)]


def _operands(decay: str) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(5)
    gate = (2, TOKENS - 1, HEADS)
    query, key = rng.standard_normal((2, *gate, KEYS))
    g = -rng.uniform(size=(*gate, KEYS) if decay == "channel" else gate) * (decay != "none")
    state = rng.standard_normal((2, HEADS, KEYS, VALUES))
    return query, key, rng.standard_normal((*gate, VALUES)), g, rng.uniform(size=gate), state


@pytest.mark.parametrize("size", [1, CHUNK, TOKENS, 2 * TOKENS])
@pytest.mark.parametrize("name", RULES)
def test_chunks_without_a_fault_are_the_rule_whatever_their_size(name: str, size: int) -> None:
    (rule,) = patterns.load(names=[name])
    operands = _operands(rule.decay)
    for found, wanted in zip(chunked(*operands, size=size, fault=Fault()), rule.recurrence(*operands), strict=True):
        assert relative(found, wanted) < 1e-12


@pytest.mark.parametrize("name", RULES)
def test_each_fault_is_another_recurrence(name: str) -> None:
    (rule,) = patterns.load(names=[name])
    operands = _operands(rule.decay)
    wanted, final = rule.recurrence(*operands)
    for code, fault in FAULTS:
        out, state = chunked(*operands, size=CHUNK, fault=fault)
        apart = max(relative(out, wanted), relative(state, final))
        assert (apart > 1e-3) != (fault.of_decay and rule.decay == "none"), code


@pytest.mark.parametrize("name", RULES)
def test_within_the_first_chunk_all_faults_are_worked_out_at_once(name: str) -> None:
    (rule,) = patterns.load(names=[name])
    *operands, state = _operands(rule.decay)
    few = [x[:, :2] for x in operands]
    outs, _ = beginnings(*few, state, faults=[fault for _, fault in FAULTS])
    for (code, fault), found in zip(FAULTS, outs, strict=True):
        wanted, _ = chunked(*few, state, size=CHUNK, fault=fault)
        assert relative(found, wanted) < 1e-12, code
