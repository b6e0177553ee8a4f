"""Convolutions of few channels by our kernels: what is taken, and that it is the same function."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sapwood as sw
from sapwood.errors import SapwoodError
from sapwood.recovery import loop, narrow, narrow_kernels
from sapwood.recovery.regions import Compiled
from tests.emulated import Emulated, emulated

SHAPES = [
    (2, 16, 16, 8, 8, 3, 3), (3, 7, 5, 6, 9, 3, 3), (1, 16, 7, 5, 5, 3, 3), (2, 3, 16, 8, 8, 3, 3),
    (1, 4, 4, 6, 6, 1, 3), (1, 1, 1, 1, 1, 3, 3), (2, 33, 40, 4, 4, 3, 3), (9, 2, 2, 7, 5, 3, 1),
    (2, 12, 26, 4, 8, 3, 3), (1, 64, 64, 8, 8, 3, 3), (3, 14, 10, 32, 16, 3, 3), (2, 20, 24, 40, 16, 3, 3),
]  # fmt: skip
"""Images, inputs, outputs, height and width of the image and of the window."""
DTYPES = (torch.bfloat16, torch.float16)
WAYS = (1, 2)
OF_MODELS = [(2, 3, 8, 6, 6, 3, 3), (2, 8, 7, 6, 6, 3, 3), (2, 7, 8, 6, 6, 3, 3)]


def some(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(shape).to(dtype).contiguous(memory_format=torch.channels_last)


def operands(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    images, c, o, height, width, high, wide = shape
    torch.manual_seed(0)
    sizes = ((images, c, height, width), (o, c, high, wide), (images, o, height, width))
    return tuple(some(dtype, *size) for size in sizes)


def computed(x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor, way: int = 1) -> tuple[torch.Tensor, ...]:
    products = narrow_kernels.product(x, weight, False, way), narrow_kernels.product(grad, weight, True, way)
    return *products, narrow_kernels.weights(x, grad, weight, way)


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[str]]:
    """A library with what these tests launch, and the names in it."""
    names: dict[str, None] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(narrow_kernels, "_processors", lambda device: 2)
        patch.setattr(narrow_kernels, "_kernel", lambda name, device: lambda *_: names.setdefault(name))
        for shape, dtype in [*((s, d) for s in SHAPES for d in DTYPES), *((s, torch.float16) for s in OF_MODELS)]:
            for way in WAYS:
                computed(*operands(shape, dtype), way)
    files = (narrow_kernels.SHARED[1], *(narrow_kernels.SOURCES / f for f in ("product.cu", "weights.cu")))
    text = "\n".join(file.read_text() for file in files)
    return emulated(text, list(names), tmp_path_factory.mktemp("narrow")), list(names)


launched: list[str] = []


@pytest.fixture
def on_cpu(known: tuple[Any, list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of two multiprocessors."""
    monkeypatch.setattr(narrow_kernels, "_processors", lambda device: 2)
    launched.clear()
    monkeypatch.setattr(narrow_kernels, "_kernel", lambda name, device: launched.append(name) or Emulated(*known, name))
    monkeypatch.setattr(narrow, "DEVICES", ("cpu",))
    monkeypatch.setattr(narrow, "_KNOWN", {})


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products(shape: tuple[int, ...], way: int, dtype: torch.dtype) -> None:
    assert len(WAYS) == len(narrow_kernels.PRODUCTS) == len(narrow_kernels.BLOCKS)
    x, weight, grad = operands(shape, dtype)
    wide = [t.double().requires_grad_() for t in (x, weight)]
    out = F.conv2d(*wide, padding=(shape[5] // 2, shape[6] // 2))
    out.backward(grad.double())
    for got, wanted in zip(computed(x, weight, grad, way), (out.detach(), *(t.grad for t in wide)), strict=True):
        assert wanted is not None and got.shape == wanted.shape and got.dtype == dtype
        assert (got.double() - wanted).norm() <= 0.003 * wanted.norm()
        assert got.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_is_compiled_ahead_is_what_runs(shape: tuple[int, ...]) -> None:
    x, weight, grad = operands(shape, torch.bfloat16)
    for way in WAYS:
        computed(x, weight, grad, way)
    used = set(launched)
    launched.clear()
    narrow_kernels.compile_for([(x.device, x.dtype, tuple(x.shape), tuple(weight.shape))], 2)
    assert set(launched) == used


@pytest.mark.usefixtures("on_cpu")
def test_what_is_not_finite_stays_where_it_is() -> None:
    """Channels beyond the last are zeros: nothing is multiplied by the infinity of the next pixel."""
    x, weight, grad = operands(SHAPES[1], torch.bfloat16)
    x[1, 3, 2, 4] = float("inf")
    wanted = F.conv2d(x.double(), weight.double(), padding=1).isfinite()
    assert torch.equal(computed(x, weight, grad)[0].isfinite(), wanted)


@pytest.mark.usefixtures("on_cpu")
def test_tensors_that_do_not_start_at_a_multiple_of_sixteen_bytes() -> None:
    x, weight, grad = operands(SHAPES[0], torch.bfloat16)
    apart = [torch.cat([torch.zeros(1).to(t), t.permute(0, 2, 3, 1).flatten()])[1:] for t in (x, weight, grad)]
    shifted = [a.view(t.permute(0, 2, 3, 1).shape).permute(0, 3, 1, 2) for a, t in zip(apart, (x, weight, grad))]
    assert all(t.data_ptr() % 16 for t in shifted)
    for got, wanted in zip(computed(*shifted), computed(x, weight, grad), strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.usefixtures("on_cpu")
def test_rows_that_do_not_fit_into_shared_memory_are_refused() -> None:
    with pytest.raises(SapwoodError, match="shared memory"):
        narrow_kernels.weights(
            *(some(torch.bfloat16, *s) for s in ((1, 64, 1, 600), (1, 16, 1, 600), (16, 64, 3, 3))), 1
        )


def test_the_fastest_that_is_right_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(3)

    def fails() -> torch.Tensor:
        raise RuntimeError

    calls = {"theirs": lambda: x, "wrong": lambda: 2 * x, "fails": fails, "slow": lambda: x + 0, "fast": lambda: 1 * x}
    took = {"theirs": 1.0, "slow": 0.95, "fast": 0.5, "wrong": 0.1}
    by_call = {call: took.get(name) for name, call in calls.items()}
    monkeypatch.setattr(narrow, "milliseconds", lambda given, device: [by_call[c] for c in given])
    assert narrow._fastest(list(calls.values()), torch.device("cpu")) == 4
    assert narrow._fastest([calls[n] for n in ("theirs", "slow", "wrong")], torch.device("cpu")) == 0


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, 7, 3, padding=1, bias=False)
        self.second = nn.Conv2d(7, width, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.relu(self.first(x)))


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("ours", [(1, 2, 1), (0, 1, 0), (2, 0, 2)], ids=str)
def test_a_model(ours: narrow.Ours, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever part is ours: gradients as before, nothing left on the model; blocks that are alike compile once."""
    monkeypatch.setattr(narrow, "tried", lambda *kind: ours)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *(Block(8) for _ in range(3))).half()
    x = some(torch.float16, 2, 3, 6, 6)
    model(x).sum().backward()
    wanted = {n: p.grad for n, p in model.named_parameters()}
    found = narrow.NarrowConvolutions(model)
    before = torch.get_rng_state()
    with found.look():
        model(x)
    assert len(found.chosen) == 1 + 3 * 2 and found.looked and torch.equal(before, torch.get_rng_state())
    blocks = Compiled(model)
    model.zero_grad(set_to_none=True)
    torch._dynamo.utils.counters.clear()
    with found.on():
        if compiled:
            with blocks.on():
                model(x).sum().backward()
            assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
        else:
            model(x).sum().backward()
    # seven layers, of which the first needs no gradient of its inputs; gradients of weights are summed apart
    assert len(launched) == 7 * (ours[0] > 0) + 6 * (ours[1] > 0) + 14 * (ours[2] > 0)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and wanted[name] is not None
        assert (parameter.grad - wanted[name]).norm() <= 0.02 * wanted[name].norm(), name
    with found.on():
        assert torch.equal(model(x[:1]), model(x[:1].clone())) and model(x[:0]).shape[0] == 0  # other sizes
        (slope,) = torch.autograd.grad(model(x.requires_grad_()).sum(), x, create_graph=True)
        slope.float().pow(2).sum().backward()  # gradients of gradients
    assert not any("_conv_forward" in vars(m) for m in model.modules())


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("how", ["keyword", "double", "other sizes", "two kinds"])
def test_what_is_left_alone(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(narrow, "tried", lambda *kind: (1, 1, 1))
    layer = nn.Conv2d(4, 4, 3, padding=1).to(torch.float64 if how == "double" else torch.bfloat16)
    x = some(layer.weight.dtype, 2, 4, 5, 5)
    found = narrow.NarrowConvolutions(layer)
    with found.look(), torch.autocast("cpu", torch.bfloat16):
        if how == "keyword":
            layer(input=x)
        elif how != "other sizes":
            layer(x)
        if how in ("other sizes", "two kinds"):
            layer(x[0])
    assert found.looked and found.chosen == {}


@pytest.mark.parametrize(
    ("layer", "taken"),
    [
        (nn.Conv2d(16, 16, 3, padding=1), True),
        (nn.Conv2d(3, 64, 3, padding="same"), True),
        (nn.Conv2d(16, 16, (1, 3), padding=(0, 1)), True),
        (nn.Conv2d(16, 16, 3), False),
        (nn.Conv2d(16, 16, 3, padding=1, stride=2), False),
        (nn.Conv2d(16, 16, 3, padding=2, dilation=2), False),
        (nn.Conv2d(16, 16, 3, padding=1, groups=2), False),
        (nn.Conv2d(16, 16, 3, padding=1, padding_mode="reflect"), False),
        (nn.Conv2d(16, 65, 3, padding=1), False),
        (nn.Conv2d(16, 16, 1), False),
        (nn.Conv2d(16, 16, 5, padding=2), False),
        (nn.Conv2d(16, 16, 4, padding=2), False),
        (nn.ConvTranspose2d(16, 16, 3, padding=1), False),
    ],
)
def test_what_is_tried(layer: nn.Module, taken: bool) -> None:
    assert narrow.is_narrow(layer) is taken


@pytest.mark.parametrize("devices", [(), ("cuda",)])
def test_on_a_cpu_nothing_changes(devices: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(narrow, "DEVICES", devices)
    layer = nn.Conv2d(4, 4, 3, padding=1)
    found = narrow.NarrowConvolutions(layer)
    assert found.looked is not bool(devices)
    with found.look():
        layer(torch.randn(1, 4, 5, 5))
    assert found.looked and found.chosen == {} and not layer._forward_pre_hooks
    assert found.seen == ({layer: {None}} if devices else {})


def test_a_step_that_fails_leaves_no_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(narrow, "DEVICES", ("cuda",))
    layer = nn.Conv2d(4, 4, 3, padding=1)
    found = narrow.NarrowConvolutions(layer)
    with pytest.raises(RuntimeError), found.look():
        layer(torch.randn(1, 5, 5, 5))
    assert not layer._forward_pre_hooks and not found.looked


class Plain:
    """In place of a captured step: the step itself."""

    refused = ""

    def __init__(self, step: Any) -> None:
        self.step = step

    def __call__(self, batch: Any) -> torch.Tensor:
        return self.step(batch)  # type: ignore[no-any-return]

    def reset(self) -> None:
        pass


@pytest.mark.parametrize(("schedule", "rounds"), [("one-shot", 1), ("iterative", 3), ("cubic", 3)])
def test_nothing_is_tried_before_the_last_cut(schedule: str, rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[int] = []
    monkeypatch.setattr(loop, "graphed", lambda step, *rest: Plain(step))
    monkeypatch.setattr(narrow, "DEVICES", ("cpu",))
    monkeypatch.setattr(narrow, "_KNOWN", {})
    monkeypatch.setattr(narrow, "tried", lambda *kind: tries.append(kind[3][0]) or narrow.NONE)
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model.append(nn.Linear(16, 4))
    data = [(torch.randn(4, 3, 8, 8), torch.randint(4, (4,))) for _ in range(6)]
    fast: dict[str, Any] = {"mixed_precision": "bf16", "channels_last": True, "graph": True}
    budget = sw.Budget(channels=0.25)
    done = sw.prune_and_recover(
        model, data[0][0], data, budget, lr=0.01, epochs=2, schedule=schedule, rounds=rounds, **fast
    )
    assert tries == [done.model[0].out_channels] == [4]
