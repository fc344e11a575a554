"""The two functions of deltafuse.torch without an exporter: transformers' own to float32 rounding."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from transformers.models.olmo_hybrid import modeling_olmo_hybrid as olmo
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen35
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

import deltafuse.torch
from deltafuse import UserError

FORMS = {
    "chunk": (deltafuse.torch.chunk_gated_delta_rule, "torch_chunk_gated_delta_rule"),
    "recurrent": (deltafuse.torch.recurrent_gated_delta_rule, "torch_recurrent_gated_delta_rule"),
}
#: batch, tokens, key heads, value heads, key size, value size, whether there is a state, type
CASES = [
    (2, 130, 2, 4, 16, 24, True, torch.float32),
    (1, 3, 4, 4, 8, 12, False, torch.float32),
    (3, 64, 1, 4, 16, 8, True, torch.float16),
    (1, 65, 2, 2, 8, 16, False, torch.bfloat16),
]


def operands(batch, tokens, key_heads, value_heads, key_dim, value_dim, state, dtype):
    torch.manual_seed(tokens)
    key = torch.randn(batch, 1, key_heads, key_dim) + 0.5 * torch.randn(batch, tokens, key_heads, key_dim)
    return {
        "query": torch.randn(batch, tokens, key_heads, key_dim).to(dtype),
        "key": torch.nn.functional.normalize(key, dim=-1).to(dtype),
        "value": torch.randn(batch, tokens, value_heads, value_dim).to(dtype),
        "g": -0.1 * torch.rand(batch, tokens, value_heads),
        "beta": torch.rand(batch, tokens, value_heads).to(dtype),
        "initial_state": torch.randn(batch, value_heads, key_dim, value_dim) if state else None,
    }


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("module", [qwen35, qwen3_next, olmo])
def test_equal_to_transformers(form, normalise, case, module):
    ours, name = FORMS[form]
    given = operands(*case) | {"use_qk_l2norm_in_kernel": normalise, "output_final_state": True}
    found, wanted = ours(**given), getattr(module, name)(**given)
    for a, b, rounding in zip(found, wanted, (torch.finfo(case[-1]).eps, 1e-6), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert (a - b).abs().max() <= max(1e-6, rounding) * b.abs().max()


@pytest.mark.parametrize("form", FORMS)
def test_the_state_is_given_back_where_it_is_asked_for(form):
    ours, _ = FORMS[form]
    given = operands(*CASES[0])
    out, state = ours(**given)
    assert state is None
    again, state = ours(**given, output_final_state=True)
    assert torch.equal(out, again)
    assert state.shape == (2, 4, 16, 24)


@pytest.mark.parametrize("form", FORMS)
def test_scale(form):
    ours, _ = FORMS[form]
    given = operands(*CASES[0])
    plain, scaled = ours(**given)[0], ours(**given, scale=0.5)[0]
    torch.testing.assert_close(scaled, plain * 0.5 * 4, rtol=1e-5, atol=1e-6)


def test_chunks_of_any_size_give_the_same():
    given = operands(*CASES[0])
    ours = [deltafuse.torch.chunk_gated_delta_rule(**given, chunk_size=size)[0] for size in (1, 7, 64, 500)]
    for other in ours[1:]:
        torch.testing.assert_close(other, ours[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_gradients_flow(form):
    ours, name = FORMS[form]
    given = operands(*CASES[0])
    grads = []
    for rule in (ours, getattr(qwen35, name)):
        leaves = {key: value.clone().requires_grad_() for key, value in given.items()}
        rule(**leaves)[0].square().sum().backward()
        grads.append([leaf.grad for leaf in leaves.values()])
    for a, b in zip(*grads, strict=True):
        assert (a - b).abs().max() <= 1e-5 * b.abs().max()


def test_what_no_kernel_could_do_is_refused():
    given = operands(1, 3, 4, 6, 8, 8, False, torch.float32)
    with pytest.raises(UserError, match="6 value heads are no multiple of 4 key heads") as raised:
        deltafuse.torch.chunk_gated_delta_rule(**given)
    assert raised.value.code == "head-ratio"
    with pytest.raises(UserError, match="packed sequences") as raised:
        deltafuse.torch.recurrent_gated_delta_rule(**operands(*CASES[1]), cu_seqlens=torch.tensor([0, 3]))
    assert raised.value.code == "packed-sequences"


def test_the_package_alone_does_not_import_torch():
    code = "import sys, deltafuse; deltafuse.fuse; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"


def test_without_torch_the_message_says_what_to_install():
    code = "import sys; sys.modules['torch'] = None; import deltafuse.torch"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1] == "ImportError: deltafuse.torch needs torch: pip install 'deltafuse[torch]'"
