"""Ordinary patterns on what torch's two exporters write, with free axes, run against the unfused model."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import graphs
from deltafuse.rollback import rollback
from deltafuse.verify import verify


@pytest.fixture(scope="module", autouse=True)
def _worker() -> Iterator[None]:
    with graphs.one_worker():
        yield


class Norm(nn.Module):
    """A layer norm as models write it by hand, over a count of last axes."""

    def __init__(self, size: tuple[int, ...] = (8,), *, affine: bool = True, unbiased: bool = False) -> None:
        super().__init__()
        self.axes = tuple(range(-len(size), 0))
        self.affine, self.unbiased = affine, unbiased
        self.weight, self.bias = nn.Parameter(torch.randn(size)), nn.Parameter(torch.randn(size))

    def forward(self, x: Tensor) -> Tensor:
        d = x - x.mean(self.axes, keepdim=True)
        variance = x.var(self.axes, keepdim=True) if self.unbiased else d.pow(2).mean(self.axes, keepdim=True)
        y = d / torch.sqrt(variance + 1e-5)
        return y * self.weight + self.bias if self.affine else y


class Clamp(nn.Module):
    """Bounds taken one after the other."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.minimum(torch.maximum(x, torch.tensor(-0.25)), torch.tensor(0.5))


class Copy(nn.Module):
    """A copy between two operators."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu((x * 2).clone()) + 1


def model(middle: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), middle, nn.Linear(8, 8)).eval()


def torchscript(module: nn.Module, path: Path, opset: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module, (torch.randn(2, 3, 8),), str(path), dynamo=False, opset_version=opset, input_names=["x"],
            dynamic_axes={"x": {0: "b", 1: "t"}}, keep_initializers_as_inputs=False,
        )  # fmt: skip


def dynamo(module: nn.Module, path: Path, opset: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            module, (torch.randn(2, 3, 8),), dynamo=True, opset_version=opset, verbose=False, optimize=False,
            input_names=["x"], dynamic_shapes=({0: Dim("b"), 1: Dim("t")},),
        )  # fmt: skip
    program.save(str(path))


Exporter = Callable[[nn.Module, Path, int], None]
EXPORTERS = [(torchscript, 17), (dynamo, 18)]
IDS = ["torchscript", "dynamo"]


def fused(module: nn.Module, rule: str, exporter: Exporter, opset: int, folder: Path, sites: int = 1) -> list[str]:
    """Fuses an export, compares both at several sizes, rolls back; the operators of the fused file."""
    torch.manual_seed(0)
    path, out = folder / "model.onnx", folder / "fused.onnx"
    exporter(module, path, opset)
    report = graphs.fuse(path, out, rules=(rule,))
    assert report.exit == 0, report.notes
    assert [site.status for site in report.sites] == ["fused"] * sites
    assert verify(path, out, level="site").exit == 0
    for shape in ((1, 1, 8), (4, 7, 8), (2, 64, 8)):
        x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
        wanted, found = (graphs.session(onnx.load(p)).run(None, {"x": x})[0] for p in (path, out))
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    rollback(out, folder / "back.onnx")
    assert (folder / "back.onnx").read_bytes() == path.read_bytes()
    return [node.op_type for node in onnx.load(out).graph.node]


@pytest.mark.parametrize(("exporter", "opset"), EXPORTERS, ids=IDS)
@pytest.mark.parametrize("affine", [True, False])
def test_a_norm_by_hand(exporter: Exporter, opset: int, affine: bool, tmp_path: Path) -> None:
    ops = fused(model(Norm(affine=affine)), "layer_norm", exporter, opset, tmp_path)
    assert ops.count("LayerNormalization") == 1
    assert not {"ReduceMean", "Sqrt", "Div", "Sub"} & set(ops)


@pytest.mark.parametrize(("exporter", "opset"), EXPORTERS, ids=IDS)
def test_a_clamp_in_two_steps(exporter: Exporter, opset: int, tmp_path: Path) -> None:
    ops = fused(model(Clamp()), "min_max_clip", exporter, opset, tmp_path)
    assert ops.count("Clip") == 1
    assert not {"Min", "Max"} & set(ops)


def test_a_copy(tmp_path: Path) -> None:
    assert "Identity" not in fused(model(Copy()), "identity", dynamo, 18, tmp_path)


def test_weights_that_torchscript_shares_by_an_identity(tmp_path: Path) -> None:
    norms = model(nn.Sequential(nn.LayerNorm(8), nn.LayerNorm(8)))
    ops = fused(norms, "identity", torchscript, 17, tmp_path, sites=2)
    assert ops.count("LayerNormalization") == 2
    assert "Identity" not in ops


def test_the_norm_of_torch_before_opset_17_is_found_and_refused(tmp_path: Path) -> None:
    torchscript(model(nn.LayerNorm(8)), tmp_path / "model.onnx", 14)
    report = graphs.fuse(tmp_path / "model.onnx", rules=("layer_norm",))
    assert (report.exit, graphs.codes(report)) == (4, ["expression-opset"])
    assert "17" in report.sites[0].reason.text
    assert report.sites[0].match.parameters == {"axis": -1, "eps": float(np.float32(1e-5))}


@pytest.mark.parametrize(("exporter", "opset"), EXPORTERS, ids=IDS)
def test_the_variance_of_a_sample_is_no_layer_norm(exporter: Exporter, opset: int, tmp_path: Path) -> None:
    exporter(model(Norm(unbiased=True)), tmp_path / "model.onnx", opset)
    report = graphs.fuse(tmp_path / "model.onnx", rules=("layer_norm",))
    assert report.exit == 3
    assert not [site for site in report.sites if site.status == "fused"]
