"""Packed weights on a GPU: the kernels of sapwood.sparse against dense products in float64."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sapwood as sw
from sapwood.errors import SapwoodError
from sapwood.sparse import SparseLinear, cuda, nvrtc, operator
from sapwood.sparse.format import pack_weight, unpack_weight

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BITS = {2: torch.int16, 4: torch.int32}
ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-10, torch.float32: 2**-22}


@pytest.fixture(params=["started early", "in turn"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(nvrtc, "EARLY", request.param != "in turn")
    return str(request.param)


def weight_of(rows: int, columns: int, zeros: float, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    made = torch.randn(rows, columns, device="cuda")
    return made.masked_fill_(torch.rand_like(made) < zeros, 0).to(dtype)


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    packed = pack_weight(weight)
    made: torch.Tensor = operator.sparse_linear(
        x, packed.values, packed.places, packed.starts, bias, weight.shape[1], cuda.MOST
    )
    return made


def assert_near(found: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """No further from float64 than the dense product is, and each number one rounding of a sum in float32."""
    wanted = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    dense = F.linear(x, weight, bias)
    assert found.shape == dense.shape and found.dtype is dense.dtype
    slack = 1e-6 if x.dtype is torch.float32 else 1e-3
    limit = 1.1 * (dense.double() - wanted).norm() + slack * wanted.norm() + 1e-30
    off = (found.double() - wanted).abs()
    assert off.norm() <= limit
    terms = F.linear(x.double().abs(), weight.double().abs())
    assert bool((off <= ROUNDING[x.dtype] * wanted.abs() + 3e-6 * terms + 1e-6).all())


def test_the_kernels_compile_here() -> None:
    assert cuda.unready(0) == ""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 32])
def test_every_batch(batch: int, dtype: torch.dtype) -> None:
    torch.manual_seed(batch)
    weight, x = weight_of(777, 5003, 0.8, dtype), torch.randn(batch, 5003, device="cuda").to(dtype)
    bias = torch.randn(777, device="cuda").to(dtype)
    assert_near(product(x, weight, bias), x, weight, bias)


@pytest.mark.parametrize("seed", range(40))
def test_odd_shapes(seed: int) -> None:
    dice = torch.Generator().manual_seed(seed)

    def draw(low: float, high: float) -> int:
        return round(math.exp(math.log(low) + float(torch.rand((), generator=dice)) * math.log(high / low)))

    rows, columns, batch = draw(1, 20000), draw(1, 20000), draw(1, 32)
    columns = min(columns, 40_000_000 // rows)
    zeros = (0.0, 0.5, 0.8, 0.95, 0.999, 1.0)[seed % 6]
    dtype = DTYPES[seed % 3]
    torch.manual_seed(seed)
    weight, x = weight_of(rows, columns, zeros, dtype), torch.randn(batch, columns, device="cuda").to(dtype)
    if rows > 3:
        weight[0], weight[1], weight[2] = 0, 1, 0
        weight[2, -1] = 3
    assert_near(product(x, weight), x, weight)
    kind = BITS[weight.element_size()]
    packed = pack_weight(weight)
    assert torch.equal(cuda.unpack(packed).view(kind), weight.view(kind))
    assert torch.equal(unpack_weight(packed).view(kind), weight.view(kind))


@pytest.mark.parametrize(("rows", "columns"), [(64, 100_000), (16, 200_000), (3, 70_001), (1024, 14336), (8192, 8192)])
@pytest.mark.parametrize("batch", [1, 16])
def test_wide_ones(rows: int, columns: int, batch: int) -> None:
    torch.manual_seed(0)
    weight, x = weight_of(rows, columns, 0.9), torch.randn(batch, columns, device="cuda", dtype=torch.bfloat16)
    assert_near(product(x, weight), x, weight)


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9, reason="needs Hopper")
@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize(
    ("rows", "columns", "zeros"),
    [
        *[(1, 8, 0.0), (40, 104, 0.5), (3000, 4096, 0.8), (777, 4504, 0.0), (6001, 8192, 0.9)],
        *[(300, 12296, 0.5), (1030, 14336, 0.8), (90, 28672, 0.99), (500, 4096, 1.0)],
        *[(777, 12288, 0.8), (300, 8200, 0.5), (52000, 8192, 0.95), (60000, 4104, 0.9)],
    ],
)
@pytest.mark.parametrize(("batch", "cluster"), [(9, 1), (9, 2), (16, 1), (16, 2)])
def test_dense_products_of_tiles(
    batch: int, cluster: int, rows: int, columns: int, zeros: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In clusters across rows and across tiles, with more tiles than a cluster has, and more sums than have room."""
    monkeypatch.setattr(cuda, "CLUSTER", cluster)
    monkeypatch.setattr(cuda, "CHUNKS", 0)
    monkeypatch.setattr(cuda, "_launch", None)  # it is not taken
    torch.manual_seed(rows)
    weight, x = weight_of(rows, columns, zeros, dtype), torch.randn(batch, columns, device="cuda").to(dtype)
    bias = torch.randn(rows, device="cuda").to(dtype)
    first = product(x, weight, bias)
    assert_near(first, x, weight, bias)
    assert all(torch.equal(product(x, weight, bias), first) for _ in range(3))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), [(40, 100), (300, 4500), (300, 4504)])
@pytest.mark.parametrize("batch", [1, 3, 16])
def test_what_is_not_finite_meets_zeros_as_in_a_dense_product(
    batch: int, rows: int, columns: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    weight = weight_of(rows, columns, 0.5, dtype)
    weight[0] = 1
    for bad in (math.inf, -math.inf, math.nan):
        x = torch.randn(batch, columns, device="cuda").to(dtype)
        x[0, 7] = x[-1, columns - 1] = bad
        found, wanted = product(x, weight), F.linear(x.float(), weight.float())
        assert torch.equal(found.isnan(), wanted.isnan()) and torch.equal(found.isinf(), wanted.isinf())
        plain = ~wanted.isnan() & ~wanted.isinf()
        torch.testing.assert_close(found[plain].float(), wanted[plain], rtol=2e-2, atol=2e-1)
    weight[3, 5], weight[4, 6] = math.inf, math.nan
    x = torch.randn(batch, columns, device="cuda").to(dtype)
    found, wanted = product(x, weight), F.linear(x.float(), weight.float())
    assert torch.equal(found.isnan(), wanted.isnan()) and torch.equal(found.isinf(), wanted.isinf())


def test_results_do_not_change_from_run_to_run() -> None:
    for batch, columns in ((1, 4096), (4, 14336), (16, 14336)):
        weight, x = weight_of(1024, columns, 0.8), torch.randn(batch, columns, device="cuda", dtype=torch.bfloat16)
        first = product(x, weight)
        assert all(torch.equal(product(x, weight), first) for _ in range(10))


def test_every_output_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory is poisoned first."""
    plain = torch.empty

    def poisoned(*args: object, **kwargs: object) -> torch.Tensor:
        made: torch.Tensor = plain(*args, **kwargs)  # type: ignore[call-overload]
        return made.fill_(math.nan) if made.is_floating_point() else made

    for batch, rows, columns in ((1, 1023, 4096), (5, 77, 14336), (32, 4097, 2049)):
        weight, x = weight_of(rows, columns, 0.9), torch.randn(batch, columns, device="cuda", dtype=torch.bfloat16)
        packed = pack_weight(weight)
        monkeypatch.setattr(torch, "empty", poisoned)
        assert bool(torch.isfinite(cuda.linear(x, packed, None)).all())
        assert bool(torch.isfinite(cuda.unpack(packed)).all())
        monkeypatch.setattr(torch, "empty", plain)


def test_streams_and_graphs() -> None:
    weight = weight_of(4096, 14336, 0.8)
    packed = pack_weight(weight)
    given = (packed.values, packed.places, packed.starts, None, 14336, cuda.MOST)
    xs = [torch.randn(b, 14336, device="cuda", dtype=torch.bfloat16) for b in (1, 2, 8, 16)]
    wanted = [operator.sparse_linear(x, *given) for x in xs]
    torch.cuda.synchronize()
    streams, found = [torch.cuda.Stream() for _ in xs], []
    for _ in range(5):
        found = []
        for stream, x in zip(streams, xs, strict=True):
            with torch.cuda.stream(stream):
                found.append(operator.sparse_linear(x, *given))
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    for x, y in zip(xs, wanted, strict=True):
        graph, held = torch.cuda.CUDAGraph(), x.clone()
        with torch.cuda.graph(graph):
            out = operator.sparse_linear(held, *given)
        held.copy_(2 * x)
        graph.replay()
        torch.testing.assert_close(out, 2 * y)
        held.copy_(x)
        graph.replay()
        assert torch.equal(out, y)


@pytest.mark.parametrize("batch", [1, 4, 16])
def test_each_layer_of_a_chain_sees_what_the_last_one_wrote(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that start early, over two buffers in turn."""
    packs = [pack_weight(weight_of(1024, 1024, 0.8) / 14) for _ in range(5)]
    x = torch.randn(batch, 1024, device="cuda", dtype=torch.bfloat16)

    def chain() -> torch.Tensor:
        y = x
        for i in range(60):
            p = packs[i % 5]
            y = operator.sparse_linear(y, p.values, p.places, p.starts, None, 1024, cuda.MOST)
        return y

    monkeypatch.setattr(nvrtc, "EARLY", False)
    wanted = chain()
    monkeypatch.setattr(nvrtc, "EARLY", True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain()
    for _ in range(50):
        graph.replay()
        assert torch.equal(found, wanted)


def test_non_contiguous_and_unaligned_inputs() -> None:
    weight = weight_of(130, 256, 0.7)
    for x in (
        torch.randn(256, 4, device="cuda", dtype=torch.bfloat16).t(),
        torch.randn(4, 512, device="cuda", dtype=torch.bfloat16)[:, ::2],
        torch.randn(257, device="cuda", dtype=torch.bfloat16)[1:][None],
        torch.randn(2, 3, 256, device="cuda", dtype=torch.bfloat16),
    ):
        assert_near(product(x, weight), x, weight)
    with pytest.raises(SapwoodError, match=r"inputs of torch.bfloat16 on cuda:0; got torch.bfloat16 on cpu"):
        product(torch.randn(1, 256, dtype=torch.bfloat16), weight)


def test_models_move_compile_and_come_back(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)).eval()
    masked = sw.mask(model, sw.Budget(sparsity=0.9)).cuda().bfloat16()
    packed = sw.pack(masked)
    assert all(isinstance(packed[i], SparseLinear) for i in (0, 2))
    x = torch.randn(2, 512, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        wanted = masked(x)
        torch.testing.assert_close(packed(x), wanted, rtol=3e-2, atol=3e-2)
        torch.compiler.reset()
        torch.testing.assert_close(torch.compile(packed, fullgraph=True)(x), wanted, rtol=3e-2, atol=3e-2)
        many = torch.randn(500, 512, device="cuda", dtype=torch.bfloat16)
        torch.testing.assert_close(packed(many), masked(many), rtol=3e-2, atol=3e-2)
    sw.save(tmp_path / "it", packed)
    back = sw.load(tmp_path / "it", model)
    assert isinstance(back[0], SparseLinear)
    with torch.no_grad():
        assert torch.equal(back.cuda().bfloat16()(x), packed(x))
        torch.testing.assert_close(packed.cpu()(x.cpu()), wanted.cpu(), rtol=3e-2, atol=3e-2)


def test_deploy_packs_where_it_pays() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8192, 8192, bias=False) for _ in range(4))).cuda().bfloat16().eval()
    masked = sw.mask(model, sw.Budget(sparsity=0.9))
    x = torch.randn(1, 8192, device="cuda", dtype=torch.bfloat16)
    deployed = sw.deploy(masked, x, seconds=0.5)
    assert deployed.form.startswith("packed") and deployed.speed > 1.5
    with torch.no_grad():
        torch.testing.assert_close(deployed(x), masked(x), rtol=5e-2, atol=5e-2)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_devices_in_one_process() -> None:
    for device in ("cuda:0", "cuda:1", "cuda:0"):
        weight = weight_of(100, 300, 0.8).to(device)
        x = torch.randn(2, 300, device=device, dtype=torch.bfloat16)
        assert_near(product(x, weight), x, weight)
