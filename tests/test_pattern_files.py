"""Faults in a pattern file of the user's: each is told with the file, the part and where to read how it is written."""

from __future__ import annotations

from pathlib import Path

import onnx.parser
import pytest

from deltafuse import patterns
from deltafuse.errors import UserError
from exports import export
from own_patterns import RECIPROCAL

MODEL = """
<ir_version: 8, opset_import: ["" : 17]>
g (float[n, 4] a) => (float[n, 4] b) <float one = {1.0}> { b = Div(one, a) }"""
PROPOSAL = 'yield Proposal({"x": region.source}, {"y": region.result})'
REFERENCE = 'return {"y": 1.0 / operands["x"]}'
NODE = 'emitter.node("Reciprocal", "reciprocal", (place.roles["x"].name,), outputs=(place.outputs["y"].name,))'
EMISSION = 'return Emission("Reciprocal")'
METHOD = "    def emit"
#: What is put in place of what -> the part that the message names, and what it says of it.
FAULTS = [
    (PROPOSAL, "yield view.nothing", "in propose: AttributeError"),
    (PROPOSAL, "yield 3", "propose: what it gives: it is 3 and must be Proposal or Reason"),
    (PROPOSAL, 'yield Proposal({"z": region.source}, {"y": region.result})', "propose: 'z' is none of roles"),
    (PROPOSAL, 'yield Proposal({"x": 9999}, {"y": region.result})', "names a value that the graph does not have"),
    (PROPOSAL, 'yield Proposal({"x": "a"}, {"y": "b"})', "propose: what it gives.roles: it is dict and must be"),
    (REFERENCE, 'return {"y": operands["no"]}', "in reference: KeyError: 'no'"),
    (REFERENCE, "return None", "reference: what it gives: it is None and must be Mapping"),
    (REFERENCE, 'return {"y": "no"}', "reference: y is 'no' and must be an array of numbers"),
    (NODE, "emitter.nothing()", "in emit: AttributeError"),
    (NODE, "raise SystemExit(0)", "in emit: SystemExit: 0"),
    (NODE, "pass", "emit: the nodes emitted for inverse.0 do not write each of ['b'] once"),
    (NODE, NODE.replace('"Reciprocal"', '"Neg"'), "emit: the nodes emitted for inverse.0 (Reciprocal) are not equal"),
    (EMISSION, "return None", "emit: what it gives: it is None and must be Emission or Reason"),
    (EMISSION, "return Emission(3)", "emit: what it gives.op: it is 3 and must be a text"),
    (EMISSION, 'return Emission("Reciprocal", {"q": "x"})', "emit: the site has no output 'q'"),
    (EMISSION, "from deltafuse.reasons import Reason; return Reason('zzz')", "emit: there is no text for 'zzz'"),
    (METHOD, f"    def solve(self, trial): return None\n\n{METHOD}", "solve: what it gives: it is None and must be"),
    (METHOD, f"    def draws(self, *given): return None\n\n{METHOD}", "draws: TypeError: 'NoneType' object"),
    (METHOD, f"    def lower(self, node): return [3]\n\n{METHOD}", "lower: what it gives: it is 3 and must be Node"),
    ("PATTERN = _Inverse()", "PATTERN = _Inverse", "is a class; write _Inverse()"),
    ('"inverse"', "None", "PATTERN.name: it is None and must be a text"),
    ('frozenset({"Div"})', '"Div"', "PATTERN.anchors: it is 'Div' and must be a set of texts"),
    ('{"Div": (1, 1)}', '{"Div": 1}', "PATTERN.operators: it is dict and must be a mapping"),
    ('{"Div": (1, 1)}', "{}", "PATTERN.operators: it is empty"),
    ('("x",)', "3", "PATTERN.roles: it is 3 and must be a tuple of texts"),
    ("    def propose", '    texts = ["a"]\n\n    def propose', "PATTERN.texts: it is list and must be a mapping"),
    ("    def propose", '    neighbours = {"c": 3}\n\n    def propose', "PATTERN.neighbours: it is dict and must be"),
    ("PATTERN = _Inverse()", "import sys\nsys.exit(0)", "cannot be imported: SystemExit: 0"),
]
RULES = [
    ("PATTERN.recurrence = lambda *given: 1 / 0", "in <lambda>: ZeroDivisionError"),
    ("PATTERN.recurrence = lambda query: None", "PATTERN.recurrence: TypeError"),
    ("PATTERN.recurrence = lambda *given: None", "PATTERN.recurrence: it gives NoneType and must give out and"),
    ("PATTERN.recurrence = lambda *given: (given[0], 3)", "PATTERN.recurrence: the final state is int where"),
    ("PATTERN.recurrence = lambda *given: (given[0], given[0])", "the final state is float64(1, 2, 2, 4) where"),
    ("PATTERN.neighbours = {'x': lambda *given: None}", "PATTERN.neighbours['x']: it gives NoneType"),
    ("PATTERN.neighbours = 3", "PATTERN.neighbours: it is int and must be a mapping"),
    ("PATTERN.decay = 'row'", "PATTERN.decay: 'row' is none of head, channel, none"),
    ("PATTERN.name = ''", "PATTERN.name: it is empty"),
    ("PATTERN.anchors = 'Exp'", "PATTERN.anchors: it is 'Exp' and must be a set of texts"),
    ("PATTERN.least_roots = '4'", "PATTERN.least_roots: it is '4' and must be a whole number"),
]


@pytest.mark.parametrize(("old", "new", "says"), FAULTS)
def test_a_fault_of_an_ordinary_pattern_ends_with_1(old: str, new: str, says: str, tmp_path: Path, fuse) -> None:
    path, model, output = tmp_path / "mine" / "inverse.py", tmp_path / "model.onnx", tmp_path / "out.onnx"
    path.parent.mkdir()
    assert old in RECIPROCAL
    path.write_text(RECIPROCAL.replace(old, new, 1))
    onnx.save(onnx.parser.parse_model(MODEL), model)
    outcome = fuse(model, "-o", output, "--patterns", path.parent, "--rules", "inverse")
    assert outcome.exit == 1
    assert str(path) in outcome.err
    assert says in outcome.err
    assert "Traceback" not in outcome.err
    assert not output.exists()


@pytest.mark.parametrize(("line", "says"), RULES)
def test_a_fault_of_a_recurrence_is_told_when_it_is_read(line: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "rule.py"
    text = (patterns.shipped_folder() / "gated_delta_rule.py").read_text()
    path.write_text(f"{text}\n{line}\n")
    with pytest.raises(UserError) as error:
        patterns.load([tmp_path])
    assert error.value.code == "bad-pattern"
    assert str(path) in str(error.value)
    assert says in str(error.value)
    assert str(error.value).endswith("see docs/patterns.md")


def test_a_recurrence_that_raises_later_is_told(tmp_path: Path, fuse) -> None:
    path = tmp_path / "rule.py"
    text = (patterns.shipped_folder() / "gated_delta_rule.py").read_text()
    path.write_text(
        f"{text}\ndef late(query, *given):\n    if query.shape[2] != 2:\n        raise ValueError('heads')\n"
        "    return recurrence(query, *given)\n\n\nPATTERN.recurrence = late\n"
    )
    outcome = fuse(export("rec_ts14").path, "-o", tmp_path / "out.onnx", "--patterns", tmp_path)
    assert outcome.exit == 1
    assert f"{path}, line" in outcome.err
    assert "in late: ValueError: heads; mend late" in outcome.err
