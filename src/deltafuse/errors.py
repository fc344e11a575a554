"""Every error deltafuse raises on purpose.

Two families: a `UserError` is something the caller can mend, its message says how; an
`InternalError` is a bug of ours. Anything else that escapes is treated as an internal error too.
"""


class DeltafuseError(Exception):
    """Base of all errors raised on purpose."""


class UserError(DeltafuseError):
    """The caller can mend this: a bad file, a bad option. The message says what to do.

    Attributes:
        code: stable short name for the JSON document, e.g. ``not-onnx``.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class InternalError(DeltafuseError):
    """A bug of ours: an emitted node that is not equal to what it replaces, say."""
