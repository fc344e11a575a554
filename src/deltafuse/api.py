"""The commands as functions: the same names, the same options, the reports as dataclasses. Light until one is called.

Paths are text or `pathlib.Path`. Every function raises `UserError` for what the caller can mend, with a message that
says how, and `InternalError` for a bug of ours. A report's ``exit`` is the exit code of the command.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypedDict

from deltafuse.options import (
    DEFAULT_TARGET,
    DEFAULT_TIMEOUT,
    AttentionMode,
    Boundary,
    ExternalData,
    Form,
    FuseOptions,
    Operator,
    Progress,
    RecordMode,
    SilentProgress,
)

if TYPE_CHECKING:
    from deltafuse.lower import LowerReport
    from deltafuse.match import FuseReport
    from deltafuse.probing import Listing
    from deltafuse.rollback import RollbackReport

__all__ = ["fuse", "inspect", "listing", "lower", "rollback"]

AnyPath: TypeAlias = "str | PathLike[str]"


def _texts(given: str | Sequence[str]) -> tuple[str, ...]:
    """A text alone is one pattern, not a pattern for each of its letters."""
    return (given,) if isinstance(given, str) else tuple(given)


def _paths(given: AnyPath | Sequence[AnyPath]) -> tuple[Path, ...]:
    return (Path(given),) if isinstance(given, str | PathLike) else tuple(map(Path, given))


def _path(given: AnyPath | None) -> Path | None:
    return None if given is None else Path(given)


class _Choices(TypedDict):
    sites: tuple[str, ...]
    skip_sites: tuple[str, ...]
    rules: tuple[str, ...]
    patterns: tuple[Path, ...]
    html: Path | None


def _choices(
    sites: Sequence[str],
    skip_sites: Sequence[str],
    rules: Sequence[str],
    patterns: AnyPath | Sequence[AnyPath],
    html: AnyPath | None,
) -> _Choices:
    """What to look for and where to show it, as the options have it."""
    return {
        "sites": _texts(sites),
        "skip_sites": _texts(skip_sites),
        "rules": _texts(rules),
        "patterns": _paths(patterns),
        "html": _path(html),
    }


def fuse(
    model: AnyPath,
    output: AnyPath | None = None,
    *,
    target: str = DEFAULT_TARGET,
    form: Form | None = None,
    op: Operator | None = None,
    sites: Sequence[str] = (),
    skip_sites: Sequence[str] = (),
    rules: Sequence[str] = (),
    patterns: Sequence[AnyPath] = (),
    pin: bool = True,
    pins: Mapping[str, int] | None = None,
    batch: int = 1,
    boundary: Boundary | None = None,
    signature: str | None = None,
    allow_bf16_to_fp16: bool = False,
    record: RecordMode = "embed",
    external_data: ExternalData | None = None,
    allow_outside: bool = False,
    keep_going: bool = False,
    strict: bool = False,
    dry_run: bool = False,
    plan: AnyPath | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    html: AnyPath | None = None,
    progress: Progress | None = None,
) -> FuseReport:
    """Finds the sites of a model, proves them and writes the fused model, as ``fuse MODEL -o OUT`` does.

    Keywords as in `FuseOptions`; `pins` maps symbols to sizes. Exit 3: no site matched, 4: some are refused.

        >>> deltafuse.fuse("prefill.onnx", "prefill-fused.onnx", pins={"seq_len": 128}).exit
        0
    """
    from deltafuse import pipeline

    options = FuseOptions(
        Path(model),
        _path(output),
        target=target,
        form=form,
        op=op,
        **_choices(sites, skip_sites, rules, patterns, html),
        pin=pin,
        pins=tuple((pins or {}).items()),
        batch=batch,
        boundary=boundary,
        signature=signature,
        allow_bf16_to_fp16=allow_bf16_to_fp16,
        timeout=timeout,
        record=record,
        external_data=external_data,
        allow_outside=allow_outside,
        keep_going=keep_going,
        strict=strict,
        dry_run=dry_run,
        plan=_path(plan),
    )
    return pipeline.fuse(options, progress or SilentProgress())


def inspect(
    model: AnyPath,
    *,
    target: str = DEFAULT_TARGET,
    form: Form | None = None,
    op: Operator | None = None,
    sites: Sequence[str] = (),
    skip_sites: Sequence[str] = (),
    rules: Sequence[str] = (),
    patterns: Sequence[AnyPath] = (),
    pin: bool = True,
    pins: Mapping[str, int] | None = None,
    batch: int = 1,
    boundary: Boundary | None = None,
    signature: str | None = None,
    allow_bf16_to_fp16: bool = False,
    allow_outside: bool = False,
    timeout: float = DEFAULT_TIMEOUT,
    extract: AnyPath | None = None,
    html: AnyPath | None = None,
    progress: Progress | None = None,
) -> FuseReport:
    """Shows the sites of a model and writes no model, as ``fuse inspect MODEL`` does; for its tables see `listing`.

    The keywords are described at `FuseOptions`, the report is that of `fuse`.

        >>> for site in deltafuse.inspect("decode.onnx").sites:
        ...     print(site.name, site.status, site.op)
        layers.0 match RecurrentGatedDeltaRule
    """
    from deltafuse import pipeline

    options = FuseOptions(
        Path(model),
        None,
        target=target,
        form=form,
        op=op,
        **_choices(sites, skip_sites, rules, patterns, html),
        pin=pin,
        pins=tuple((pins or {}).items()),
        batch=batch,
        boundary=boundary,
        signature=signature,
        allow_bf16_to_fp16=allow_bf16_to_fp16,
        allow_outside=allow_outside,
        timeout=timeout,
        extract=_path(extract),
    )
    return pipeline.inspect(options, progress or SilentProgress())


def listing(
    model: AnyPath, *, tensors: str | None = None, nodes: str | None = None, ops: Sequence[str] = ()
) -> Listing:
    """Lists tensors, nodes and operators of any model, as ``fuse inspect MODEL --tensors --nodes --op`` does.

    Nothing is run and no weight is read.

    Example:
        >>> for row in deltafuse.listing("decode.onnx", tensors="^past_").tensors:
        ...     print(row.name, row.dtype, row.shape)
        past_recurrent_states float32 (3, 'batch', 4, 16, 16)

    Args:
        model: the file to read.
        tensors: regular expression that a tensor's name must match somewhere; "" for all, None for none.
        nodes: the same for nodes.
        ops: operators whose nodes are listed and counted, shell-style, e.g. ``Reduce*``.
    """
    from deltafuse import probing

    return probing.listing(Path(model), tensors=tensors, nodes=nodes, ops=ops)


def rollback(
    fused: AnyPath,
    output: AnyPath,
    *,
    sites: Sequence[str] = (),
    all_records: bool = False,
    sidecar: AnyPath | None = None,
    external_data: ExternalData | None = None,
    allow_outside: bool = False,
    progress: Progress | None = None,
) -> RollbackReport:
    """Gives back the model that a fused one was made from, as ``fuse rollback FUSED -o MODEL`` does.

    Example:
        >>> deltafuse.rollback("prefill-fused.onnx", "prefill-back.onnx").mode
        'bytes'

    Args:
        fused: the fused model; never written.
        output: the file to write.
        sites: shell-style patterns: restore only these; empty for all.
        all_records: undo every fuse, not just the last.
        sidecar: the record, where it was written beside the model.
        external_data: see `FuseOptions`.
        allow_outside: see `FuseOptions`.
        progress: told about stages.

    Returns:
        What was restored and, in ``refused``, what could not be.
    """
    from deltafuse.rollback import rollback as run

    shown = progress or SilentProgress()
    shown.start("restoring")
    return run(
        Path(fused),
        Path(output),
        sites=_texts(sites) or None,
        all_records=all_records,
        sidecar=None if sidecar is None else Path(sidecar),
        how=external_data,
        allow_outside=allow_outside,
        progress=shown.advance,
    )


def lower(
    fused: AnyPath,
    output: AnyPath,
    *,
    rounding: bool = True,
    linear_attention: AttentionMode = "auto",
    external_data: ExternalData | None = None,
    allow_outside: bool = False,
    progress: Progress | None = None,
) -> LowerReport:
    """Writes a fused model with plain operators in place of the fused ones, as ``fuse lower FUSED -o RUNNABLE`` does.

    Example:
        >>> deltafuse.lower("decode-fused.onnx", "decode-runnable.onnx", rounding=False).exit
        0
        >>> session = onnxruntime.InferenceSession("decode-runnable.onnx")

    Args:
        fused: the fused model; never written.
        output: the file to write.
        rounding: round operands and results as the kernels do; else keep the unfused graph's own precision.
        linear_attention: lower LinearAttention and CausalConvWithState where the installed onnxruntime lacks them,
            always, or never.
        external_data: see `FuseOptions`.
        allow_outside: see `FuseOptions`.
        progress: told about stages.

    Returns:
        Exit 0, or 3 where there is nothing to lower; then nothing is written.
    """
    from deltafuse.lower import lower as run

    return run(
        Path(fused),
        Path(output),
        rounding=rounding,
        linear_attention=linear_attention,
        external_data=external_data,
        allow_outside=allow_outside,
        progress=progress,
    )
