"""What must hold of a graph before anything is looked for in it: each value has one source, each operator a version."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx

from deltafuse.errors import UserError
from deltafuse.graph import Graph
from deltafuse.opset import LINEAR_ATTENTION_OPSET
from deltafuse.wire import Model
from deltafuse.wording import number

__all__ = ["checked"]

#: What a version of operators can be: onnxruntime has an int for it.
_LAST_VERSION = (1 << 31) - 1


def checked(model: Model) -> Model:
    """The same model; raises where its graph is none, so that a fuse of it would mean something else to each reader.

    Raises:
        UserError: ``value-written-twice``, ``value-without-source``, ``initializer-twice``, ``empty-name``,
            ``opset-missing``, ``opset-unknown``.
    """
    _check_names(model)
    _check_sources(model.path, model.graph)
    _check_opsets(model)
    return model


def _check_names(model: Model) -> None:
    path, graph = model.path, model.graph
    if 0 in graph.inputs or 0 in graph.outputs:
        raise UserError("empty-name", f"{path}: an input or output of the graph has no name: give it one")
    twice = _first_twice(head.name for head in model.constants if head.name)
    if twice is not None:
        heads = [head.message(model.data) for head in model.constants if head.name == twice]
        # the same bytes twice mean the same to every reader
        if len(set(heads)) > 1:
            raise UserError(
                "initializer-twice",
                f"{path} has {number(len(heads), 'initializer')} {twice!r} that differ, and readers do not agree which "
                "counts: remove all but one",
            )


def check_written_once(path: Path, graph: Graph) -> npt.NDArray[np.int64]:
    """Looks for a value that two nodes write, or a node and a graph input or initializer.

    Returns:
        How many nodes, inputs and written initializers give each value.

    Raises:
        UserError: ``value-written-twice``.
    """
    sources = np.bincount(graph.writing.flat, minlength=len(graph.value_names))
    np.add.at(sources, np.array(graph.inputs, np.int64), 1)
    sources[list(graph.initializers)] += sources[list(graph.initializers)] > 0
    sources[0] = 1
    twice = np.flatnonzero(sources > 1)
    if len(twice):
        raise UserError(
            "value-written-twice",
            f"{path}: the value {graph.name(int(twice[0]))!r} is given more than once, by nodes, inputs or initializers"
            ": rename one, or export the model again",
        )
    return sources


def _check_sources(path: Path, graph: Graph) -> None:
    """Each value that is read is given by the graph's inputs, an initializer or one node; nothing by two of them."""
    sources = check_written_once(path, graph)
    sources[list(graph.initializers)] = 1
    read = np.concatenate(
        [graph.reading.flat, np.array([v for values in graph.captures.values() for v in values], np.int64)]
    )
    read = np.concatenate([read, np.array(graph.outputs, np.int64)])
    lost = next(iter(read[sources[read] == 0].tolist()), 0)
    if lost:
        raise UserError(
            "value-without-source",
            f"{path}: nothing gives the value {graph.name(lost)!r}, which {_reader(graph, lost)}: declare it as an "
            "input of the graph, or export the model again",
        )


def _reader(graph: Graph, value: int) -> str:
    node = next((node for node in range(len(graph.op)) if value in graph.reads(node)), -1)
    return "is an output of the graph" if node < 0 else f"{graph.label(node) or graph.op[node]} reads"


def _check_opsets(model: Model) -> None:
    graph, imports = model.graph, model.opset_imports
    missing = sorted(domain for domain in set(graph.domain) if domain not in imports)
    if missing:
        raise UserError(
            "opset-missing",
            f"{model.path} has operators of {missing[0] or 'ai.onnx'} and does not say of which version: add an "
            "opset_import for it, the one it was exported with",
        )
    broken = next((domain for domain, version in imports.items() if not 0 < version <= _LAST_VERSION), None)
    if broken:
        raise UserError(
            "opset-unknown",
            f"{model.path} has operators of {broken}, version {_signed(imports[broken])}, which is none: mend its "
            "opset_import, or export the model again",
        )
    # our own output is read by releases of onnx that do not know its opset yet
    newest = max(onnx.defs.onnx_opset_version(), LINEAR_ATTENTION_OPSET)
    version = imports.get("", 1)
    if not 0 < version <= newest:
        raise UserError(
            "opset-unknown",
            f"{model.path} is of opset {_signed(version)}, and what is installed "
            f"knows 1 to {newest}: update onnx and onnxruntime, or export the model with an older opset",
        )


def _signed(version: int) -> int:
    return version if version >> 63 == 0 else version - (1 << 64)


def _first_twice(names: Iterable[str]) -> str | None:
    return next((name for name, count in Counter(names).items() if count > 1), None)
