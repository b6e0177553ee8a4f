"""Packed weights: nothing is lost, products are right, and packed models are models like any other."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

import sapwood as sw
from sapwood.errors import SapwoodError
from sapwood.measurement import Timing
from sapwood.measurement.packing import pack_zeros
from sapwood.sparse import SparseLinear, cpu, format, operator
from sapwood.sparse.format import columns_of, pack_weight, unpack_weight

BITS = {2: torch.int16, 4: torch.int32}


def weight_of(rows: int, columns: int, zeros: float, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    dice = torch.Generator().manual_seed(seed)
    made = torch.randn(rows, columns, generator=dice)
    return made.masked_fill_(torch.rand(rows, columns, generator=dice) < zeros, 0).to(dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    kind = BITS[a.element_size()]
    return a.dtype is b.dtype and torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


def layer_of(rows: int, columns: int, zeros: float, bias: bool = True, dtype: torch.dtype = torch.float32) -> nn.Linear:
    layer = nn.Linear(columns, rows, bias=bias, dtype=dtype)
    with torch.no_grad():
        layer.weight.copy_(weight_of(rows, columns, zeros, dtype))
    return layer


# -- the format -----------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 40),
    columns=st.one_of(st.integers(0, 300), st.integers(2040, 2060), st.integers(4090, 6200)),
    zeros=st.sampled_from([0.0, 0.3, 0.5, 0.9, 0.97, 0.999, 1.0]),
    dtype=st.sampled_from(list(format.DTYPES)),
    seed=st.integers(0, 99),
    by_kind=st.booleans(),
)
def test_packing_loses_nothing(
    rows: int, columns: int, zeros: float, dtype: torch.dtype, seed: int, by_kind: bool
) -> None:
    weight = weight_of(rows, columns, zeros, dtype, seed)
    packed = pack_weight(weight, by_kind)
    assert same_bits(unpack_weight(packed), weight)
    assert packed.by_kind <= by_kind
    operator.dense(packed)
    if packed.places.numel():
        places = columns_of(packed.places)
        assert int(places.max()) < columns and bool((places.diff(dim=1) >= 0).all())


def test_a_gpu_gets_chunks_of_eight_kinds_in_turn() -> None:
    packed = pack_weight(weight_of(3, 4096, 0.8), by_kind=True)
    columns = columns_of(packed.places)
    alike = (columns % 8 == columns[:, :1] % 8).all(1)
    assert packed.by_kind and float(alike.float().mean()) > 0.9
    first = columns[: int(packed.starts[1]), 0] % 8
    assert first[:64].tolist() == [*range(8)] * 8


def test_steps_that_are_too_long_for_a_kind_are_left_to_the_others() -> None:
    weight = torch.zeros(1, 4096)
    weight[0, :2048] = 1  # and few, far apart, of one kind after that
    weight[0, 2600::700] = 1
    assert torch.equal(unpack_weight(pack_weight(weight, by_kind=True)), weight)


def test_a_layer_packed_for_a_gpu_works_on_a_cpu() -> None:
    weight, x = weight_of(64, 4096, 0.8), torch.randn(3, 4096)
    packed = pack_weight(weight, by_kind=True)
    assert packed.by_kind
    layer = SparseLinear(packed, None, 16)
    torch.testing.assert_close(layer(x), F.linear(x, weight), atol=1e-4, rtol=1e-4)
    loaded = SparseLinear(pack_weight(weight), None, 16)
    loaded.load_state_dict(layer.state_dict())
    assert not loaded.packed.by_kind and torch.equal(loaded.weight, weight)


def test_minus_zero_nan_and_infinity_are_values() -> None:
    weight = torch.tensor([[0.0, -0.0, math.nan, math.inf, -math.inf, 1e-45, 0.0]])
    packed = pack_weight(weight)
    assert int((packed.values.view(torch.int32) != 0).sum()) == 5
    assert same_bits(unpack_weight(packed), weight)


def test_rows_far_apart_columns_and_large_matrices() -> None:
    wide = torch.zeros(3, 100_000)
    wide[0, 99_999] = wide[2, 0] = wide[2, 65_536] = 2.0
    assert torch.equal(unpack_weight(pack_weight(wide)), wide)
    with pytest.raises(SapwoodError, match="at most 1073741824 x 1048576 weights"):
        pack_weight(torch.zeros(1, 1_048_577))


def test_packing_in_parts_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = weight_of(37, 2500, 0.8)
    whole = pack_weight(weight)
    monkeypatch.setattr(format, "_AT_ONCE", 6000)
    parts = pack_weight(weight)
    for name in ("values", "places", "starts"):
        assert torch.equal(getattr(whole, name), getattr(parts, name))
    assert torch.equal(unpack_weight(parts), weight)


@pytest.mark.parametrize(("zeros", "most"), [(0.5, 0.76), (0.8, 0.31), (0.9, 0.16), (0.95, 0.09)])
def test_a_nonzero_of_16_bits_takes_24(zeros: float, most: float) -> None:
    weight = weight_of(256, 4096, zeros, torch.bfloat16)
    assert pack_weight(weight).nbytes <= most * weight.nbytes


def test_what_cannot_be_packed_is_refused() -> None:
    with pytest.raises(SapwoodError, match="a matrix of bfloat16, float16, float32; got 2 dimensions of float64"):
        pack_weight(torch.zeros(2, 2, dtype=torch.float64))
    with pytest.raises(SapwoodError, match="3 dimensions"):
        pack_weight(torch.zeros(2, 2, 2))
    with pytest.raises(SapwoodError, match="share of zeros between 0 and 1"):
        sw.pack(nn.Linear(2, 2), zeros=2)


# -- products -------------------------------------------------------------------------------


def test_there_is_a_kernel_here() -> None:
    assert cpu.unready() == ""
    assert "no kernel" in operator.unready(torch.device("cpu"), torch.float16)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 60),
    columns=st.one_of(st.integers(1, 300), st.integers(2040, 2060)),
    batch=st.integers(1, 40),
    zeros=st.sampled_from([0.0, 0.5, 0.9, 0.99, 1.0]),
    dtype=st.sampled_from(list(format.DTYPES)),
    bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_products_are_as_near_as_dense_ones(
    rows: int, columns: int, batch: int, zeros: float, dtype: torch.dtype, bias: bool, seed: int
) -> None:
    weight = weight_of(rows, columns, zeros, dtype, seed)
    x = torch.randn(batch, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)
    added = torch.randn(rows, generator=torch.Generator().manual_seed(seed)).to(dtype) if bias else None
    packed = pack_weight(weight)
    found = operator.sparse_linear(x, packed.values, packed.places, packed.starts, added, columns, 16)
    wanted = F.linear(x.double(), weight.double(), None if added is None else added.double())
    dense = F.linear(x, weight, added)
    assert found.shape == dense.shape and found.dtype is dtype
    slack = 1e-6 if dtype is torch.float32 else 4e-3
    assert (found.double() - wanted).norm() <= 1.1 * (dense.double() - wanted).norm() + slack * wanted.norm()


def test_the_default_dtype_does_not_matter() -> None:
    x, weight = torch.randn(3, 100), weight_of(20, 100, 0.8)
    packed = pack_weight(weight)
    torch.set_default_dtype(torch.bfloat16)
    cpu.unready.cache_clear()
    try:
        assert cpu.unready() == ""
        found = cpu.linear(x, packed, None)
    finally:
        torch.set_default_dtype(torch.float32)
        cpu.unready.cache_clear()
    assert torch.allclose(found, x @ weight.t(), atol=1e-5)


@pytest.mark.parametrize("rows", [1, 3])
def test_what_is_not_finite_meets_zeros_as_in_a_dense_product(rows: int) -> None:
    weight = weight_of(50, 100, 0.9)
    layer = SparseLinear(pack_weight(weight), None, 16)
    for bad in (math.inf, -math.inf, math.nan):
        x = torch.randn(rows, 100)
        x[0, 7] = bad
        torch.testing.assert_close(layer(x), F.linear(x, weight), equal_nan=True)
    weight[3, 5], weight[4, 6] = math.inf, math.nan
    x = torch.randn(rows, 100)
    torch.testing.assert_close(SparseLinear(pack_weight(weight), None, 16)(x), F.linear(x, weight), equal_nan=True)


def test_results_do_not_change_from_run_to_run() -> None:
    layer, x = SparseLinear.of(layer_of(300, 700, 0.8), 16), torch.randn(4, 700)
    first = layer(x)
    assert all(torch.equal(layer(x), first) for _ in range(20))


def test_inputs_of_any_shape_and_layout() -> None:
    plain = layer_of(30, 40, 0.8)
    layer = SparseLinear.of(plain, 16)
    for x in (
        torch.randn(40),
        torch.randn(2, 3, 40),
        torch.randn(40, 5).t(),
        torch.randn(0, 40),
        torch.randn(9, 81)[:, 1::2],
    ):
        torch.testing.assert_close(layer(x), plain(x))
    with pytest.raises(SapwoodError, match="inputs of 40 features; got shape"):
        layer(torch.randn(2, 41))
    with pytest.raises(SapwoodError, match=r"inputs of torch.float32 on cpu; got torch.float64"):
        layer(torch.randn(2, 40).double())


def test_threads_do_not_disturb_one_another() -> None:
    plain = layer_of(200, 300, 0.8)
    layer, x = SparseLinear.of(plain, 16), torch.randn(2, 300)
    wanted, wrong = layer(x), []

    def work() -> None:
        wrong.extend(1 for _ in range(30) if not torch.equal(layer(x), wanted))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_without_numba_the_dense_way_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "unready", lambda: "numba is not installed")
    plain = layer_of(30, 40, 0.8)
    layer = SparseLinear.of(plain)
    assert layer._most == 0
    x = torch.randn(2, 40)
    torch.testing.assert_close(layer(x), plain(x))


# -- the operator, as torch sees it -----------------------------------------------------------


def test_the_operator_is_well_behaved() -> None:
    packed = pack_weight(weight_of(6, 9, 0.6))
    given = (packed.values, packed.places, packed.starts)
    for grad in (False, True):
        x, bias = torch.randn(3, 9, requires_grad=grad), torch.randn(6, requires_grad=grad)
        torch.library.opcheck(torch.ops.sapwood.sparse_linear.default, (x, *given, bias, 9, 16))


def test_gradients_reach_inputs_and_bias() -> None:
    plain = layer_of(12, 20, 0.7)
    layer, x = SparseLinear.of(plain, 16), torch.randn(3, 20, requires_grad=True)
    other = x.detach().clone().requires_grad_()
    layer(x).square().sum().backward()
    plain(other).square().sum().backward()
    torch.testing.assert_close(x.grad, other.grad)
    assert layer.bias is not None
    torch.testing.assert_close(layer.bias.grad, plain.bias.grad)
    packed = layer.packed
    values = packed.values.clone().requires_grad_()
    made = operator.sparse_linear(x, values, packed.places, packed.starts, None, 20, 16)
    with pytest.raises(SapwoodError, match=r"sw\.unpack the model"):
        made.sum().backward()


def test_compiled_models_use_it() -> None:
    torch.compiler.reset()  # it gives up on code that was compiled for many models, as those of other tests were
    model = nn.Sequential(layer_of(64, 32, 0.8), nn.GELU(), layer_of(8, 64, 0.8)).eval()
    packed = sw.pack(model)
    x = torch.randn(3, 32)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(packed, fullgraph=True)(x), model(x))


# -- layers and models ------------------------------------------------------------------------


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)).eval()


def test_pack_and_unpack_are_exact() -> None:
    model = sw.mask(small(), sw.Budget(sparsity=0.8), ignore=["4"])
    before = {n: t.clone() for n, t in model.state_dict().items()}
    packed = sw.pack(model)
    assert [type(m) for m in packed] == [SparseLinear, nn.ReLU, SparseLinear, nn.ReLU, nn.Linear]
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    x = torch.randn(5, 32)
    torch.testing.assert_close(packed(x), model(x))
    again = sw.unpack(packed)
    assert {n: t.shape for n, t in again.state_dict().items()} == {n: t.shape for n, t in before.items()}
    assert all(torch.equal(t, before[n]) for n, t in again.state_dict().items())
    sw.hold(again)  # and its zeros are still known as a mask
    assert "zeros=8" in repr(packed)
    assert sw.sparsity(packed[0]).layers.keys() == {"weight"}
    assert str(sw.sparsity(packed)).splitlines()[-1] == str(sw.sparsity(model)).splitlines()[-1]


def test_what_is_not_a_plain_linear_layer_stays() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(50, 16)
            self.attend = nn.MultiheadAttention(16, 2, batch_first=True)
            self.hooked, self.own, self.head = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 50, bias=False)
            self.head.weight = self.embed.weight
            self.hooked.register_forward_hook(lambda m, a, out: out * 2)
            with torch.no_grad():
                for parameter in self.parameters():
                    parameter[torch.rand_like(parameter) < 0.8] = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.embed(x)
            h = self.attend(h, h, h, need_weights=False)[0]
            return self.head(self.own(self.hooked(h)))

    model, x = Tied().eval(), torch.randint(50, (2, 7))
    packed: Any = sw.pack(model)
    assert [n for n, m in packed.named_modules() if isinstance(m, SparseLinear)] == ["own"]
    assert packed.head.weight is packed.embed.weight
    torch.testing.assert_close(packed(x), model(x))
    assert isinstance(sw.pack(layer_of(8, 8, 0.9)), SparseLinear)
    assert type(sw.pack(nn.Linear(8, 8))) is nn.Linear


def test_state_dicts_and_safetensors(tmp_path: Path) -> None:
    packed = sw.pack(sw.mask(small(), sw.Budget(sparsity=0.8)))
    other = sw.pack(sw.mask(small(), sw.Budget(sparsity=0.6)))
    save_file(packed.state_dict(), tmp_path / "model.safetensors")
    other.load_state_dict(load_file(tmp_path / "model.safetensors"))
    x = torch.randn(3, 32)
    assert torch.equal(other(x), packed(x))


@pytest.mark.parametrize("part", ["places", "starts", "values"])
def test_damaged_places_are_refused(part: str) -> None:
    layer = SparseLinear.of(layer_of(16, 32, 0.7))
    state = {n: t.clone() for n, t in layer.state_dict().items()}
    if part == "places":
        state["places"][3] = 40
    elif part == "starts":
        state["starts"][2] = 10_000
    else:
        state["values"] = state["values"][:-1]
    with pytest.raises(SapwoodError, match=r"places within the matrix|packed weights of 16 x 32"):
        layer.load_state_dict(state)


@pytest.mark.parametrize("own", [False, True])
def test_bundles_keep_layers_packed(tmp_path: Path, own: bool) -> None:
    packed = sw.pack(sw.mask(small(), sw.Budget(sparsity=0.8)))
    sw.save(tmp_path / "it", packed)
    found = sw.load_(tmp_path / "it", small()) if own else sw.load(tmp_path / "it", small())
    kinds = [type(m) for m in packed]
    assert [type(m) for m in found] == kinds and kinds.count(SparseLinear) == 3
    assert all(torch.equal(t, packed.state_dict()[n]) for n, t in found.state_dict().items())
    x = torch.randn(3, 32)
    assert torch.equal(found(x), packed(x))


def test_dense_copies_are_kept_where_allowed() -> None:
    plain = layer_of(30, 40, 0.8)
    layer = SparseLinear.of(plain, most=2, keep_dense=True)
    torch.testing.assert_close(layer(torch.ones(2, 40)), plain(torch.ones(2, 40)))
    assert layer._dense is None
    torch.testing.assert_close(layer(torch.ones(3, 40)), plain(torch.ones(3, 40)))
    assert layer._dense is not None
    assert "_dense" not in layer.state_dict()


def test_deploy_and_bench_know_packed_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer_of(2048, 2048, 0.97)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.layer(x)
            return out

    model, x = Large().eval(), torch.randn(1, 2048)

    def clock(calls: Mapping[str, Any], *_: Any, **__: Any) -> dict[str, Timing]:
        """Whatever else runs on this machine, packed is twice as fast."""
        speeds = {name: 2.0 if name == "packed" else 1.0 for name in calls}
        return {n: Timing(1 / v, 1 / v, 1 / v, 0.0, 9, v, v, v, True) for n, v in speeds.items()}

    monkeypatch.setattr("sapwood.measurement.packing.take_turns", clock)
    found = pack_zeros(model, ((x,), {}))
    assert found is not None
    assert found[1][0] == "1 of 1 layers with zeros: 1 as packed"
    deployed = sw.deploy(model, x, "eager", seconds=0.2)
    assert "packed, eager" in {f.name for f in deployed.forms}


def test_the_number_of_threads_stays(tmp_path: Path) -> None:
    """In a process of its own: numba starts its threads once."""
    code = """
import torch, sapwood as sw
torch.set_num_threads(1)
layer = torch.nn.Linear(512, 512).eval()
with torch.no_grad():
    layer.weight[:, ::2] = 0
    sw.pack(torch.nn.Sequential(layer))(torch.ones(1, 512))
print(torch.get_num_threads())
"""
    if cpu.unready():
        pytest.skip(cpu.unready())
    plain = {k: v for k, v in os.environ.items() if not k.endswith("NUM_THREADS")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=plain, cwd=tmp_path)
    assert done.stdout.split() == ["1"], done.stderr[-2000:]


def test_a_bias_of_another_kind_is_refused() -> None:
    packed = pack_weight(torch.eye(4))
    for bias in (torch.ones(3), torch.ones(4).bfloat16()):
        with pytest.raises(SapwoodError, match="a bias of 4 numbers"):
            operator.sparse_linear(torch.ones(2, 4), packed.values, packed.places, packed.starts, bias, 4, 8)
