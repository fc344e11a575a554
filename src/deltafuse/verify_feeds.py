"""What to feed both sides of a site with: which role each input plays is read off the fused node's operands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from onnx import TensorProto, helper

from deltafuse.dims import Dim, evaluate, symbols
from deltafuse.draws import Draw
from deltafuse.fused import call as read_call
from deltafuse.graph import Graph
from deltafuse.reasons import Reason
from deltafuse.verify_regions import Region, walk_back

Array = npt.NDArray[np.generic]

FLOATS = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE})

#: The initial state comes last: where there is none, its zeros may be computed from another operand.
_PORTS = ("g", "gk", "beta", "query", "key", "value", "initial_state", "state")
_REDUCTIONS = frozenset({"ReduceSum", "ReduceSumSquare", "ReduceL2", "ReduceMean", "LpNormalization"})


@dataclass(frozen=True)
class Part:
    """What a region's input is for.

    Attributes:
        role: port of the fused node it feeds, ``shape`` where only its sizes count, ``other`` where nothing tells.
        normed: whether a norm lies between.
        key_dim: key head size, 0 where it is not known.
    """

    role: str
    normed: bool = False
    key_dim: int = 0


@dataclass(frozen=True)
class Input:
    """One input of both sides.

    Attributes:
        shape: sizes, symbolic where they are free.
        dtype: element type in the fused file.
    """

    name: str
    shape: tuple[Dim, ...]
    dtype: int
    part: Part


def parts(graph: Graph, region: Region, key_dims: Mapping[int, int]) -> dict[str, Part] | Reason:
    """Traces the operands of each fused node back to the region's inputs.

    Args:
        graph: of the fused file.
        region: its nodes.
        key_dims: fused node -> key head size.
    """
    inside = set(region.nodes)
    found: dict[str, Part] = {}
    for node in region.fused:
        call = read_call(graph.node(node))
        if isinstance(call, Reason):
            return call
        for port in _PORTS:
            if port not in call.ports:
                continue
            names, normed = _trace(graph, inside, call.ports[port])
            for name in names:
                found.setdefault(name, Part(port.replace("initial_", ""), normed, key_dims.get(node, 0)))
    return found


def _trace(graph: Graph, inside: set[int], operand: str) -> tuple[list[str], bool]:
    """Names of the region inputs that an operand's data comes from, and whether it is normalised on the way."""
    walk = walk_back(graph, inside, graph.find(operand) or 0)
    normed = any(graph.standard[node] in _REDUCTIONS for node in walk.nodes)
    return [graph.name(value) for value in walk.sources], normed


def feeds(inputs: Sequence[Input], numbers: Mapping[str, int], tokens: Dim, how: Draw, seed: int) -> dict[str, Array]:
    """Draws every input in double; integers and booleans in their own type.

    Args:
        inputs: of both sides.
        numbers: symbol -> size.
        tokens: the token count as it occurs in shapes.
        how: ranges to draw from.
        seed: of the generator.
    """
    rng = np.random.default_rng(seed)
    drawn = {item.name: draw(rng, item, numbers, tokens, how) for item in inputs}
    exponents = _exponents(inputs, how)
    far = {name: np.ldexp(np.asarray(drawn[name], np.float64), exponent) for name, exponent in exponents.items()}
    return {**drawn, **far}


def _exponents(inputs: Sequence[Input], how: Draw) -> dict[str, int]:
    """By which powers of two a draw takes operands apart: as in `deltafuse.scalings`, all rows alike.

    Both sides are given the same and run, so that only what the rule does not feel keeps them within bounds: operands
    that one input holds together stay as they are.
    """
    own = {item.part.role: item.part.normed for item in inputs}
    found: dict[str, int] = {}
    if how.spread and own.keys() >= {"query", "key"}:
        found["query"] = how.spread if how.corner & 1 else 0 if own["query"] else -how.spread
    if how.spread and own.get("key"):
        found["key"] = how.spread if how.corner >> 1 else 0
    elif how.spread and own.keys() >= {"key", "beta", "value"}:
        key = how.spread if how.corner >> 1 else -how.spread
        found |= {"key": key, "beta": -2 * key, "value": key}
    return {item.name: found[item.part.role] for item in inputs if item.part.role in found and item.dtype in FLOATS}


def draw(rng: np.random.Generator, item: Input, numbers: Mapping[str, int], tokens: Dim, how: Draw) -> Array:
    """Draws one input: floats in double, integers and booleans in their own type."""
    shape = tuple(evaluate(dim, numbers) for dim in item.shape)
    if item.dtype not in FLOATS:
        return _integers(rng, shape, item.dtype)
    if item.part.role == "shape":
        return np.zeros(shape)
    axis = _token_axis(item, tokens, numbers)
    floats = _floats(rng, shape, axis, item.part, how)
    if how.surge and item.part.role == "beta":
        _surge(floats, axis, evaluate(tokens, numbers), how.surge)
    return floats


def _integers(rng: np.random.Generator, shape: tuple[int, ...], dtype: int) -> Array:
    return rng.integers(0, 2, shape).astype(helper.tensor_dtype_to_np_dtype(dtype))


def _token_axis(item: Input, tokens: Dim, numbers: Mapping[str, int]) -> int | None:
    """The axis that holds the tokens, None where it cannot be told: keys are then not correlated along it."""
    if not isinstance(tokens, int):
        own = symbols(tokens)
        axes = [axis for axis, dim in enumerate(item.shape) if symbols(dim) & own]
    else:
        count = evaluate(tokens, numbers)
        axes = [axis for axis, dim in enumerate(item.shape) if dim == count and axis > 0]
    return axes[0] if axes else None


def _floats(
    rng: np.random.Generator, shape: tuple[int, ...], axis: int | None, part: Part, how: Draw
) -> npt.NDArray[np.float64]:
    if part.role in ("g", "gk"):
        return _decay(rng, shape, axis, how)
    if part.role == "beta":
        low, high = how.beta
        # Keys whose norm is not exactly one leave less room above 1.
        return rng.uniform(low, min(high, 1.0), shape)
    if part.role in ("query", "key"):
        return _vectors(rng, shape, axis, part, how)
    return rng.standard_normal(shape) * how.scale


def _surge(beta: npt.NDArray[np.float64], axis: int | None, tokens: int, exponent: int) -> None:
    """Makes the beta of one token large, where it can be told."""
    if tokens == 1:
        beta *= 2.0**exponent
    elif axis is not None:
        moved = np.moveaxis(beta, axis, 0)
        moved[len(moved) // 2] *= 2.0**exponent


def _decay(rng: np.random.Generator, shape: tuple[int, ...], axis: int | None, how: Draw) -> npt.NDArray[np.float64]:
    g = rng.uniform(*how.decay, shape)
    if how.plunge and axis is not None:
        moved = np.moveaxis(g, axis, 0)
        moved[len(moved) // 2] = how.plunge
    return g


def _vectors(
    rng: np.random.Generator, shape: tuple[int, ...], axis: int | None, part: Part, how: Draw
) -> npt.NDArray[np.float64]:
    """Rows of norm about one, or of the draw's norm where the site normalises them; keys change slowly in time."""
    drawn = rng.standard_normal(shape)
    if part.role == "key" and axis is not None:
        moved = np.moveaxis(drawn, axis, 0)
        for t in range(1, len(moved)):
            moved[t] = how.memory * moved[t - 1] + np.sqrt(1 - how.memory**2) * moved[t]
    last = shape[-1] if shape else 1
    size = part.key_dim if part.key_dim and last % part.key_dim == 0 else last
    rows = np.reshape(drawn, (-1, size))
    unit: npt.NDArray[np.float64] = rows / np.linalg.norm(rows, axis=-1, keepdims=True)
    norms = how.norm * rng.uniform(0.5, 1.5, (len(rows), 1)) if part.normed else np.ones((len(rows), 1))
    return np.reshape(unit * norms, shape)
