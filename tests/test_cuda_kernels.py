"""The CUDA kernels of sapwood.sparse, compiled for the CPU and run thread by thread: what they compute."""

from __future__ import annotations

import random
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sapwood.sparse import cuda
from sapwood.sparse.format import Packed, pack_weight
from tests.emulated import Emulated, emulated

SHAPES = (
    *("0, 1, 1, 16, 16, 2, 0", "1, 2, 4, 1, 16, 1, 0", "0, 4, 2, 1, 16, 1, 1", "1, 8, 1, 1, 16, 1, 1"),
    *("1, 8, 4, 1, 16, 1, 1", "1, 8, 2, 1, 16, 1, 1", "0, 16, 4, 1, 16, 1, 1", "0, 16, 1, 2, 16, 1, 1"),
    *("2, 4, 1, 2, 16, 1, 1", "2, 8, 4, 1, 16, 1, 1"),
    *("0, 1, 2, 1, 16, 2, 2", "1, 8, 2, 1, 16, 1, 2", "0, 16, 4, 1, 16, 1, 2", "2, 4, 1, 2, 16, 1, 2"),
)
TILES = [f"sparse_tiles<{kind}, {form}>" for kind in (0, 1) for form in (0, 1, 2)]
OTHERS = (*(f"sum_parts<{k}>" for k in (0, 1, 2)), "unpack<0>", "unpack<2>")
NAMES = [*(f"sparse_linear<{s}>" for s in SHAPES), *TILES, *OTHERS]
TYPES = {0: torch.bfloat16, 1: torch.float16, 2: torch.float32}
NEAR = {torch.bfloat16: 2**-8, torch.float16: 2**-10, torch.float32: 2**-22}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """All kernels in one library."""
    apart = {name: cuda.FILES[name][2:] for name in ("sparse_linear", "sparse_tiles", "unpack")}
    parts = [f"namespace in_{name} {{\n{_read(files)}\n}}\nusing in_{name}::{name};" for name, files in apart.items()]
    text = "\n".join([_read(("common.cu",)), *parts, "using in_unpack::sum_parts;"])
    return emulated(text, NAMES, tmp_path_factory.mktemp("emulated"))


def _read(files: tuple[str, ...]) -> str:
    return "\n".join((cuda.SOURCES / name).read_text() for name in files)


@pytest.fixture
def on_cpu(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of five multiprocessors."""
    machine = SimpleNamespace(
        major=9, multi_processor_count=5, shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472
    )
    cuda._most.cache_clear()
    monkeypatch.setattr(cuda, "TILED", 17)
    never = 1 << 20  # as compiled above
    monkeypatch.setattr(cuda, "WAYS", {b: (16, 2 if b == 1 else 1, never if b < 3 else 0, 1) for b in (1, 2, 4, 8, 16)})
    monkeypatch.setattr(cuda, "_kernel", lambda name, device: Emulated(library, NAMES, name))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: machine)


def _weight(rows: int, columns: int, zeros: float, dtype: torch.dtype) -> torch.Tensor:
    """Some rows are empty, some have no zeros."""
    weight = torch.randn(rows, columns).to(dtype)
    weight[torch.rand(rows, columns) < zeros] = 0
    weight[torch.rand(rows) < 0.1] = 0
    full = torch.rand(rows) < 0.05
    weight[full] = torch.randn(int(full.sum()), columns).to(dtype)
    return weight


def _require_near(found: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    exact = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    assert torch.equal(found.isnan(), exact.isnan()) and torch.equal(found.isinf(), exact.isinf())
    allowed = NEAR[found.dtype] * exact.abs() + 2e-6 * (x.double().abs() @ weight.double().abs().t()) + 1e-6
    off = ((found.double() - exact).abs() / allowed)[exact.isfinite()]  # one rounding at the end, of a sum in float32
    assert len(off) == 0 or float(off.max()) < 1


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(
    ("kind", "batch", "at_once", "split"),
    [
        *[(0, 1, 1, 16), (1, 2, 4, 1), (0, 3, 2, 1), (1, 7, 1, 1), (1, 8, 4, 1)],
        *[(1, 5, 2, 1), (0, 16, 4, 1), (0, 13, 1, 2), (2, 4, 1, 2), (2, 7, 4, 1)],
    ],
)
def test_products_agree_with_dense_ones(
    kind: int, batch: int, at_once: int, split: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "_shared", lambda rows, blocks, warps: (at_once, split))  # as compiled above
    require_right(kind, batch)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(
    ("kind", "batch", "at_once", "split"), [(0, 1, 2, 1), (1, 7, 2, 1), (0, 16, 4, 1), (2, 3, 1, 2)]
)
def test_two_sets_at_once(kind: int, batch: int, at_once: int, split: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_shared", lambda rows, blocks, warps: (at_once, split))  # as compiled above
    monkeypatch.setattr(cuda, "WAYS", {b: (16, 2 if b == 1 else 1, -1, 2) for b in cuda.WAYS})
    require_right(kind, batch)


@pytest.mark.usefixtures("on_cpu")
def test_tall_ones_by_tiles_give_all_sums_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no room for them in shared memory."""
    monkeypatch.setattr(cuda, "TILED", 9)
    monkeypatch.setattr(cuda, "CHUNKS", 0)
    done: set[str] = set()
    monkeypatch.setattr(cuda, "_kernel", lambda name, device, known=cuda._kernel: done.add(name) or known(name, device))
    weight, x = torch.zeros(4400, 4104, dtype=torch.bfloat16), torch.randn(9, 4104).bfloat16()
    weight[::7, ::300], weight[-1] = 1, 2
    _require_near(cuda.linear(x, pack_weight(weight, by_kind=True), None), x, weight, None)
    assert {name.partition(",")[0] for name in done} == {"sparse_tiles<0", "sum_parts<0>"}


def test_what_is_asked_for_is_what_the_kernel_of_tiles_has() -> None:
    """Its constants stand in two places."""
    text = (cuda.SOURCES / "tiles.cu").read_text()
    own = {name: int(n) for name, n in re.findall(r"constexpr int (WRITERS|DEPTH|AHEAD) = (\d+);", text)}
    assert own == {"WRITERS": cuda.WRITERS, "DEPTH": cuda.DEPTH, "AHEAD": cuda.AHEAD}


@pytest.mark.usefixtures("on_cpu")
def test_chunks_across_the_middle_of_a_tile_beside_the_last_column(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "TILED", 9)
    weight = torch.zeros(8, 4096, dtype=torch.bfloat16)
    weight[0, 8:], weight[7, 2048:] = torch.randn(4088), torch.randn(2048)
    x = torch.randn(9, 4096).bfloat16()
    _require_near(cuda.linear(x, pack_weight(weight, by_kind=True), None), x, weight, None)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("shared_x", [True, False])
@pytest.mark.parametrize(
    ("kind", "batch", "columns"),
    [
        *[(0, 16, 56), (0, 9, 4096), (1, 16, 4096), (0, 11, 4104), (0, 16, 8192), (1, 13, 9000), (0, 10, 16384)],
        (0, 12, 16392),
    ],
)
def test_products_by_tiles(
    kind: int, batch: int, columns: int, shared_x: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In clusters and not, with a last tile of eight columns, and with more units than blocks."""
    monkeypatch.setattr(cuda, "TILED", 9)
    monkeypatch.setattr(cuda, "CLUSTER", 2 if shared_x else 1)
    monkeypatch.setattr(cuda, "CHUNKS", 0)
    done: set[str] = set()
    monkeypatch.setattr(cuda, "_kernel", lambda name, device, known=cuda._kernel: done.add(name) or known(name, device))
    require_right(kind, batch, columns)
    wanted = {f"sparse_tiles<{kind}", *([f"sum_parts<{kind}>"] if columns > 4096 * cuda.CLUSTERED else [])}
    assert {name.partition(",")[0] for name in done} == wanted


def require_right(kind: int, batch: int, columns_: int = 0) -> None:
    torch.manual_seed(batch)
    chance = random.Random(batch)
    for _ in range(6):
        rows = chance.choice([1, 3, chance.randint(1, 40), chance.randint(40, 120), 1030])
        odd = chance.choice([1, chance.randint(2, 90), chance.randint(90, 1500), chance.randint(4097, 5000)])
        columns = chance.choice([odd, 32 * chance.randint(1, 40), 4096 + 32])
        columns = columns_ or (min(columns, 60) if rows > 300 else columns)
        rows = min(rows, 80) if columns > 60 and columns_ else rows
        weight = _weight(rows, columns, chance.choice([0.0, 0.5, 0.8, 0.97, 1.0]), TYPES[kind])
        x, bias = torch.randn(batch, columns).to(TYPES[kind]), torch.randn(rows).to(TYPES[kind])
        if chance.random() < 0.2:
            x[chance.randrange(batch), chance.randrange(columns)] = chance.choice([float("nan"), float("inf")])
        given = bias if chance.random() < 0.5 else None
        packed = pack_weight(weight, by_kind=chance.random() < 0.8)
        if len(packed.places) or columns_:  # what is compiled above for others has chunks
            _require_near(cuda.linear(x, packed, given), x, weight, given)


@pytest.mark.usefixtures("on_cpu")
def test_parts_have_sums_in_float32_whatever_the_default_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_shared", lambda rows, blocks, warps: (4, 1))
    made: list[torch.Tensor] = []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: made.append(empty(*a, **k)) or made[-1])
    weight, x = _weight(40, 5000, 0.8, torch.bfloat16), torch.randn(16, 5000).bfloat16()
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = cuda.linear(x, pack_weight(weight, by_kind=True), None)
    finally:
        torch.set_default_dtype(torch.float32)
    assert [t.dtype for t in made if t.dim() == 3] == [torch.float32]
    _require_near(found, x, weight, None)


@pytest.mark.usefixtures("on_cpu")
def test_chunks_by_kind_seldom_meet_the_same_bank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_shared", lambda rows, blocks, warps: (1, 1))
    x, weight = torch.randn(8, 4096).half(), _weight(64, 4096, 0.8, torch.float16)
    cycles = {}
    for by_kind in (False, True):
        cuda.linear(x, pack_weight(weight, by_kind=by_kind), None)
        cycles[by_kind] = Emulated.counts[1] / Emulated.counts[0]
    assert cycles[True] < 1.3 < 1.8 < cycles[False]


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("kind", [0, 2])
def test_unpacked_is_what_was_packed(kind: int) -> None:
    torch.manual_seed(0)
    for rows, columns, zeros in ((1, 1, 0.0), (7, 5000, 0.8), (33, 100, 0.5), (3, 9001, 0.99)):
        weight = _weight(rows, columns, zeros, TYPES[kind])
        packed: Packed = pack_weight(weight, by_kind=True)
        if len(packed.places):
            assert torch.equal(cuda.unpack(packed), weight)
