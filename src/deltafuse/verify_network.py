"""Network level of ``fuse verify``: both whole models on the same inputs, one after the other.

The fused model runs lowered and at the target's precision. Each run has a child process of its own, so that there is
never more than one model in memory, and none in this process.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from deltafuse.dims import symbols
from deltafuse.inputs import Inputs
from deltafuse.inputs_sizes import declared_names
from deltafuse.network_diff import OutputVerdict, Top1, Worst, compare_outputs
from deltafuse.network_model import Runnable, obstacle, runnable
from deltafuse.network_run import Ran, gigabytes, run_model, write_inputs
from deltafuse.options import Progress
from deltafuse.reasons import TEXTS, Reason
from deltafuse.shapes import Shapes
from deltafuse.verify_bars import Bar
from deltafuse.verify_trial import Finding, finding
from deltafuse.wire import Model

__all__ = ["InputReport", "NetworkReport", "OutputVerdict", "RunReport", "Top1", "Worst", "obstacle", "run_networks"]

TEXTS.update(
    {
        "network-sizes": "{error} The node {node} ({op}) reads {operands}: {advice}",
        "network-silent": "every output of {path} is zero on these inputs, so that there is nothing to compare: are "
        "its weights filled in?",
        "fused-does-not-run": "the unfused model runs on these inputs and the fused one does not: {error}",
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
    """

    verdict: Literal["passes", "differs"]
    outputs: tuple[OutputVerdict, ...]
    inputs: tuple[InputReport, ...]
    sizes: Mapping[str, int]
    seed: int
    runs: tuple[RunReport, ...]
    reason: Finding | None = None


@dataclass(frozen=True)
class Networks:
    """What is run, on what and how.

    Attributes:
        unfused, fused: the scanned files; see `obstacle`.
        seconds: limit of one run.
        memory: address space limit of a run in bytes, None for none.
        close: the bar for outputs; None for that of a float16 boundary.
    """

    unfused: Model
    fused: Model
    inputs: Inputs
    seed: int
    seconds: float
    memory: int | None = None
    close: Bar | None = None


def run_networks(networks: Networks, progress: Progress) -> NetworkReport | Reason:
    """Runs and compares.

    Returns:
        Why the unfused model does not run, or why a run had to be ended (``network-memory`` and the like). A fused
        model that does not run where the unfused one does is a difference.
    """
    with TemporaryDirectory(prefix="deltafuse-") as name:
        return _run(networks, Path(name), progress)


def _run(networks: Networks, folder: Path, progress: Progress) -> NetworkReport | Reason:
    files = write_inputs(networks.inputs.arrays, folder / "inputs")
    runs: dict[str, Ran] = {}
    for which, model in (("unfused", networks.unfused), ("fused", networks.fused)):
        below = folder / which
        below.mkdir()
        with runnable(model, below) as source:
            ran = source if isinstance(source, Reason) else _run_one(networks, which, source, files, below, progress)
        if isinstance(ran, Reason):
            return _stopped(networks, which, model, ran, runs)
        runs[which] = ran
    return _compared(networks, runs, progress)


def _run_one(
    networks: Networks, which: str, source: Runnable, files: Mapping[str, Path], below: Path, progress: Progress
) -> Ran | Reason:
    progress.start(f"running the {which} model ({gigabytes(source.size)})")
    name = str(getattr(networks, which).path)
    return run_model(source, name, files, below / "run", networks.seconds, networks.memory)


def _stopped(
    networks: Networks, which: str, model: Model, reason: Reason, runs: Mapping[str, Ran]
) -> NetworkReport | Reason:
    if reason.code == "network-does-not-run":
        reason = _with_sizes(networks, model, reason)
    if which == "unfused" or reason.code in ("network-memory", "network-timeout", "network-operator-missing"):
        return reason
    failed = Reason("fused-does-not-run", {"error": reason.text})
    return _report(networks, (), runs, finding(failed))


def _compared(networks: Networks, runs: Mapping[str, Ran], progress: Progress) -> NetworkReport | Reason:
    progress.start("comparing outputs")
    roles = networks.inputs.roles.values()
    vocabulary = max((role.rows for role in roles if role.role == "ids"), default=0)
    unfused, fused = runs["unfused"].outputs, runs["fused"].outputs
    total = len({*unfused, *fused})
    verdicts: list[OutputVerdict] = []
    for verdict in compare_outputs(unfused, fused, vocabulary, networks.close):
        verdicts.append(verdict)
        progress.advance(len(verdicts), total)
    measured = [verdict for verdict in verdicts if verdict.rms is not None]
    if measured and not any(verdict.rms or verdict.max_abs for verdict in measured):
        return Reason("network-silent", {"path": networks.unfused.path})
    return _report(networks, verdicts, runs, None)


def _report(
    networks: Networks, outputs: Sequence[OutputVerdict], runs: Mapping[str, Ran], reason: Finding | None
) -> NetworkReport:
    inputs = networks.inputs
    fed = tuple(
        InputReport(name, array.shape, str(array.dtype), "given" if name in inputs.given else inputs.roles[name].label)
        for name, array in inputs.arrays.items()
    )
    passes = reason is None and bool(outputs) and all(output.verdict == "passes" for output in outputs)
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
    known = declared_names(Shapes(networks.fused))
    free = [name for name in known if name in hanging or shapes.unions.root(name) in hanging]
    advice = (
        f"give another size with --dim {free[0]}=N" + (f" (or {', '.join(free[1:])})" if free[1:] else "")
        if free
        else "no size that can be chosen is in them; give other arrays with --inputs"
    )
    text = ", ".join(f"{name} [{', '.join(map(str, shape or ('?',)))}]" for name, shape in operands.items())
    at = {"error": reason.text, "node": graph.node_name(names[0]), "op": graph.op[names[0]]}
    return Reason("network-sizes", {**at, "operands": text, "advice": advice})
