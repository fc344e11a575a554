"""Tensors of a model without their data, and their data where it is small."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import onnx
from onnx import numpy_helper

from deltafuse.errors import UserError
from deltafuse.locations import external_bytes
from deltafuse.protobuf import LENGTH, VARINT, Bytes, fields, read_varint
from deltafuse.reasons import TEXTS, Reason

if TYPE_CHECKING:
    from deltafuse.wire import Model

TEXTS.update(
    {
        "constant-too-large": "the constant {name} has {size:# byte}, at most {limit} are read; store it in fewer",
        "constant-type": "the constant {name} is of a kind that is not read ({type}); give it a plain tensor type",
        "constant-damaged": "the constant {name} cannot be decoded ({error}); export the model again",
    }
)

#: bits of one element; types that are not here are not read (4-bit and smaller types, strings)
_NAMES = {
    8: "UINT8 INT8 BOOL",
    16: "UINT16 INT16 FLOAT16 BFLOAT16",
    32: "UINT32 INT32 FLOAT",
    64: "UINT64 INT64 DOUBLE",
}
_BITS = {onnx.TensorProto.DataType.Value(name): bits for bits, names in _NAMES.items() for name in names.split()}
#: Constants of at most this many bytes are remembered.
_SHORT = 128
#: Attributes of a Constant that hold numbers or texts -> element type.
_CONSTANT_TYPES = {
    b"value_float": onnx.TensorProto.FLOAT,
    b"value_floats": onnx.TensorProto.FLOAT,
    b"value_int": onnx.TensorProto.INT64,
    b"value_ints": onnx.TensorProto.INT64,
    b"value_string": onnx.TensorProto.STRING,
    b"value_strings": onnx.TensorProto.STRING,
}
#: The type that an attribute of a Constant has; files of old leave it out.
_ATTRIBUTE_TYPES = {
    name.encode(): onnx.AttributeProto.AttributeType.Value(kind)
    for name, kind in (
        ("value", "TENSOR"), ("sparse_value", "SPARSE_TENSOR"), ("value_float", "FLOAT"), ("value_floats", "FLOATS"),
        ("value_int", "INT"), ("value_ints", "INTS"), ("value_string", "STRING"), ("value_strings", "STRINGS"),
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorHead:
    """A TensorProto without its data.

    Attributes:
        name: initializer name, "" inside a Constant attribute.
        dtype: ``onnx.TensorProto`` element type.
        dims: sizes.
        start, end: byte range of the TensorProto message in the file (`form` says of which message).
        external: key/value pairs of external_data, empty where the data is inline.
        form: which message lies there: ``tensor`` (TensorProto), ``sparse`` (SparseTensorProto) or ``attribute``
            (AttributeProto of a Constant's value_int, value_floats, ...).
        rest: byte ranges of further parts of the same message (a submessage may be split; the parts merge).
    """

    name: str
    dtype: int
    dims: tuple[int, ...]
    start: int
    end: int
    external: dict[str, str] = field(default_factory=dict[str, str])
    form: str = "tensor"
    rest: tuple[tuple[int, int], ...] = ()

    @property
    def elements(self) -> int:
        """How many elements the tensor has."""
        count = 1
        for size in self.dims:
            count *= size
        return count

    @property
    def offset(self) -> int:
        """Where external data begins in its file.

        Raises:
            UserError: ``external-data-damaged``: the file says something that is no number of bytes.
        """
        return self._number("offset")

    @property
    def length(self) -> int:
        """Bytes of external data, 0 where the file does not say; raises as `offset` does."""
        return self._number("length")

    def _number(self, key: str) -> int:
        text = self.external.get(key) or "0"
        if text.isdecimal() and len(text) < 19:
            return int(text)
        raise UserError(
            "external-data-damaged",
            f"the external data of {self.name or 'a constant'} has the {key} {text[:40]!r}, which is no number of bytes"
            ": save the model again",
        )

    def message(self, data: Bytes) -> bytes:
        """The bytes of the message, its parts joined (which is how protobuf merges them)."""
        return b"".join(bytes(data[start:end]) for start, end in ((self.start, self.end), *self.rest))


def tensor_head(data: Bytes, parts: Sequence[tuple[int, int]]) -> TensorHead:
    """Reads all but the data of the TensorProto in `parts`, data is skipped by its length.

    Raises:
        WireError: the bytes are no message.
        UnicodeDecodeError: a name is not UTF-8.
    """
    name, dtype, location = "", 0, 0
    dims: list[int] = []
    external: dict[str, str] = {}
    for start, end in parts:
        for number, wire, value, begin, stop, _ in fields(data, start, end):
            if number == 1:
                dims += [_signed(value)] if wire == VARINT else _packed(data, begin, stop)
            elif number == 2:
                dtype = value
            elif number == 8:
                name = bytes(data[begin:stop]).decode()
            elif number == 13:
                external.update([text_entry(data, begin, stop)])
            elif number == 14:
                location = value
    first, *rest = parts
    if location != onnx.TensorProto.EXTERNAL:
        external = {}
    return TensorHead(name, dtype, tuple(dims), first[0], first[1], external, rest=tuple(rest))


def sparse_head(data: Bytes, parts: Sequence[tuple[int, int]]) -> TensorHead:
    """As `tensor_head` for a SparseTensorProto: name and type of its values, dims of the whole."""
    dims: list[int] = []
    values: list[tuple[int, int]] = []
    for start, end in parts:
        for number, wire, value, begin, stop, _ in fields(data, start, end):
            if number == 1:
                values.append((begin, stop))
            elif number == 3:
                dims += [_signed(value)] if wire == VARINT else _packed(data, begin, stop)
    inner = tensor_head(data, values) if values else TensorHead("", 0, (), 0, 0)
    first, *rest = parts
    return TensorHead(inner.name, inner.dtype, tuple(dims), *first, inner.external, "sparse", tuple(rest))


def constant_head(data: Bytes, attributes: Sequence[tuple[int, int]]) -> TensorHead | None:
    """The head of what a Constant node with these attributes holds, None where it holds nothing known."""
    for start, end in attributes:
        name, tensors, sparse, lengths = _constant_fields(data, start, end)
        if name == b"value" and tensors:
            return tensor_head(data, tensors)
        if name == b"sparse_value" and sparse:
            return sparse_head(data, sparse)
        dtype = _CONSTANT_TYPES.get(name)
        if dtype is not None:
            return TensorHead("", dtype, (lengths,) if name.endswith(b"s") else (), start, end, form="attribute")
    return None


def _constant_fields(
    data: Bytes, start: int, end: int
) -> tuple[bytes, list[tuple[int, int]], list[tuple[int, int]], int]:
    """Name, tensors, sparse tensors and number of elements; no name where the attribute says it is of another type."""
    name, tensors, sparse, lengths, kind = b"", list[tuple[int, int]](), list[tuple[int, int]](), 0, 0
    for number, wire, value, begin, stop, _ in fields(data, start, end):
        if number == 1:
            name = bytes(data[begin:stop])
        elif number == 5:
            tensors.append((begin, stop))
        elif number == 22:
            sparse.append((begin, stop))
        elif number in (7, 8, 9):
            lengths += _count(data, number, wire, begin, stop)
        elif number == 20:
            kind = value
    # runtimes go by the type that is stated, whatever is filled
    return name if kind in (0, _ATTRIBUTE_TYPES.get(name, 0)) else b"", tensors, sparse, lengths


@lru_cache(maxsize=4096)
def _short_head(attribute: bytes) -> TensorHead | None:
    # exports repeat a few constants (axes, an index) tens of thousands of times
    return constant_head(attribute, [(0, len(attribute))])


def node_head(data: Bytes, attributes: Sequence[tuple[int, int]]) -> TensorHead | None:
    """What `constant_head` gives, found faster where the same constant was seen before."""
    start, end = attributes[0] if len(attributes) == 1 else (0, _SHORT + 1)
    if end - start > _SHORT:
        return constant_head(data, attributes)
    head = _short_head(bytes(data[start:end]))
    if head is None:
        return None
    rest = tuple((first + start, last + start) for first, last in head.rest)
    span = (head.start + start, head.end + start)
    return TensorHead(head.name, head.dtype, head.dims, *span, head.external, head.form, rest)


def text_entry(data: Bytes, start: int, end: int) -> tuple[str, str]:
    """Key and value of a StringStringEntryProto."""
    key = value = ""
    for number, _, _, begin, stop, _ in fields(data, start, end):
        if number == 1:
            key = bytes(data[begin:stop]).decode()
        elif number == 2:
            value = bytes(data[begin:stop]).decode()
    return key, value


def read_tensor(model: Model, head: TensorHead, limit: int = 1 << 20) -> npt.NDArray[np.generic] | Reason:
    """Reads a constant, inline or external, of at most `limit` bytes.

    Of an external file only the tensor's own bytes are read. bfloat16 comes back as float32.

    Returns:
        The array in the dtype and shape of the file, or the reason why it was not read:
        ``constant-too-large``, ``external-data-missing``, ``external-data-short``, ``external-data-outside``,
        ``constant-type``, ``constant-damaged``.
    """
    name = head.name or "of a Constant node"
    bits = _BITS.get(head.dtype)
    if bits is None or head.form == "sparse":
        kind = "sparse" if head.form == "sparse" else str(head.dtype)
        return Reason("constant-type", {"name": name, "type": kind})
    size = head.elements * bits // 8
    if min(head.dims, default=0) < 0:
        return Reason("constant-damaged", {"name": name, "error": f"dims {list(head.dims)}"})
    if size > limit:
        return Reason("constant-too-large", {"name": name, "size": size, "limit": limit})
    try:
        message = head.message(model.data)
        if not head.external:
            decode = _short_array if len(message) <= _SHORT else _array
            return decode(message, head.form, head.dtype, bool(head.dims))
        raw = external_bytes(model, head, name, size)
        if isinstance(raw, Reason):
            return raw
        tensor = onnx.TensorProto.FromString(message)
        tensor.ClearField("external_data")
        tensor.data_location = onnx.TensorProto.DEFAULT
        tensor.raw_data = raw
        return _widened(numpy_helper.to_array(tensor), head.dtype)
    except (ValueError, TypeError) as error:
        return Reason("constant-damaged", {"name": name, "error": error})


def _array(message: bytes, form: str, dtype: int, many: bool) -> npt.NDArray[np.generic]:
    if form == "attribute":
        attribute = onnx.AttributeProto.FromString(message)
        if dtype == onnx.TensorProto.FLOAT:
            return np.array(list(attribute.floats) if many else attribute.f, np.float32)
        return np.array(list(attribute.ints) if many else attribute.i, np.int64)
    return _widened(numpy_helper.to_array(onnx.TensorProto.FromString(message)), dtype)


def _widened(array: npt.NDArray[np.generic], dtype: int) -> npt.NDArray[np.generic]:
    return array.astype(np.float32) if dtype == onnx.TensorProto.BFLOAT16 else array


@lru_cache(maxsize=4096)
def _short_array(message: bytes, form: str, dtype: int, many: bool) -> npt.NDArray[np.generic]:
    array = _array(message, form, dtype, many)
    array.flags.writeable = False  # it is handed out again
    return array


def _packed(data: Bytes, start: int, end: int) -> list[int]:
    values: list[int] = []
    while start < end:
        value, start = read_varint(data, start)
        values.append(_signed(value))
    return values


def _count(data: Bytes, number: int, wire: int, begin: int, stop: int) -> int:
    if wire != LENGTH or number == 9:
        return 1
    return (stop - begin) // 4 if number == 7 else len(_packed(data, begin, stop))


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
