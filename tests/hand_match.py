"""Matches built by hand, for tests of what comes after the prover."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from deltafuse.dims import symbol
from deltafuse.match import Dims, Match, Norm, Proof, Role, Validity

FLOAT, HALF, BF16 = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16
NUMPY = {FLOAT: np.float32, HALF: np.float16, TensorProto.DOUBLE: np.float64}


@dataclass(frozen=True)
class Site:
    """What differs from site to site; `match` and `arrays` follow from it."""

    name: str = "layers.3"
    tokens: int | str = "seq_len"
    batch: int | str = "batch"
    key_heads: int = 2
    value_heads: int = 4
    key_dim: int = 16
    value_dim: int = 32
    dtype: int = FLOAT
    g_dtype: int = FLOAT
    qkv_layout: str = "BTHD"
    gate_layout: str = "BTH"
    state_layout: str | None = "BHKV"
    out_layout: str = "BTHD"
    final_layout: str | None = "BHKV"
    state_dtype: int = FLOAT
    norm: Norm | None = None
    scale: float = 0.3
    valid: tuple[int, int] | None = None


def l2norm(dtype: int, eps: float = 1e-6, kind: str = "rsqrt") -> Norm:
    """The norm as transformers' exports write it: Mul, ReduceSum, Add, Sqrt, Reciprocal, Mul."""
    constants = (
        numpy_helper.from_array(np.array(eps, NUMPY[dtype]), "eps"),
        numpy_helper.from_array(np.array([-1]), "axes"),
    )
    nodes = (
        helper.make_node("Mul", ["x", "x"], ["squares"]),
        helper.make_node("ReduceSum", ["squares", "axes"], ["sum"], keepdims=1),
        helper.make_node("Add", ["sum", "eps"], ["shifted"]),
        helper.make_node("Sqrt", ["shifted"], ["root"]),
        helper.make_node("Reciprocal", ["root"], ["factor"]),
        helper.make_node("Mul", ["x", "factor"], ["y"]),
    )
    return Norm(kind, float(numpy_helper.to_array(constants[0])), dtype, nodes, constants)


def match(site: Site) -> Match:
    dims = Dims(
        _dim(site.batch), _dim(site.tokens), site.key_heads, site.value_heads, site.key_dim, site.value_dim
    )  # fmt: skip
    ids = iter(range(1, 20))

    def role(name: str, layout: str | None, dtype: int, heads: int, size: int) -> Role | None:
        if layout is None:
            return None
        letters = {
            "B": dims.batch,
            "T": dims.tokens,
            "H": heads,
            "D": size,
            "K": dims.key_dim,
            "V": dims.value_dim,
            "1": 1,
        }
        shape = [_product([letters[letter] for letter in axis]) for axis in parts(layout)]
        return Role(next(ids), name, layout, tuple(shape), dtype)

    nk, nv, dk, dv = site.key_heads, site.value_heads, site.key_dim, site.value_dim
    valid = None if site.valid is None else Validity(*site.valid, None, None, site.valid)
    return Match(
        name=site.name,
        rule="gated_delta_rule",
        form="chunk",
        query=role("/model/layers.3/linear_attn/q", site.qkv_layout, site.dtype, nk, dk),
        key=role("/model/layers.3/linear_attn/k", site.qkv_layout, site.dtype, nk, dk),
        value=role("/model/layers.3/linear_attn/v", site.qkv_layout, site.dtype, nv, dv),
        g=role("/model/layers.3/linear_attn/g", site.gate_layout, site.g_dtype, nv, 1),
        beta=role("/model/layers.3/linear_attn/beta", site.gate_layout, site.dtype, nv, 1),
        state=role("past_state", site.state_layout, site.state_dtype, nv, 1),
        out=role("/model/layers.3/linear_attn/o", site.out_layout, site.dtype, nv, dv),
        final_state=role("present_state", site.final_layout, site.state_dtype, nv, 1),
        query_norm=site.norm,
        key_norm=site.norm,
        dims=dims,
        scale=site.scale,
        valid_tokens=valid,
        nodes=(),
        class_key=b"",
        proof=Proof(0.0, 3),
    )


def parts(layout: str) -> list[str]:
    """The letters of each axis."""
    found: list[str] = []
    inside = False
    for letter in layout:
        if letter in "()":
            inside = letter == "("
            found += [""] * inside
        elif inside:
            found[-1] += letter
        else:
            found.append(letter)
    return found


def arrange(array: np.ndarray, have: str, layout: str) -> np.ndarray:
    """An array of plain axes ``have`` in a layout; letters that the layout lacks have size one."""
    letters = [letter for axis in parts(layout) for letter in axis if letter != "1"]
    dropped = tuple(have.index(letter) for letter in have if letter not in letters)
    array, have = array.squeeze(dropped), "".join(letter for letter in have if letter in letters)
    sizes = dict(zip((*have, "1"), (*array.shape, 1), strict=True))
    array = array.transpose([have.index(letter) for letter in letters])
    return array.reshape([int(np.prod([sizes[letter] for letter in axis])) for axis in parts(layout)])


def arrays(site: Site, tokens: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Draws in plain axes, double: q, k, v BTHD; g, beta BTH; state BHKV."""
    rng = np.random.default_rng(seed)
    nk, nv, dk, dv = site.key_heads, site.value_heads, site.key_dim, site.value_dim
    common = rng.normal(size=(1, 1, nk, dk))
    return {
        "q": rng.normal(size=(1, tokens, nk, dk)) / np.sqrt(dk),
        "k": (common + 0.5 * rng.normal(size=(1, tokens, nk, dk))) / np.sqrt(dk),
        "v": rng.normal(size=(1, tokens, nv, dv)),
        "g": -0.1 * rng.uniform(size=(1, tokens, nv)),
        "beta": rng.uniform(0.05, 0.95, size=(1, tokens, nv)),
        "state": rng.normal(size=(1, nv, dk, dv)),
    }


def recurrence(site: Site, draw: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The rule in double: out BTHD and the final state BHKV."""
    q, k, v, g, beta = (draw[name][0] for name in ("q", "k", "v", "g", "beta"))
    if site.norm is not None:
        q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + site.norm.eps) for x in (q, k))
    state = np.zeros_like(draw["state"][0]) if site.state_layout is None else draw["state"][0].copy()
    group, out = site.value_heads // site.key_heads, np.zeros_like(v)
    reads = [h // group for h in range(site.value_heads)]
    for t in range(v.shape[0]):
        for h in range(site.value_heads):
            state[h] *= np.exp(g[t, h])
            delta = beta[t, h] * (v[t, h] - k[t, reads[h]] @ state[h])
            state[h] += np.outer(k[t, reads[h]], delta)
            out[t, h] = site.scale * (q[t, reads[h]] @ state[h])
    return out[None], state[None]


def _dim(size: int | str):
    return size if isinstance(size, int) else symbol(size)


def _product(sizes):
    result = 1
    for size in sizes:
        result = result * size
    return result
