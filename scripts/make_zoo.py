"""Makes the project's own zoo, the test fixtures among it, and the demo models: exports of the rule in every spelling.

    python scripts/make_zoo.py [--out DIR] [--only GLOB ...] [--list]

Each member is NAME.onnx, NAME.npz (inputs by name, outputs as out0, out1, ...) and NAME.json (the truth), as
`scripts/zoo_report.py` reads them. Without --out, fixtures of whole exports go to tests/fixtures, spellings and near
misses to tests/zoo. Needs the ``dev`` extra, and members named ``*__TOOL`` that tool; all of them take some minutes on
two cores.
"""

from __future__ import annotations

import argparse
import fnmatch
import functools
import json
import logging
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import torch
from onnxruntime.tools import pytorch_export_contrib_ops
from torch.export import Dim

from fixture_cases import CASES
from fixture_files import file_inputs, seed_of, shorten_traces, write_fixture
from full_fixtures import FULL
from qwen_models import exporting, torchscript
from rule_models import FAMILIES, Case, module_of, rule_inputs
from zoo_conversions import CONVERSIONS, CONVERTED
from zoo_functions import MODELS, attention_inputs, attention_outputs
from zoo_member import Axes, Member
from zoo_near import NEAR_MISSES
from zoo_spellings import SMALL_CHUNKS, SPELLINGS

ROOT = Path(__file__).parents[1]
FIXTURES, ZOO = ROOT / "tests/fixtures", ROOT / "tests/zoo"
DEMO = ROOT / "src/deltafuse/demo_models"
DTYPES = {torch.float32: "float32", torch.float16: "float16"}
#: Demo model -> the fixture it is a copy of.
DEMO_MODELS = {"prefill": "full_prefill_ts17", "decode": "full_decode_ts17"}


def dynamic_axes(case: Case) -> dict[str, dict[int, str]]:
    """Dynamic axes of each input and output; a state has no token axis."""
    letters = {"B": {0: "batch"}, "BT": {0: "batch", 1: "tokens"}}.get(case.dynamic, {})
    names = (*case.inputs, *case.outputs)
    return {name: {a: s for a, s in letters.items() if a == 0 or "state" not in name} for name in names if letters}


def export(case: Case, module: torch.nn.Module, arguments: tuple[torch.Tensor, ...], path: Path) -> None:
    """Exports one case to ``path``."""
    names = {"inputs": list(case.inputs), "outputs": list(case.outputs)}
    if case.exporter == "torchscript":
        with exporting(FAMILIES[case.family]):
            torchscript(module, arguments, path, opset=case.opset, axes=dynamic_axes(case), **names)
    else:
        dynamo(module, arguments, path, opset=case.opset, axes=dynamic_axes(case), **names)


def dynamo(
    module: torch.nn.Module,
    arguments: tuple[torch.Tensor, ...],
    path: Path,
    *,
    inputs: list[str],
    outputs: list[str],
    opset: int,
    axes: Axes,
) -> None:
    """`torch.onnx.export` by way of torch.export."""
    kinds = {"batch": Dim("batch", min=1, max=64), "tokens": Dim.DYNAMIC}
    shapes = tuple({axis: kinds[symbol] for axis, symbol in axes[name].items()} for name in inputs if axes)
    logging.getLogger("torch.onnx._internal.exporter._registration").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            module,
            arguments,
            dynamo=True,
            opset_version=opset,
            input_names=inputs,
            output_names=outputs,
            dynamic_shapes=shapes or None,
            verbose=False,
        )
    program.save(str(path))
    shorten_traces(path)


def truth_of(case: Case) -> dict[str, object]:
    """What a test may expect of a case."""
    function = {"steps": "hand-written steps", "softmax": "hand-written attention"}.get(
        case.kind, f"transformers {case.family}, {case.kind} function"
    )
    static_batch = case.batch > 1 and "B" not in case.dynamic
    return {
        "source": function,
        "exporter": {"kind": case.exporter, "opset": case.opset},
        "kind": "recurrent" if case.kind == "steps" else case.kind,
        "expect": "match",
        "exit": 4 if static_batch else 0,
        "why": "a static batch above one" if static_batch else "",
        "n_sites": 1,
        "dims": {
            "batch": case.batch,
            "tokens": case.tokens,
            "key_heads": case.key_heads,
            "value_heads": case.value_heads,
            "key_dim": case.key_dim,
            "value_dim": case.value_dim,
            "chunk_size": case.chunk if case.kind == "chunk" else None,
        },
        "dynamic_axes": dynamic_axes(case),
        "dtype": DTYPES[case.dtype],
        "initial_state": case.state,
        "final_state": case.final,
        "l2norm": case.norm,
        "scale": case.key_dim**-0.5,
        "roles": {name: name for name in case.inputs},
        "valid_tokens": case.valid,
        **case.truth,
    }


def make_case(case: Case, out: Path) -> None:
    """Exports one case with what torch makes of the same inputs."""
    path = out / f"{case.name}.onnx"
    module, arguments = module_of(case), rule_inputs(case, seed_of(case.name))
    expected = module(*arguments)
    export(case, module, arguments, path)
    expected = expected if isinstance(expected, tuple) else (expected,)
    write_fixture(path, dict(zip(case.inputs, arguments, strict=True)), expected, truth_of(case))


def swap_decay(graph: onnx.GraphProto) -> None:
    """Turns the pairwise decay of a chunk around: exp(sum_j - sum_i) instead of exp(sum_i - sum_j)."""
    producers = {output: node for node in graph.node for output in node.output}
    exponents = [producers[node.input[0]] for node in graph.node if node.op_type == "Exp"]
    masked = next(node for node in exponents if node.op_type == "Where")
    difference = next(
        producers[name] for name in masked.input if name in producers and producers[name].op_type == "Sub"
    )
    first, second = difference.input
    difference.input[:] = [second, first]


def show_cumulated_decay(graph: onnx.GraphProto) -> None:
    """Makes the decay summed up within each chunk a graph output as well."""
    cumulated = next(node for node in graph.node if node.op_type == "CumSum").output[0]
    graph.output.append(onnx.helper.make_tensor_value_info(cumulated, onnx.TensorProto.FLOAT, None))


#: Name -> (source, edit, what differs from the source's truth).
EDITED: dict[str, tuple[str, Callable[[onnx.GraphProto], None], dict[str, object]]] = {
    "nm_chunk_decay_sign": (
        "chunk_dy23_noinit_nofinal",
        swap_decay,
        {"expect": "no-match", "exit": 3, "why": "the decay between two tokens of a chunk is turned around"},
    ),
    "leak_chunk": (
        "chunk_dy23_noinit_nofinal",
        show_cumulated_decay,
        {
            "exit": 0,
            "why": "the decay summed up within a chunk is an output too, of g alone",
        },
    ),
}


def make_edited(name: str, out: Path) -> None:
    """Edits a fixture that is there already; what is expected is what onnxruntime makes of it."""
    source, edit, differs = EDITED[name]
    path = out / f"{name}.onnx"
    model = onnx.load(out / f"{source}.onnx")
    edit(model.graph)
    onnx.save(model, path)
    truth = json.loads((out / f"{source}.json").read_text()) | differs | {"name": name}
    with np.load(out / f"{source}.npz") as arrays:
        feeds = {key: arrays[key] for key in arrays.files if not key.startswith("out")}
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    expected = session.run(None, feeds)
    write_fixture(path, {key: torch.from_numpy(array) for key, array in feeds.items()}, expected, truth)


def make_member(member: Member, out: Path) -> None:
    """Exports a hand-written module with what torch makes of the same inputs."""
    path = out / f"{member.name}.onnx"
    module, arguments = member.module().eval(), tuple(member.inputs.values())
    write = dynamo if member.exporter == "dynamo" else torchscript
    if member.exporter == "contrib":
        pytorch_export_contrib_ops.register()
    with torch.no_grad():
        expected = module(*arguments)
        names = {"inputs": list(member.inputs), "outputs": list(member.outputs)}
        write(module, arguments, path, opset=member.opset, axes=member.axes, **names)
    write_fixture(path, member.inputs, expected, member.truth())


def make_attention(name: str, out: Path) -> None:
    """The body of ONNX's own LinearAttention, called or inlined; numpy runs the rule for the outputs."""
    path = out / f"{name}.onnx"
    onnx.save(MODELS[name](), path)
    inputs = attention_inputs()
    truth = Member(name, torch.nn.Identity, inputs, "the function body of LinearAttention", tokens=5, opset=23).truth()
    write_fixture(path, inputs, attention_outputs(inputs), truth | {"source": "ONNX opset 27, LinearAttention"})


def make_converted(source: str, conversion: str, out: Path) -> None:
    """What a tool makes of a member; its outputs are the source's."""
    folder = next(folder for folder in (out, FIXTURES, ZOO) if (folder / f"{source}.onnx").exists())
    path = out / f"{source}__{conversion}.onnx"
    onnx.save(CONVERSIONS[conversion](onnx.load(folder / f"{source}.onnx")), path)
    truth = {"codes": [""]} | json.loads((folder / f"{source}.json").read_text())
    truth |= {"name": path.stem, "why": f"{source} after {conversion}"}
    if conversion in ("half", "halfinside"):
        truth |= {"dtype": "float16"}
    with np.load(folder / f"{source}.npz") as arrays:
        expected = [arrays[f"out{i}"] for i in range(len(truth["outputs"]))]
        feeds = {name: torch.from_numpy(arrays[name]) for name in file_inputs(path)}
    if conversion == "half":
        feeds = {name: tensor.half() for name, tensor in feeds.items()}
        expected = [array.astype(np.float16) for array in expected]
    write_fixture(path, feeds, expected, truth)


def copy_demo(out: Path) -> None:
    """The demo ships two of the fixtures."""
    DEMO.mkdir(exist_ok=True)
    for demo, fixture in DEMO_MODELS.items():
        for suffix in (".onnx", ".npz"):
            shutil.copyfile(out / f"{fixture}{suffix}", DEMO / f"{demo}{suffix}")


Job = Callable[[Path], None]


def fixtures() -> dict[str, Job]:
    """Whole exports: what the tests of every stage read."""
    jobs: dict[str, Job] = {case.name: functools.partial(make_case, case) for case in CASES}
    return jobs | FULL | {name: functools.partial(make_edited, name) for name in EDITED}


def spellings() -> dict[str, Job]:
    """Spellings and near misses, each with what is to become of it."""
    jobs: dict[str, Job] = {case.name: functools.partial(make_case, case) for case in SMALL_CHUNKS}
    jobs |= {member.name: functools.partial(make_member, member) for member in (*SPELLINGS, *NEAR_MISSES)}
    jobs |= {name: functools.partial(make_attention, name) for name in MODELS}
    for source, conversions in CONVERTED.items():
        jobs |= {f"{source}__{tool}": functools.partial(make_converted, source, tool) for tool in conversions}
    return jobs


def main() -> None:
    """Makes what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="one folder for all of them")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="GLOB", help="names to take, e.g. 'chunk_*'")
    parser.add_argument("--list", action="store_true", help="print the names, make nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    chosen = [
        (name, folder, make)
        for folder, jobs in ((FIXTURES, fixtures()), (ZOO, spellings()))
        for name, make in jobs.items()
        if any(fnmatch.fnmatch(name, pattern) for pattern in options.only)
    ]
    if options.list:
        print("\n".join(name for name, _, _ in chosen))
        return
    for _, folder, make in chosen:
        out = options.out or folder
        out.mkdir(parents=True, exist_ok=True)
        make(out)
    if options.out is None and {name for name, _, _ in chosen} & set(DEMO_MODELS.values()):
        copy_demo(FIXTURES)


if __name__ == "__main__":
    main()
