"""The rooms of the house: which modules belong together, and what each room knows; for the documentation.

A module belongs to the first room one of whose patterns fits its path.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from docs_text import cell, code, table

ROOT = Path(__file__).parents[1]
PACKAGE = "src/deltafuse/"


@dataclass(frozen=True)
class Room:
    """Some modules.

    Attributes:
        name: as a heading.
        knows: what its modules are about.
        ignorant: what they never ask for, "" where that is nothing.
        modules: patterns of paths, those of the package without its folder and ``.py``.
    """

    name: str
    knows: str
    ignorant: str
    modules: tuple[str, ...]


ROOMS = (
    Room(
        "Command and Python interface",
        "options, exit codes, which stage a command runs; imports the rest when it is needed",
        "how anything is done",
        (
            "__init__", "__main__", "cli", "commands*", "parsers*", "api*", "options", "console", "errors",
            "diagnosis", "limits", "demo", "doctor*", "completion*", "plan_file*", "choosing", "clock", "versions",
            "file_kinds", "pin_names", "user_code", "kinds",
        ),
    ),
    Room(
        "Reports",
        "tables, JSON documents, HTML pages, made from the dataclasses that stages hand on",
        "how a value in a report came about",
        ("report*", "tables*", "html*", "axis_names", "plots", "note*", "outcome", "reasons", "page*", "picture",
         "layer_map", "evidence", "operator_counts", "wording", "explaining", "glossary",
         "next_steps"),
    ),
    Room(
        "The file",
        "the wire format: interned ids, byte ranges, edits, external data, files that appear whole",
        "what a rule is",
        (
            "wire", "mapping", "scanner", "first_nodes", "lockstep", "protobuf", "messages", "tensors", "edits",
            "composing", "external", "locations", "copies", "files",
            "turns", "sidecars", "undoing", "ragged", "sanity", "probing", "near_names", "nesting",
        ),
    ),
    Room(
        "The graph",
        "values, producers, consumers, classes, subgraphs and functions of one scope",
        "targets, files",
        (
            "graph", "classes", "scope", "bodies", "enclosed", "nesting", "subgraphs", "functions", "inlining", "calls",
            "restated", "ordering", "while_loops", "constant*", "dtypes",
        ),
    ),
    Room(
        "Shapes and sizes",
        "symbolic sizes, shapes and element types, small contents, what a size decides",
        "rules, targets",
        ("dim*", "shape*", "size*", "repeats", "quasi_linear", "far_reads", "layouts"),
    ),
    Room(
        "Finding",
        "where a rule could be: anchors, cones, roots, what lies in bodies and functions",
        "numerics, targets",
        ("found", "searching", "finder", "anchors", "climb", "cores", "region", "roots", "buried", "strangers",
         "parted", "gathering", "softmax", "readings", "slices", "wiring", "signature", "ahead"),
    ),
    Room(
        "Running a cut",
        "cut a candidate out, turn it into double, run it in a worker with limits",
        "rules, targets",
        (
            "cuts", "subexpressions", "probe*", "bench", "feeds", "draws", "worker*", "children", "allocator",
            "background", "kernels",
        ),
    ),
    Room(
        "Proving",
        "a candidate and a pattern make a match, or a reason why not",
        "targets, files",
        (
            "prover", "search", "roles", "rule", "trial", "comparing", "agreement", "guards", "neighbours*", "nearest",
            "chunk_faults",
            "norm*", "carried", "hidden", "memory", "nested_sums", "odd_terms", "factors", "reach", "term*",
            "contractions",
            "validity", "coverage", "counts", "scalings", "sites", "match", "patterns*", "patterns/*delta*.py",
        ),
    ),
    Room(
        "Ordinary expressions",
        "patterns that are no recurrence: proposals, guards, proofs, plans",
        "targets, files",
        ("expression*", "causal_windows", "patterns/*.py"),
    ),
    Room(
        "Targets",
        "contracts of operators, their limits, the nodes that are written",
        "how a match was found",
        ("targets/*", "planning", "emitted", "adjusting", "drafting", "forecast", "opset", "aliases"),
    ),
    Room(
        "Writing and undoing",
        "byte edits, pinned axes, the patch that gives the original back, folders of models",
        "rules, numerics",
        (
            "pipeline", "splice", "pinning", "pin_sizes", "patch", "record", "rollback", "restore*", "partial",
            "folder*", "extract",
        ),
    ),
    Room(
        "Fused nodes, lowered",
        "read the fused nodes of a file and turn them into what onnxruntime runs",
        "matching",
        ("fused", "fused_sites", "held", "lower*", "foreign", "boundary"),
    ),
    Room(
        "Lint",
        "hold the fused nodes of any file against a profile",
        "matching",
        ("lint*",),
    ),
    Room(
        "Verify",
        "both files side by side: sites, whole models, chains of steps, causes of a difference",
        "matching",
        (
            "verify*", "network*", "rollout*", "inputs*", "masks", "measure", "divergence", "hybrid", "states*",
            "structure*", "bisecting", "ablating*", "minimizing",
        ),
    ),
    Room(
        "Export time",
        "the fused node put in place while torch exports a model",
        "",
        ("torch/*",),
    ),
)  # fmt: skip


def modules() -> list[str]:
    """Paths of all modules and shipped patterns, below the project's folder."""
    found = [*(ROOT / "src").rglob("*.py"), *(ROOT / "patterns").glob("*.py")]
    return sorted(str(path.relative_to(ROOT)) for path in found)


def room_of(path: str) -> str:
    """Name of the room that a module is in.

    Args:
        path: below the project's folder.

    Raises:
        LookupError: in none; the message says where to add it.
    """
    short = path.removeprefix(PACKAGE).removesuffix(".py") if path.startswith(PACKAGE) else path
    for room in ROOMS:
        if any(fnmatch(short, pattern) for pattern in room.modules):
            return room.name
    raise LookupError(f"{path} is in no room: add it to ROOMS of scripts/docs_rooms.py")


def rooms() -> str:
    """All rooms with their modules, each with the first line of its docstring."""
    parts: list[str] = []
    found = {path: room_of(path) for path in modules() if not path.endswith("/__init__.py") or path.count("/") < 3}
    for room in ROOMS:
        knows = f"Knows {room.knows}." + (f" Does not know: {room.ignorant}." if room.ignorant else "")
        rows = [[code(_name(path)), _summary(path)] for path, name in found.items() if name == room.name]
        parts.append(f"### {room.name}\n\n{knows}\n\n{table(('module', 'what it is'), rows)}")
    return "\n".join(parts)


def _name(path: str) -> str:
    return path.removeprefix(PACKAGE) if path.startswith(PACKAGE) else path


def _summary(path: str) -> str:
    text = ast.get_docstring(ast.parse((ROOT / path).read_text())) or ""
    return cell(text.splitlines()[0].replace("`", "")) if text else ""
