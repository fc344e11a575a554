"""Why an error came up that nothing expected: a file that is no valid model is told as such, all else is our bug."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from pathlib import Path

from deltafuse.errors import DeltafuseError, UserError

__all__ = ["explained"]

#: Files that are larger are not looked over: the checker takes several times their size.
_LARGEST = 1 << 30
#: Domain of the operators that the checker is not asked about.
_FOREIGN = "deltafuse.foreign"


@contextmanager
def explained(*models: Path | None) -> Generator[None]:
    """Turns an error of the block into a `UserError` where one of the models is to blame.

    Nothing is looked at unless there is an error, so that a right file costs nothing.

    Raises:
        UserError: ``out-of-memory``; ``not-onnx``: protobuf or UTF-8 do not hold; ``invalid-onnx``: the model breaks
            the rules of the standard, which onnx.checker tells.
    """
    try:
        yield
    except (DeltafuseError, OSError):
        raise
    except Exception as error:
        reason = _reason(error, [path for path in models if path is not None])
        if reason is None:
            raise
        raise reason from error


def _reason(error: Exception, models: Iterable[Path]) -> UserError | None:
    if isinstance(error, MemoryError):
        return UserError("out-of-memory", "memory ran out: end other programs, or use a larger machine")
    for path in models:
        complaint = _complaint(path)
        if complaint:
            return UserError(
                "invalid-onnx", f"{path} is not a valid ONNX model ({complaint}): mend it, or export it again"
            )
    return None


def _complaint(path: Path) -> str:
    """What onnx.checker says against a model, "" where nothing."""
    if not path.is_file() or path.stat().st_size > _LARGEST:
        return ""
    import onnx
    from google.protobuf.message import DecodeError

    try:
        model = onnx.ModelProto.FromString(path.read_bytes())
    except DecodeError as error:
        return str(error)
    with suppress(UnicodeDecodeError, ValueError, AttributeError, TypeError):
        _set_apart(model)
    try:
        onnx.checker.check_model(model.SerializeToString())  # pyright: ignore[reportUnknownMemberType]
    except (onnx.checker.ValidationError, UnicodeDecodeError, ValueError) as error:
        return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
    return ""


def _set_apart(model: object) -> None:
    """Puts operators that the standard does not know, those of kernels among them, where the checker lets them be."""
    import onnx

    assert isinstance(model, onnx.ModelProto)
    version = max([entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")], default=1)
    for node in model.graph.node:
        if node.domain in ("", "ai.onnx") and not onnx.defs.has(node.op_type, min(version, 1 << 30), ""):
            node.domain = _FOREIGN
    model.opset_import.add(domain=_FOREIGN, version=1)
