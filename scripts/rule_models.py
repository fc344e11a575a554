"""The rule alone, as modules to export: transformers' own functions, and hand-written steps, some wrong on purpose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Literal

import torch
from torch import nn
from torch.nn import functional
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen35
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

FAMILIES: dict[str, ModuleType] = {"qwen3_5": qwen35, "qwen3_next": qwen3_next}
INPUTS = ("query", "key", "value", "g", "beta", "state")


@dataclass(frozen=True)
class Case:
    """One export of the rule.

    Attributes:
        name: of the files.
        kind: which function, ``steps`` for the hand-written steps, ``loop`` for a scripted loop.
        exporter, opset: who writes it.
        tokens, batch: sizes it is traced at.
        state, final: whether an initial state goes in and the final one comes out.
        norm: ``inside`` the function, ``outside`` on repeated heads in the source's dtype (as older releases do) or
            ``none``.
        dynamic: the inputs' dynamic axes: ``B``, ``BT`` or none.
        valid: token counts for which the exported graph is still the rule, where tokens are dynamic.
        fault: what is wrong with hand-written steps; which of the scripted loops.
        truth: entries of the truth that differ from what the other fields say.
    """

    name: str
    kind: Literal["chunk", "recurrent", "steps", "softmax", "loop"]
    exporter: Literal["torchscript", "dynamo"]
    opset: int
    tokens: int
    batch: int = 1
    key_heads: int = 2
    value_heads: int = 4
    key_dim: int = 16
    value_dim: int = 32
    chunk: int = 16
    dtype: torch.dtype = torch.float32
    state: bool = True
    final: bool = True
    norm: Literal["inside", "outside", "none"] = "inside"
    dynamic: Literal["", "B", "BT"] = ""
    valid: tuple[int, int] | None = None
    family: str = "qwen3_5"
    fault: str = ""
    truth: dict[str, object] = field(default_factory=dict)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the graph's inputs."""
        return INPUTS if self.state else INPUTS[:-1]

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the graph's outputs."""
        extra = ("decayed_state",) if self.fault == "leak" else ()
        return (("out", "final_state") if self.final else ("out",)) + extra


def rule_inputs(case: Case, seed: int) -> tuple[torch.Tensor, ...]:
    """Operands that tell right from wrong: keys alike from token to token, slow decay, norms near 1.

    With fast decay and independent keys several wrong graphs are right to seven digits.
    """
    torch.manual_seed(seed)
    head = (case.batch, case.tokens)
    query = torch.randn(*head, case.key_heads, case.key_dim) * 0.4
    key = torch.randn(case.batch, 1, case.key_heads, case.key_dim) + 0.5 * torch.randn_like(query)
    if case.norm == "none":
        query, key = functional.normalize(query, dim=-1), functional.normalize(key, dim=-1)
    value = torch.randn(*head, case.value_heads, case.value_dim)
    g = -0.1 * torch.rand(*head, case.value_heads)
    beta = torch.rand(*head, case.value_heads)
    state = 0.5 * torch.randn(case.batch, case.value_heads, case.key_dim, case.value_dim)
    low = [tensor.to(case.dtype) for tensor in (query, key, value, beta)]
    # Half precision models keep the decay and the state in float32.
    operands = (low[0], low[1], low[2], g, low[3], state)
    return operands if case.state else operands[:-1]


class Rule(nn.Module):
    """One of transformers' functions."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        name = "torch_chunk_gated_delta_rule" if case.kind == "chunk" else "torch_recurrent_gated_delta_rule"
        self.rule: Callable[..., tuple[torch.Tensor, torch.Tensor | None]] = getattr(FAMILIES[case.family], name)
        self.l2norm = FAMILIES[case.family].l2norm

    def forward(self, query, key, value, g, beta, state=None):
        """Gives out [B, T, Hv, Dv] and, if asked for, the final state [B, Hv, Dk, Dv]."""
        case = self.case
        if case.norm == "outside":
            repeat = case.value_heads // case.key_heads
            query, key = (self.l2norm(x.repeat_interleave(repeat, dim=2)) for x in (query, key))
        options = {"chunk_size": case.chunk} if case.kind == "chunk" else {}
        out, final = self.rule(
            query,
            key,
            value,
            g=g,
            beta=beta,
            initial_state=state,
            output_final_state=case.final,
            use_qk_l2norm_in_kernel=case.norm == "inside",
            **options,
        )
        return (out, final) if case.final else out


class Steps(nn.Module):
    """The recurrence by hand, one token after the other, with at most one thing wrong (``case.fault``).

    ``decay_sign`` divides by exp(g), ``stale_read`` reads the state before the update, ``clamp`` keeps the state within
    +-50, ``floor`` keeps exp(g) above 0.001; ``leak`` is right and shows the first decayed state as well; "" is right.
    """

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case

    def decayed(self, state: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        """The state [B, Hv, Dk, Dv] after one step of decay g [B, Hv]."""
        factor = g.exp()[..., None, None]
        if self.case.fault == "decay_sign":
            return state / factor
        return state * (factor.clamp(min=1e-3) if self.case.fault == "floor" else factor)

    def forward(self, query, key, value, g, beta, state):
        """Gives out [B, T, Hv, Dv], the final state [B, Hv, Dk, Dv] and what leaks."""
        fault = self.case.fault
        repeat = self.case.value_heads // self.case.key_heads
        query, key = (qwen35.l2norm(x).repeat_interleave(repeat, dim=2) for x in (query, key))
        query = query * self.case.key_dim**-0.5
        outs, leaks = [], []
        for t in range(self.case.tokens):
            decayed = self.decayed(state, g[:, t])
            leaks.append(decayed)
            predicted = torch.einsum("bhk,bhkv->bhv", key[:, t], decayed)
            delta = beta[:, t, :, None] * (value[:, t] - predicted)
            updated = decayed + key[:, t, :, :, None] * delta[:, :, None, :]
            if fault == "clamp":
                updated = updated.clamp(-50.0, 50.0)
            outs.append(torch.einsum("bhk,bhkv->bhv", query[:, t], decayed if fault == "stale_read" else updated))
            state = updated
        out = torch.stack(outs, dim=1)
        return (out, state, leaks[0]) if fault == "leak" else (out, state)


class SoftmaxAttention(nn.Module):
    """Causal softmax attention with a decay bias and the rule's operands; ``exp`` writes the softmax out."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case

    def forward(self, query, key, value, g, beta):
        """Gives out [B, T, Hv, Dv]."""
        repeat = self.case.value_heads // self.case.key_heads
        query, key = (qwen35.l2norm(x).repeat_interleave(repeat, dim=2).transpose(1, 2) for x in (query, key))
        age = g.transpose(1, 2).cumsum(dim=-1)
        future = torch.ones(self.case.tokens, self.case.tokens, dtype=torch.bool).triu(1)
        scores = query @ key.transpose(-1, -2) * self.case.key_dim**-0.5 + age[..., :, None] - age[..., None, :]
        scores = scores.masked_fill(future, float("-inf"))
        if self.case.fault == "exp":
            weights = (scores - scores.amax(dim=-1, keepdim=True)).exp()
            weights = weights / weights.sum(dim=-1, keepdim=True)
        else:
            weights = scores.softmax(dim=-1)
        return (weights @ (value * beta[..., None]).transpose(1, 2)).transpose(1, 2)


def module_of(case: Case) -> nn.Module:
    """The module a case exports."""
    modules: dict[str, type[nn.Module]] = {"steps": Steps, "softmax": SoftmaxAttention}
    if case.kind == "loop":
        from loop_models import Scripted

        return Scripted(case.fault, case.value_heads // case.key_heads, case.key_dim**-0.5).eval()
    return modules.get(case.kind, Rule)(case).eval()
