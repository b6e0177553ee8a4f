"""Graphs, compilation, deployed forms, packed zeros and latency plans on a CUDA device."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sapwood as sw
from sapwood.measurement.backends import capture, prepare
from sapwood.measurement.convolutions import Arranged, Conv, one_pass_ways, separate, ways_for
from sapwood.measurement.deployment import deploy
from sapwood.measurement.packing import pack_two_of_four
from tests.helpers import outputs, same, snapshot
from tests.test_convolutions import Mobile, Residual
from tests.test_latency import chain
from tests.test_measure import Many
from tests.test_padding import Gated, Odd

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]
CUDA = torch.device("cuda")


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


@pytest.mark.parametrize("backend", ["eager", "graph", "compile"])
def test_every_backend_runs_new_inputs(backend: str) -> None:
    model, x = Many().cuda().eval(), torch.randn(2, 3, 4, 4, device=CUDA)
    runner = prepare(model, {"x": x}, backend)
    assert runner.backend == backend and not runner.notes
    first = runner.run(x=torch.randn_like(x))
    kept = first["logits"].clone()
    other = torch.randn_like(x)
    second = runner.run(x=other)
    assert torch.equal(first["logits"], kept)  # what was given out stays
    torch.testing.assert_close(second["logits"], outputs(model, other)[0], rtol=1e-3, atol=1e-3)


def test_measure_tells_memory_and_device() -> None:
    model, x = nn.Linear(1024, 1024).cuda(), torch.randn(64, 1024, device=CUDA)
    found = sw.measure(model, x, "graph", seconds=0.1)
    assert found.backend == "graph" and found.machine["kind"] == "cuda" and found.machine["cudnn"]
    assert found.peak_bytes is not None and found.peak_bytes > 4 * 1024 * 1024
    assert 0 < found.median_ms < 10


def test_out_of_memory_is_told() -> None:
    with pytest.raises(sw.SapwoodError, match=r"enough memory.*smaller batch"):
        sw.measure(Big().cuda(), torch.randn(1, device=CUDA))


class Big(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale * torch.ones(2**40, device=x.device)


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "channels", "adds"),
    [(7, 2, 3, 3, False), (3, 1, 1, 3, False), (16, 16, 0, 3, False), (3, 1, 1, 32, True), (1, 1, 0, 64, True)],
)
def test_all_ways_of_a_convolution_agree(kernel: int, stride: int, padding: int, channels: int, adds: bool) -> None:
    last = torch.channels_last
    x = torch.randn(4, channels, 64, 64, device=CUDA).bfloat16().contiguous(memory_format=last)
    weight = (torch.randn(64, channels, kernel, kernel, device=CUDA) / 10).bfloat16().contiguous(memory_format=last)
    bias = torch.randn(64, device=CUDA).bfloat16()
    conv = Conv((kernel, kernel), (stride, stride), (padding, padding), (1, 1), 1, "relu", adds)
    plain = torch.nn.functional.conv2d(x, weight, bias, stride, padding)
    other = torch.randn_like(plain) if adds else None
    exact = separate(x.float(), weight.float(), bias.float(), None if other is None else other.float(), conv)
    ways = list(ways_for(x, weight, conv))
    assert len(ways) > 2
    for way in ways:
        found = Arranged(way, weight, bias, conv)(x, other)
        assert found.is_contiguous(memory_format=last) and error(found, exact) < 1e-2, way.name


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "channels", "made", "own", "adds", "after"),
    [
        (3, 2, 1, 3, 32, False, False, "relu6"),
        (1, 1, 0, 24, 144, False, True, "relu6"),
        (1, 1, 0, 13, 37, False, True, "hardswish"),
        (1, 1, 0, 300, 20, False, False, ""),
        (3, 1, 1, 40, 24, False, True, "silu"),
        (3, 1, 1, 40, 24, False, False, "relu"),
        (3, 1, 1, 96, 96, True, False, "relu6"),
        (3, 2, 1, 13, 13, True, False, "hardswish"),
        (7, 1, 3, 33, 33, True, True, ""),
        (5, 1, 2, 64, 64, True, False, "silu"),
    ],
)
def test_one_pass_does_what_cudnn_does_in_many(
    kernel: int, stride: int, padding: int, channels: int, made: int, own: bool, adds: bool, after: str
) -> None:
    last, groups = torch.channels_last, channels if own else 1
    x = (3 * torch.randn(3, channels, 30, 24, device=CUDA)).bfloat16().contiguous(memory_format=last)
    weight = torch.randn(made, channels // groups, kernel, kernel, device=CUDA) / (kernel * (channels / groups) ** 0.5)
    weight, bias = weight.bfloat16().contiguous(memory_format=last), torch.randn(made, device=CUDA).bfloat16()
    conv = Conv((kernel, kernel), (stride, stride), (padding, padding), (1, 1), groups, after, adds)
    plain = torch.nn.functional.conv2d(x, weight, bias, stride, padding, 1, groups)
    other = torch.randn_like(plain) if adds else None
    exact = separate(x.double(), weight.double(), bias.double(), None if other is None else other.double(), conv)
    ways = one_pass_ways(x, weight, conv)
    assert bool(ways) == (own or not conv.all_in_cudnn())
    apart = error(separate(x, weight, bias, other, conv), exact)
    for way in ways:
        found = Arranged(way, weight, bias, conv)(x, other)
        assert found.is_contiguous(memory_format=last) and error(found, exact) <= 1.2 * apart, way.name
    x[1, 2, 3, 4] = float("nan")
    spoilt = separate(x, weight, bias, other, conv).isnan()
    for way in ways:
        found = Arranged(way, weight, bias, conv)(x, other).isnan()
        assert (found >= spoilt).all() and (way.made or (found == spoilt).all()), way.name


def test_a_mobile_network_runs_in_one_pass_a_layer() -> None:
    """relu6, depthwise kernels and sums without activation, also within torch.compile."""
    model = Mobile().to(CUDA, torch.bfloat16)
    x = torch.randn(16, 3, 64, 64, device=CUDA).bfloat16()
    for backend in ("graph", "compile"):
        made = deploy(model, x, backend, seconds=0.1)
        assert made.form == f"arranged, {backend}", made.forms
        note = next(note for note in made.notes if note.startswith("convolutions: "))
        kinds = [part.split(" ", 1) for part in note.removeprefix("convolutions: ").split(", ")]
        assert sum(int(n) for n, kind in kinds if "one pass" in kind) >= 5, note
        other = torch.randn_like(x)
        assert error(made(other), outputs(model, other)[0]) < 2e-2


def test_odd_widths_are_padded() -> None:
    model = Odd().to(CUDA, torch.bfloat16).eval()
    x = torch.randn(16, 3, 64, 64, device=CUDA).bfloat16()
    made = deploy(model, x, "graph", seconds=0.1)
    form = next(form for form in made.forms if form.name == "padded, graph")
    assert form.timing is not None and any("padded to eights" in note for note in form.notes), form
    assert error(made(x), outputs(model, x)[0]) < 2e-2


def test_odd_products_are_padded_and_win() -> None:
    model = Gated(1229, 2451).to(CUDA, torch.bfloat16).eval()
    x = torch.randn(16, 256, 1229, device=CUDA).bfloat16()
    made = deploy(model, x, "graph", seconds=0.1)
    assert made.form == "padded, graph" and "4 products padded to eights" in made.notes, made.forms
    assert error(made(x), outputs(model, x)[0]) < 2e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_deployed_convolutions_are_the_same_function(dtype: torch.dtype) -> None:
    model = Residual().to(CUDA, dtype)
    before, x = snapshot(model), torch.randn(8, 3, 64, 64, device=CUDA, dtype=dtype)
    made = deploy(model, x, seconds=0.1)
    assert same(model, before) and made.form != "as given"
    other = torch.randn_like(x)
    assert error(made(other), outputs(model, other)[0]) < 2e-2
    assert error(made(other[:3]), outputs(model, other[:3])[0]) < 2e-2  # another batch size
    assert torch.backends.cudnn.benchmark is False


def test_a_model_that_cannot_be_captured_is_deployed_otherwise() -> None:
    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layer(x)
            return x * 2 if x.sum().item() > 0 else x

    model, x = Asks().cuda(), torch.randn(2, 8, device=CUDA)
    made = deploy(model, x, seconds=0.05)
    assert any("graph failed" in form.reason for form in made.forms)
    torch.testing.assert_close(made(x), outputs(model, x)[0])
    assert torch.randn(4, device=CUDA).isfinite().all()  # random numbers and memory are in order


def test_a_graph_keeps_what_it_reads() -> None:
    """The call alone is kept; the layer, the input and the runner are gone."""

    def made() -> tuple[Any, torch.Tensor]:
        layer, x = nn.Linear(2048, 2048).cuda(), torch.randn(64, 2048, device=CUDA)
        return capture(layer, ((x,), {}), CUDA).call, outputs(layer, x)[0].clone()

    call, wanted = made()
    gc.collect()
    torch.cuda.empty_cache()
    junk = [torch.full((2048, 2048), float("nan"), device=CUDA) for _ in range(64)]
    torch.testing.assert_close(call(), wanted)
    del junk


def test_two_of_four_is_packed_where_it_pays_and_right_where_it_is() -> None:
    model = nn.Sequential(nn.Linear(4096, 8192), nn.ReLU(), nn.Linear(8192, 4096)).to(CUDA, torch.bfloat16)
    sw.mask_(model, pattern="2:4")
    x = torch.randn(2048, 4096, device=CUDA).bfloat16()
    packed = pack_two_of_four(model, ((x,), {}))
    made = deploy(model, x, seconds=0.1)
    assert error(made(x), outputs(model, x)[0]) < 2e-2
    if packed is not None:
        assert "layers with 2:4 zeros: " in packed[1][0]
        assert error(packed[0](x), outputs(model, x)[0]) < 2e-2
        assert any(form.name == "2:4, graph" for form in made.forms)


@pytest.mark.parametrize("backend", ["graph", "compile"])
def test_latency_budgets_are_met_on_the_device(backend: str, own_cache: Path) -> None:
    model = chain(128).to(CUDA, torch.bfloat16)
    model[7] = nn.Linear(128 * 64 * 64, 10, device=CUDA, dtype=torch.bfloat16)
    x = torch.randn(32, 3, 64, 64, device=CUDA).bfloat16()
    done = sw.prune(model, x, sw.Budget(latency=0.6), backend=backend)
    assert done.check.passed and done.plan.groups
    left: Any = done.plan.achieved
    assert left["latency_ms"] <= 0.6 * left["dense_latency_ms"] * 1.04
    assert list(own_cache.glob("operators-*.json"))


def test_the_device_likes_whole_tiles() -> None:
    plan = sw.make_plan(
        chain(256).to(CUDA, torch.bfloat16),
        torch.randn(2, 3, 8, 8, device=CUDA).bfloat16(),
        sw.Budget(channels=0.7),
        allocate="uniform",
        round_to="auto",
    )
    assert all(len(kept) % 8 == 0 for kept in plan.groups.values())
