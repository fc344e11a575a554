"""The TorchScript exporter: an autograd function whose ``symbolic`` writes a target's nodes with ``graph.op``."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from onnx import AttributeProto, NodeProto, TensorProto, numpy_helper
from torch import Tensor

from deltafuse.torch.call import LAYOUTS, LEAST_OPSET, Call, Operand, attribute, declared, plan
from deltafuse.torch.eager import chunked, prepare, recurrent

#: What of torch is without types, or is what its own symbolic functions use.
_torch: Any = torch
_jit: Any = torch.jit
_torch_c: Any = _torch._C

NAMES = ("query", "key", "value", "g", "beta", "state")
TYPES = {
    torch.float32: int(TensorProto.FLOAT),
    torch.float16: int(TensorProto.FLOAT16),
    torch.bfloat16: int(TensorProto.BFLOAT16),
    torch.float64: int(TensorProto.DOUBLE),
}
#: Letter that ``graph.op`` puts behind the name of an attribute of each kind.
_SUFFIXES = {
    AttributeProto.INT: "i", AttributeProto.INTS: "i", AttributeProto.FLOAT: "f", AttributeProto.FLOATS: "f",
    AttributeProto.STRING: "s", AttributeProto.STRINGS: "s", AttributeProto.TENSOR: "t",
}  # fmt: skip


@dataclass(frozen=True)
class Traced:
    """A call as it was traced: the exporter loses sizes on the way.

    Attributes:
        call: what was asked for.
        shapes, dtypes: of each operand that there is.
        inputs: shapes of the model's inputs and weights, in order; () for what is no tensor.
    """

    call: Call
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    inputs: tuple[tuple[int, ...], ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the operands that there are; only the state may be missing."""
        return NAMES[: len(self.shapes)]


def compute(call: Call, operands: Sequence[Tensor | None]) -> tuple[Tensor, Tensor]:
    """Runs the rule in torch.

    Args:
        call: what was asked for.
        operands: query, key, value, g, beta and state, the last maybe None.

    Returns:
        Output [B, T, Nv, Dv] in the query's type, final state [B, Nv, Dk, Dv] float32.
    """
    query, key, value, g, beta = (operand for operand in operands[:5] if operand is not None)
    ready = prepare(query, key, value, g, beta, operands[5], scale=call.scale, normalise=call.normalise)
    out, final = recurrent(ready) if call.form == "recurrent" else chunked(ready, call.chunk_size)
    return out.transpose(1, 2).contiguous().to(query.dtype), final


def export(call: Call, operands: Sequence[Tensor | None]) -> tuple[Tensor, Tensor | None]:
    """The same while the TorchScript exporter traces."""
    given = [operand for operand in operands if operand is not None]
    with warnings.catch_warnings():
        # Sizes are tensors while a trace runs. These are kept with the call; the trace does not depend on them.
        warnings.simplefilter("ignore", _jit.TracerWarning)
        shapes = tuple(tuple(int(size) for size in operand.shape) for operand in given)
    traced = Traced(call, shapes, tuple(operand.dtype for operand in given), _inputs())
    # A trace that cannot be exported ends here, before the exporter goes through all of it.
    plan(call, _operands(traced, (), ()), "Div", LEAST_OPSET)
    rule: Any = GatedDeltaRule
    found = rule.apply(traced, *operands)
    return found if call.keep_state else (found, None)


class GatedDeltaRule(torch.autograd.Function):
    """The rule as one node of a trace."""

    @staticmethod
    def forward(ctx: Any, traced: Traced, *operands: Tensor | None) -> Any:
        """Runs the rule, so that what follows is traced with the right values."""
        out, final = compute(traced.call, operands)
        return (out, final) if traced.call.keep_state else out

    @staticmethod
    def symbolic(graph: Any, traced: Traced, *operands: Any) -> Any:
        """Writes the target's nodes."""
        given = dict(zip(traced.names, operands, strict=False))
        known = _operands(traced, _fixed(given), _dynamic(graph, traced))
        planned = plan(traced.call, known, "Div", graph.opset)
        values, types = dict(given), declared(planned)
        batch, tokens, heads, value_dim = known["value"].shape
        final_shape = (batch, heads, known["key"].shape[3], value_dim)
        types |= {
            "out": (known["query"].dtype, (batch, tokens, heads, value_dim)),
            "final_state": (int(TensorProto.FLOAT), final_shape),
        }
        for node in planned.nodes:
            _write(graph, node, values)
            for name in node.output:
                if name in types:
                    _declare(values[name], given["value"].type(), *types[name])
        return (values["out"], values["final_state"]) if traced.call.keep_state else values["out"]


def _inputs() -> tuple[tuple[int, ...], ...]:
    """Shapes of the trace's inputs, weights included."""
    sizes = [_sizes(value) or [] for value in _torch_c._get_tracing_state().graph().inputs()]
    return tuple(tuple(size for size in shape if size is not None) for shape in sizes)


def _sizes(value: Any) -> list[int | None] | None:
    """What the exporter knows of a value's shape, None for a size that it does not know."""
    kind = value.type()
    return kind.varyingSizes() if hasattr(kind, "varyingSizes") else None


def _dynamic(graph: Any, traced: Traced) -> set[int]:
    """Sizes at which the dynamic axes of the model's inputs were traced."""
    found: set[int] = set()
    for index, value in enumerate(graph.graph.inputs()):
        sizes = _sizes(value)
        if sizes is None or None not in sizes:
            continue
        fitting = [shape for shape in traced.inputs if _fits(shape, sizes)]
        # Inputs keep their order; where one seems not to, all that it could be count.
        own = [shape for shape in traced.inputs[index : index + 1] if shape in fitting]
        found |= {known for shape in own or fitting for size, known in zip(sizes, shape, strict=True) if size is None}
    return found


def _fits(shape: Sequence[int], sizes: Sequence[int | None]) -> bool:
    return len(shape) == len(sizes) and all(size in (None, known) for size, known in zip(sizes, shape, strict=True))


def _fixed(given: Mapping[str, Any]) -> set[str]:
    """Which of the axes B and T the exporter knows the size of, in any operand."""
    axes = ((LAYOUTS[name], _sizes(value)) for name, value in given.items())
    return {
        letter
        for layout, sizes in axes
        if sizes is not None
        for letter, size in zip(layout, sizes, strict=True)
        if size is not None
    }


def _operands(traced: Traced, fixed: Collection[str], dynamic: Collection[int]) -> dict[str, Operand]:
    """Sizes as they were traced, but for the batch and the tokens where they are, or may be, dynamic.

    With dynamic axes the exporter gives up many sizes that are fixed. One that it knows of any operand is fixed, and so
    is one that no dynamic axis of an input had in the trace.

    Args:
        traced: the call.
        fixed: the axes whose size the exporter knows.
        dynamic: sizes at which dynamic axes were traced.
    """
    free = {letter for letter in "BT" if letter not in fixed}
    found: dict[str, Operand] = {}
    for name, shape, dtype in zip(traced.names, traced.shapes, traced.dtypes, strict=True):
        axes = zip(LAYOUTS[name], shape, strict=True)
        sizes = tuple(None if letter in free and size in dynamic else size for letter, size in axes)
        found[name] = Operand(sizes, TYPES[dtype])
    return found


def _write(graph: Any, node: NodeProto, values: dict[str, Any]) -> None:
    """One node; its results go into `values`."""
    kind = f"{node.domain}::{node.op_type}" if node.domain else node.op_type
    attributes: dict[str, Any] = {}
    for entry in node.attribute:
        value = attribute(entry)
        if isinstance(value, TensorProto):
            value = _torch.from_numpy(np.array(numpy_helper.to_array(value)))
        attributes[f"{entry.name}_{_SUFFIXES[entry.type]}"] = value
    inputs = [values[name] if name else _absent(graph) for name in node.input]
    results = graph.op(kind, *inputs, outputs=len(node.output), **attributes)
    values |= zip(node.output, results if len(node.output) > 1 else (results,), strict=True)


def _absent(graph: Any) -> Any:
    """An optional input that is left out."""
    missing = graph.op("prim::Constant")
    missing.setType(_torch_c.OptionalType.ofTensor())
    return missing


def _declare(value: Any, like: Any, dtype: int, shape: Sequence[int | str | None]) -> None:
    """Says what a value is, since shape inference does not know the target's operators."""
    sizes = [size if isinstance(size, int) else None for size in shape]
    kinds = {number: kind for kind, number in TYPES.items()}
    value.setType(like.with_dtype(kinds[dtype]).with_sizes(sizes))
