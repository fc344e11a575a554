"""Puts the functions of this package into a model of transformers, for one export."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Generator, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from types import MappingProxyType
from typing import Any

from torch import nn

from deltafuse.errors import UserError
from deltafuse.options import DEFAULT_TARGET, Boundary, Operator
from deltafuse.torch.call import SETTINGS, Settings
from deltafuse.torch.rule import chunk_gated_delta_rule, recurrent_gated_delta_rule
from deltafuse.torch.translation import translations

Table = dict[Callable[..., Any], Callable[..., Any]]

#: Names that releases of transformers, and the packages whose kernels they take, have for the two functions.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "torch_chunk_gated_delta_rule": chunk_gated_delta_rule,
    "chunk_gated_delta_rule": chunk_gated_delta_rule,
    "torch_recurrent_gated_delta_rule": recurrent_gated_delta_rule,
    "recurrent_gated_delta_rule": recurrent_gated_delta_rule,
    "fused_recurrent_gated_delta_rule": recurrent_gated_delta_rule,
}


@contextmanager
def use_custom_gated_delta_rule(
    model: nn.Module,
    target: str = DEFAULT_TARGET,
    op: Operator | None = None,
    *,
    boundary: Boundary | None = None,
    signature: str | None = None,
    allow_bf16_to_fp16: bool = False,
) -> Generator[Table, None, None]:
    """While it is open, an export of the model writes the target's node for each gated delta rule.

    The functions that the model's layers call are replaced wherever they are held (in the layer, in its class, in the
    file of its class) and are back afterwards, after an error too.

        >>> with deltafuse.torch.use_custom_gated_delta_rule(model, "ort"):
        ...     torch.onnx.export(model, args, "model.onnx", dynamo=False)
        >>> with deltafuse.torch.use_custom_gated_delta_rule(model, "ort") as table:
        ...     torch.onnx.export(model, args, "model.onnx", dynamo=True, custom_translation_table=table)

    Args:
        model: a model of transformers, or one whose code calls the functions of this package itself.
        target: name of a profile, see ``fuse targets``.
        op: force this operator where its limits allow it; None for what is legal.
        boundary: element type of the kernels' operands, where the target leaves a choice.
        signature: version of the operators' signature; None for the newest.
        allow_bf16_to_fp16: accept the smaller range where a bfloat16 model meets a float16 kernel.

    Yields:
        The table of `deltafuse.torch.translations`, which an export by way of torch.export needs.

    Raises:
        UserError: ``unknown-target``; ``option``: the target does not take one; ``no-rule-function``: the model holds
            none of the functions; the code of the limit that a call of the model is beyond.
    """
    settings = Settings(target, op, boundary, signature, allow_bf16_to_fp16)
    table = translations(target, op, boundary=boundary, signature=signature, allow_bf16_to_fp16=allow_bf16_to_fp16)
    places = list(_places(model))
    if not places:
        raise UserError(
            "no-rule-function",
            f"no layer of {type(model).__name__} calls one of {', '.join(FUNCTIONS)}: let the model's own code call "
            "deltafuse.torch.chunk_gated_delta_rule and recurrent_gated_delta_rule",
        )
    with ExitStack() as stack:
        for owner, name, function in places:
            stack.enter_context(_replaced(owner, name, function))
        token = SETTINGS.set(settings)
        stack.callback(SETTINGS.reset, token)
        try:
            yield table
        except Exception as error:
            found = _user_error(error)
            if found is None or found is error:
                raise
            # An exporter wraps what it meets; this is the part that says how to mend it.
            raise found from error


def _user_error(error: BaseException | None) -> UserError | None:
    while error is not None and not isinstance(error, UserError):
        error = error.__cause__ or error.__context__
    return error


Owner = type | MutableMapping[str, Any]


def _places(model: nn.Module) -> Iterator[tuple[Owner, str, Callable[..., Any]]]:
    """Where the functions are held: (class or dictionary of names, name, what goes there)."""
    seen: set[int] = set()
    for layer in model.modules():
        for owner, names in _owners(layer):
            if id(owner) in seen:
                continue
            seen.add(id(owner))
            for name, value in list(names.items()):
                function = _replacement(name, value)
                if function is not None:
                    yield owner, name, function


def _owners(layer: nn.Module) -> Iterator[tuple[Owner, MappingProxyType[str, Any] | dict[str, Any]]]:
    yield vars(layer), vars(layer)
    for cls in type(layer).__mro__:
        file = sys.modules.get(cls.__module__)
        if file is None or cls.__module__.partition(".")[0] in ("torch", "builtins"):
            continue
        yield cls, vars(cls)
        yield vars(file), vars(file)


def _replacement(name: str, value: object) -> Callable[..., Any] | None:
    """What goes in the place of a value, None where it is none of the functions."""
    if isinstance(value, functools.partial):
        inner = _replacement(name, value.func)
        return None if inner is None else functools.partial(inner, *value.args, **value.keywords)
    if isinstance(value, staticmethod):
        inner = _replacement(name, value.__func__)
        return None if inner is None else staticmethod(inner)
    if not callable(value) or isinstance(value, type):
        return None
    return FUNCTIONS.get(getattr(value, "__name__", name)) or FUNCTIONS.get(name)


@contextmanager
def _replaced(owner: Owner, name: str, function: Callable[..., Any]) -> Generator[None, None, None]:
    """Puts a function in its place; what was there comes back."""
    if isinstance(owner, type):
        before = vars(owner)[name]
        setattr(owner, name, function)
        try:
            yield
        finally:
            setattr(owner, name, before)
        return
    before = owner[name]
    owner[name] = function
    try:
        yield
    finally:
        owner[name] = before
