"""The documentation holds: its blocks run, what it is made from is complete, what it names exists."""

from __future__ import annotations

import re
from importlib.metadata import metadata, requires
from pathlib import Path

import pytest

import docs_pages
import docs_reasons
import docs_reports
import docs_rooms
import export_unfused
from deltafuse import cli, explaining, targets
from deltafuse.demo import write_demo
from deltafuse.parsers import EXITS
from deltafuse.report import failure
from deltafuse.rollout import PRECISIONS
from deltafuse.tables_causes import DIVERGENCE_COLUMNS
from deltafuse.tables_verify import VERIFY_COLUMNS
from deltafuse.verify_tolerances import EXACT, rows
from doc_blocks import ROOT, blocks, follow

DOCS = ROOT / "docs"
PAGES = sorted(str(path.relative_to(ROOT)) for path in DOCS.rglob("*.md"))
#: Pages whose blocks need more than a demo model: run where what they write is looked at.
ELSEWHERE = {
    "docs/ascend.md": "tests/test_export_unfused.py",
    "docs/export-time.md": "tests/test_torch_export.py",
}
RUN = [page for page in PAGES if blocks(page, "bash") + blocks(page, "python") and page not in ELSEWHERE]
LICENCES = re.compile(r"\b(MIT|BSD|Apache)\b")


@pytest.mark.parametrize("page", RUN)
def test_what_a_page_says_can_be_done(page: str, tmp_path: Path) -> None:
    assert follow(blocks(page), tmp_path) > 0


@pytest.mark.parametrize(("page", "test"), ELSEWHERE.items())
def test_the_blocks_of_the_other_pages_are_run_elsewhere(page: str, test: str) -> None:
    assert f'blocks("{page}"' in (ROOT / test).read_text()


def test_a_page_whose_block_fails_or_prints_something_else_is_found(tmp_path: Path) -> None:
    other = '```bash\necho a\n```\n\n```text title="output"\nb\n```\n'
    for number, text in enumerate(("```bash\nfalse\n```\n", other)):
        page, folder = tmp_path / f"{number}.md", tmp_path / str(number)
        page.write_text(text)
        folder.mkdir()
        with pytest.raises(AssertionError):
            follow(blocks(str(page)), folder)


def test_every_page_is_in_the_navigation() -> None:
    named = re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(f"docs/{name}" for name in named) == PAGES


def test_every_maker_has_a_place_and_every_place_a_maker() -> None:
    marks = [mark for page in PAGES for mark in re.findall(r"<!-- made: (\w+) -->", (ROOT / page).read_text())]
    assert sorted(marks) == sorted(docs_pages.MAKERS)
    assert docs_pages.on_page_markdown("a\n<!-- made: targets -->\nb").startswith("a\n## ascend-310p")
    with pytest.raises(KeyError):
        docs_pages.filled("<!-- made: nothing -->")


@pytest.mark.parametrize(
    ("html", "fetches"),
    [
        ('<script src="https://elsewhere/x.js"></script>', True),
        ("<link rel=stylesheet href=//elsewhere/x.css>", True),
        ('<img alt="" src="http://elsewhere/x.png">', True),
        ('<a href="https://elsewhere/">there</a><script src="x.js"></script>', False),
    ],
)
def test_no_page_makes_a_browser_ask_another_host(html: str, fetches: bool) -> None:
    class _Page:
        class file:  # noqa: N801
            src_uri = "x.md"

    if fetches:
        with pytest.raises(ValueError, match="another host"):
            docs_pages.on_post_page(html, page=_Page)
    else:
        docs_pages.on_post_page(html, page=_Page)


def test_every_reason_is_listed_with_where_it_arises() -> None:
    text = docs_reasons.reasons()
    codes = explaining.texts()
    assert [code for code in codes if text.count(f"`{code}`{{ #{code} }}") != 1] == []
    assert set(docs_reasons.places()) == set(codes)
    assert "| `head-size`{ #head-size } | the key head size is {key&#95;dim}" in text


def test_every_error_is_listed_with_its_message() -> None:
    listed = dict(re.findall(r"^\| `([a-z-]+)`\{ #error-\S+ \} \| (.*) \|$", docs_reasons.errors(), re.MULTILINE))
    sources = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    raised = set(re.findall(r'UserError\(\s*"([a-z-]+)"', sources))
    assert len(raised) > 50
    assert raised - set(listed) == {"usage"} - set(listed)
    assert "{path} does not exist: check the path…" in listed["missing-file"].split("<br>")


def test_every_target_is_listed_with_all_its_limits_and_ports() -> None:
    made = docs_pages.MAKERS["targets"]()
    for name in targets.names():
        profile = targets.get(name)
        section = made.split(f"## {name}\n")[1].split("\n## ")[0]
        assert all(f"`{limit.code}`](reasons.md#{limit.code}) | {limit.mark} |" in section for limit in profile.limits)
        ports = [port for one in (*profile.operators, *profile.others) for port in (*one.inputs, *one.outputs)]
        assert all(f"| `{port.name}` | `{port.layout}` |" in section for port in ports)


def test_every_module_has_a_room_and_every_room_modules() -> None:
    rooms = [docs_rooms.room_of(path) for path in docs_rooms.modules()]
    assert set(rooms) == {room.name for room in docs_rooms.ROOMS}
    made = docs_rooms.rooms()
    assert "| `prover.py` | Prove that a candidate is the rule" in made
    assert [line for line in made.splitlines() if line.endswith("|  |") and "__init__" not in line] == []
    with pytest.raises(LookupError, match="docs_rooms"):
        docs_rooms.room_of("src/deltafuse/nowhere.py")


def test_every_command_shows_its_help() -> None:
    made = docs_pages.MAKERS["commands"]()
    assert re.findall(r"^## (.*)$", made, re.MULTILINE) == ["fuse", *(f"fuse {name}" for name in cli.PARSERS)]


def keys(text: str) -> list[str]:
    """What the first column of a page's tables names."""
    first = [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| `")]
    return sorted(key for cell in first for key in re.findall(r"`(\w+)`", cell))


def test_the_keys_of_reports_are_those_that_are_printed(fuse, tmp_path: Path) -> None:
    write_demo(tmp_path)
    document = fuse(tmp_path / "decode.onnx", "-o", tmp_path / "fused.onnx", "--json").document
    page = (DOCS / "reference/reports.md").read_text()
    whole, of_a_site = page.split("## fuse and fuse inspect")[1].split("Of a folder")[0].split("Of a site:")
    site = document["sites"][0]
    assert keys(whole) == sorted(document)
    assert keys(of_a_site) == sorted(site)
    for name in ("roles", "valid_tokens", "proof", "dims"):
        (row,) = [row for row in of_a_site.splitlines() if row.startswith(f"| `{name}` |")]
        assert set(site[name]) <= set(re.findall(r"`(\w+)`", row))
    assert set(failure([], 1, "code", "text")) <= set(document)


def test_reports_of_the_other_commands_are_listed_with_all_fields() -> None:
    made = docs_pages.MAKERS["reports"]()
    assert re.findall(r"^## (.*)$", made, re.MULTILINE) == list(docs_reports.REPORTS)
    assert "| `rounding` | Rounding &#124; null |" in made
    assert docs_reports.meanings(docs_reports.LintReport)["exit"].startswith("0 without findings")


def test_exit_codes_are_those_of_the_help() -> None:
    table = (DOCS / "reference/reports.md").read_text().split("## Exit codes")[1].split("## ")[0]
    assert re.findall(r"^\| (\d) \|", table, re.M) == re.findall(r"^  (\d)  ", EXITS, re.M)


def test_columns_of_verify_are_explained() -> None:
    told = set(re.findall(r"^\| ([a-z, ]+) \|", (DOCS / "verify.md").read_text(), re.M))
    columns = {*VERIFY_COLUMNS, *DIVERGENCE_COLUMNS} - {"site", "verdict", "site in the model", "worst tensor"}
    assert columns <= told
    assert {", ".join(PRECISIONS), "cosine, nrmse, max abs"} <= told


def test_the_bars_that_are_told_are_those_of_the_table() -> None:
    told = re.findall(r"^\| ([^|]*) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", (DOCS / "verify.md").read_text(), re.M)
    assert told == [(row.title, *(f"{size:g}" for size in (row.cosine, row.nrmse, row.max_abs))) for row in rows()]
    shown = " ".join(cli.PARSERS["verify"]().format_help().split())
    for row in rows():
        assert f"{row.title}: {row.values}" in shown
    assert f"in double, may be {EXACT:g} off" in shown
    assert f"has {EXACT:g} and no other" in (DOCS / "verify.md").read_text()


@pytest.mark.parametrize("page", PAGES)
def test_options_on_a_page_exist(page: str) -> None:
    parsers = [cli.plain_parser(), export_unfused.parser(), *(make() for make in cli.PARSERS.values())]
    known = {name for parser in parsers for name in re.findall(r"--[a-z][a-z0-9-]+", parser.format_help())}
    scripts = "".join(path.read_text() for path in (ROOT / "scripts").glob("*.py"))
    known |= set(re.findall(r'"(--[a-z][a-z-]+)"', scripts))
    # Of mkdocs and of MindSpore Lite's converter.
    known |= {"--strict", "--fmk", "--optimize"}
    named = re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+(?![\w-])", (ROOT / page).read_text())
    assert set(named) - known == set()


def test_what_is_needed_has_a_licence_that_goes_with_ours() -> None:
    needed = [re.split(r"[ <>=;]", line)[0] for line in requires("deltafuse") or () if "extra" not in line]
    assert len(needed) >= 8
    for name in needed:
        said = metadata(name)
        texts = [said["License-Expression"] or "", (said["License"] or "")[:200]]
        texts += [line for line in said.get_all("Classifier") or () if line.startswith("License")]
        assert any(LICENCES.search(text) for text in texts), name


def test_the_licence_is_the_one_that_is_declared() -> None:
    assert "Apache License" in (ROOT / "LICENSE").read_text()[:200]
    assert metadata("deltafuse")["License-Expression"] == "Apache-2.0"
