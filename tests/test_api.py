"""The Python interface: what is public, how it mirrors the command, and that it works."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import subprocess
import sys
from types import ModuleType

import onnxruntime
import pytest

import deltafuse
from deltafuse import parsers
from deltafuse.demo import write_demo
from deltafuse.options import FuseOptions
from doc_blocks import blocks
from exports import export

VERBS = ["fuse", "inspect", "listing", "lower", "rollback", "verify"]
TYPES = [
    "DeltafuseError", "FuseOptions", "FuseReport", "InternalError", "Listing", "LowerReport", "Match", "Progress",
    "RollbackReport", "SiteReport", "UserError", "VerifyReport",
]  # fmt: skip
HEAVY = ("jinja2", "numpy", "onnx", "onnxruntime", "onnx_graphsurgeon", "rich", "zstandard")


def test_nothing_is_public_by_accident():
    assert deltafuse.__all__ == TYPES + VERBS
    assert dir(deltafuse) == sorted(deltafuse.__all__)
    public = {name: value for name, value in vars(deltafuse).items() if not name.startswith("_")}
    own = {name for name, value in public.items() if not isinstance(value, ModuleType)}
    # `from __future__ import annotations` leaves its name; what else there is are the package's own modules.
    assert own - {"annotations"} <= set(deltafuse.__all__)
    modules = {value.__name__ for value in public.values() if isinstance(value, ModuleType)}
    assert {name for name in modules if not name.startswith("deltafuse.")} == set()


def test_every_public_name_is_there_and_described():
    for name in deltafuse.__all__:
        value = getattr(deltafuse, name)
        assert inspect.getdoc(value)
        if name in VERBS:
            # an example each, there and in the overview
            assert f"deltafuse.{name}(" in value.__doc__
            assert f"deltafuse.{name}(" in deltafuse.__doc__


def test_importing_is_light():
    code = f"import sys, deltafuse; deltafuse.fuse; print([name for name in {HEAVY!r} if name in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_functions_stay_functions_when_modules_of_their_name_are_imported():
    code = (
        "import deltafuse, deltafuse.verify, deltafuse.rollback, deltafuse.lower\n"
        "from deltafuse import lower, rollback, verify\n"
        "from deltafuse.lower import LowerReport\n"
        "assert LowerReport is deltafuse.LowerReport\n"
        "names = ('lower', 'rollback', 'verify')\n"
        "print([getattr(deltafuse, name).__module__ for name in names])"
    )
    modules = ["deltafuse.api", "deltafuse.api", "deltafuse.api_verify"]
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == str(modules)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="fuze"):
        deltafuse.fuze  # noqa: B018 - the look-up is what is tested


def keywords(name):
    return set(inspect.signature(getattr(deltafuse, name)).parameters)


def options(parser):
    return {action.dest for action in parser._actions} - {
        "help", "json", "version", "install_completion", "show_completion",
    }  # fmt: skip


#: What goes by another name in Python, or is no option of the command.
RENAMED = {
    "fuse": {}, "inspect": {}, "verify": {"dim": "dims"}, "rollback": {"all": "all_records"}, "lower": {},
}  # fmt: skip
TABLES = {"tensors", "nodes"}
#: How the command shows what the report holds.
SHOWN = {"detail", "netron"}


@pytest.mark.parametrize("name", sorted(RENAMED))
def test_every_option_of_the_command_is_a_keyword(name):
    parser = parsers.plain_parser() if name == "fuse" else parsers.PARSERS[name]()
    wanted = {RENAMED[name].get(option, option) for option in options(parser)}
    if name == "inspect":
        assert wanted >= TABLES | SHOWN
        wanted -= TABLES | SHOWN
    assert wanted <= keywords(name)


def test_every_field_of_the_options_is_a_keyword():
    fields = {field.name for field in dataclasses.fields(FuseOptions)}
    assert keywords("fuse") == fields - {"extract"} | {"progress"}
    writing = {"output", "record", "external_data", "keep_going", "strict", "dry_run", "plan"}
    assert keywords("inspect") == fields - writing | {"progress"}
    assert keywords("listing") >= TABLES


def test_defaults_are_those_of_the_command():
    defaults = {field.name: field.default for field in dataclasses.fields(FuseOptions)}
    for name in ("fuse", "inspect"):
        for parameter in inspect.signature(getattr(deltafuse, name)).parameters.values():
            if parameter.name not in ("model", "progress", "pins"):
                assert parameter.default == defaults[parameter.name]


@pytest.mark.parametrize("name", ["fuse", "inspect"])
def test_every_keyword_reaches_the_run(monkeypatch, tmp_path, name):
    given = {
        "target": "t", "form": "chunk", "op": "rgdr", "sites": ["a"], "skip_sites": ["b"], "rules": ["c"],
        "patterns": [str(tmp_path)], "pin": False, "pins": {"s": 2}, "boundary": "fp32", "signature": "8",
        "allow_bf16_to_fp16": True, "timeout": 3.0, "record": "none", "keep_going": True, "strict": True,
        "dry_run": True, "batch": 2, "output": "out.onnx", "extract": str(tmp_path),
        "external_data": "copy", "allow_outside": True, "html": str(tmp_path / "page.html"), "plan": "plan.json",
    }  # fmt: skip
    given = {key: value for key, value in given.items() if key in keywords(name)}
    assert set(given) == keywords(name) - {"model", "progress"}
    seen = []
    module = importlib.import_module("deltafuse.pipeline")
    monkeypatch.setattr(module, name, lambda options, progress: seen.append((options, progress)))
    getattr(deltafuse, name)("m.onnx", progress="p", **given)
    ((found, progress),) = seen
    assert progress == "p"
    default = FuseOptions(model=found.model)
    for key in given:
        assert getattr(found, key) != getattr(default, key)
    assert (found.sites, found.pins, found.patterns) == (("a",), (("s", 2),), (tmp_path,))
    assert found.model.name == "m.onnx"


# From one end to the other


class Heard:
    """Progress that remembers its stages."""

    def __init__(self):
        self.stages = []

    def start(self, stage):
        self.stages.append(stage)

    def advance(self, n, total):
        assert 0 <= n <= total

    def note(self, text):
        pass


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    write_demo(folder)
    return folder


@pytest.fixture(scope="module")
def report(demo):
    return deltafuse.fuse(str(demo / "decode.onnx"), demo / "fused.onnx")


def test_fuse_writes_and_reports(report, demo):
    assert isinstance(report, deltafuse.FuseReport)
    assert report.exit == 0
    assert {site.status for site in report.sites} == {"fused"}
    assert isinstance(report.sites[0], deltafuse.SiteReport)
    assert isinstance(report.sites[0].match, deltafuse.Match)
    assert (demo / "fused.onnx").is_file()


def test_fuse_without_an_output_writes_nothing(demo, tmp_path):
    before = sorted(demo.iterdir())
    found = deltafuse.fuse(demo / "decode.onnx")
    assert (found.exit, found.output) == (0, None)
    assert "nothing was written: no output was given" in found.notes
    assert sorted(demo.iterdir()) == before


@pytest.mark.parametrize(
    "wrong",
    [
        {"form": "loops"}, {"op": "CGDR"}, {"record": None}, {"boundary": "fp8"}, {"pins": {"tokens": 0}},
        {"pins": {"tokens": "4"}},
    ],
)  # fmt: skip
def test_a_value_that_the_command_would_not_take(demo, wrong):
    with pytest.raises(deltafuse.UserError) as caught:
        deltafuse.fuse(demo / "decode.onnx", **wrong)
    assert caught.value.code == "usage"
    assert next(iter(wrong)) in str(caught.value)


def test_a_text_alone_is_one_pattern(demo):
    found = deltafuse.fuse(demo / "decode.onnx", dry_run=True, sites="*.0", rules="gated_delta_rule")
    assert [site.name for site in found.sites if site.status == "fused"] == ["layers.0"]


def test_inspect_finds_the_same_sites(report, demo, tmp_path):
    progress = Heard()
    found = deltafuse.inspect(demo / "decode.onnx", sites=["layers.0"], extract=tmp_path / "sites", progress=progress)
    assert [site.name for site in found.sites] == [site.name for site in report.sites]
    assert len(found.extracted) == len(list((tmp_path / "sites").iterdir())) == 3
    assert progress.stages


def test_listing_gives_rows(demo):
    found = deltafuse.listing(str(demo / "decode.onnx"), tensors="^past_", ops=["Exp"])
    assert isinstance(found, deltafuse.Listing)
    assert [row.kind for row in found.tensors] == ["input"] * len(found.tensors)
    assert len(found.tensors) > 0
    assert set(found.ops) == {"Exp"}


def test_verify_finds_the_sites_equal(report, demo):
    found = deltafuse.verify(demo / "decode.onnx", str(demo / "fused.onnx"), level="site")
    assert isinstance(found, deltafuse.VerifyReport)
    assert (found.exit, {site.verdict for site in found.sites}) == (0, {"equal"})


def test_verify_passes_its_inputs_on(report, demo, tmp_path):
    saved = tmp_path / "inputs.npz"
    found = deltafuse.verify(
        demo / "decode.onnx", demo / "fused.onnx", level="network", save_inputs=saved, seed=3, dims={"past_seq_len": 5}
    )
    assert (found.exit, found.network.verdict) == (0, "passes")
    assert found.network.sizes["past_seq_len"] == 5
    again = deltafuse.verify(demo / "decode.onnx", demo / "fused.onnx", level="network", inputs=saved)
    assert {one.role for one in again.network.inputs} == {"given"}


def test_lower_writes_what_onnxruntime_runs(report, demo, tmp_path):
    found = deltafuse.lower(demo / "fused.onnx", str(tmp_path / "runnable.onnx"), rounding=False)
    assert isinstance(found, deltafuse.LowerReport)
    assert (found.exit, len(found.lowered)) == (0, len(report.sites))
    onnxruntime.InferenceSession(str(tmp_path / "runnable.onnx"), providers=["CPUExecutionProvider"])


def test_rollback_gives_the_original_back(report, demo, tmp_path):
    progress = Heard()
    found = deltafuse.rollback(demo / "fused.onnx", tmp_path / "back.onnx", progress=progress)
    assert isinstance(found, deltafuse.RollbackReport)
    assert (tmp_path / "back.onnx").read_bytes() == (demo / "decode.onnx").read_bytes()
    assert progress.stages == ["restoring"]


def test_the_example_of_the_readme_runs(tmp_path, monkeypatch, capsys):
    (example,) = (block.text for block in blocks("README.md", "python"))
    monkeypatch.chdir(tmp_path)
    write_demo(tmp_path / "demo")
    names = {}
    exec(example, names)
    assert capsys.readouterr().out.splitlines()[0].startswith("layers.0 fused ChunkGatedDeltaRule 0.")
    assert (tmp_path / "demo/api-back.onnx").read_bytes() == (tmp_path / "demo/prefill.onnx").read_bytes()
    assert (tmp_path / "demo/api-runnable.onnx").is_file()
    assert len(names["states"]) > 0


def test_what_the_caller_can_mend_is_a_user_error(tmp_path):
    path = tmp_path / "nowhere.onnx"
    calls = [
        lambda: deltafuse.fuse(path, tmp_path / "out.onnx"),
        lambda: deltafuse.inspect(path),
        lambda: deltafuse.listing(path, tensors=""),
        lambda: deltafuse.verify(path, path),
        lambda: deltafuse.rollback(path, tmp_path / "out.onnx"),
        lambda: deltafuse.lower(path, tmp_path / "out.onnx"),
    ]
    for call in calls:
        with pytest.raises(deltafuse.UserError, match=r"nowhere\.onnx") as caught:
            call()
        assert caught.value.code == "missing-file"
        assert isinstance(caught.value, deltafuse.DeltafuseError)


def test_a_bug_of_ours_is_an_internal_error(monkeypatch, tmp_path):
    module = importlib.import_module("deltafuse.pipeline")

    def wrong(*_, **__):
        raise deltafuse.InternalError("emitted nodes differ")

    monkeypatch.setattr(module, "prove_emitted", wrong)
    with pytest.raises(deltafuse.InternalError, match="emitted nodes differ"):
        deltafuse.fuse(export("steps_ts17").path, tmp_path / "out.onnx")
