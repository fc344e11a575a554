"""Targets `ort` and `onnx` where onnxruntime may lack their operators: what is said, and what goes without them."""

from __future__ import annotations

from pathlib import Path

import onnxruntime
import pytest
from onnx import TensorProto

from deltafuse import targets
from deltafuse.lint import lint
from deltafuse.lower import lower
from deltafuse.lowering_attention import runtime_has
from deltafuse.lowering_conv import runtime_has_conv
from deltafuse.options import FuseOptions, SilentProgress
from deltafuse.pipeline import fuse
from deltafuse.rollback import rollback
from deltafuse.verify import verify
from exports import export

DOMAINS = {"ort": "com.microsoft", "onnx": ""}
NAMES = ("full_decode_ts17_half", "full_prefill_ts17")


def needed(target: str) -> str:
    """The onnxruntime that runs what a target writes."""
    (one,) = (one for one in targets.get(target).requires if one.package == "onnxruntime")
    return one.version


def loads(path: Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


@pytest.fixture(scope="module", params=[(name, target) for name in NAMES for target in DOMAINS], ids="-".join)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    """Unfused, fused, target."""
    name, target = request.param
    source, fused = export(name).path, tmp_path_factory.mktemp(target) / "fused.onnx"
    assert fuse(FuseOptions(source, fused, target=target), SilentProgress()).exit == 0
    return source, fused, target


def test_a_fused_file_is_proven_and_says_what_it_needs(pair: tuple[Path, Path, str]) -> None:
    source, fused, target = pair
    report = verify(source, fused)
    assert report.exit == 0
    assert {site.verdict for site in report.sites} == {"equal"}
    runs = runtime_has(DOMAINS[target]) and runtime_has_conv(DOMAINS[target])
    said = [note for note in report.notes if f"target {target} needs {needed(target)}" in note]
    assert len(said) == (0 if runs else 1)
    assert all(onnxruntime.__version__ in note and "compared as plain operators" in note for note in said)


def test_the_runtime_refuses_it_by_the_operator_or_the_opset_or_runs_it(pair: tuple[Path, Path, str]) -> None:
    _, fused, target = pair
    if runtime_has(DOMAINS[target]) and runtime_has_conv(DOMAINS[target]):
        assert loads(fused).get_outputs()[0].name == "logits"
        return
    wanted = "Opset 27 is under development" if target == "onnx" else "is not a registered function/op"
    with pytest.raises(Exception, match=wanted):
        loads(fused)


def test_lowered_it_runs_on_any(pair: tuple[Path, Path, str], tmp_path: Path) -> None:
    _, fused, _ = pair
    assert lower(fused, tmp_path / "runnable.onnx", linear_attention="always").exit == 0
    assert loads(tmp_path / "runnable.onnx").get_outputs()[0].name == "logits"


def test_it_is_clean_and_comes_back(pair: tuple[Path, Path, str], tmp_path: Path) -> None:
    source, fused, target = pair
    assert lint(fused, target).findings == ()
    rollback(fused, tmp_path / "back.onnx")
    assert (tmp_path / "back.onnx").read_bytes() == source.read_bytes()


@pytest.mark.parametrize(
    ("name", "target"), [("full_decode_ts17", "ort"), ("rec_ts17_nonorm", "ort"), ("rec_ts17_eqheads_nofinal", "onnx")]
)
def test_a_type_that_the_runtime_has_no_kernel_for_is_compared_in_plain_operators(
    name: str, target: str, tmp_path: Path
) -> None:
    source, fused, plain = export(name).path, tmp_path / "fused.onnx", tmp_path / "plain.onnx"
    assert fuse(FuseOptions(source, fused, target=target, boundary="bf16"), SilentProgress()).exit == 0
    report = verify(source, fused)
    assert report.exit == 0
    assert {site.verdict for site in report.sites} == {"equal"}
    assert report.network is not None
    runs = runtime_has(DOMAINS[target], TensorProto.BFLOAT16)
    assert lower(fused, plain).exit == (3 if runs else 0)
    assert loads(fused if runs else plain).get_outputs()
