"""The shape engine against what onnxruntime returns, operator by operator, for several sizes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest

from deltafuse.dims import ceildiv, evaluate, parse, symbol
from deltafuse.shapes import Shapes
from deltafuse.wire import scan

B, T, S = map(symbol, ("b", "t", "s"))
#: Sizes that every graph below runs at. No two are equal in one set, so that swapped axes show.
BINDINGS = ({"b": 2, "t": 5, "s": 7}, {"b": 1, "t": 37, "s": 3})


def model_of(inputs: str, body: str, opset: int = 20, imports: str = "") -> onnx.ModelProto:
    """A model whose outputs are all values that its nodes write, none of them typed."""
    text = f'<ir_version: 8, opset_import: ["" : {opset}{imports}]> g ({inputs}) => () {{ {body} }}'
    model = onnx.parser.parse_model(text)
    for name in dict.fromkeys(name for node in model.graph.node for name in node.output if name):
        model.graph.output.append(onnx.ValueInfoProto(name=name))
    return model


def engine_of(model: onnx.ModelProto, folder: Path, sizes: Mapping[str, int] | None = None) -> Shapes:
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return Shapes(scan(path), sizes)


def run(model: onnx.ModelProto, binding: Mapping[str, int]) -> dict[str, np.ndarray]:
    """Every output of the model on drawn inputs of these sizes."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    session = ort.InferenceSession(model.SerializeToString(), options)
    draw = np.random.default_rng(0)
    feeds = {}
    for value in model.graph.input:
        shape = [
            dim.dim_value if dim.HasField("dim_value") else evaluate(parse(dim.dim_param), binding)
            for dim in value.type.tensor_type.shape.dim
        ]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        feeds[value.name] = np.asarray(draw.random(shape) * 2).astype(dtype)
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def check(model: onnx.ModelProto, folder: Path, open_dims: frozenset[str] = frozenset()) -> Shapes:
    """Every value's shape, dtype and contents are what a run gives; `open_dims` may have unknown sizes."""
    shapes = engine_of(model, folder)
    for binding in BINDINGS:
        for name, array in run(model, binding).items():
            value = shapes.graph.find(name)
            assert value is not None
            dims, contents = shapes.shape(value), shapes.contents(value)
            assert dims is not None, name
            assert len(dims) == array.ndim, name
            if name not in open_dims:
                assert [evaluate(dim, binding) for dim in dims] == list(array.shape), name
            assert shapes.dtype(value) == onnx.helper.np_dtype_to_tensor_dtype(array.dtype), name
            _check_contents(contents, array, binding)
    return shapes


def _check_contents(contents: np.ndarray | None, array: np.ndarray, binding: Mapping[str, int]) -> None:
    if contents is None:
        return
    assert contents.shape == array.shape
    for item, found in zip(contents.reshape(-1).tolist(), array.reshape(-1).tolist(), strict=True):
        if isinstance(item, (int, float)):
            assert item == found
        elif item is not None and hasattr(item, "terms"):
            assert evaluate(item, binding) == found


X = "float[b, t, 8] x"
OPERATORS = {
    "broadcast": (f"{X}, float[t, 1] y", "a = Add(x, y) c = Greater(a, x) d = Where(c, x, y) e = Not(c)"),
    "variadic": (f"{X}, float[1] y, float[t, 8] z", "a = Max(x, y, z) c = Sum(x, x)"),
    "unary": (X, "a = Exp(x) c = Sigmoid(a) d = Softplus(c) e = Neg(d) f = Sqrt(e) g = Cast <to = 10> (x)"),
    "cast_like": (f"{X}, int64[b] y", "a = CastLike(x, y) c = Softmax <axis = -1> (x) d = Identity(a)"),
    "matmul": (f"{X}, float[8, s] w, float[8] v", "a = MatMul(x, w) c = MatMul(x, v) d = MatMul(v, w)"),
    "matmul_batched": ("float[b, 1, t, 8] x, float[4, 8, s] y", "a = MatMul(x, y)"),
    "gemm": ("float[8, t] x, float[s, 8] w, float[s] c", "a = Gemm <transA = 1, transB = 1> (x, w, c)"),
    "einsum": (
        f"{X}, float[b, 8, s] y",
        'a = Einsum <equation = "btd,bds->bst"> (x, y) c = Einsum <equation = "...i"> (x)',
    ),
    "einsum_dots": (f"{X}, float[8, s] w", 'a = Einsum <equation = "...d,ds->...s"> (x, w)'),
    "conv": (
        "float[b, 8, t] x, float[8, 2, 3] w",
        "a = Conv <group = 4, pads = [2, 0], strides = [2], dilations = [1]> (x, w)",
    ),
    "conv_depthwise": ("float[b, 8, t] x, float[8, 1, 4] w", "a = Conv <group = 8, pads = [3, 3]> (x, w)"),
    "conv_2d": ("float[b, 3, t, 9] x, float[4, 3, 2, 3] w", "a = Conv <strides = [1, 2], dilations = [1, 2]> (x, w)"),
    "conv_same": ("float[b, 3, t] x, float[4, 3, 3] w", 'a = Conv <auto_pad = "SAME_UPPER", strides = [2]> (x, w)'),
    "conv_valid": ("float[b, 3, t] x, float[4, 3, 3] w", 'a = Conv <auto_pad = "VALID"> (x, w)'),
    "pools": (
        "float[b, 3, t] x",
        "a = MaxPool <kernel_shape = [2], strides = [2], ceil_mode = 1> (x) c = AveragePool <kernel_shape = [3]> (x)"
        " d = GlobalAveragePool(x)",
    ),
    "pools_padded": (
        "float[b, 3, t] x",
        "a = MaxPool <kernel_shape = [3], strides = [2], pads = [1, 1], ceil_mode = 1> (x)"
        " c = MaxPool <kernel_shape = [2], strides = [3], pads = [0, 1], ceil_mode = 1> (x)"
        " d = AveragePool <kernel_shape = [2], strides = [2], pads = [1, 1], ceil_mode = 1> (x)",
    ),
    "reshape": (
        X,
        "i = Constant <value_ints = [0, -1, 2, 4]> () a = Reshape(x, i) j = Constant <value_ints = [-1, 8]> ()"
        " c = Reshape(x, j) k = Constant <value_ints = [0, 0, 8]> () d = Reshape(x, k)",
    ),
    "reshape_allowzero": ("float[0, t] x", "i = Constant <value_ints = [3, 0]> () a = Reshape <allowzero = 1> (x, i)"),
    "reshape_by_shape": (
        X,
        "s = Shape(x) i = Constant <value_int = 1> () n = Gather(s, i) j = Constant <value_ints = [0]> ()"
        " m = Unsqueeze(n, j) k = Constant <value_ints = [-1, 2, 4]> () t = Concat <axis = 0> (m, k) a = Reshape(x, t)",
    ),
    "transpose": (X, "a = Transpose <perm = [2, 0, 1]> (x) c = Transpose(x)"),
    "squeeze": (
        "float[1, b, 1, t] x",
        "i = Constant <value_ints = [0, -2]> () a = Squeeze(x, i) j = Constant <value_ints = [-1, 1]> ()"
        " c = Unsqueeze(a, j) d = Flatten <axis = 2> (c)",
    ),
    "expand": (
        "float[b, 1, 8] x, float[t] y",
        "s = Shape(y) e = Constant <value_ints = [1]> () f = Concat <axis = 0> (s, e) a = Expand(x, f)",
    ),
    "expand_minus_one": (
        "float[b, 1] x, float[t] y",
        "s = Shape(y) o = Shape(x) k = Constant <value_ints = [-1]> () c = Concat <axis = 0> (k, s)"
        " n = Shape(c) l = ConstantOfShape <value = int64[1] {1}> (n) m = Constant <value_int = -1> ()"
        " d = Mul(l, m) e = Equal(c, d) f = Where(e, l, c) a = Expand(x, f)",
    ),
    "tile": (X, "i = Constant <value_ints = [1, 2, 3]> () a = Tile(x, i)"),
    "concat": (f"{X}, float[b, s, 8] y", "a = Concat <axis = 1> (x, y) c = Concat <axis = -1> (a, a)"),
    "split": (
        X,
        "i = Constant <value_ints = [3, 5]> () a, c = Split <axis = -1> (x, i)"
        " d, e = Split <axis = 2, num_outputs = 2> (x)"
        " f, g, h = Split <axis = 2, num_outputs = 3> (x)",
    ),
    "slice": (
        X,
        "o = Constant <value_ints = [1]> () z = Constant <value_ints = [0]> () n = Constant <value_ints = [-3]> ()"
        " e = Constant <value_ints = [9223372036854775807]> () m = Constant <value_ints = [-1]> ()"
        " a = Slice(x, o, e, o) c = Slice(x, n, e, o) d = Slice(x, z, m, o) f = Slice(x, z, e, m, o)"
        " two = Constant <value_ints = [2]> () g = Slice(x, z, e, o, two) h = Slice(x, z, two, m)"
        " far = Constant <value_ints = [100]> () k = Slice(x, two, far, o)",
    ),
    "slice_reversed": (
        X,
        "o = Constant <value_ints = [1]> () m = Constant <value_ints = [-1]> ()"
        " e = Constant <value_ints = [-9223372036854775807]> () a = Slice(x, m, e, o, m)",
    ),
    "gather": (
        f"{X}, int64[s, 2] i",
        "z = Sub(i, i) a = Gather <axis = 1> (x, z) j = Constant <value_int = 0> () c = Gather <axis = -1> (x, j)"
        " k = Gather(x, j)",
    ),
    "gather_elements": (f"{X}, int64[b, t, 3] i", "z = Sub(i, i) a = GatherElements <axis = 2> (x, z)"),
    "gather_nd": (f"{X}, int64[s, 2] i", "z = Sub(i, i) a = GatherND(x, z)"),
    "gather_nd_batched": (f"{X}, int64[b, s, 1] i", "z = Sub(i, i) a = GatherND <batch_dims = 1> (x, z)"),
    "scatter": (
        f"{X}, int64[s, 1] i, float[s, t, 8] u, int64[b, t, 1] j",
        "z = Sub(i, i) a = ScatterND(x, z, u) y = Sub(j, j) f = Cast <to = 1> (j)"
        " c = ScatterElements <axis = 2> (x, y, f)",
    ),
    "pad": (X, "p = Constant <value_ints = [0, 2, 0, 0, 1, 0]> () a = Pad(x, p)"),
    "pad_to_chunk": (
        X,
        "s = Shape <start = 1, end = 2> (x) c = Constant <value_ints = [16]> () r = Mod(s, c)"
        " q = Sub(c, r) m = Mod(q, c)"
        " z = Constant <value_ints = [0, 0, 0, 0]> () e = Constant <value_ints = [0]> ()"
        " p = Concat <axis = 0> (z, m, e)"
        " a = Pad(x, p) d = Constant <value_ints = [0, -1, 16, 8]> () f = Reshape(a, d)",
    ),
    "pad_with_zeros_only": (X, "p = Constant <value_ints = [0, 0, 0, 0, 0, 0]> () a = Pad(x, p)"),
    "range": (
        X,
        "s = Shape(x) i = Constant <value_int = 1> () n = Gather(s, i) z = Constant <value_int = 0> ()"
        " a = Range(z, n, i) k = Constant <value_int = 3> () c = Range(z, n, k) f = Cast <to = 1> (n)"
        " m = Constant <value_int = -1> () d = Range(n, z, m)",
    ),
    "shape": (X, "a = Shape(x) c = Shape <start = 1> (x) d = Shape <start = -2, end = -1> (x) e = Size(x)"),
    "constant_of_shape": (X, "s = Shape(x) a = ConstantOfShape(s) c = ConstantOfShape <value = bool[1] {1}> (s)"),
    "constants": (
        X,
        "a = Constant <value = int32[2] {3, 4}> () c = Constant <value_float = 1.5> () d = Constant <value_int = 3> ()"
        " e = Constant <value_ints = [1, 2]> () f = Constant <value_floats = [1.0, 2.0]> ()",
    ),
    "trilu": (
        X,
        "a = Trilu <upper = 0> (x) i = Constant <value_int = 1> () c = CumSum(x, i)"
        " z = Constant <value_int = 0> () y = Gather(x, z) d = EyeLike(y)",
    ),
    "reduce": (
        X,
        "i = Constant <value_ints = [-1]> () a = ReduceSum(x, i) c = ReduceSum <keepdims = 0> (x, i) d = ReduceSum(x)"
        " e = ReduceMean <keepdims = 0> (x) f = ReduceSum <noop_with_empty_axes = 1> (x) g = ReduceL2(x, i)"
        " h = ArgMax <axis = 1> (x) k = ArgMax <axis = -1, keepdims = 0> (x)",
    ),
    "top_k": (X, "n = Constant <value_ints = [3]> () a, c = TopK <axis = 2> (x, n)"),
    "normalization": (f"{X}, float[8] w", "a = LayerNormalization <axis = -1> (x, w, w)"),
    "one_hot": (
        "int64[b, t] x",
        "d = Constant <value_int = 5> () v = Constant <value_floats = [0.0, 1.0]> () a = OneHot(x, d, v)"
        " c = OneHot <axis = 0> (x, d, v)",
    ),
    "dropout": (X, "a, c = Dropout(x)"),
    "clip": (X, "i = Constant <value_float = 0.5> () a = Clip(x, i)"),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_shapes_types_and_contents_are_those_of_a_run(name: str, tmp_path: Path) -> None:
    inputs, body = OPERATORS[name]
    shapes = check(model_of(inputs, body), tmp_path)
    assert not shapes.conflicts


ATTRIBUTE_FORMS = {
    "squeeze": ("float[1, b, 1] x", "a = Squeeze <axes = [0, 2]> (x) c = Unsqueeze <axes = [0, 2]> (a)"),
    "split": (X, "a, c = Split <axis = 2, split = [3, 5]> (x) d, e = Split <axis = 2> (x)"),
    "reduce": (X, "a = ReduceSum <axes = [1], keepdims = 0> (x) c = ReduceMean <axes = [-1]> (x) d = ReduceMax(x)"),
    "slice": (X, "a = Slice <axes = [1], starts = [1], ends = [9223372036854775807]> (x)"),
    "pad": (X, "a = Pad <pads = [0, 1, 0, 0, 2, 0]> (x)"),
}


@pytest.mark.parametrize("name", ATTRIBUTE_FORMS)
def test_attribute_forms_of_older_opsets(name: str, tmp_path: Path) -> None:
    inputs, body = ATTRIBUTE_FORMS[name]
    check(model_of(inputs, body, opset=9 if name in ("slice", "pad") else 11), tmp_path)


ARITHMETIC = {
    "chunks": "c = Constant <value_int = 16> () l = Add(n, c) o = Constant <value_int = 1> () m = Sub(l, o)"
    " q = Div(m, c)",
    "chunks_in_floats": "c = Constant <value_float = 16.0> () f = Cast <to = 1> (n) d = Div(f, c)"
    " e = Ceil(d) q = Cast <to = 7> (e)"
    " g = Floor(d) h = Cast <to = 7> (g)",
    "negated": "m = Neg(n) c = Constant <value_int = 16> () q = Mod(m, c) r = Abs(m) k = Sign(n)",
    "comparisons": "o = Constant <value_int = 1> () z = Constant <value_int = 0> () a = Greater(n, z) q = Equal(n, z)"
    " c = GreaterOrEqual(n, o) d = Less(n, n) e = LessOrEqual(n, n) f = And(a, c) g = Or(q, d) h = Xor(q, a)"
    " i = Not(a)",
    "choices": "o = Constant <value_int = 1> () a = Equal(n, n) q = Where(a, n, o) c = Max(n, o) d = Min(n, o)",
    "doubled": "t = Constant <value_float = 2.0> () f = Cast <to = 1> (n) g = Mul(f, t) q = Cast <to = 6> (g)",
    "vectors": "k = Constant <value_ints = [2, 3]> () q = Mul(n, k) a = ReduceProd(q) c = ReduceSum <keepdims = 0> (q)"
    " d = ReduceMax(q) e = Reshape(q, v) v = Constant <value_ints = [2, 1]> ()",
    "moved": "i = Constant <value_ints = [2, 1]> () q = Gather(s, i) z = Constant <value_ints = [0]> ()"
    " o = Constant <value_ints = [1]> () a = Slice(s, o, e, z) e = Constant <value_ints = [3]> ()"
    " c, d, f = Split <num_outputs = 3> (s)"
    " g = Tile(q, k) k = Constant <value_ints = [2]> () h = Expand(n, k) j = Squeeze(c) l = Transpose(q)",
    "scattered": "z = Constant <value_ints = [0]> () y = Constant <value = int64[1, 1] {1}> () v = Unsqueeze(n, z)"
    " q = ScatterND(s, y, v) a = ScatterElements(s, z, v)",
    "hot": "d = Constant <value_int = 3> () v = Constant <value_ints = [0, 1]> () i = Constant <value_ints = [2, 0]> ()"
    " q = OneHot(i, d, v) z = Constant <value_int = 0> () o = Constant <value_int = 1> () r = Range(z, d, o)",
    "filled": "k = Constant <value_ints = [2, 2]> () q = ConstantOfShape <value = int64[1] {-1}> (k) a = Identity(q)",
}


@pytest.mark.parametrize("name", ARITHMETIC)
def test_shape_arithmetic_is_followed(name: str, tmp_path: Path) -> None:
    body = "s = Shape(x) one = Constant <value_int = 1> () n = Gather(s, one) " + ARITHMETIC[name]
    model = model_of(X, body)
    _sort(model.graph)
    shapes = check(model, tmp_path)
    result = shapes.graph.find("q")
    assert result is not None
    contents = shapes.contents(result)
    assert contents is not None
    assert all(item is not None for item in contents.reshape(-1).tolist())


def _sort(graph: onnx.GraphProto) -> None:
    """Constants first: the texts above name them where they are used."""
    nodes = sorted(graph.node, key=lambda node: node.op_type != "Constant")
    del graph.node[:]
    graph.node.extend(nodes)


def names_of(shapes: Shapes, name: str) -> list[str]:
    value = shapes.graph.find(name)
    assert value is not None
    shape = shapes.shape(value)
    assert shape is not None
    return [str(dim) for dim in shape]


def test_padding_to_chunks_comes_out_in_one_form(tmp_path: Path) -> None:
    shapes = check(model_of(*OPERATORS["pad_to_chunk"]), tmp_path)
    assert names_of(shapes, "f") == ["b", str(ceildiv(T, 16)), "16", "8"]


def test_sizes_that_meet_are_united(tmp_path: Path) -> None:
    model = model_of(
        "float[s43, 4, t] mask, float[s17, 4, t] x, float[s17, t, s9] y, float[1, 4, s5] z",
        "a = Add(x, mask) c = MatMul(a, y) d = Concat <axis = 0> (a, z)",
    )
    shapes = engine_of(model, tmp_path)
    assert names_of(shapes, "c") == ["s43", "4", "s9"]
    assert names_of(shapes, "d") == ["s43 + 1", "4", "t"]
    assert shapes.classes() == {"s43": {"s43", "s17"}, "t": {"t", "s5"}}
    assert shapes.find(symbol("s17") * 4) == 4 * symbol("s43")
    assert not shapes.conflicts


def test_reshape_unites_what_is_left_over(tmp_path: Path) -> None:
    model = model_of("float[s17, 2, 8] x, float[s43, 16] y", "s = Shape(y) a = Reshape(x, s)")
    shapes = engine_of(model, tmp_path)
    assert names_of(shapes, "a") == ["s17", "16"]
    assert shapes.classes() == {"s17": {"s17", "s43"}}


def test_a_number_is_noted_and_no_name_is_lost(tmp_path: Path) -> None:
    shapes = engine_of(model_of("float[b, 8] x, float[4, 8] y", "a = Add(x, y) c = Exp(x)"), tmp_path)
    assert names_of(shapes, "a") == ["4", "8"]
    assert names_of(shapes, "c") == ["b", "8"]
    assert shapes.bindings == {"b": 4}


def test_contradictions_are_recorded_with_their_node(tmp_path: Path) -> None:
    shapes = engine_of(model_of("float[b, 3] x, float[b, 4] y, float[b, t] z", "a = Exp(x) c = Add(a, y)"), tmp_path)
    value = shapes.graph.find("c")
    assert value is not None
    shapes.shape(value)
    assert [(conflict.node, conflict.left, conflict.right) for conflict in shapes.conflicts] == [(1, 3, 4)]


def test_expressions_make_equations_and_no_union(tmp_path: Path) -> None:
    model = model_of(
        "float[b, past, 8] cache, float[b, step, 8] key, float[b, total] mask",
        "k = Concat <axis = 1> (cache, key) e = ReduceSum <keepdims = 0> (k, i) a = Add(e, mask)"
        " i = Constant <value_ints = [2]> ()",
    )
    _sort(model.graph)
    shapes = engine_of(model, tmp_path)
    assert names_of(shapes, "a") == ["b", "past + step"]
    assert shapes.classes() == {}
    assert [(str(e.left), str(e.right)) for e in shapes.unions.equations] == [("past + step", "total")]


def test_unnamed_axes_of_inputs_get_names_that_know_where_they_are_from(tmp_path: Path) -> None:
    model = model_of("float[b, t] x", "a = Exp(x)")
    del model.graph.input[0].type.tensor_type.shape.dim[:]
    model.graph.input[0].type.tensor_type.shape.dim.add()
    model.graph.input[0].type.tensor_type.shape.dim.add(dim_param="t")
    shapes = engine_of(model, tmp_path)
    assert names_of(shapes, "a") == ["x[0]", "t"]
    assert shapes.names.origins == {"x[0]": (shapes.graph.find("x"), 0)}


def test_digits_in_a_dim_param_are_a_number(tmp_path: Path) -> None:
    model = model_of("float[b, t] x", "a = Exp(x)")
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_param = "128"
    assert engine_of(model, tmp_path).shape(1) == (B, 128)


def declare(model: onnx.ModelProto, name: str, dims: list[int | str | None]) -> None:
    """States type and shape of an output."""
    info = onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT16, dims)
    next(output for output in model.graph.output if output.name == name).CopyFrom(info)


def test_unknown_operators_are_what_the_file_declares(tmp_path: Path) -> None:
    model = model_of(
        "float[b, 8] x", "a = other.Thing(x) c = other.Thing(a) d = Exp(a) e = Exp(c)", imports=', "other" : 1'
    )
    declare(model, "a", ["b", 16, None])
    shapes = engine_of(model, tmp_path)
    found = [shapes.graph.find(name) for name in "acde"]
    a, c, d, e = (value for value in found if value is not None)
    assert names_of(shapes, "d") == ["b", "16", "a[2]"]
    assert (shapes.dtype(a), shapes.dtype(d)) == (onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT16)
    assert (shapes.shape(c), shapes.dtype(c), shapes.shape(e), shapes.dtype(e)) == (None, None, None, None)
    shape = shapes.shape(d)
    assert shape is not None
    assert [shapes.is_known(dim) for dim in shape] == [True, True, False]


def test_declared_sizes_fill_what_a_rule_leaves_open(tmp_path: Path) -> None:
    model = model_of("float[b, 8] x", "n = NonZero(x) a = Transpose(n)")
    declare(model, "a", ["found", 2])
    shapes = engine_of(model, tmp_path)
    assert names_of(shapes, "n") == ["2", "n[1]"]
    assert names_of(shapes, "a") == ["found", "2"]
    assert shapes.find(parse("n[1]")) == symbol("found")


def test_data_flow_is_right_where_the_file_says_otherwise(tmp_path: Path) -> None:
    model = model_of("float[b, 8] x", "a = Exp(x) c = Exp(a)")
    declare(model, "a", ["nonsense", 9])
    shapes = engine_of(model, tmp_path)
    assert names_of(shapes, "c") == ["b", "8"]
    assert [(conflict.left, conflict.right) for conflict in shapes.conflicts] == [(8, 9)]


def test_an_exporters_number_wins_over_a_clamp(tmp_path: Path) -> None:
    body = (
        "s = Constant <value_ints = [-1]> () e = Constant <value_ints = [9223372036854775807]> ()"
        " two = Constant <value_ints = [2]> () y = Slice(x, two, e, s) a = Slice(y, s, e, s)"
    )
    model = model_of("float[b, t] x", body)
    shapes = engine_of(model, tmp_path)
    assert names_of(shapes, "a") == ["b", "Min(1, Max(0, t - 2))"]
    declare(model, "a", ["b", 1])
    assert names_of(engine_of(model, tmp_path), "a") == ["b", "1"]


def test_defined_values_cut_the_graph(tmp_path: Path) -> None:
    shapes = engine_of(model_of("float[b, 8] x", "a = Exp(x) c = Exp(a)"), tmp_path)
    a = shapes.graph.find("a")
    assert a is not None
    shapes.define(a, (B, T, 3), onnx.TensorProto.FLOAT16)
    c = shapes.graph.find("c")
    assert c is not None
    assert shapes.shape(c) == (B, T, 3)
    assert shapes.dtype(c) == onnx.TensorProto.FLOAT16
    assert shapes.again({"t": 5}).shape(c) == (B, 5, 3)


def test_numbers_can_be_put_in_for_symbols(tmp_path: Path) -> None:
    model = model_of(*OPERATORS["pad_to_chunk"])
    shapes = engine_of(model, tmp_path, {"b": 2, "t": 37})
    assert names_of(shapes, "f") == ["2", "3", "16", "8"]


def test_deep_graphs_need_no_recursion_and_no_more_than_the_slice(tmp_path: Path) -> None:
    chain = [onnx.helper.make_node("Exp", [f"v{i}"], [f"v{i + 1}"]) for i in range(20_000)]
    graph = onnx.helper.make_graph(
        chain,
        "g",
        [onnx.helper.make_tensor_value_info("v0", onnx.TensorProto.FLOAT, ["b", 8])],
        [onnx.helper.make_tensor_value_info("v20000", onnx.TensorProto.FLOAT, None)],
    )
    shapes = engine_of(onnx.helper.make_model(graph), tmp_path)
    early, last = shapes.graph.find("v5"), shapes.graph.find("v20000")
    assert early is not None
    assert last is not None
    assert shapes.shape(early) == (B, 8)
    assert shapes.known_shape(last) is None
    assert shapes.shape(last) == (B, 8)
    assert shapes.dtype(last) == onnx.TensorProto.FLOAT


def test_scatter_asks_for_its_data_only(tmp_path: Path) -> None:
    body = "z = Shape(x) o = ConstantOfShape(z) u = Exp(x) w = Exp(u) y = Sub(i, i) a = ScatterND(o, y, w)"
    shapes = engine_of(model_of("float[b, 8] x, int64[b, 1] i", body), tmp_path)
    a, w = shapes.graph.find("a"), shapes.graph.find("w")
    assert a is not None
    assert w is not None
    assert shapes.shape(a) == (B, 8)
    assert shapes.known_shape(w) is None


CONTROL = {
    "if_known": (
        X,
        "s = Shape <start = 2> (x) e = Constant <value_ints = [8]> () c = Equal(s, e)"
        " a = If (c) <then_branch = g1 () => (float p) { p = Transpose(x) },"
        " else_branch = g2 () => (float q) { q = Identity(x) }>",
    ),
    "if_open": (
        f"{X}, bool flag",
        "a = If (flag) <then_branch = g1 () => (float p) { p = Exp(x) },"
        " else_branch = g2 () => (float q) { q = Identity(x) }>",
    ),
    "loop": (
        X,
        "s = Shape <start = 1, end = 2> (x) z = Constant <value_ints = [0]> () n = Squeeze(s, z)"
        " t = Constant <value = bool {1}> ()"
        " a, c = Loop (n, t, x) <body = g1 (int64 i, bool go, float v) => (bool on, float w, float out)"
        " { on = Identity(go) w = Exp(v) out = Transpose(w) }>",
    ),
    "scan": (
        "float[t, b, 8] x, float[b, 8] h",
        "a, c = Scan (h, x) <num_scan_inputs = 1, body = g1 (float[b, 8] v, float[b, 8] u) => (float w, float out)"
        " { w = Add(v, u) out = Transpose(w) }>",
    ),
}


@pytest.mark.parametrize("name", CONTROL)
def test_bodies_are_followed(name: str, tmp_path: Path) -> None:
    inputs, body = CONTROL[name]
    model = model_of(inputs, body)
    for node in model.graph.node:
        _untype(node)
    shapes = engine_of(model, tmp_path)
    for binding in BINDINGS:
        for output, array in run(model, binding).items():
            value = shapes.graph.find(output)
            assert value is not None
            shape = shapes.shape(value)
            assert shape is not None, output
            assert [evaluate(dim, binding) for dim in shape] == list(array.shape), output
            assert shapes.dtype(value) == onnx.helper.np_dtype_to_tensor_dtype(array.dtype), output


def _untype(node: onnx.NodeProto) -> None:
    """Body outputs state no shape, so that nothing is read off."""
    for attribute in node.attribute:
        scalars = 2 if node.op_type == "Loop" else 0
        for value in (*attribute.g.output, *attribute.g.input[scalars:]):
            if not value.type.tensor_type.shape.dim:
                value.type.tensor_type.ClearField("shape")


def test_loop_sizes_that_an_iteration_changes_stay_open(tmp_path: Path) -> None:
    body = (
        "n = Constant <value_int = 3> () t = Constant <value = bool {1}> ()"
        " a = Loop (n, t, x) <body = g1 (int64 i, bool go, float v) => (bool on, float w)"
        " { on = Identity(go) w = Concat <axis = 1> (v, v) }>"
    )
    model = model_of(X, body)
    for node in model.graph.node:
        _untype(node)
    assert names_of(engine_of(model, tmp_path), "a") == ["b", "a[1]", "8"]


CONTRIB = {
    "fused_matmul": (
        "float[b, 8, t] x, float[b, s, 8] y",
        "a = com.microsoft.FusedMatMul <transA = 1, transB = 1> (x, y)",
    ),
    "quick_gelu": (X, "a = com.microsoft.QuickGelu(x)"),
    "bias_gelu": (f"{X}, float[8] y", "a = com.microsoft.BiasGelu(x, y)"),
    "skip_norm": (
        f"{X}, float[8] w",
        "a, m, v, c = com.microsoft.SkipSimplifiedLayerNormalization(x, x, w) d = SimplifiedLayerNormalization(x, w)",
    ),
}


@pytest.mark.parametrize("name", CONTRIB)
def test_contributed_operators(name: str, tmp_path: Path) -> None:
    inputs, body = CONTRIB[name]
    model = model_of(inputs, body, imports=', "com.microsoft" : 1')
    kept = [output for output in model.graph.output if output.name not in ("m", "v")]
    del model.graph.output[:]
    model.graph.output.extend(kept)
    for node in model.graph.node:
        node.output[:] = ["" if name in ("m", "v") else name for name in node.output]
    check(model, tmp_path)


def test_grouped_attention(tmp_path: Path) -> None:
    body = (
        "a, k, v = com.microsoft.GroupQueryAttention <num_heads = 4, kv_num_heads = 2>"
        " (x, y, y, past, past, length, total)"
    )
    inputs = "float[b, t, 64] x, float[b, t, 32] y, float[b, 2, s, 16] past, int32[b] length, int32 total"
    shapes = engine_of(model_of(inputs, body, imports=', "com.microsoft" : 1'), tmp_path)
    assert names_of(shapes, "a") == ["b", "t", "64"]
    assert names_of(shapes, "k") == ["b", "2", "k[2]", "16"]


def test_constants_beside_the_file_are_read(tmp_path: Path) -> None:
    model = model_of(X, "a = Reshape(x, i)")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([0, -1, 2, 4]), "i"))
    tensor = model.graph.initializer[0]
    (tmp_path / "data").write_bytes(tensor.raw_data)
    onnx.external_data_helper.set_external_data(tensor, "data", offset=0, length=len(tensor.raw_data))
    tensor.ClearField("raw_data")
    shapes = engine_of(model, tmp_path)
    assert names_of(shapes, "a") == ["b", "t", "2", "4"]


def test_missing_constants_leave_the_rank(tmp_path: Path) -> None:
    model = model_of(X, "a = Reshape(x, i)")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([0, -1, 2, 4]), "i"))
    tensor = model.graph.initializer[0]
    onnx.external_data_helper.set_external_data(tensor, "absent", offset=0, length=32)
    tensor.ClearField("raw_data")
    assert names_of(engine_of(model, tmp_path), "a") == ["a[0]", "a[1]", "a[2]", "a[3]"]
