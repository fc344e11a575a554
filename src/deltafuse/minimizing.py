"""``--minimize DIR``: one site as a stand-alone reproduction, with the inputs that it has in the whole model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper

from deltafuse.errors import UserError
from deltafuse.files import check_output, make_folder
from deltafuse.inputs import Inputs
from deltafuse.inputs_file import write_arrays
from deltafuse.network_model import obstacle, runnable
from deltafuse.network_run import run_model, write_inputs
from deltafuse.probe import Worker, to_double
from deltafuse.reasons import Reason
from deltafuse.verify_cut import Pair
from deltafuse.verify_draws import PairDraws, Run, drawn, drawn_as_typed
from deltafuse.verify_stage import Stage

__all__ = ["Reproduction", "check_folder", "reproduce"]

Array = npt.NDArray[np.generic]
UNFUSED, FUSED, INPUTS, COMMAND = "unfused.onnx", "fused.onnx", "inputs.npz", "command.txt"


@dataclass(frozen=True)
class Reproduction:
    """What was written.

    Attributes:
        site: the site to blame, None where there is none; then nothing was written.
        files: the cut graph, its fused form, the inputs, the command.
        command: what shows the fault.
        values: ``model``: what the site has in the unfused model; ``drawn`` where that cannot be run.
        note: why nothing was written.
    """

    site: str | None
    files: tuple[str, ...] = ()
    command: str | None = None
    values: str | None = None
    note: str | None = None


def check_folder(folder: Path, inputs: Iterable[Path]) -> None:
    """Raises where a reproduction would replace something else than an earlier one.

    Args:
        folder: where it is to be written.
        inputs: files that are compared.

    Raises:
        UserError: ``output-is-input``; ``folder-in-use``: it has files of these names that are no reproduction.
    """
    names = [folder / name for name in (UNFUSED, FUSED, INPUTS, COMMAND) if (folder / name).exists()]
    for path in names:
        check_output(path, inputs)
    if names and not (folder / COMMAND).exists():
        raise UserError("folder-in-use", f"{folder} has a file {names[0].name} already: give --minimize a new folder")


def reproduce(
    stage: Stage, pair: Pair, inputs: Inputs | None, folder: Path, seconds: float, memory: int | None
) -> Reproduction:
    """Writes a site's cut graph, its fused form and inputs.

    Args:
        stage: both files.
        pair: both sides of the site.
        inputs: of the whole model, None where it cannot be run.
        folder: where to write; is made if need be.
        seconds: limit of one run.
        memory: address space limit of one run.
    """
    arrays = None if inputs is None else _of_model(stage, pair, inputs, seconds, memory)
    values = "drawn" if arrays is None else "model"
    if arrays is None:
        arrays = _drawn(pair, seconds)
    if isinstance(arrays, Reason):
        return Reproduction(None, note=f"{pair.name} cannot be run on its own: {arrays.text}")
    make_folder(folder)
    for name, model in ((UNFUSED, pair.unfused), (FUSED, pair.fused)):
        (folder / name).write_bytes(_alone(stage, pair, model, arrays).SerializeToString())
    write_arrays(folder / INPUTS, arrays)
    command = f"fuse verify {folder / UNFUSED} {folder / FUSED} --inputs {folder / INPUTS}"
    (folder / COMMAND).write_text(f"{command}\n")
    files = tuple(str(folder / name) for name in (UNFUSED, FUSED, INPUTS, COMMAND))
    return Reproduction(pair.name, files, command, values)


def _alone(stage: Stage, pair: Pair, model: onnx.ModelProto, arrays: Mapping[str, Array]) -> onnx.ModelProto:
    """One side with the inputs and outputs of both, in the sizes of the arrays."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    del copy.graph.input[:], copy.graph.output[:]
    copy.graph.input.extend(
        helper.make_tensor_value_info(item.name, item.dtype, arrays[item.name].shape) for item in pair.inputs
    )
    shapes, graph = stage.after.shapes, stage.after.graph
    for name in pair.outputs:
        value = graph.find(name) or 0
        rank = len(shapes.shape(value) or ())
        dtype = shapes.dtype(value)
        info = helper.make_tensor_value_info(name, dtype, [None] * rank) if dtype and rank else None
        copy.graph.output.append(onnx.ValueInfoProto(name=name) if info is None else info)
    copy.producer_name = "deltafuse"
    return copy


def _of_model(
    stage: Stage, pair: Pair, inputs: Inputs, seconds: float, memory: int | None
) -> dict[str, Array] | None:
    """What the site reads in the unfused model, in the types of the fused file."""
    model = stage.before.model
    if obstacle(model, stage.foreign) is not None:
        return None
    names = [item.name for item in pair.inputs]
    with TemporaryDirectory(prefix="deltafuse-") as name:
        folder = Path(name)
        with runnable(model, folder, taps=names, foreign=stage.foreign) as source:
            if isinstance(source, Reason):
                return None
            files = write_inputs(inputs.arrays, folder / "inputs")
            ran = run_model(source, str(model.path), files, folder / "run", seconds, memory)
        if isinstance(ran, Reason):
            return None
        found = {name: np.load(ran.outputs[name]) for name in names if name in ran.outputs}
    found |= {name: inputs.arrays[name] for name in names if name in inputs.arrays}
    if len(found) < len(names):
        return None
    types = {item.name: helper.tensor_dtype_to_np_dtype(item.dtype) for item in pair.inputs}
    return {name: found[name].astype(types[name]) for name in names}


def _drawn(pair: Pair, seconds: float) -> dict[str, Array] | Reason:
    with Worker(seconds) as worker:
        unfused = to_double(pair.unfused)
        session = unfused if isinstance(unfused, Reason) else worker.load(unfused.SerializeToString())
        if isinstance(session, Reason):
            return session

        def ran(run: Run) -> object:
            return worker.run(session, drawn(pair, run), pair.outputs)

        draws = PairDraws(pair, ran)
        sizes = draws.sizes()
        return sizes if isinstance(sizes, Reason) else drawn_as_typed(pair, next(draws.runs(sizes[0])))
