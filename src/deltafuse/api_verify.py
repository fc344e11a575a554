"""``fuse verify`` as a function; the other commands are in `deltafuse.api`.

Its arguments:

    unfused: the model as exported.
    fused: what fuse made of it.
    level: ``site`` needs no weights, ``network`` runs both whole models too, ``task`` runs the sites and what is
        asked for of a pair, ``all`` does all it can.
    inputs: npz with arrays for some or all inputs of the whole models.
    save_inputs: npz to write the inputs to that were used.
    seed: of the inputs that are drawn.
    dims: sizes of axes of the inputs: symbol -> size.
    prefill: unfused and fused file of the graph that takes a prompt, in place of `unfused` and `fused`.
    decode: the same of the graph that takes one token more; alone, its first states are drawn.
    rollout: decode steps to chain.
    prompt: npy with the token ids of the prompt.
    nll: npy with token ids whose loss is to be told.
    maps: output -> input of states that are not paired by names and sizes; several names are parted by commas.
    bisect: fuse some sites at a time, to find those that move an output beyond tolerance.
    ablate: shell-style patterns of sites whose decisions are undone one by one.
    minimize: folder for a stand-alone reproduction of the first site to blame.
    lowering: Python file that lowers other tools' Custom nodes, or the name of a shipped one.
    html: file to write the report to as one page, with plots.
    cosine: least cosine, in place of that for the kind of difference and the target.
    nrmse: largest root mean square error, over the unfused values.
    max_abs: largest difference of one element.
    timeout: seconds that the run may take.
    memory: address space limit of a whole model's run, in bytes.
    allow_outside: take data that lies outside of a model's folder; onnxruntime does not run such a model as a whole.
    progress: told about stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from deltafuse.options import DEFAULT_TIMEOUT, Level, Progress, SilentProgress

if TYPE_CHECKING:
    from deltafuse.verify import VerifyReport

__all__ = ["verify"]

AnyPath: TypeAlias = "str | PathLike[str]"


def verify(
    unfused: AnyPath | None = None,
    fused: AnyPath | None = None,
    *,
    level: Level = "all",
    inputs: AnyPath | None = None,
    save_inputs: AnyPath | None = None,
    seed: int = 0,
    dims: Mapping[str, int] | None = None,
    prefill: tuple[AnyPath, AnyPath] | None = None,
    decode: tuple[AnyPath, AnyPath] | None = None,
    rollout: int = 0,
    prompt: AnyPath | None = None,
    nll: AnyPath | None = None,
    maps: Mapping[str, str] | None = None,
    bisect: bool = False,
    ablate: str | Sequence[str] = (),
    minimize: AnyPath | None = None,
    lowering: AnyPath | None = None,
    html: AnyPath | None = None,
    cosine: float | None = None,
    nrmse: float | None = None,
    max_abs: float | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    memory: int | None = None,
    allow_outside: bool = False,
    progress: Progress | None = None,
) -> VerifyReport:
    """Compares a fused model with the unfused one, or the graphs of a pair, as ``fuse verify`` does.

    Example:
        >>> deltafuse.verify("prefill.onnx", "prefill-fused.onnx", dims={"seq_len": 40}).exit
        0
        >>> pair = {"prefill": ("p.onnx", "p-fused.onnx"), "decode": ("d.onnx", "d-fused.onnx")}
        >>> deltafuse.verify(**pair, rollout=64, prompt="ids.npy").task.verdict
        'passes'

    The keywords are described at `deltafuse.api_verify`, with the bars, limits and files that the command has too.

    Returns:
        Exit 0 where all is equal, else 5.
    """
    from deltafuse.commands_verify import run
    from deltafuse.foreign import load_lowering
    from deltafuse.inputs import InputOptions
    from deltafuse.verify import Settings
    from deltafuse.verify_bars import Overrides
    from deltafuse.verify_causes import Causes
    from deltafuse.verify_task import TaskOptions

    options = InputOptions(_path(inputs), _path(save_inputs), seed, dict(dims or {}))
    bars, shown = Overrides(cosine, nrmse, max_abs), progress or SilentProgress()
    foreign = None if lowering is None else load_lowering(str(lowering))
    settings = Settings(level, options, timeout, memory, bars, shown, foreign, allow_outside)
    graphs = _files(prefill), _files(decode)
    task = TaskOptions(*graphs, rollout, _path(prompt), _path(nll), tuple((maps or {}).items()))
    causes = Causes(bisect, (ablate,) if isinstance(ablate, str) else tuple(ablate), _path(minimize))
    return run(_path(unfused), _path(fused), task, causes, settings, _path(html))


def _files(given: tuple[AnyPath, AnyPath] | None) -> tuple[Path, Path] | None:
    return None if given is None else (Path(given[0]), Path(given[1]))


def _path(given: AnyPath | None) -> Path | None:
    return None if given is None else Path(given)
