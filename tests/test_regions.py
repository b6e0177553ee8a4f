"""Blocks that repeat, compiled in training: each kind once, and the model is left as it was."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import sapwood as sw
from sapwood.recovery.regions import blocks_of


class Part(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.inner(x))


class Stage(nn.Module):
    """One of its class has parts of 16, one of 12: no two stages are alike, but their parts are."""

    def __init__(self, width: int, parts: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Part(width) for _ in range(parts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x)
        return x


class Parts(nn.ModuleList):
    pass


class Row(nn.Sequential):
    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU())


def staged() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), Stage(16, 3), nn.Linear(16, 12), Stage(12, 2), nn.Linear(12, 3))


def test_blocks_that_repeat_are_found() -> None:
    model = staged()
    assert blocks_of(model) == [*model[1].parts, *model[3].parts]
    assert (
        blocks_of(model[1]) == list(model[1].parts) and blocks_of(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))) == []
    )
    assert blocks_of(nn.Sequential(Part(4), Part(5))) == []  # no two are alike: compiled as a whole
    assert blocks_of(nn.Sequential(Part(4), Part(4), nn.Linear(99, 99))) == []  # too little of the whole
    lists = nn.Sequential(Stage(4, 1), Stage(5, 1))
    lists[0].parts, lists[1].parts = (Parts([Part(4), Part(4)]) for _ in range(2))  # alike, but never called
    assert len(blocks_of(lists)) == 2 and all(type(b) is Stage for b in blocks_of(lists))
    assert len(blocks_of(nn.Sequential(Stage(4, 1), Stage(4, 1)))) == 2  # the outermost


def test_blocks_are_compiled_once_for_each_kind_and_left_as_they_were(quick_compile: Any) -> None:
    x, y = torch.randn(32, 8, dtype=torch.float64), torch.randint(0, 3, (32,))
    plain, model, teacher = (staged().double() for _ in range(3))
    looks = []

    def look(seen: nn.Module) -> float:
        looks.append(all(m._compiled_call_impl is None for m in seen.modules()))
        return 0.0

    more: dict[str, Any] = {"lr": 0.05, "epochs": 4, "validate": look}
    sw.recover(plain, [(x, y)], teacher=copy.deepcopy(teacher), **more)
    sw.recover(model, [(x, y)], teacher=teacher, compile=True, **more)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-12)
    assert not torch.equal(model[0].weight, staged()[0].weight.double())
    assert quick_compile["unique_graphs"] == 4  # two widths, student and teacher
    assert all(looks) and look(model) == look(teacher) == 0.0 and all(looks)
    pickle.dumps(model)


@pytest.fixture
def quick_compile(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **more: compile_(f, backend="aot_eager", **more))
    torch._dynamo.reset()
    counters.clear()
    yield counters["stats"]
    torch._dynamo.reset()


def batches_of(*lengths: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randn(n, 8), torch.randint(0, 3, (n,))) for n in lengths]


def test_blocks_that_are_computed_again_in_backward(quick_compile: Any) -> None:
    class Checkpointed(Stage):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for part in self.parts:
                x = checkpoint(part, x, use_reentrant=False)
            return x

    model = nn.Sequential(nn.Linear(8, 16), Checkpointed(16, 3), nn.Linear(16, 3))
    sw.recover(model, batches_of(32), lr=0.05, epochs=2, compile=True)
    assert quick_compile["unique_graphs"] == 1


def test_hooks_within_compiled_blocks_are_called(quick_compile: Any) -> None:
    model, calls = staged(), []
    model[1].parts[1].inner.register_forward_hook(lambda *_: calls.append("inner"))
    model[1].parts[2].register_forward_hook(lambda *_: calls.append("outer"))
    sw.recover(model, batches_of(32), lr=0.05, epochs=4, compile=True)
    assert calls == ["inner", "outer"] * 4


def test_blocks_of_torch_layers_and_batches_of_many_sizes_are_compiled(quick_compile: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 16), Row(16), Row(16), Row(16), nn.Linear(16, 3))
    sw.recover(model, batches_of(*range(20, 30)), lr=0.05, epochs=1, compile=True)
    assert 1 <= quick_compile["unique_graphs"] <= 2  # then the number of examples is a variable
    for width in range(20, 32):  # however many models there were before
        before = quick_compile["unique_graphs"]
        model = nn.Sequential(nn.Linear(8, width), Row(width), Row(width), nn.Linear(width, 3))
        sw.recover(model, batches_of(32), lr=0.05, epochs=1, compile=True)
        assert quick_compile["unique_graphs"] == before + 1


def test_blocks_that_a_user_has_compiled_stay_so(quick_compile: Any) -> None:
    model = staged()
    model[1].parts[0].compile()
    sw.recover(model, batches_of(32), lr=0.05, epochs=1, compile=True)
    assert [m for m in model.modules() if m._compiled_call_impl is not None] == [model[1].parts[0]]
