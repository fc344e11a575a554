"""``fuse explain``: what codes mean; ``fuse targets NAME``: one target in full."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

import deltafuse
import docs_reports
from conftest import Outcome
from deltafuse import folder_commands, tables, tables_causes, tables_listing, tables_verify, targets
from deltafuse.completion import candidates
from deltafuse.demo import MODELS
from deltafuse.explaining import explained, texts
from deltafuse.glossary import GLOSSARY, term_of
from deltafuse.note_texts import NOTES

Fuse = Callable[..., Outcome]


def test_a_reason_is_told_with_its_fix_and_its_place(fuse: Fuse) -> None:
    shown = fuse("explain", "not-the-rule").out.splitlines()
    what, _, fix = texts()["not-the-rule"].rpartition("; ")
    assert shown[:-1] == ["not-the-rule, a reason", f"  {what}", f"  fix: {fix}", "  from: deltafuse/search.py"]
    assert shown[-1].endswith("is filled in when it is shown")


def test_an_error_is_told_with_its_messages(fuse: Fuse) -> None:
    shown = fuse("explain", "bad-regex").out
    assert shown.startswith("bad-regex, an error, exit 1\n  {text} is not a regular expression ({error}): put a ")
    assert "\n  from: deltafuse/probing.py\n" in shown


def test_a_code_of_a_pattern_comes_from_its_file(fuse: Fuse) -> None:
    (one,) = fuse("explain", "read-before-update", "--json").document["codes"]
    assert one["from"][0].startswith(("patterns/", "deltafuse/"))
    assert one["texts"] == ["the output reads the state before it is updated"]


def test_without_a_code_all_are_listed(fuse: Fuse) -> None:
    listed = fuse("explain", "--json").document["codes"]
    reasons = {one["code"] for one in listed if one["kind"] == "reason"}
    assert reasons == set(texts())
    assert len([one for one in listed if one["kind"] == "term"]) == len(GLOSSARY)
    assert {"bad-regex", "unknown-code", "usage"} <= {one["code"] for one in listed if one["kind"] == "error"}
    assert all(one["from"] for one in listed)
    lines = fuse("explain").out.splitlines()
    assert len(lines) == len(listed) + 1
    assert lines[-1].startswith(f"{len(listed)} codes; ")


def test_patterns_of_codes_and_several_codes(fuse: Fuse) -> None:
    shown = fuse("explain", "pin-*", "bad-regex", "--json").document["codes"]
    codes = [one["code"] for one in shown]
    assert codes == sorted(codes)
    assert {"bad-regex", "pin-bound", "pin-static"} <= set(codes)
    assert all(code.startswith("pin-") or code == "bad-regex" for code in codes)


def test_one_code_reads_few_files_and_says_the_same() -> None:
    assert explained(["static-batch"]) == explained(["static-batch*"])


def test_a_misspelt_code_names_the_nearest(fuse: Fuse) -> None:
    done = fuse("explain", "not-the-rle", "--json")
    assert (done.exit, done.document["error"]["code"]) == (1, "unknown-code")
    assert "did you mean not-the-rule" in done.document["error"]["text"]
    assert "see the list of `fuse explain`" in fuse("explain", "qqqqqq").err


@pytest.mark.parametrize(("code", "hint"), [("not-the-rle", "did you mean not-the-rule"), ("zzz-*", "see the list")])
def test_a_code_that_is_not_known_is_told_beside_those_that_are(fuse: Fuse, code: str, hint: str) -> None:
    done = fuse("explain", "valid_tokens", code, "pin-*", "--json")
    assert (done.exit, done.document["error"]["code"]) == (1, "unknown-code")
    assert f"there is no code {code!r}, and no such term; {hint}" in done.document["error"]["text"]


def test_completion_offers_every_code() -> None:
    offered = set(candidates(["explain"], ""))
    assert {one.code for one in explained()} - offered == set()


@pytest.mark.parametrize("name", targets.names())
def test_a_target_is_shown_in_detail(fuse: Fuse, name: str) -> None:
    profile, shown = targets.get(name), fuse("targets", name).out
    for needed in profile.requires:
        assert f"needs {needed.package} {needed.version}" in shown
    for limit in profile.limits:
        assert f"{limit.code}" in shown
    for one in (*profile.operators, *profile.others):
        assert f"operator {one.op}, signature {one.signature}: " in shown
        for port in (*one.inputs, *one.outputs):
            assert f" {port.name}" in shown
        for rule in one.attributes:
            assert f"  attribute {rule.name}" in shown
    others = [other for other in targets.names() if other != name]
    assert not any(line.startswith(f"{other}:") for line in shown.splitlines() for other in others)


def test_a_target_in_detail_as_json_and_an_unknown_one(fuse: Fuse) -> None:
    (one,) = fuse("targets", "ort", "--json").document["targets"]
    assert (one["name"], one["operators"][0]["op"]) == ("ort", "LinearAttention")
    assert len(fuse("targets", "--json").document["targets"]) == len(targets.names())
    done = fuse("targets", "orr", "--json")
    assert (done.exit, done.document["error"]["code"]) == (1, "unknown-target")


def test_a_finding_of_lint_is_told_with_what_to_do(fuse: Fuse) -> None:
    (one,) = fuse("explain", "opset-newer", "--json").document["codes"]
    assert (one["kind"], one["from"]) == ("finding", ["deltafuse/lint_attention.py"])
    assert one["texts"] == ["import {where} {least}: … is another operator in the newer version"]
    (older,) = explained(["opset"])
    assert older.texts == ("import {where} {least}; raise other operators with it",)
    shown = fuse("explain", "state-shared").out
    assert shown.startswith("state-shared, of fuse lint, exit 5 unless it is a note\n  copy … into a value of its own")


def test_every_finding_says_what_to_do() -> None:
    found = [one for one in explained() if one.kind == "finding"]
    assert len(found) > 30
    assert [one.code for one in found if not one.texts] == []


@pytest.mark.parametrize("code", sorted(NOTES))
def test_a_note_is_told_with_what_to_do(fuse: Fuse, code: str) -> None:
    what, _, fix = NOTES[code].rpartition("; ")
    shown = fuse("explain", code).out.splitlines()
    assert shown[:3] == [f"{code}, a note, of a site that is right", f"  {what}", f"  fix: {fix}"]


@pytest.mark.parametrize("options", [("prefill",), ("decode", "--target", "ascend-a2"), ("decode", "--no-pin")])
def test_every_note_on_a_site_has_a_code_that_is_known(fuse: Fuse, options: tuple[str, ...]) -> None:
    name, *more = options
    sites = fuse("inspect", MODELS / f"{name}.onnx", *more, "--json").document["sites"]
    codes = {note.partition(": ")[0] for site in sites for note in site["notes"]}
    assert codes
    assert codes <= set(NOTES)


def test_braces_are_told(fuse: Fuse) -> None:
    assert fuse("explain", "static-batch").out.endswith("is filled in when it is shown\n")
    assert "filled in" not in fuse("explain", "undecayed-read").out


# Words of reports


@pytest.mark.parametrize("words", [("near-miss",), ("near miss",), ("near", "miss"), ("near_miss",), ("Near miss",)])
def test_a_word_of_several_is_known_however_it_is_written(fuse: Fuse, words: tuple[str, ...]) -> None:
    shown = fuse("explain", *words).out.splitlines()
    assert shown == ["near-miss, a word of tables, pages and JSON documents", f"  {term_of('near miss')[1]}"]
    (one,) = fuse("explain", *words, "--json").document["codes"]
    assert (one["code"], one["kind"], one["texts"]) == ("near-miss", "term", [term_of("near-miss")[1]])


def test_codes_and_words_together_and_a_code_goes_first(fuse: Fuse) -> None:
    done = fuse("explain", "not-the-rule", "nrmse", "--json").document["codes"]
    assert [(one["code"], one["kind"]) for one in done] == [("not-the-rule", "reason"), ("nrmse", "term")]
    assert "fuse lower" in fuse("explain", "lowered").out
    (one,) = fuse("explain", "valid_tokens", "--json").document["codes"]
    assert one["kind"] == "note"


@pytest.mark.parametrize(
    ("word", "near"), [("nrsme", "nrmse"), ("acumulated", "accumulated"), ("near-mis", "near-miss")]
)
def test_a_misspelt_word_names_the_nearest(fuse: Fuse, word: str, near: str) -> None:
    done = fuse("explain", word, "--json")
    assert (done.exit, done.document["error"]["code"]) == (1, "unknown-code")
    assert near in done.document["error"]["text"].partition("did you mean ")[2].removesuffix("?").split(" or ")


def test_no_word_has_two_meanings() -> None:
    names = [name.casefold().replace("-", " ") for names in GLOSSARY for name in names]
    assert len(set(names)) == len(names)


def unknown(words: Iterable[str]) -> list[str]:
    """Those of some words that are neither a term nor a code."""
    return sorted(word for word in set(words) if term_of(word) is None and not explained([word]))


def test_every_heading_of_a_table_is_known() -> None:
    modules = (tables, tables_causes, tables_listing, tables_verify, folder_commands)
    found = [vars(module)[name] for module in modules for name in vars(module) if name.endswith("COLUMNS")]
    assert len(found) > 6
    assert unknown(word for columns in found for word in columns) == []
    assert unknown(tables.STATUS_STYLES) == []


def test_every_label_of_a_sites_detail_is_known(fuse: Fuse) -> None:
    shown = fuse("inspect", MODELS / "decode.onnx", "--site", "*").out
    labels = set(re.findall(r"^  ([a-z0-9_ ]+): ", shown, re.MULTILINE)) - {"in its own names"}
    assert len(labels) > 12
    assert unknown(labels) == []


def test_every_heading_of_a_page_is_known() -> None:
    package = Path(deltafuse.__file__).parent
    pages = [path.read_text() for path in (package / "templates").glob("*.html.j2")]
    found = [word.strip() for text in pages for word in re.findall(r"<(?:h[2-4]|th)[^>]*>([^<{]*)<", text)]
    script = (package / "web" / "sites.js").read_text()
    rows = re.findall(r'table\(\[("[^\]]*)\]', script) + re.findall(r'rows\.push\(\[("[^"]*")', script)
    found += [word for row in rows for word in re.findall(r'"([^"]*)"', row)]
    found += re.findall(r'el\("h3", \{\}, (?:near \? )?"([^"]+)"', script)
    assert len(found) > 60
    assert unknown(word for word in found if word) == []


def test_every_key_of_a_document_is_known(fuse: Fuse) -> None:
    document = fuse("inspect", MODELS / "decode.onnx", "--json").document
    kinds = {kind for report in docs_reports.REPORTS.values() for kind in docs_reports._reached(report)}
    fields = [field.name for kind in kinds for field in dataclasses.fields(kind)]
    assert unknown([*document, *document["sites"][0], *fields]) == []
