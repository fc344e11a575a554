"""Network level of ``fuse verify``: both whole models on the same inputs, one after the other.

The fused model runs lowered and at the target's precision. Each run has a child process of its own, so that there is
never more than one model in memory, and none in this process.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from deltafuse.dims import symbols
from deltafuse.divergence import DivergenceReport, diverge, load_taps, taps_of
from deltafuse.inputs import Inputs
from deltafuse.inputs_sizes import declared_names
from deltafuse.masks import MaskReport, compare_padded, padded
from deltafuse.network_diff import OutputVerdict, Top1, Worst, compare_outputs
from deltafuse.network_model import Runnable, obstacle, runnable
from deltafuse.network_run import Ran, gigabytes, run_model, write_inputs
from deltafuse.options import Progress
from deltafuse.probe import Worker
from deltafuse.reasons import TEXTS, Reason
from deltafuse.shapes import Shapes
from deltafuse.verify_bars import Bar
from deltafuse.verify_stage import Stage
from deltafuse.verify_trial import Finding, finding
from deltafuse.wire import Model

__all__ = ["InputReport", "NetworkReport", "OutputVerdict", "RunReport", "Top1", "Worst", "obstacle", "run_networks"]

TEXTS.update(
    {
        "network-sizes": "{error} The node {node} ({op}) reads {operands}; {advice}",
        "network-silent": "every output of {path} is zero on these inputs, so that there is nothing to compare; fill "
        "in the weights, or give other inputs with --inputs",
        "fused-does-not-run": "the unfused model runs on these inputs and the fused one does not: {error}; look the "
        "fused file over with fuse lint, and fuse the model again",
    }
)

_NODE = re.compile(r"Name:'([^']+)'")


@dataclass(frozen=True)
class InputReport:
    """What was fed to an input.

    Attributes:
        role: what it was taken for, e.g. ``ids``; ``given`` where the user's file had it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    role: str


@dataclass(frozen=True)
class RunReport:
    """What a run took.

    Attributes:
        model: ``unfused`` or ``fused``.
        seconds: of loading and running.
        peak: bytes of memory at most, mapped weights among them.
    """

    model: str
    seconds: float
    peak: int


@dataclass(frozen=True)
class NetworkReport:
    """Both models on the same inputs.

    Attributes:
        verdict: ``passes`` where every output meets the bar. That alone shows no fusion to be right: a norm behind
            the rule hides a lost scale.
        sizes: symbol -> size that the inputs were given.
        reason: why there are no outputs to compare.
        divergence: where both runs part; None where there is no site.
        masks: padded draws; None where no mask has several tokens.
    """

    verdict: Literal["passes", "differs"]
    outputs: tuple[OutputVerdict, ...]
    inputs: tuple[InputReport, ...]
    sizes: Mapping[str, int]
    seed: int
    runs: tuple[RunReport, ...]
    reason: Finding | None = None
    divergence: DivergenceReport | None = None
    masks: MaskReport | None = None


@dataclass(frozen=True)
class Networks:
    """What is run, on what and how.

    Attributes:
        stage: both files (see `obstacle`) and what their sites tell.
        close: the bar for outputs.
        seconds: limit of one run.
        memory: address space limit of a run in bytes, None for none.
    """

    stage: Stage
    inputs: Inputs
    close: Bar
    seed: int
    seconds: float
    memory: int | None = None

    def model(self, which: str) -> Model:
        """The unfused or the fused file."""
        return (self.stage.before if which == "unfused" else self.stage.after).model

    @property
    def taps(self) -> tuple[str, ...]:
        """Values at the sites that are no outputs of the graph."""
        graph = self.stage.after.graph
        outputs = set(map(graph.name, graph.outputs))
        return tuple(name for name in taps_of(self.stage.regions) if name not in outputs)


def run_networks(networks: Networks, progress: Progress) -> NetworkReport | Reason:
    """Runs and compares.

    Returns:
        Why the unfused model does not run, or why a run had to be ended (``network-memory`` and the like). A fused
        model that does not run where the unfused one does is a difference.
    """
    with TemporaryDirectory(prefix="deltafuse-") as name:
        return _run(networks, Path(name), progress)


def _run(networks: Networks, folder: Path, progress: Progress) -> NetworkReport | Reason:
    draws = [networks.inputs.arrays, *padded(networks.inputs).values()]
    files = [write_inputs(arrays, folder / f"inputs-{index}") for index, arrays in enumerate(draws)]
    runs: dict[str, Ran] = {}
    for which in ("unfused", "fused"):
        below = folder / which
        below.mkdir()
        opened = runnable(networks.model(which), below, taps=networks.taps, foreign=networks.stage.foreign)
        with opened as source:
            ran = source if isinstance(source, Reason) else _run_one(networks, which, source, files, below, progress)
        if isinstance(ran, Reason):
            return _stopped(networks, which, ran, runs)
        runs[which] = ran
    return _compared(networks, runs, progress)


def _run_one(
    networks: Networks, which: str, source: Runnable, files: Sequence[Mapping[str, Path]], below: Path,
    progress: Progress,
) -> Ran | Reason:
    progress.start(f"running the {which} model ({gigabytes(source.size)})")
    return run_model(
        source, str(networks.model(which).path), files[0], below / "run", networks.seconds, networks.memory,
        further=files[1:], taps=networks.taps,
    )  # fmt: skip


def _stopped(
    networks: Networks, which: str, reason: Reason, runs: Mapping[str, Ran]
) -> NetworkReport | Reason:
    if reason.code == "network-does-not-run":
        reason = _with_sizes(networks, networks.model(which), reason)
    if which == "unfused" or reason.code in ("network-memory", "network-timeout", "network-operator-missing"):
        return reason
    failed = Reason("fused-does-not-run", {"error": reason.what})
    return _report(networks, (), runs, finding(failed))


def _compared(networks: Networks, runs: Mapping[str, Ran], progress: Progress) -> NetworkReport | Reason:
    progress.start("comparing outputs")
    roles = networks.inputs.roles.values()
    vocabulary = max((role.rows for role in roles if role.role == "ids"), default=0)
    unfused, fused = (_without(run.outputs, networks.taps) for run in (runs["unfused"], runs["fused"]))
    total = len({*unfused, *fused})
    verdicts: list[OutputVerdict] = []
    for verdict in compare_outputs(unfused, fused, vocabulary, networks.close):
        verdicts.append(verdict)
        progress.advance(len(verdicts), total)
    measured = [verdict for verdict in verdicts if verdict.rms is not None]
    if measured and not any(verdict.rms or verdict.max_abs for verdict in measured):
        return Reason("network-silent", {"path": networks.model("unfused").path})
    masks = _masks(networks, runs, vocabulary)
    return replace(_report(networks, verdicts, runs, None, masks), divergence=_divergence(networks, runs), masks=masks)


def _without(outputs: Mapping[str, Path], taps: Collection[str]) -> dict[str, Path]:
    return {name: path for name, path in outputs.items() if name not in taps}


def _masks(networks: Networks, runs: Mapping[str, Ran], vocabulary: int) -> MaskReport | None:
    sides = [
        (_without(runs[which].outputs, networks.taps), *runs[which].further) for which in ("unfused", "fused")
    ]
    if len(sides[0]) < 2:
        return None
    return compare_padded(networks.inputs, sides[0], sides[1], vocabulary, networks.close)


def _divergence(networks: Networks, runs: Mapping[str, Ran]) -> DivergenceReport | None:
    names = taps_of(networks.stage.regions)
    if not names:
        return None
    sides = [load_taps(runs[which].outputs, names, networks.inputs.arrays) for which in ("unfused", "fused")]
    with Worker(networks.seconds) as worker:
        return diverge(networks.stage, sides[0], sides[1], networks.close, worker)


def _report(
    networks: Networks,
    outputs: Sequence[OutputVerdict],
    runs: Mapping[str, Ran],
    reason: Finding | None,
    masks: MaskReport | None = None,
) -> NetworkReport:
    inputs = networks.inputs
    fed = tuple(
        InputReport(name, array.shape, str(array.dtype), "given" if name in inputs.given else inputs.roles[name].label)
        for name, array in inputs.arrays.items()
    )
    checked = [*outputs, *(draw for draw in (masks.draws if masks is not None else ()))]
    passes = reason is None and bool(outputs) and all(part.verdict == "passes" for part in checked)
    return NetworkReport(
        "passes" if passes else "differs",
        tuple(outputs),
        fed,
        dict(inputs.sizes),
        networks.seed,
        tuple(RunReport(which, ran.seconds, ran.peak) for which, ran in runs.items()),
        reason,
    )


def _with_sizes(networks: Networks, model: Model, reason: Reason) -> Reason:
    """Adds what sizes the failing node has, and which symbol of an input they hang on."""
    error = str(reason.args["error"])
    found = _NODE.search(error)
    graph = model.graph
    names = [] if found is None else [i for i in range(len(graph.op)) if graph.node_name(i) == found.group(1)]
    if not names:
        return reason
    shapes = Shapes(model)
    operands = {graph.name(value): shapes.shape(value) for value in graph.node_inputs[names[0]] if value}
    hanging = {name for shape in operands.values() for dim in shape or () for name in symbols(dim)}
    known = declared_names(Shapes(networks.model("fused")))
    free = [name for name in known if name in hanging or shapes.unions.root(name) in hanging]
    advice = (
        f"give another size with --dim {free[0]}=N" + (f" (or {', '.join(free[1:])})" if free[1:] else "")
        if free
        else "give other arrays with --inputs: no size that can be chosen is in them"
    )
    text = ", ".join(f"{name} [{', '.join(map(str, shape or ('?',)))}]" for name, shape in operands.items())
    at = {"error": reason.what, "node": graph.node_name(names[0]), "op": graph.op[names[0]]}
    return Reason("network-sizes", {**at, "operands": text, "advice": advice})
