"""Messages of a model file, decoded: what cannot be is the file's fault and told as such."""

from __future__ import annotations

from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from deltafuse.errors import UserError

_Message = TypeVar("_Message", bound=Message)


def decoded(kind: type[_Message], raw: bytes, what: str) -> _Message:
    """Decodes one message of a file.

    Args:
        kind: its class.
        raw: its bytes.
        what: what to call it in the error.

    Raises:
        UserError: ``not-onnx``: the bytes are no such message, or messages lie in each other too deep for protobuf.
    """
    try:
        return kind.FromString(raw)
    except DecodeError as error:
        text = f"{what} cannot be read ({error}): give a file that onnx.load reads, or export the model again"
        raise UserError("not-onnx", text) from None
