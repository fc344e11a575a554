"""Inputs to run a whole model on: sizes solved, values drawn as a real run would have them, or taken from a file."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
from onnx import TensorProto, helper

from deltafuse.dims import Dim, evaluate, symbols
from deltafuse.draws import DRAWS
from deltafuse.dtypes import dtype_name
from deltafuse.errors import UserError
from deltafuse.inputs_file import read_arrays
from deltafuse.inputs_roles import InputRole, input_roles
from deltafuse.inputs_sizes import SiteSizes, declared_names, solve_sizes, visited
from deltafuse.shapes import Shapes
from deltafuse.verify_feeds import Input, Part, draw
from deltafuse.wire import Model
from deltafuse.wording import number

Array = npt.NDArray[np.generic]

_FLOATS = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE})
_INTEGERS = frozenset({
    TensorProto.INT8, TensorProto.INT16, TensorProto.INT32, TensorProto.INT64,
    TensorProto.UINT8, TensorProto.UINT16, TensorProto.UINT32, TensorProto.UINT64,
})  # fmt: skip

#: What numpy takes, and a gigabyte of numbers drawn in double.
_MOST_AXES, _MOST_ELEMENTS = 64, 1 << 27


@dataclass(frozen=True)
class InputOptions:
    """What the user says about inputs.

    Attributes:
        path: an npz with arrays for some or all inputs, by their names.
        save: where to write the inputs that are used, as an npz.
        seed: of the numbers that are drawn.
        dims: symbol of an input's axis -> size.
    """

    path: Path | None = None
    save: Path | None = None
    seed: int = 0
    dims: Mapping[str, int] = field(default_factory=dict[str, int])


@dataclass(frozen=True)
class Inputs:
    """One array for each input.

    Attributes:
        arrays: by name, in the order of the graph.
        sizes: symbol -> size.
        roles: what each input was taken for.
        given: names of the inputs whose arrays come from the user's file, or from a run before.
        steps: inputs of floats that are no state -> one array for each step of a chain, along a first axis.
        past: tokens that came before, as masks and caches tell.
    """

    arrays: Mapping[str, Array]
    sizes: Mapping[str, int]
    roles: Mapping[str, InputRole]
    given: tuple[str, ...]
    steps: Mapping[str, Array] = field(default_factory=dict[str, Array])
    past: int = 0


def make_inputs(
    model: Model,
    kinds: bytearray,
    sites: Sequence[SiteSizes],
    parts: Mapping[str, Part],
    options: InputOptions,
    *,
    given: Mapping[str, Array] | None = None,
    steps: int = 0,
    held: Collection[str] = (),
) -> Inputs:
    """Draws what the user does not give.

    Args:
        model: the fused file, whose pinned axes are numbers.
        kinds: of its values, see `deltafuse.classes.classify`.
        sites: what its sites say about sizes.
        parts: value that a fused site reads -> which operand of it.
        options: what the user says.
        given: arrays that a run before gave, by input.
        steps: of how many steps of a chain to draw what is no state.
        held: inputs that a step before gives.

    Raises:
        UserError: the file of inputs does not fit, an input is of a kind that cannot be drawn, or no sizes fit.
    """
    shapes = visited(Shapes(model))
    graph = model.graph
    names = [graph.name(value) for value in graph.inputs]
    arrays = ({} if options.path is None else _given(shapes, options.path)) | dict(given or {})
    sizes = solve_sizes(shapes, sites, options.dims, {name: array.shape for name, array in arrays.items()})
    roles = input_roles(shapes, kinds, parts)
    tokens = sites[0].tokens if sites else 1
    drawer = _Drawer(shapes, roles, sizes, options, arrays, tokens)
    fresh = [name for name in names if steps and name not in arrays and name not in held and drawer.is_fresh(name)]
    chains: dict[str, Array] = {
        name: np.stack([drawer.array(name, step) for step in range(1, steps + 1)]) for name in fresh
    }
    drawn = {name: drawer.array(name) for name in names}
    return Inputs(drawn, sizes, roles, tuple(arrays), chains, drawer.past())


def _given(shapes: Shapes, path: Path) -> dict[str, Array]:
    """The arrays of a file that are inputs; others (expected outputs) are left."""
    graph = shapes.graph
    found = read_arrays(path)
    arrays = {name: found[name] for name in map(graph.name, graph.inputs) if name in found}
    if not arrays:
        wanted = ", ".join(map(graph.name, graph.inputs))
        raise UserError("inputs-unknown", f"{path} has no array for any input; name them after these: {wanted}")
    for name, array in arrays.items():
        wanted = helper.tensor_dtype_to_np_dtype(shapes.dtype(graph.find(name) or 0) or 0)
        if array.dtype != wanted:
            raise UserError("inputs-type", f"{name} in {path} is {array.dtype}, the model takes {wanted}: convert it")
    return arrays


class _Drawer:
    """Draws arrays one by one; what an input is filled with does not depend on the others that are drawn."""

    def __init__(
        self,
        shapes: Shapes,
        roles: Mapping[str, InputRole],
        sizes: Mapping[str, int],
        options: InputOptions,
        given: Mapping[str, Array],
        tokens: Dim,
    ) -> None:
        self._shapes = shapes
        self._roles = roles
        self._options = options
        self._given = given
        self._tokens = shapes.find(tokens)
        names = declared_names(shapes)
        self._numbers = {names[name]: size for name, size in sizes.items()}

    def is_fresh(self, name: str) -> bool:
        """Whether another array goes in at each step: floats that are no state, ids of several tokens."""
        role = self._roles[name]
        if role.role == "ids":
            return math.prod(self._shape(name)) > 1
        state = role.part is not None and role.part.role == "state"
        dtype = self._shapes.dtype(self._shapes.graph.find(name) or 0)
        return dtype in _FLOATS and role.role != "mask" and not state

    def array(self, name: str, step: int = 0) -> Array:
        """The array for one input, at one step of a chain."""
        if name in self._given:
            return self._given[name]
        dtype = self._shapes.dtype(self._shapes.graph.find(name) or 0) or 0
        shape, role = self._fitting(name), self._roles[name]
        rng = np.random.default_rng([self._options.seed, *name.encode(), *([step] if step else [])])
        if dtype == TensorProto.BOOL:
            return np.ones(shape, np.bool_)
        if dtype in _INTEGERS:
            numbers = self._integers(rng, shape, role)
        elif dtype in _FLOATS:
            numbers = self._floats(rng, name, shape, role)
        else:
            kind = dtype_name(dtype)
            raise UserError("inputs-type", f"the input {name} is of type {kind}, for which no values are drawn: "
                            "give arrays with --inputs")  # fmt: skip
        return numbers.astype(helper.tensor_dtype_to_np_dtype(dtype))

    def _dims(self, name: str) -> tuple[Dim, ...]:
        shape = self._shapes.shape(self._shapes.graph.find(name) or 0)
        if shape is None:
            raise UserError("inputs-rank", f"the input {name} declares no shape: give an array with --inputs")
        return shape

    def _shape(self, name: str) -> tuple[int, ...]:
        return tuple(evaluate(dim, self._numbers) for dim in self._dims(name))

    def _fitting(self, name: str) -> tuple[int, ...]:
        """The shape of an input that is to be drawn."""
        shape = self._shape(name)
        if len(shape) > _MOST_AXES or math.prod(shape) > _MOST_ELEMENTS or min(shape, default=0) < 0:
            sizes = " x ".join(map(str, shape[:8]))
            axes = number(len(shape), "axis")
            raise UserError("inputs-too-large", f"the input {name} declares {axes} ({sizes[:80]}), too many to draw: "
                            "give sizes with --dim, arrays with --inputs, or take --level site")  # fmt: skip
        return shape

    def _floats(self, rng: np.random.Generator, name: str, shape: tuple[int, ...], role: InputRole) -> Array:
        if role.role == "mask":
            return np.zeros(shape)
        if role.part is None or role.part.role == "state":
            # Entries of a state are sums of values times keys of norm one, spread over the key axis.
            key_dim = 0 if role.part is None else role.part.key_dim
            return rng.standard_normal(shape) / math.sqrt(key_dim or 1)
        item = Input(name, shape, TensorProto.DOUBLE, role.part)
        return draw(rng, item, self._numbers, self._tokens, DRAWS[0])

    def _integers(self, rng: np.random.Generator, shape: tuple[int, ...], role: InputRole) -> npt.NDArray[np.int64]:
        if role.role == "ids":
            return self._ids(rng, shape, role)
        if role.role == "positions":
            steps = np.arange(shape[-1] if shape else 1) + self._past(shape[-1] if shape else 1)
            steps = np.minimum(steps, role.rows - 1) if role.rows else steps
            return np.broadcast_to(steps if shape else steps[0], shape)
        return np.ones(shape, np.int64)

    def _ids(self, rng: np.random.Generator, shape: tuple[int, ...], role: InputRole) -> npt.NDArray[np.int64]:
        rows = np.setdiff1d(np.arange(role.rows), role.marks)
        ids = rng.choice(rows if len(rows) else np.arange(role.rows), math.prod(shape)).astype(np.int64)
        count = self._image_rows()
        if count and role.marks:
            if count > ids.size:
                rows = number(count, "image row does", "image rows do")
                raise UserError("inputs-image", f"{rows} not fit into {number(ids.size, 'token')}: "
                                "give fewer of them, or more tokens with --dim")  # fmt: skip
            # Behind the first token where there is room, as a prompt has it.
            start = min(1, ids.size - count)
            ids[start : start + count] = role.marks[0]
        return np.reshape(ids, shape)

    def _image_rows(self) -> int:
        """How many image rows the user asks for."""
        names = declared_names(self._shapes)
        asked = {names[name] for name in self._options.dims}
        for name, role in self._roles.items():
            own = self._dims(name)[0] if role.role == "image" else 0
            if name in self._given and role.role == "image":
                return self._given[name].shape[0]
            if symbols(own) & asked:
                return evaluate(own, self._numbers)
        return 0

    def past(self) -> int:
        """Tokens that came before those of the ids."""
        ids = [self._shape(name) for name, role in self._roles.items() if role.role == "ids"]
        return self._past(ids[0][-1] if ids and ids[0] else 1)

    def _past(self, step: int) -> int:
        """Tokens that came before: what the mask has more, else the length of a cache."""
        masks = [name for name, role in self._roles.items() if role.role == "mask" and len(self._dims(name)) == 2]
        lengths = [self._shape(name)[1] - step for name in masks]
        for name, role in self._roles.items():
            if role.role == "other" and not masks and len(self._dims(name)) >= 4:
                lengths += [evaluate(dim, self._numbers) for dim in self._dims(name)[2:] if not isinstance(dim, int)]
        return max([0, *lengths])
