"""Counts the operators of one linear attention layer before and after ``fuse``: the tables of a page in ``docs``.

    python scripts/remaining_operators.py [--write]

Without --write it says whether docs/remaining-operators.md holds what is counted, and exits 1 where it does not.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import onnx
from onnx import GraphProto, NodeProto

import deltafuse

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/remaining-operators.md"
BEGIN, END = "<!-- counted -->\n", "<!-- end -->\n"
TARGETS = ("ort", "onnx")
#: What is counted: title -> fixture; the first layer of each is a linear one.
EXPORTS = {
    "Prefill, TorchScript, float16": "full_prefill_ts17_half",
    "Decode, TorchScript, float16": "full_decode_ts17_half",
    "Prefill, transformers' own exporter, float32": "full_prefill_transformers",
    "Decode, transformers' own exporter, float32": "full_decode_transformers",
}
#: Work on whole activations, or a state that is computed again: none of it may be left.
HEAVY = frozenset({
    "MatMul", "Gemm", "Einsum", "Conv", "Softmax", "Loop", "Scan", "If", "CumSum", "Trilu", "ScatterND",
    "ScatterElements", "GatherND", "GatherElements", "OneHot", "Tile", "Range",
})  # fmt: skip
_PROJECTIONS = ("MatMul", "Gemm")

# What two builders write that make a graph of their own, counted by hand from their source: from the projections to the
# result of the rule, both states included, without what a runtime computes once when it loads the file.
GENAI = Counter({
    "Transpose": 2, "CausalConvWithState": 1, "Split": 1, "Reshape": 4, "LpNormalization": 2, "Mul": 2, "Sigmoid": 1,
    "Cast": 2, "Add": 1, "Softplus": 1, "LinearAttention": 1,
})  # fmt: skip
MOBIUS = Counter({
    "Transpose": 2, "CausalConvWithState": 1, "Split": 1, "Shape": 2, "Concat": 2, "Reshape": 4, "ReduceSumSquare": 2,
    "Sqrt": 2, "Div": 2, "Sigmoid": 1, "Cast": 1, "Add": 1, "Softplus": 1, "Mul": 1, "CastLike": 1,
    "LinearAttention": 1,
})  # fmt: skip
BUILDERS = {"onnxruntime-genai": GENAI, "mobius": MOBIUS}


class Region:
    """The nodes of one layer from its projections to given values, at what a run computes anew.

    Args:
        graph: with the layer in it.
        ends: the rule's results and the convolution's state.
    """

    def __init__(self, graph: GraphProto, ends: Iterable[str]) -> None:
        self.producer = {value: node for node in graph.node for value in node.output if value}
        self.initializers = {tensor.name for tensor in graph.initializer}
        self._constant: dict[str, bool] = {"": True}
        self.nodes: list[NodeProto] = []
        seen: set[str] = set()
        stack = list(ends)
        while stack:
            node = self.producer.get(stack.pop())
            if node is None or node.output[0] in seen or self.is_projection(node):
                continue
            seen.add(node.output[0])
            if not self.is_constant(node.output[0]):
                self.nodes.append(node)
                stack += node.input

    def is_projection(self, node: NodeProto) -> bool:
        """Whether a product with a weight."""
        return node.op_type in _PROJECTIONS and any(self.is_constant(value) for value in node.input)

    def is_constant(self, value: str) -> bool:
        """Whether a value is the same in each run."""
        if value not in self._constant:
            node = self.producer.get(value)
            known = value in self.initializers if node is None else all(map(self.is_constant, node.input))
            self._constant[value] = known
        return self._constant[value]

    def counts(self) -> Counter[str]:
        """How many there are of each operator."""
        return Counter(node.op_type for node in self.nodes)


def conv_state(graph: GraphProto) -> str:
    """The first layer's part of the convolution states that a model gives out, stacked or one a layer."""
    producer = {value: node for node in graph.node for value in node.output}
    value = next(output.name for output in graph.output if "conv_states" in output.name)
    while producer[value].op_type in ("Concat", "Unsqueeze"):
        value = producer[value].input[0]
    return value


def regions(fixture: str, folder: Path) -> dict[str, Region]:
    """The first layer unfused and fused for each target."""
    source = ROOT / f"tests/fixtures/{fixture}.onnx"
    found: dict[str, Region] = {}
    for target in TARGETS:
        fused = folder / f"{fixture}-{target}.onnx"
        report = deltafuse.fuse(source, fused, target=target)
        match = next(site.match for site in report.sites if site.match is not None)
        ends = [match.out.name, *([match.final_state.name] if match.final_state else [])]
        for side, path in (("unfused", source), (target, fused)):
            graph = onnx.load(path, load_external_data=False).graph
            found.setdefault(side, Region(graph, [*ends, conv_state(graph)]))
    return found


def table(columns: Mapping[str, Counter[str]]) -> list[str]:
    """One row for each operator, those that stay first."""
    stays = {op for name, counts in columns.items() if name != "unfused" for op in counts}
    ops = sorted({op for counts in columns.values() for op in counts}, key=lambda op: (op not in stays, op))
    lines = [f"| operator | {' | '.join(columns)} |", f"|---|{'---:|' * len(columns)}"]
    lines.append(f"| all | {' | '.join(str(counts.total()) for counts in columns.values())} |")
    rows = ((op, [str(counts[op] or "") for counts in columns.values()]) for op in ops)
    return lines + [f"| {op} | {' | '.join(numbers)} |" for op, numbers in rows]


def counted() -> dict[str, dict[str, Region]]:
    """Title -> unfused or target -> what is counted."""
    with tempfile.TemporaryDirectory() as folder:
        return {title: regions(fixture, Path(folder)) for title, fixture in EXPORTS.items()}


def tables_of(found: Mapping[str, Mapping[str, Region]]) -> str:
    """The tables, as the page has them."""
    lines: list[str] = []
    for title, sides in found.items():
        counts = {side: region.counts() for side, region in sides.items()}
        lines += [f"## {title}", "", *table({**counts, **BUILDERS}), ""]
    return "\n".join(lines)


def split(text: str) -> tuple[str, str, str]:
    """The page before the tables, the tables and what follows."""
    before, rest = text.split(BEGIN)
    tables, after = rest.split(END)
    return before, tables, after


def main() -> int:
    """Compares or writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the tables into the page")
    options = parser.parse_args()
    before, tables, after = split(PAGE.read_text())
    now = tables_of(counted())
    if options.write:
        PAGE.write_text(f"{before}{BEGIN}{now}{END}{after}")
    elif tables != now:
        print(f"{PAGE} holds other numbers: run this with --write")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
