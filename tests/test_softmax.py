"""Attention with a softmax is told as what it is, and what only has a softmax somewhere is not taken for it."""

from __future__ import annotations

import pytest

import graphs

pytestmark = pytest.mark.usefixtures("one_worker")

#: Softmax attention with a forget gate over four tokens, and a decayed sum of outer products as its last state.
ATTENTION = """
<ir_version: 8, opset_import: ["" : 17]>
attention (float[1,4,6,5] q, float[1,4,6,5] k, float[1,4,6,3] v, float[1,4,6] g, float[1,4,6] beta,
           float[1,4,5,3] state) => (float[1,4,6,3] out, float[1,4,5,3] final_state)
<int64[1] last = {-1}, int64[1] row = {-2}, int64 axis = {2}, int64 end = {-1}, float scale = {0.25}>
{
  total = CumSum(g, axis)
  kt = Transpose<perm = [0, 1, 3, 2]>(k)
  raw = MatMul(q, kt)
  scores = Mul(raw, scale)
  down = Unsqueeze(total, last)
  across = Unsqueeze(total, row)
  apart = Sub(down, across)
  biased = Add(scores, apart)
  weights = Softmax<axis = 3>(biased)
  b1 = Unsqueeze(beta, last)
  written = Mul(v, b1)
  read = MatMul(weights, written)
  before = MatMul(q, state)
  out = Add(read, before)
  whole = Gather<axis = 2>(total, end)
  w1 = Unsqueeze(whole, last)
  w2 = Unsqueeze(w1, last)
  decay = Exp(w2)
  decayed = Mul(state, decay)
  outer = MatMul(kt, v)
  final_state = Add(decayed, outer)
}
"""

SOFTMAX = "weights = Softmax<axis = 3>(biased)"
WRITTEN_OUT = {
    "softmax": SOFTMAX,
    "last": "weights = Softmax(biased)",
    "masked": "w0 = Softmax<axis = -1>(biased)\n  weights = Mul(w0, scale)",
    "quotient": "top = ReduceMax<axes = [-1]>(biased)\n  less = Sub(biased, top)\n  e = Exp(less)\n"
    "  sum = ReduceSum(e, last)\n  weights = Div(e, sum)",
    "reciprocal": "e = Exp(biased)\n  sum = ReduceSum(e, last)\n  one = Reciprocal(sum)\n  weights = Mul(e, one)",
    "cast": "e = Exp(biased)\n  h = Cast<to = 11>(e)\n  sum = ReduceSum(h, last)\n  w0 = Div(h, sum)\n"
    "  weights = Cast<to = 1>(w0)",
}


def told(text, folder):
    report = graphs.fuse(graphs.save(graphs.parse(text), folder))
    return report.exit, graphs.codes(report), report.notes


@pytest.mark.parametrize("form", WRITTEN_OUT)
def test_it_is_no_site_and_the_note_names_it(form, tmp_path):
    code, codes, notes = told(ATTENTION.replace(SOFTMAX, WRITTEN_OUT[form]), tmp_path)
    assert (code, codes) == (3, [])
    (note,) = notes
    assert note.startswith("no site: ")
    assert " of data and 4 contractions of data with data were looked at, none is part of a rule" in note
    name = "w0" if form == "masked" else "weights" if "Softmax" in WRITTEN_OUT[form] else "e"
    assert f"; {name}: attention with softmax, which is no delta rule; if the model does have linear attention" in note


def test_of_several_the_first_is_named(tmp_path):
    more = (
        "vt = Transpose<perm = [0, 1, 3, 2]>(v)\n  again = MatMul(read, vt)\n  more = Softmax(again)\n"
        "  third = MatMul(more, v)\n  out = Add(third, before)"
    )
    twice = ATTENTION.replace("out = Add(read, before)", more)
    _, _, notes = told(twice, tmp_path)
    assert "; weights and 1 more: attention with softmax, which is no delta rule; if the model does" in notes[0]


def test_an_operator_that_is_called_attention_is_one(tmp_path):
    text = """
    <ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>
    m (float[1,6,8] q, float[1,6,8] k, float[1,6,8] v) => (float[1,6,8] out)
    { out = com.microsoft.MultiHeadAttention<num_heads = 2>(q, k, v) }
    """
    _, _, notes = told(text, tmp_path)
    assert "; out: attention with softmax, which is no delta rule; if the model does" in notes[0]


def test_one_that_was_looked_at_is_told_in_the_singular(tmp_path):
    text = '<ir_version: 8, opset_import: ["" : 17]> m (float[1,6,8] x) => (float[1,6,8] out) { out = Exp(x) }'
    _, _, (note,) = told(text, tmp_path)
    assert "1 exponential of data and 0 contractions of data with data were looked at" in note
    assert note.endswith("in its place; a rule of another kind is looked for with --rules, see `fuse patterns`")


#: A softmax of given scores that is written out without their greatest: one exponential of one value.
EXPONENTIAL = """
<ir_version: 8, opset_import: ["" : 17]>
attention (float[1,4,6,6] scores, float[1,4,6,5] q, float[1,4,6,3] v, float[1,4,6] beta, float[1,4,5,3] state)
  => (float[1,4,6,3] out)
<int64[1] last = {-1}>
{
  e = Exp(scores)
  sum = ReduceSum(e, last)
  weights = Div(e, sum)
  b1 = Unsqueeze(beta, last)
  written = Mul(v, b1)
  read = MatMul(weights, written)
  before = MatMul(q, state)
  out = Add(read, before)
}
"""


def test_an_exponential_that_is_taken_for_a_decay_says_what_it_is(tmp_path):
    report = graphs.fuse(graphs.save(graphs.parse(EXPONENTIAL), tmp_path))
    assert (report.exit, graphs.codes(report)) == (3, ["softmax-attention"])
    text = report.sites[0].reason.text
    assert text.startswith("the softmax e of values inside the site weighs others: this is attention with softmax and ")
    unlike = EXPONENTIAL.replace("Div(e, sum)", "Mul(e, sum)")
    assert graphs.codes(graphs.fuse(graphs.save(graphs.parse(unlike), tmp_path))) != ["softmax-attention"]


def test_a_near_miss_whose_results_go_into_attention_stays_what_it_is(tmp_path):
    after = "\n  turned = Transpose<perm = [0, 1, 3, 2]>(final_state)\n  weights = Softmax(final_state)"
    edits = (("delta = Mul(missing, b1)", "delta = Mul(missing, missing)"),
             ("update)\n  q1", f"update){after}\n  weighed = MatMul(weights, turned)\n  q1"))  # fmt: skip
    report = graphs.fuse(graphs.save(graphs.step(*edits, outputs=("weighed",)), tmp_path))
    assert (report.exit, graphs.codes(report)) == (3, ["activation-inside"])


def test_a_softmax_of_the_delta_is_an_activation_inside(tmp_path):
    text = graphs.STEP.replace("delta = Mul(missing, b1)", "soft = Softmax(missing)\n  delta = Mul(soft, b1)")
    assert told(text, tmp_path)[:2] == (3, ["activation-inside"])


def test_a_softmax_along_another_axis_is_no_attention(tmp_path):
    code, codes, _ = told(ATTENTION.replace(SOFTMAX, "weights = Softmax<axis = 2>(biased)"), tmp_path)
    assert (code, codes) == (3, ["decay-shape"])


def test_a_softmax_in_front_of_the_rule_is_none_either(tmp_path):
    text = ATTENTION.replace(SOFTMAX, "weights = Tanh(biased)").replace("raw = MatMul(q, kt)", "q1 = Softmax(q)\n"
                                                                        "  raw = MatMul(q1, kt)")  # fmt: skip
    code, codes, notes = told(text, tmp_path)
    assert (code, codes, notes) == (3, ["decay-shape"], ())
