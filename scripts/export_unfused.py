"""Exports the unfused prefill and decode graphs of a Qwen3.5 or Qwen3-Next checkpoint, each into a folder of its own.

Examples:
    python scripts/export_unfused.py --tiny --output-dir tiny
    python scripts/export_unfused.py --model-id checkpoints/qwen3.5 --output-dir onnx --dtype fp16 --dummy-seq-len 32

A trace is right for some sizes only. Prefill: for the token counts that fill as many chunks as ``--dummy-seq-len``
does (32 of 64: one chunk, 1 to 64 tokens). Decode: for one token, whatever its step axis is called. A fused prefill
takes any number of tokens, a fused decode is fixed to one.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

NEEDED = ("torch", "transformers", "onnx", "onnxscript")
#: Model types of transformers, and whether their checkpoints hold a vision tower.
FAMILIES = {
    "qwen3_5": True,
    "qwen3_5_text": False,
    "qwen3_5_moe": True,
    "qwen3_5_moe_text": False,
    "qwen3_next": False,
}
COMPONENTS = ("prefill", "decode")
#: Exporters of torch, each with the oldest and the newest opset it writes (torch 2.13).
OPSETS = {"torchscript": (14, 20), "dynamo": (18, 23)}


def parser() -> argparse.ArgumentParser:
    """The options."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = options.add_mutually_exclusive_group(required=True)
    source.add_argument("--model-id", type=Path, metavar="DIR", help="a checkpoint's folder: config.json and weights")
    source.add_argument("--tiny", action="store_true", help="random weights: 3 linear layers, 1 with full attention")
    options.add_argument("--output-dir", type=Path, metavar="DIR", required=True, help="gets prefill/ and decode/")
    options.add_argument("--component", choices=("all", *COMPONENTS), default="all")
    options.add_argument(
        "--dtype", choices=("fp16", "fp32"), default="fp16", help="of the weights; default %(default)s"
    )
    options.add_argument(
        "--dummy-seq-len",
        type=partial(at_least, 2),
        default=32,
        metavar="N",
        help="tokens to trace a prefill with, and tokens before the one a decode is traced with; default %(default)s",
    )
    options.add_argument("--exporter", choices=tuple(OPSETS), default="torchscript")
    options.add_argument("--opset", type=int, default=18, metavar="N", help="default %(default)s")
    options.add_argument(
        "--chunk-size",
        type=partial(at_least, 2),
        default=None,
        metavar="N",
        help="tokens in a chunk of the written-out rule; default: what the model's own code has, 64. "
        "Small chunks make small graphs; the fused graph is the same",
    )
    return options


def at_least(least: int, text: str) -> int:
    """The whole number of an option, from ``least`` on."""
    number = int(text)
    if number < least:
        raise argparse.ArgumentTypeError(f"{text} is too small: at least {least} is needed")
    return number


def fail(message: str) -> NoReturn:
    """Ends with exit code 1 and a message that says what to do."""
    sys.exit(f"export_unfused: {message}")


def check_opset(exporter: str, opset: int) -> None:
    """Ends where an exporter does not write an opset: it would write another, or stop half-way."""
    low, high = OPSETS[exporter]
    if not low <= opset <= high:
        fail(f"--exporter {exporter} writes opsets {low} to {high}, not {opset}")


def check_packages() -> None:
    """Ends where something that exports is missing."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        fail(f"{' and '.join(missing)} cannot be imported. Exporting needs the dev extra: pip install -e '.[dev]'")


def check_checkpoint(folder: Path) -> None:
    """Ends where a folder holds no checkpoint of a family that can be exported."""
    config = folder / "config.json"
    if not folder.is_dir():
        fail(f"{folder}: no such folder. --model-id takes the folder of a downloaded checkpoint, not a name on a hub")
    if not config.is_file():
        fail(f"{folder}: no config.json in it, so it is no checkpoint that transformers can read")
    try:
        kind = json.loads(config.read_text()).get("model_type")
    except (ValueError, AttributeError) as error:
        fail(f"{config}: not a JSON object ({error})")
    if kind not in FAMILIES:
        fail(
            f"{folder}: its model_type is {kind!r}, which is neither Qwen3.5 nor Qwen3-Next. "
            f"Exported are {', '.join(FAMILIES)}"
        )


def main(arguments: list[str] | None = None) -> None:
    """Exports what the options say."""
    options = parser().parse_args(arguments)
    check_opset(options.exporter, options.opset)
    if options.model_id is not None:
        check_checkpoint(options.model_id)
    check_packages()
    from export_checkpoint import CheckpointError, load_checkpoint, make_tiny
    from export_graphs import Export, export

    try:
        checkpoint = make_tiny(options.dtype) if options.tiny else load_checkpoint(options.model_id, options.dtype)
    except CheckpointError as error:
        fail(str(error))
    chosen = COMPONENTS if options.component == "all" else (options.component,)
    settings = Export(options.exporter, options.opset, options.dummy_seq_len, options.chunk_size)
    for component in chosen:
        path = options.output_dir / component / "model.onnx"
        path.parent.mkdir(parents=True, exist_ok=True)
        export(checkpoint, component, settings, path)
        print(path)


if __name__ == "__main__":
    main()
