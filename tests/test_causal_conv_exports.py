"""Causal convolutions as torch's two exporters write them: prefill and decode, in the spellings that models have."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional

import graphs
from deltafuse.lint import lint
from deltafuse.rollback import rollback
from deltafuse.verify import verify

CHANNELS, WIDTH = 6, 4
TARGETS = ["ort", "onnx"]

Make = Callable[..., "Convolution"]


@pytest.fixture(scope="module", autouse=True)
def _worker() -> Iterator[None]:
    with graphs.one_worker():
        yield


class Convolution(nn.Module):
    """The convolution alone, between two layers that keep its ends from being graph inputs."""

    def __init__(self, *, bias: bool = False, silu: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.after = nn.Linear(CHANNELS, CHANNELS), nn.Linear(CHANNELS, CHANNELS)
        self.conv = nn.Conv1d(CHANNELS, CHANNELS, WIDTH, groups=CHANNELS, padding=WIDTH - 1, bias=bias)
        self.silu = silu

    def act(self, y: Tensor) -> Tensor:
        return functional.silu(y) if self.silu else y

    def inside(self, x: Tensor) -> Tensor:
        """[B, T, C] to [B, T, C]."""
        x = x.transpose(1, 2)
        return self.act(self.conv(x)[:, :, : x.shape[-1]]).transpose(1, 2)

    def forward(self, x: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        y, *more = self.stepped(self.before(x), *states) if states else (self.inside(self.before(x)),)
        return self.after(y), *more

    def stepped(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """With a state of the columns that the convolution reads."""
        joined = torch.cat([state, x.transpose(1, 2)], -1)
        y = functional.conv1d(joined, self.conv.weight, self.conv.bias, groups=CHANNELS)
        return self.act(y).transpose(1, 2), joined[:, :, 1 - WIDTH :]


class Padded(Convolution):
    """Zeros in front by a Pad."""

    def inside(self, x: Tensor) -> Tensor:
        x = functional.pad(x.transpose(1, 2), (WIDTH - 1, 0))
        return self.act(functional.conv1d(x, self.conv.weight, self.conv.bias, groups=CHANNELS)).transpose(1, 2)


class Zeros(Convolution):
    """Zeros in front by a concatenation."""

    def inside(self, x: Tensor) -> Tensor:
        x = x.transpose(1, 2)
        x = torch.cat([x.new_zeros((x.shape[0], CHANNELS, WIDTH - 1)), x], -1)
        return self.act(functional.conv1d(x, self.conv.weight, self.conv.bias, groups=CHANNELS)).transpose(1, 2)


class Rows(Convolution):
    """Columns put together as rows: [B, T, C]."""

    def inside(self, x: Tensor) -> Tensor:
        x = torch.cat([x.new_zeros((x.shape[0], WIDTH - 1, CHANNELS)), x], 1).transpose(1, 2)
        return self.act(functional.conv1d(x, self.conv.weight, self.conv.bias, groups=CHANNELS).transpose(1, 2))


class TwoAxes(Convolution):
    """A convolution over two axes, one of which has one row."""

    def inside(self, x: Tensor) -> Tensor:
        x = functional.pad(x.transpose(1, 2), (WIDTH - 1, 0)).unsqueeze(2)
        y = functional.conv2d(x, self.conv.weight.unsqueeze(2), self.conv.bias, groups=CHANNELS)
        return self.act(y).squeeze(2).transpose(1, 2)


class Masked(Convolution):
    """Padding tokens multiplied away before, which stays as it is."""

    def inside(self, x: Tensor) -> Tensor:
        return super().inside(x * (x[:, :, :1] > 0).to(x.dtype))


class Written(Convolution):
    """SiLU written out."""

    def act(self, y: Tensor) -> Tensor:
        return y / (1 + torch.exp(-y))


class Wide(Convolution):
    """With a state of as many columns as the kernel has, as transformers keeps it."""

    def stepped(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        x = x.transpose(1, 2)
        joined = torch.cat([state, x], -1)
        y = functional.conv1d(joined, self.conv.weight, self.conv.bias, padding=0, groups=CHANNELS)
        return self.act(y[:, :, -x.shape[-1] :]).transpose(1, 2), joined[:, :, -WIDTH:]


class Summed(Convolution):
    """A product and a sum, for one token."""

    def stepped(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        joined = torch.cat([state[:, :, 1:], x.transpose(1, 2)], -1)
        y = torch.sum(joined * self.conv.weight.squeeze(1), dim=-1)
        y = y + self.conv.bias if self.conv.bias is not None else y
        return self.act(y).unsqueeze(1), joined


@dataclass(frozen=True)
class Export:
    """What is traced, and which axes are free."""

    exporter: str
    tokens: int | None
    state: int = 0
    half: bool = False

    def write(self, module: nn.Module, path: Path) -> None:
        dtype = torch.float16 if self.half else torch.float32
        args = [torch.randn(2, self.tokens or 7, CHANNELS, dtype=dtype)]
        args += [torch.randn(2, CHANNELS, self.state, dtype=dtype)] if self.state else []
        free = [{0: "b"} | ({} if self.tokens else {1: "t"}), {0: "b"}][: len(args)]
        names = ["x", "past"][: len(args)]
        module = module.to(dtype).eval()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if self.exporter == "torchscript":
                torch.onnx.export(
                    module, tuple(args), str(path), dynamo=False, opset_version=17, input_names=names,
                    dynamic_axes=dict(zip(names, free, strict=True)),
                )  # fmt: skip
                return
            shapes = tuple({axis: Dim(name) for axis, name in axes.items()} for axes in free)
            program = torch.onnx.export(
                module, tuple(args), dynamo=True, opset_version=20, verbose=False, input_names=names,
                dynamic_shapes=(shapes[0], shapes[1:]) if self.state else shapes,
            )  # fmt: skip
        program.save(str(path))


@cache
def exported(make: Make, bias: bool, export: Export) -> bytes:
    """The file that an exporter writes; for all targets once."""
    with TemporaryDirectory() as folder:
        export.write(make(bias=bias) if bias else make(), Path(folder) / "model.onnx")
        return (Path(folder) / "model.onnx").read_bytes()


def fused(
    make: Make, export: Export, target: str, folder: Path, *, bias: bool = False
) -> tuple[onnx.ModelProto, dict[str, object]]:
    """Fuses an export by the default rules and judges it in every way; the fused model, and what was found."""
    path, out = folder / "model.onnx", folder / "fused.onnx"
    path.write_bytes(exported(make, bias, export))
    report = graphs.fuse(path, out, target=target)
    assert [(site.status, site.op) for site in report.sites] == [("fused", "CausalConvWithState")], graphs.codes(report)
    assert report.exit == 0
    judged = verify(path, out)
    assert (judged.exit, [site.verdict for site in judged.sites]) == (0, ["equal"])
    assert lint(out, target).exit == 0
    same(path, out, export)
    again = graphs.fuse(out, folder / "again.onnx", target=target)
    assert (again.exit, again.sites) == (3, ())
    assert "already-fused: the model holds fused nodes already (1)" in again.notes[0]
    rollback(out, folder / "back.onnx")
    assert (folder / "back.onnx").read_bytes() == path.read_bytes()
    match = report.sites[0].match
    return onnx.load(out), {"parameters": match.parameters, "roles": set(match.roles), "outputs": set(match.outputs)}


def same(path: Path, out: Path, export: Export) -> None:
    """Both give the same on onnxruntime's own kernel, fewer tokens than the kernel is wide among the sizes."""
    sessions = [graphs.session(onnx.load(one)) for one in (path, out)]
    rng = np.random.default_rng(0)
    for batch, tokens in ((1, 1), (3, 2), (2, 3), (2, 9), (1, 40)):
        tokens = export.tokens or tokens
        feeds = {"x": rng.standard_normal((batch, tokens, CHANNELS))}
        feeds |= {"past": rng.standard_normal((batch, CHANNELS, export.state))} if export.state else {}
        feeds = {name: array.astype(np.float16 if export.half else np.float32) for name, array in feeds.items()}
        bar = 5e-3 if export.half else 1e-5
        for found, wanted in zip(*(session.run(None, feeds) for session in sessions), strict=True):
            np.testing.assert_allclose(found, wanted, rtol=bar, atol=bar)


def ops(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node if node.op_type != "Constant"]


PREFILL: Sequence[Make] = [
    Convolution, Padded, Zeros, Rows, TwoAxes, Masked, Written, lambda: Convolution(bias=True, silu=False),
]  # fmt: skip
IDS = ["conv", "padded", "zeros", "rows", "two axes", "masked", "written", "bias"]


@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
@pytest.mark.parametrize("make", PREFILL, ids=IDS)
@pytest.mark.parametrize("target", TARGETS)
def test_a_prefill_of_any_length(make: Make, exporter: str, target: str, tmp_path: Path) -> None:
    module = make()
    model, found = fused(make, Export(exporter, None), target, tmp_path)
    assert found["outputs"] == {"y"}
    assert found["roles"] == {"x", "weight"} | ({"bias"} if module.conv.bias is not None else set())
    assert bool(found["parameters"].get("silu")) == module.silu
    assert {"Conv", "Sigmoid", "Exp", "Concat", "Pad"}.isdisjoint(ops(model)) or isinstance(module, Masked)
    assert "Conv" not in ops(model)


@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
@pytest.mark.parametrize("tokens", [1, None])
@pytest.mark.parametrize("bias", [False, True])
def test_a_state_goes_in_and_comes_out(exporter: str, tokens: int | None, bias: bool, tmp_path: Path) -> None:
    model, found = fused(Convolution, Export(exporter, tokens, WIDTH - 1), "ort", tmp_path, bias=bias)
    assert found["outputs"] == {"y", "present_state"}
    assert found["roles"] == {"x", "weight", "past_state"} | ({"bias"} if bias else set())
    assert {"Conv", "Concat", "Slice"}.isdisjoint(ops(model))


@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
@pytest.mark.parametrize("tokens", [1, 3, None])
@pytest.mark.parametrize("target", TARGETS)
def test_a_state_of_more_columns_stays_where_it_is(
    exporter: str, tokens: int | None, target: str, tmp_path: Path
) -> None:
    model, found = fused(Wide, Export(exporter, tokens, WIDTH), target, tmp_path)
    assert found["outputs"] == {"y"}
    assert "past_state" in found["roles"]
    assert "Conv" not in ops(model)
    assert "Concat" in ops(model)


@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("target", TARGETS)
def test_a_decode_step_by_a_product_and_a_sum(exporter: str, bias: bool, target: str, tmp_path: Path) -> None:
    model, found = fused(Summed, Export(exporter, 1, WIDTH), target, tmp_path, bias=bias)
    assert {"x", "past_state", "weight"} <= found["roles"]
    assert "ReduceSum" not in ops(model)


@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
@pytest.mark.parametrize(("make", "export"), [(Convolution, (None, 0)), (Convolution, (1, 3)), (Wide, (1, 4))])
@pytest.mark.parametrize("target", TARGETS)
def test_half_precision(
    make: Make, export: tuple[int | None, int], exporter: str, target: str, tmp_path: Path
) -> None:
    model, _ = fused(make, Export(exporter, *export, half=True), target, tmp_path)
    assert "Conv" not in ops(model)


def test_the_default_target_leaves_it_alone(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(exported(Convolution, False, Export("dynamo", None)))
    report = graphs.fuse(tmp_path / "model.onnx")
    assert (report.exit, report.sites) == (3, ())
    named = graphs.fuse(tmp_path / "model.onnx", rules=("causal_conv",))
    assert (named.exit, graphs.codes(named)) == (4, ["causal-conv-target"])
    other = graphs.fuse(tmp_path / "model.onnx", rules=("gated_delta_rule",), target="ort")
    assert (other.exit, other.sites) == (3, ())
