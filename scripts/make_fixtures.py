"""Makes the test fixtures and the demo models from real exporters.

    python scripts/make_fixtures.py [NAME ...] [--out tests/fixtures] [--list]

Needs the ``dev`` extra. All of them take some minutes on two cores; names (shell patterns) select some.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import torch
from torch.export import Dim

from fixture_cases import CASES
from fixture_files import seed_of, shorten_traces, write_fixture
from full_fixtures import FULL
from qwen_models import exporting, torchscript
from rule_models import FAMILIES, Case, module_of, rule_inputs

ROOT = Path(__file__).parents[1]
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
    axes = dynamic_axes(case)
    names = {"inputs": list(case.inputs), "outputs": list(case.outputs)}
    if case.exporter == "torchscript":
        with exporting(FAMILIES[case.family]):
            torchscript(module, arguments, path, opset=case.opset, axes=axes, **names)
        return
    kinds = {"batch": Dim("batch", min=1, max=64), "tokens": Dim.DYNAMIC}
    shapes = tuple({axis: kinds[symbol] for axis, symbol in axes[name].items()} for name in case.inputs if axes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            module,
            arguments,
            dynamo=True,
            opset_version=case.opset,
            input_names=names["inputs"],
            output_names=names["outputs"],
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


def copy_demo(out: Path) -> None:
    """The demo ships two of the fixtures."""
    DEMO.mkdir(exist_ok=True)
    for demo, fixture in DEMO_MODELS.items():
        for suffix in (".onnx", ".npz"):
            shutil.copyfile(out / f"{fixture}{suffix}", DEMO / f"{demo}{suffix}")


def main() -> None:
    """Makes what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=["*"])
    parser.add_argument("--out", type=Path, default=ROOT / "tests/fixtures")
    parser.add_argument("--list", action="store_true", help="print the names, make nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    jobs: dict[str, Callable[[Path], None]] = {case.name: lambda out, case=case: make_case(case, out) for case in CASES}
    jobs |= FULL
    jobs |= {name: lambda out, name=name: make_edited(name, out) for name in EDITED}
    chosen = [name for name in jobs if any(fnmatch.fnmatch(name, pattern) for pattern in options.names)]
    if options.list:
        print("\n".join(chosen))
        return
    options.out.mkdir(parents=True, exist_ok=True)
    for name in chosen:
        jobs[name](options.out)
    if set(chosen) & set(DEMO_MODELS.values()):
        copy_demo(options.out)


if __name__ == "__main__":
    main()
