"""Faults in a target file of the user's: each is told with the file, the part and where to read how it is written."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from deltafuse import targets
from deltafuse.errors import UserError
from deltafuse.lint import lint
from deltafuse.reasons import TEXTS
from deltafuse.targets import TargetOptions
from exports import export
from hand_match import Site, match

HEAD = """
from dataclasses import replace

from deltafuse.match import Plan
from deltafuse.reasons import TEXTS, Reason
from deltafuse.targets.ascend_310p import PROFILE as ASCEND
from deltafuse.targets.base import Limit
from deltafuse.targets.onnx_opset27 import PROFILE as ONNX
from deltafuse.targets.onnxruntime_contrib import PROFILE as ORT
from deltafuse.targets.profile import Profile

(OP,) = ORT.operators


def operator(**changes):
    return replace(ORT, operators=(replace(OP, **changes),))


def limit(check, code="head-ratio", mark="A"):
    return replace(ORT, shared=(Limit(code, mark, "a fact", check),))


def plan(**changes):
    return replace(ORT, emit=lambda match, operator, case: replace(ORT.emit(match, operator, case), **changes))


def edited(change):
    def emit(match, operator, case):
        found = ORT.emit(match, operator, case)
        change(next(node for node in found.nodes if node.op_type == "LinearAttention"))
        return found

    return replace(ORT, emit=emit)


def scaled(node):
    next(one for one in node.attribute if one.name == "scale").f = 0.7


def renamed(node):
    node.op_type = "Other"


def broken(*given):
    return given[0].nothing


def ended(*given):
    raise SystemExit(0)


def deep(*given):
    return deep(*given)

"""
#: What the file says -> the part that the message names, and what it says of it.
READ = [
    ("import sys\nsys.exit(0)", "cannot be imported: SystemExit: 0 (line"),
    ("def f(:", "cannot be imported: SyntaxError"),
    ("Profile(name='x')", "cannot be imported: TypeError"),
    ("PROFILE = ORT.name", "defines no PROFILE"),
    ("PROFILE = replace(ORT, name=None)", "PROFILE.name: it is None and must be a text"),
    ("PROFILE = replace(ORT, title='')", "PROFILE.title: it is empty"),
    ("PROFILE = replace(ORT, emit=3)", "PROFILE.emit: it is 3 and must be a function"),
    ("PROFILE = replace(ORT, lint=None)", "PROFILE.lint: it is None and must be LintRules"),
    ("PROFILE = replace(ORT, others=(3,))", "PROFILE.others[0]: it is 3 and must be Operator"),
    ("PROFILE = replace(ORT, boundaries=('fp16',))", "PROFILE.boundaries[0]: it is 'fp16' and must be a whole number"),
    ("PROFILE = replace(ORT, boundaries=(7,))", "PROFILE.boundaries[0]: 7 is none of 1 (float32), 10 (float16)"),
    ("PROFILE = replace(ORT, boundaries=())", "PROFILE.boundaries: it is empty"),
    ("PROFILE = replace(ORT, boundaries=10)", "PROFILE.boundaries: it is 10 and must be a tuple of whole numbers"),
    ("PROFILE = replace(ORT, opset=17)", "PROFILE.opset: it is 17 and must be a tuple (a text, a whole number)"),
    ("PROFILE = replace(ASCEND, opset=('', 99))", "PROFILE.opset: 99 is no version that is known of ai.onnx"),
    ("PROFILE = replace(ORT, opset=('elsewhere', 1))", "PROFILE.operators[0].domain: PROFILE.opset does not import"),
    ("PROFILE = replace(ORT, opset=('ai.onnx', 20))", "PROFILE.opset: the domain of ONNX itself is written"),
    ("PROFILE = operator(domain='ai.onnx')", "PROFILE.operators[0].domain: PROFILE.opset does not import ai.onnx"),
    ("PROFILE = operator(domain='')", "PROFILE.operators[0].domain: PROFILE.opset does not import ai.onnx 27"),
    ("PROFILE = replace(ONNX, opset=('', 26))", "PROFILE.opset does not import ai.onnx 27, which has LinearAttention"),
    ("PROFILE = replace(ORT, others=ONNX.others)", "PROFILE.others[0].domain: PROFILE.opset does not import ai.onnx"),
    ("PROFILE = replace(ASCEND, others=ORT.others)", "PROFILE.others[0].domain: PROFILE.opset does not import com."),
    ("PROFILE = replace(ORT, operators=())", "PROFILE.operators: it is empty"),
    ("PROFILE = replace(ORT, operators=('RGDR',))", "PROFILE.operators[0]: it is 'RGDR' and must be Operator"),
    ("PROFILE = operator(signature=None)", "PROFILE.operators[0].signature: it is None and must be a text"),
    ("PROFILE = operator(signature='')", "PROFILE.operators[0].signature: it is empty"),
    ("PROFILE = operator(attributes=('scale',))", "PROFILE.operators[0].attributes[0]: it is 'scale' and must be"),
    ("PROFILE = operator(outputs=OP.outputs[:1])", "PROFILE.operators[0].outputs: their roles are out and must be"),
    ("PROFILE = operator(inputs=(replace(OP.inputs[0], role='q'),))", "PROFILE.operators[0].inputs[0].role: 'q' is"),
    ("PROFILE = operator(inputs=(replace(OP.inputs[0], layout='??'),))", "PROFILE.operators[0].inputs[0].layout: '??'"),
    ("PROFILE = replace(ORT, shared=[1])", "PROFILE.shared: it is list and must be a tuple of Limits"),
    ("PROFILE = limit(None)", "PROFILE.shared[0].check: it is None and must be a function"),
    ("PROFILE = limit(broken, code=None)", "PROFILE.shared[0].code: it is None and must be a text"),
    ("PROFILE = limit(broken, code='a-code')", "PROFILE.shared[0].code: there is no text for 'a-code'"),
    ("PROFILE = limit(broken, mark='Q')", "PROFILE.shared[0].mark: 'Q' is none of V, S, A"),
    ("PROFILE = operator(limits=(Limit('a-code', 'A', 'x', broken),))", "PROFILE.operators[0].limits[0].code: there"),
]
PLANNED = [
    ("PROFILE = replace(ORT, emit=broken)", "in broken: AttributeError"),
    ("PROFILE = replace(ORT, emit=ended)", "in ended: SystemExit: 0"),
    ("PROFILE = replace(ORT, emit=deep)", "in deep: RecursionError"),
    ("PROFILE = replace(ORT, emit=lambda match: None)", "emit: TypeError"),
    ("PROFILE = replace(ORT, emit=lambda *given: None)", "emit: it gives NoneType and must give a Plan"),
    ("PROFILE = plan(nodes=['x'])", "emit: nodes of its Plan: it is list and must be a tuple of NodeProtos"),
    ("PROFILE = plan(nodes=(None,))", "emit: nodes[0] of its Plan: it is None and must be NodeProto"),
    ("PROFILE = plan(nodes=())", "emit: its Plan has no node LinearAttention of the domain com.microsoft"),
    ("PROFILE = plan(op=3)", "emit: op of its Plan: it is 3 and must be a text"),
    ("PROFILE = plan(op='Other')", "emit: its Plan is of Other, and it was to write LinearAttention"),
    ("PROFILE = plan(match=None)", "emit: the match of its Plan is not the one"),
    ("PROFILE = plan(pins=((9999, 0, 1),))", "emit: it pins axis 0 of value 9999 to 1"),
    ("PROFILE = edited(renamed)", "emit: its Plan has no node LinearAttention"),
    ("PROFILE = limit(broken)", "in broken: AttributeError"),
    ("PROFILE = limit(lambda: None)", "check of limit head-ratio: TypeError"),
    ("PROFILE = limit(lambda case: True)", "check of limit head-ratio: it gives True and must give a Reason or None"),
    ("PROFILE = limit(lambda case: Reason('zzz'))", "check of limit head-ratio: there is no text for 'zzz'"),
    (
        "TEXTS['gap'] = 'it is {x}; mend it'\nPROFILE = limit(lambda case: Reason('gap'), code='gap')",
        "check of limit gap: the text of gap asks for what its Reason has not: KeyError: 'x'",
    ),
]  # fmt: skip


def written(folder: Path, text: str) -> Path:
    path = folder / "board.py"
    path.write_text(f"{HEAD}\n{text}\n")
    return path


def told(path: Path, error: UserError, says: str) -> None:
    assert error.code == "target-file"
    assert str(path) in str(error)
    assert says in str(error)
    assert str(error).endswith("see docs/targets.md")


@pytest.mark.parametrize(("text", "says"), READ)
def test_what_a_file_says_is_looked_over_when_it_is_read(text: str, says: str, tmp_path: Path) -> None:
    path = written(tmp_path, text)
    with pytest.raises(UserError) as error:
        targets.get(str(path))
    told(path, error.value, says)


@pytest.mark.parametrize(("text", "says"), PLANNED)
def test_what_its_functions_give_is_looked_over_when_they_are_called(text: str, says: str, tmp_path: Path) -> None:
    path = written(tmp_path, text)
    with pytest.raises(UserError) as error:
        targets.get(str(path)).plan(match(Site()), TargetOptions())
    told(path, error.value, says)
    TEXTS.pop("gap", None)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("PROFILE = replace(ORT, emit=broken)", "in broken: AttributeError"),
        ("PROFILE = limit(ended)", "in ended: SystemExit: 0"),
        ("PROFILE = edited(scaled)", "(LinearAttention) are not equal to what they replace: the scale of"),
        ("PROFILE = operator(attributes=())", "emit: the LinearAttention node"),
        ("PROFILE = plan(value_info=3)", "emit: value_info of its Plan: it is 3"),
        ("import sys\nsys.exit(0)", "cannot be imported: SystemExit: 0"),
    ],
)
def test_the_command_ends_with_1_and_writes_nothing(text: str, says: str, tmp_path: Path, fuse) -> None:
    path, output = written(tmp_path, text), tmp_path / "out.onnx"
    outcome = fuse(export("rec_ts14").path, "-o", output, "--target", path)
    assert outcome.exit == 1
    assert outcome.err.startswith(f"fuse: {path}")
    assert says in outcome.err
    assert outcome.err.endswith("see docs/targets.md\n")
    assert "Traceback" not in outcome.err
    assert not output.exists()


OTHERWISE = """
def node_of(found):
    return next(node for node in found.nodes if node.op_type == "LinearAttention")


def swap(found):
    inputs = node_of(found).input
    inputs[0], inputs[1] = inputs[1], inputs[0]


def states(found):
    outputs = node_of(found).output
    outputs[0], outputs[1] = outputs[1], outputs[0]


def of_the_first(found):
    node_of(found).input[:] = first[0].input


def hint(found):
    node_of(found).attribute.append(helper.make_attribute("chunk_size", 64))


def emit(match, operator, case):
    found = ORT.emit(match, operator, case)
    first.append(node_of(found))
    if match.name == "layers.1":
        CHANGE(found)
    return found


first = []
PROFILE = replace(ORT, emit=emit, others=())
"""


@pytest.mark.parametrize("change", ["lambda found: scaled(node_of(found))", "swap", "states", "of_the_first"])
def test_nodes_that_differ_between_sites_of_one_class_are_proven_each(change: str, tmp_path: Path, fuse) -> None:
    path = written(tmp_path, f"from onnx import helper\n{OTHERWISE.replace('CHANGE', f'({change})')}")
    output = tmp_path / "out.onnx"
    outcome = fuse(export("full_decode_ts17").path, "-o", output, "--target", path)
    assert outcome.exit == 1
    assert f"fuse: {path}, emit: the nodes emitted for layers.1" in outcome.err
    assert not output.exists()


def test_an_operator_for_ordinary_expressions_that_is_not_known(tmp_path: Path, fuse) -> None:
    text = "PROFILE = replace(ASCEND, opset=('board', 1), others=(replace(ORT.others[0], domain='board'),))"
    path = written(tmp_path, text)
    outcome = fuse(export("full_decode_ts17").path, "-o", tmp_path / "out.onnx", "--target", path, "--json")
    assert (outcome.exit, outcome.document["error"]["code"]) == (1, "target-file")
    says = f"{path}, others: the nodes emitted for layers.0.causal_conv (CausalConvWithState) are not equal"
    assert outcome.document["error"]["text"].startswith(says)


NAMED = """
def emit(match, operator, case):
    found = ORT.emit(match, operator, case)
    old = next(node for node in found.nodes if node.op_type == "LinearAttention").output[0]
    for node in found.nodes:
        for names in (node.input, node.output):
            names[:] = ["NAME" if name == old else name for name in names]
    return found


PROFILE = replace(ORT, emit=emit, others=())
"""


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("input_ids", "layers.0 write input_ids, which the file has already"),
        ("shared", "layers.1 write shared, which layers.0 has already"),
    ],
)
def test_names_that_are_there_already(name: str, says: str, tmp_path: Path, fuse) -> None:
    path, output = written(tmp_path, NAMED.replace("NAME", name)), tmp_path / "out.onnx"
    outcome = fuse(export("full_decode_ts17").path, "-o", output, "--target", path)
    assert outcome.exit == 1
    assert outcome.err.startswith(f"fuse: {path}, emit: the nodes emitted for {says}")
    assert not output.exists()


def test_nodes_that_differ_and_are_right_are_taken(tmp_path: Path, fuse) -> None:
    path = written(tmp_path, f"from onnx import helper\n{OTHERWISE.replace('CHANGE', 'hint')}")
    outcome = fuse(export("full_decode_ts17").path, "-o", tmp_path / "out.onnx", "--target", path, "--json")
    assert [site["status"] for site in outcome.document["sites"]] == ["fused"] * 3


def test_lint_tells_a_limit_that_raises(tmp_path: Path, fuse) -> None:
    fused = tmp_path / "fused.onnx"
    assert fuse(export("rec_ts14").path, "-o", fused, "--target", "ort").exit == 0
    outcome = fuse("lint", fused, "--target", written(tmp_path, "PROFILE = limit(broken)"))
    assert outcome.exit == 1
    assert "in broken: AttributeError" in outcome.err


def test_a_limit_in_two_places_stays_one(tmp_path: Path) -> None:
    text = "ONE = ASCEND.shared[0]\nPROFILE = replace(operator(limits=(ONE,)), shared=(ONE,))"
    profile = targets.get(str(written(tmp_path, text)))
    assert profile.limits == profile.shared
    assert profile.file == tmp_path / "board.py"


def test_a_file_without_fault_fuses_as_what_it_is_made_from(tmp_path: Path, fuse) -> None:
    path, output = written(tmp_path, "PROFILE = edited(lambda node: None)"), tmp_path / "out.onnx"
    assert fuse(export("rec_ts14").path, "-o", output, "--target", path).exit == 0
    (node,) = (node for node in onnx.load(output).graph.node if node.op_type == "LinearAttention")
    assert next(one for one in node.attribute if one.name == "scale").f == pytest.approx(0.25)
    assert lint(output, str(path)).findings == ()
