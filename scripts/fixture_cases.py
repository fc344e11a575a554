"""Which exports of the rule the tests need: every way of writing it once, not every combination."""

from __future__ import annotations

import torch

from rule_models import Case

HALF = torch.float16

TS, DY = "torchscript", "dynamo"

CHUNK = (
    Case("chunk_ts14", "chunk", TS, 14, tokens=40, value_dim=24),
    Case("chunk_ts17_c64", "chunk", TS, 17, tokens=100, chunk=64, value_dim=24),
    Case("chunk_ts17_half", "chunk", TS, 17, tokens=40, dtype=HALF),
    Case("chunk_ts17_half_norm_outside", "chunk", TS, 17, tokens=20, dtype=HALF, norm="outside"),
    Case("chunk_ts17_nonorm", "chunk", TS, 17, tokens=35, chunk=12, norm="none", state=False, value_dim=24),
    Case("chunk_ts17_dynBT", "chunk", TS, 17, tokens=40, batch=2, dynamic="BT", value_dim=24, valid=(33, 48)),
    Case("chunk_ts20_dynB_noinit", "chunk", TS, 20, tokens=12, chunk=8, batch=2, dynamic="B", state=False),
    Case("chunk_ts20_B2", "chunk", TS, 20, tokens=16, chunk=8, batch=2, value_dim=24),
    Case("chunk_ts20_eqheads_nofinal", "chunk", TS, 20, tokens=8, chunk=8, key_heads=3, value_heads=3, final=False),
    Case("chunk_ts17_next", "chunk", TS, 17, tokens=5, chunk=8, value_heads=2, key_heads=1, family="qwen3_next"),
    Case("chunk_dy18", "chunk", DY, 18, tokens=40, value_dim=24),
    Case("chunk_dy20_dynB", "chunk", DY, 20, tokens=35, batch=2, dynamic="B", value_dim=24),
    Case("chunk_dy20_dynBT", "chunk", DY, 20, tokens=32, batch=2, dynamic="BT", value_dim=24, valid=(17, 32)),
    Case("chunk_dy20_half", "chunk", DY, 20, tokens=20, dtype=HALF),
    Case("chunk_dy23_noinit_nofinal", "chunk", DY, 23, tokens=12, chunk=8, state=False, final=False),
    Case("chunk_dy23_norm_outside", "chunk", DY, 23, tokens=12, chunk=8, norm="outside"),
)

RECURRENT = (
    Case("rec_ts14", "recurrent", TS, 14, tokens=1),
    Case("rec_ts17_half", "recurrent", TS, 17, tokens=1, dtype=HALF),
    Case("rec_ts17_half_norm_outside", "recurrent", TS, 17, tokens=1, dtype=HALF, norm="outside"),
    Case("rec_ts17_T4_noinit", "recurrent", TS, 17, tokens=4, state=False),
    Case("rec_ts17_T32", "recurrent", TS, 17, tokens=32),
    Case("rec_ts17_dynB", "recurrent", TS, 17, tokens=1, batch=2, dynamic="B"),
    Case("rec_ts17_dynBT", "recurrent", TS, 17, tokens=1, batch=2, dynamic="BT", valid=(1, 1)),
    Case("rec_ts17_eqheads_nofinal", "recurrent", TS, 17, tokens=1, key_heads=3, value_heads=3, final=False),
    Case("rec_ts17_nonorm", "recurrent", TS, 17, tokens=3, norm="none"),
    Case("rec_ts17_Dv24", "recurrent", TS, 17, tokens=1, value_dim=24),
    Case("rec_ts20_T3_B2", "recurrent", TS, 20, tokens=3, batch=2, value_dim=24),
    Case("rec_ts17_B4", "recurrent", TS, 17, tokens=1, batch=4),
    Case("rec_dy18", "recurrent", DY, 18, tokens=1),
    Case("rec_dy20_dynB", "recurrent", DY, 20, tokens=1, batch=2, dynamic="B"),
    Case("rec_dy20_T3_half", "recurrent", DY, 20, tokens=3, dtype=HALF),
    Case("rec_dy23_T4_noinit", "recurrent", DY, 23, tokens=4, state=False, key_heads=2, value_heads=2),
)


def steps(name: str, fault: str, exit_code: int, why: str) -> Case:
    """Three hand-written steps with one fault."""
    expect = "no-match" if exit_code == 3 else "match"
    return Case(name, "steps", TS, 17, tokens=3, fault=fault, truth={"expect": expect, "exit": exit_code, "why": why})


ATTENTION = {"expect": "no-match", "exit": 3, "why": "softmax attention with operands of the rule's shapes"}

STEPS = (
    steps("steps_ts17", "", 0, "a right recurrence written by hand"),
    steps("leak_ts17", "leak", 4, "the decayed state is a graph output as well"),
    steps("nm_decay_sign", "decay_sign", 3, "the state is divided by exp(g)"),
    steps("nm_stale_read", "stale_read", 3, "the query reads the state before the update"),
    steps("nm_state_clamp", "clamp", 3, "the state is clamped to +-50 (piecewise)"),
    steps("nm_decay_floor", "floor", 3, "exp(g) never falls below 0.001 (piecewise)"),
    Case("nm_softmax", "softmax", DY, 20, tokens=20, state=False, final=False, truth=ATTENTION),
    Case("nm_softmax_exp", "softmax", TS, 17, tokens=20, state=False, final=False, fault="exp", truth=ATTENTION),
)


def loop(name: str, which: str, exit_code: int, why: str) -> Case:
    """A scripted loop over all tokens, any count of them."""
    expect = "no-match" if exit_code == 3 else "match"
    truth = {"expect": expect, "exit": exit_code, "why": why, "kind": "loop"}
    return Case(name, "loop", TS, 17, tokens=7, batch=2, value_dim=24, dynamic="BT", fault=which, truth=truth)


LOOPS = (
    loop("loop_list", "list", 0, "outputs in a list"),
    loop("loop_in_place", "in_place", 0, "outputs written into a buffer"),
    loop("nm_loop_short", "short", 3, "the loop stops after 2000 tokens"),
    loop("nm_loop_early", "early", 3, "the loop is left where a decay is very strong"),
    loop("nm_loop_gated", "gated", 3, "tokens from the 2000th on have no output"),
    loop("nm_loop_clamped", "clamped", 3, "the state is clamped in every step"),
)

CASES = CHUNK + RECURRENT + STEPS + LOOPS
