"""Siblings of the gated delta rule: without decay, with one decay a key channel, with beta up to two."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.olmo_hybrid import modeling_olmo_hybrid as olmo
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen35

import graphs
from deltafuse import patterns
from deltafuse.draws import DRAWS, draw
from deltafuse.rule import relative

#: A fused graph is right where it differs from the unfused one by rounding in double.
SAME = 1e-9
HEADS, KEY_DIM, VALUE_DIM, CHUNK = 4, 16, 32, 8


@pytest.fixture(scope="module", autouse=True)
def _worker() -> Iterator[None]:
    with graphs.one_worker():
        yield


class Kimi(nn.Module):
    """transformers' functions for Kimi Linear."""

    def __init__(self, chunk: bool) -> None:
        super().__init__()
        self.chunk = chunk

    def forward(self, query, key, value, g, beta, state=None):
        options = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
        if self.chunk:
            return kimi.chunk_kimi_delta_attention(query, key, value, g, beta, chunk_size=CHUNK, **options)
        return kimi.recurrent_kimi_delta_attention(query, key, value, g, beta, **options)


class Olmo(nn.Module):
    """transformers' function for Olmo-Hybrid, with beta up to two."""

    def forward(self, query, key, value, g, beta, state=None):
        doubled = 2 * beta.sigmoid()
        return olmo.torch_recurrent_gated_delta_rule(
            query, key, value, g=g, beta=doubled, initial_state=state, output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )  # fmt: skip


class Steps(nn.Module):
    """The rule without decay, token by token, by Einsum or MatMul; ``fault`` names what is wrong."""

    def __init__(self, how: str, fault: str = "") -> None:
        super().__init__()
        self.how, self.fault = how, fault

    def contract(self, vector, state):
        if self.how == "einsum":
            return torch.einsum("bhk,bhkv->bhv", vector, state)
        return (vector.unsqueeze(-2) @ state).squeeze(-2)

    def forward(self, query, key, value, beta, state=None):
        query, key = (qwen35.l2norm(x) for x in (query, key))
        query, outs = query * KEY_DIM**-0.5, []
        if state is None:
            state = torch.zeros(1, HEADS, KEY_DIM, VALUE_DIM)
        for t in range(value.shape[1]):
            known = 0.0 if self.fault == "uncorrected" else self.contract(key[:, t], state)
            delta = beta[:, t, :, None] * (value[:, t] - known)
            updated = state + key[:, t, :, :, None] * delta[:, :, None, :]
            if self.fault == "clamp":
                updated = updated.clamp(-50.0, 50.0)
            outs.append(self.contract(query[:, t], state if self.fault == "stale" else updated))
            state = updated
        return torch.stack(outs, dim=1), state


class Chunks(nn.Module):
    """The rule without decay in chunks, the triangular inverse by powers."""

    def forward(self, query, key, value, beta, state=None):
        query, key = (qwen35.l2norm(x) for x in (query, key))
        parts = (query * KEY_DIM**-0.5, key, value, beta[..., None])
        query, key, value, beta = (x.transpose(1, 2).unflatten(2, (-1, CHUNK)) for x in parts)
        below = torch.tril(torch.ones(CHUNK, CHUNK), -1)
        power = -(key * beta) @ key.transpose(-1, -2) * below
        inverse = torch.eye(CHUNK) + power
        for _ in range(2):
            power = power @ power
            inverse = inverse + inverse @ power
        reads, writes = inverse @ (key * beta), inverse @ (value * beta)
        outs = []
        for i in range(query.shape[2]):
            new = writes[:, :, i] - reads[:, :, i] @ state
            scores = query[:, :, i] @ key[:, :, i].transpose(-1, -2) * torch.tril(torch.ones(CHUNK, CHUNK))
            outs.append(query[:, :, i] @ state + scores @ new)
            state = state + key[:, :, i].transpose(-1, -2) @ new
        return torch.cat(outs, dim=2).transpose(1, 2), state


@dataclass(frozen=True)
class Case:
    """One export and what becomes of it on each target: the operator, or the reason."""

    module: nn.Module
    tokens: int
    rule: str
    form: str
    ascend: str
    stateless: bool = False
    channels: bool = False
    decays: bool = True


RGDR, CGDR = "RecurrentGatedDeltaRule", "ChunkGatedDeltaRule"
CASES = {
    "kimi step": Case(Kimi(False), 1, "kimi_delta_attention", "recurrent", RGDR, channels=True),
    "kimi 8 steps": Case(Kimi(False), 8, "kimi_delta_attention", "recurrent", RGDR, channels=True),
    "kimi 9 steps": Case(Kimi(False), 9, "kimi_delta_attention", "recurrent", "per-channel-decay", channels=True),
    "kimi no state": Case(Kimi(False), 2, "kimi_delta_attention", "recurrent", RGDR, channels=True, stateless=True),
    "kimi chunks": Case(Kimi(True), 20, "kimi_delta_attention", "chunk", "per-channel-decay", channels=True),
    "kimi short chunk": Case(Kimi(True), 4, "kimi_delta_attention", "chunk", RGDR, channels=True),
    "olmo step": Case(Olmo(), 1, "gated_delta_rule", "recurrent", RGDR),
    "einsum step": Case(Steps("einsum"), 1, "delta_rule", "recurrent", RGDR, decays=False),
    "einsum 3 steps": Case(Steps("einsum"), 3, "delta_rule", "recurrent", RGDR, decays=False),
    "matmul 9 steps": Case(Steps("matmul"), 9, "delta_rule", "recurrent", CGDR, decays=False),
    "matmul no state": Case(Steps("matmul"), 2, "delta_rule", "recurrent", RGDR, decays=False, stateless=True),
    "chunks": Case(Chunks(), 16, "delta_rule", "chunk", CGDR, decays=False),
}


def exported(case: Case, folder: Path) -> onnx.ModelProto:
    rng = torch.Generator().manual_seed(4)
    shapes = {
        "query": (1, case.tokens, HEADS, KEY_DIM),
        "key": (1, case.tokens, HEADS, KEY_DIM),
        "value": (1, case.tokens, HEADS, VALUE_DIM),
        "g": (1, case.tokens, HEADS, KEY_DIM) if case.channels else (1, case.tokens, HEADS),
        "beta": (1, case.tokens, HEADS),
        "state": (1, HEADS, KEY_DIM, VALUE_DIM),
    }
    left = [name for name in shapes if (name != "g" or case.decays) and (name != "state" or not case.stateless)]
    arguments = tuple(torch.rand(shapes[name], generator=rng) for name in left)
    path = folder / "model.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            case.module.eval(), arguments, str(path), dynamo=False, opset_version=17,
            input_names=left, output_names=["out", "final_state"],
        )  # fmt: skip
    return onnx.load(path)


@pytest.mark.parametrize("name", CASES)
def test_a_sibling_is_fused_where_the_kernel_takes_it(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    model, fused = exported(case, tmp_path), tmp_path / "fused.onnx"
    report = graphs.fuse(tmp_path / "model.onnx", fused)
    (site,) = report.sites
    assert (site.match.rule, site.match.form) == (case.rule, case.form)
    assert (site.match.g is None, site.match.channel_decay) == (not case.decays, case.channels)
    if site.op is None:
        assert (report.exit, site.reason.code) == (4, case.ascend)
        return
    assert (report.exit, site.op) == (0, case.ascend)
    (node,) = (node for node in onnx.load(fused).graph.node if node.op_type == "Custom")
    names = {a.name: list(a.strings) + list(a.ints) for a in node.attribute}
    fed = [names["input_names"][index].decode() for index in names["input_index"]]
    assert ("g" in fed, "gk" in fed) == (case.decays and not case.channels, case.channels)
    lowered = graphs.lowered_double(onnx.load(fused), report)
    assert graphs.difference(lowered, graphs.double(model), graphs.wide_feeds(model, 1)) < SAME


@pytest.mark.parametrize("target", ["ort", "onnx"])
@pytest.mark.parametrize("name", CASES)
def test_linear_attention_takes_every_sibling(name: str, target: str, tmp_path: Path) -> None:
    case = CASES[name]
    model, fused = exported(case, tmp_path), tmp_path / "fused.onnx"
    report = graphs.fuse(tmp_path / "model.onnx", fused, target=target)
    assert (report.exit, [site.match.rule for site in report.sites]) == (0, [case.rule])
    (node,) = (node for node in onnx.load(fused).graph.node if node.op_type == "LinearAttention")
    (update,) = (attribute.s for attribute in node.attribute if attribute.name == "update_rule")
    assert (update, bool(node.input[4])) == (b"gated_delta" if case.decays else b"delta", case.decays)
    lowered = graphs.lowered_double(onnx.load(fused), report)
    assert graphs.difference(lowered, graphs.double(model), graphs.wide_feeds(model, 1)) < SAME


@pytest.mark.parametrize(
    ("fault", "code"), [("uncorrected", "no-delta-term"), ("stale", "read-before-update"), ("clamp", "piecewise")]
)
def test_what_is_no_delta_rule_is_refused(fault: str, code: str, tmp_path: Path) -> None:
    exported(Case(Steps("einsum", fault), 3, "", "", "", decays=False), tmp_path)
    report = graphs.fuse(tmp_path / "model.onnx", tmp_path / "fused.onnx")
    assert (report.exit, graphs.codes(report)) == (3, [code])
    assert not (tmp_path / "fused.onnx").exists()


def test_an_older_signature_needs_a_decay(tmp_path: Path) -> None:
    exported(CASES["chunks"], tmp_path)
    report = graphs.fuse(tmp_path / "model.onnx", tmp_path / "fused.onnx", op="cgdr", signature="8-input")
    assert (report.exit, graphs.codes(report)) == (4, ["decay-required"])


def test_a_rule_that_is_not_asked_for_is_not_found(tmp_path: Path) -> None:
    exported(CASES["einsum step"], tmp_path)
    report = graphs.fuse(tmp_path / "model.onnx", rules=("gated_delta_rule", "kimi_delta_attention"))
    assert (report.exit, report.sites) == (3, ())


@pytest.mark.parametrize("how", DRAWS, ids=lambda how: how.name)
def test_rules_agree_where_they_are_the_same(how) -> None:
    sizes = {"B": 2, "T": 5, "N": 3, "H": 3, "K": 4, "V": 6}
    plain, gated, channel = patterns.load(names=["delta_rule", "gated_delta_rule", "kimi_delta_attention"])
    given = draw(how, sizes, 3, normed=False)
    operands = [given.query, given.key, given.value, given.g, given.beta, given.state]
    channels = [*operands[:3], np.repeat(given.g[..., None], sizes["K"], axis=-1), *operands[4:]]
    for one, other in zip(gated.recurrence(*operands), channel.recurrence(*channels), strict=True):
        assert relative(one, other) < SAME
    still = [*operands[:3], np.zeros_like(given.g), *operands[4:]]
    for one, other in zip(gated.recurrence(*still), plain.recurrence(*operands), strict=True):
        assert relative(one, other) < SAME
