from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from onnx import TensorProto
from rich.console import Console

from deltafuse import targets
from deltafuse.match import FuseReport, Pinned, SiteReport, Validity
from deltafuse.reasons import Reason
from deltafuse.report import failure, fuse_document, plain_document, site_document, write
from deltafuse.rollback import RollbackReport
from deltafuse.tables import print_fuse
from deltafuse.tables_verify import print_verify
from deltafuse.verify import VerifyReport
from deltafuse.verify_trial import Finding, Rounding, SiteVerdict
from hand_match import BF16, Site, l2norm, match

PROVEN = match(Site(norm=l2norm(TensorProto.FLOAT)))
targets.get("ascend-310p")
BATCHED = Reason("static-batch", {"batch": 4, "wanted": 1})


def report(*sites: SiteReport, **changes: object) -> FuseReport:
    whole = FuseReport(
        model="model.onnx",
        output="fused.onnx",
        target="ascend-310p",
        nodes_before=8808,
        nodes_after=1275,
        sites=sites,
        pinned=(Pinned("input_ids", 0, "batch", 1),),
        notes=("the whole model",),
        seconds={"scanning": 0.12345, "proving": 1.0},
        exit=0,
    )
    return replace(whole, **changes)


def fused(**changes: object) -> SiteReport:
    site = SiteReport("layers.3", "fused", PROVEN, "ChunkGatedDeltaRule", None, ("rounded to float16",), 2500)
    return replace(site, **changes)


def text(result: FuseReport, width: int) -> str:
    sink = io.StringIO()
    print_fuse(result, Console(file=sink, width=width, highlight=False, markup=False))
    return sink.getvalue()


def test_the_document_has_the_keys_that_the_schema_names() -> None:
    document = fuse_document(report(fused()))
    assert list(document) == [
        "schema",
        "exit",
        "error",
        "model",
        "output",
        "target",
        "nodes_before",
        "nodes_after",
        "seconds",
        "sites",
        "pinned",
        "notes",
        "extracted",
        "operators",
    ]
    assert document["schema"] == 1
    assert document["error"] is None
    assert (document["nodes_before"], document["nodes_after"]) == (8808, 1275)
    assert document["seconds"] == {"scanning": 0.123, "proving": 1.0}
    (axis,) = document["pinned"]
    assert axis == {"value": "input_ids", "axis": 0, "was": "batch", "now": 1, "kind": "input", "why": ""}
    assert set(document["sites"][0]) == {
        "name",
        "status",
        "status_note",
        "rule",
        "form",
        "op",
        "inside",
        "roles",
        "outputs",
        "dims",
        "scale",
        "qk_l2norm",
        "l2norm_eps",
        "valid_tokens",
        "nodes",
        "nodes_removed",
        "nodes_added",
        "emitted",
        "proof",
        "reason",
        "looked",
        "nearest",
        "notes",
        "held",
    }


def test_a_site_shows_what_was_proven_of_it() -> None:
    site = site_document(fused())
    assert site["dims"] == {
        "batch": "batch",
        "tokens": "seq_len",
        "key_heads": 2,
        "value_heads": 4,
        "key_dim": 16,
        "value_dim": 32,
    }
    assert site["roles"]["query"] == {
        "value": PROVEN.query.name,
        "shape": ["batch", "seq_len", 2, 16],
        "dtype": "float32",
        "layout": "BTHD",
    }
    assert site["outputs"] == {"out": PROVEN.out.name, "final_state": PROVEN.final_state.name}
    assert (site["scale"], site["qk_l2norm"]) == (0.3, True)
    assert site["l2norm_eps"] == pytest.approx(1e-6)
    assert site["proof"] == {
        "precision": "float64",
        "max_error": PROVEN.proof.max_error,
        "emitted_error": PROVEN.proof.emitted_error,
        "draws": PROVEN.proof.draws,
        "shared_with": None,
    }


def test_roles_and_results_that_are_not_there_are_null() -> None:
    bare = match(Site(state_layout=None, final_layout=None, dtype=BF16))
    site = site_document(fused(match=bare))
    assert site["roles"]["state"] is None
    assert site["outputs"]["final_state"] is None
    assert site["roles"]["value"]["dtype"] == "bfloat16"
    assert (site["qk_l2norm"], site["l2norm_eps"], site["valid_tokens"]) == (False, None, None)


def test_the_valid_range_is_given_with_what_was_tried() -> None:
    valid = Validity(17, 32, "fails", "wrong", (16, 17, 32, 33))
    site = site_document(fused(match=replace(PROVEN, valid_tokens=valid)))
    assert site["valid_tokens"] == {"proven": [17, 32], "below": "fails", "above": "wrong", "tried": [16, 17, 32, 33]}


def test_a_refusal_has_code_and_text_and_no_match_leaves_nulls() -> None:
    site = site_document(SiteReport("site.0", "near-miss", None, None, BATCHED, (), 12))
    assert site["reason"] == {"code": "static-batch", "text": BATCHED.text, "fix": BATCHED.fix}
    assert (site["rule"], site["roles"], site["dims"], site["proof"], site["op"]) == (None,) * 5
    assert site["nodes"] == 12


def test_documents_are_json_with_infinities_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    verdict = SiteVerdict("layers.0", "differs", float("inf"), None, 3, (1,))
    write(plain_document(VerifyReport("a", "b", (verdict,), (), 5)))
    assert json.loads(capsys.readouterr().out)["sites"][0]["error"] == "inf"
    write(fuse_document(report(fused())))
    assert json.loads(capsys.readouterr().out)["sites"][0]["name"] == "layers.3"


def test_paths_of_a_rollback_become_text(tmp_path) -> None:
    done = RollbackReport(tmp_path / "out.onnx", "bytes", ("layers.0",), (), (), 1, "00", (), ())
    document = plain_document(done)
    assert document["output"] == str(tmp_path / "out.onnx")
    assert document["restored"] == ["layers.0"]


def test_only_report_dataclasses_become_documents() -> None:
    with pytest.raises(TypeError, match="not a report"):
        plain_document({"sites": []})


def test_an_error_has_the_same_keys_as_a_report() -> None:
    document = failure(["model.onnx", "-o", "out.onnx"], 1, "not-onnx", "no model")
    assert set(document) <= set(fuse_document(report()))
    assert document["error"] == {"code": "not-onnx", "text": "no model"}
    assert (document["exit"], document["model"], document["sites"]) == (1, "model.onnx", [])


def test_the_table_shows_a_site_on_one_line() -> None:
    line = next(line for line in text(report(fused()), 200).splitlines() if line.startswith("layers.3"))
    for cell in (
        "fused",
        "gated_delta_rule",
        "ChunkGatedDeltaRule",
        "B=batch T=seq_len H=2/4 D=16x32",
        "0.3",
        "eps 1e-06",
    ):
        assert cell in line


def test_a_narrow_terminal_gets_the_same_facts_without_cut_words() -> None:
    shown = text(report(fused()), 60)
    assert max(map(len, shown.splitlines())) <= 60
    for word in ("layers.3", "fused", "ChunkGatedDeltaRule", "H=2/4", "D=16x32", "input_ids"):
        assert word in shown


def test_reasons_and_notes_are_said_once_for_all_their_sites() -> None:
    refused = [fused(name=f"layers.{i}", status="refused", op=None, reason=BATCHED) for i in range(3)]
    shown = text(report(*refused, exit=4, output=None), 250)
    assert (shown.count(BATCHED.what), shown.count(f"  fix: {BATCHED.fix}")) == (1, 1)
    assert "layers.0, layers.1, layers.2 (static-batch): " in shown
    assert shown.count("rounded to float16") == 1
    assert "note: the whole model" in shown


@pytest.mark.parametrize(
    ("changes", "last"),
    [
        ({}, "1 fused; 8808 nodes became 1275; wrote fused.onnx for ascend-310p in 1.1 s"),
        (
            {
                "nodes_after": 3868,
                "sites": (fused(removed=2520, emitted={"Cast": 40}), fused(removed=2500, emitted={"Cast": 40})),
            },
            "2 fused; 8808 nodes became 3868: 5000 of the sites and 20 nodes that only fed them went, 80 came; "
            "wrote fused.onnx for ascend-310p in 1.1 s",
        ),
        (
            {
                "nodes_after": 6363,
                "sites": (fused(removed=2499, emitted={"Cast": 40}), fused(status="refused", op=None)),
            },
            "1 fused, 1 refused; 8808 nodes became 6363: 2499 of the 2500 of the sites went (the rest they share, or "
            "others read it), 40 came, +14 elsewhere; wrote fused.onnx for ascend-310p in 1.1 s",
        ),
        ({"output": None, "exit": 4}, "1 fused; no model written (1.1 s)"),
        ({"output": None, "extracted": ("x/a", "x/b")}, "1 fused; 2 files extracted to x in 1.1 s"),
    ],
)
def test_the_last_line_says_what_was_done(changes: dict[str, object], last: str) -> None:
    assert text(report(fused(), **changes), 200).splitlines()[-1] == last


def test_no_site_is_said() -> None:
    assert text(report(exit=3, output=None), 200).splitlines()[-1] == "no site found; no model written (1.1 s)"


def test_verdicts_show_both_errors_and_why() -> None:
    equal = SiteVerdict("layers.0", "equal", 1e-15, Rounding(6e-4, 0.9999, 5e-4), 8, (17, 32))
    differs = SiteVerdict("layers.1", "differs", 0.5, None, 8, (1,), reason=Finding("not-equal", "they differ"))
    sink = io.StringIO()
    screen = Console(file=sink, width=200, highlight=False, markup=False)
    print_verify(VerifyReport("a", "b", (equal, differs), (Finding("value-changed", "x changed"),), 5), screen)
    lines = sink.getvalue().splitlines()
    assert lines[1].split() == ["layers.0", "equal", "1.0e-15", "8", "17..32", "5.0e-04", "6.0e-04"]
    assert lines[2].split() == ["layers.1", "differs", "5.0e-01", "8", "1"]
    assert lines[3:] == [
        "layers.1 (not-equal): they differ",
        "value-changed: x changed",
        "error: of a site alone, on drawn operands in double: largest relative difference, at most 1e-12",
        "rounding: the same at the target's precision; nrmse is held to the bar, max abs to none",
        "nrmse: root mean square of the difference over that of the unfused values; max abs: the largest difference of "
        "one number",
        "1 of 2 fused sites equal; 1 other difference",
    ]
