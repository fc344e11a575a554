"""What a file that is no ONNX model looks like, so that a slip of the pen is told as such."""

from __future__ import annotations

from collections.abc import Iterator

#: How many bytes are looked at.
HEAD = 512

#: Where a mark stands, the mark, what such a file is and what to do.
_MARKS: tuple[tuple[int, bytes, str], ...] = (
    (0, b"version https://git-lfs", "a Git LFS pointer, not the model: run `git lfs pull`"),
    (0, b"PK\x03\x04", "a zip archive, as torch.save and numpy.savez write: export the model to ONNX first"),
    (0, b"\x80\x02", "a Python pickle, as torch.save wrote: export the model to ONNX first"),
    (0, b"\x93NUMPY", "an array of numpy: give the model, arrays go to options such as --inputs"),
    (0, b"GGUF", "GGUF weights, which hold no graph: export the model to ONNX first"),
    (0, b"\x1f\x8b", "gzip: unpack it first"),
    (0, b"\x28\xb5\x2f\xfd", "zstd: unpack it first"),
    (0, b"\x89HDF", "an HDF5 file, as Keras writes: export the model to ONNX first"),
    (0, b"\x7fELF", "a program: give the model"),
    (4, b"TFL3", "a TFLite model: export the model to ONNX instead"),
    (4, b"ORTM", "a model in ORT format: give the ONNX file that it was made from"),
    (8, b'{"', "safetensors weights, which hold no graph: export the model to ONNX first"),
)
_EXPECTED = "give an ONNX file, as torch.onnx.export writes"


def looks_like(head: bytes) -> str:
    """What a file is by its first bytes, and what to do; "" where they do not tell.

    Args:
        head: its first `HEAD` bytes, or all of them.
    """
    for start, mark, kind in _MARKS:
        if head[start:].startswith(mark):
            return kind
    text = _text(head)
    start = text.lstrip().lower()
    if start.startswith(("<!doctype html", "<html")):
        return "a web page, which a download gives in place of a file that needs a login: download the model again"
    if start.startswith(("{", "[")):
        return f"JSON: {_EXPECTED}"
    first = next(_lines(text), "")
    return f"a text that begins with {first!r}: {_EXPECTED}" if first else ""


def _text(head: bytes) -> str:
    """The bytes as text, "" where they are none; a letter may be cut in two at the end."""
    for end in range(len(head), max(len(head) - 4, 0), -1):
        try:
            text = head[:end].decode()
        except UnicodeDecodeError:
            continue
        return text if all(letter.isprintable() or letter in "\n\r\t\f" for letter in text) else ""
    return ""


def _lines(text: str, longest: int = 40) -> Iterator[str]:
    for line in text.splitlines():
        if line.strip():
            yield line.strip()[:longest]
