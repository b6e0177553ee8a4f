"""The user's model, inputs and surroundings are never changed behind their back; nothing hangs."""

from __future__ import annotations

import functools
import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sapwood as sw
from tests.helpers import HALF, build, halve, outputs, same, snapshot
from tests.nets import Pool, conv

TOKENS = torch.randn(2, 5, 16)


class Two(nn.Module):
    """Two linear layers; subclasses put something odd between them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 24), nn.Linear(24, 4)

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def forward(self, x: torch.Tensor) -> Any:
        return self.b(self.between(self.a(x).relu()))


@functools.lru_cache
def cached_mask(size: int) -> torch.Tensor:
    return torch.tril(torch.ones(size, size))


SEEN: dict[int, torch.Tensor] = {}


class CachesOutside(Two):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] not in SEEN:
            SEEN[x.shape[1]] = torch.ones(x.shape[1], 1)
        return cached_mask(x.shape[1]) @ x * SEEN[x.shape[1]]


class ChangesItsWeights(Two):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        self.b.weight.data.clamp_(-0.01, 0.01)
        return x


class MergesOnEval(Two):
    """As low-rank adapters do: the weight changes when the mode does."""

    def train(self, mode: bool = True) -> Two:
        with torch.no_grad():
            self.a.weight += 0.1 if mode else -0.1
        return super().train(mode)


class Counts(Two):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def between(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return x


class ChangesItsInput(Two):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.sub_(0.5).mul_(2))


class RollsDice(Two):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x * (random.random() + np.random.rand() + torch.rand(1).item())


class DropsAlways(Two):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.5, training=True)


class LiteralInTraining(Two):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rand(24) if self.training else x


class AuxiliaryItem(Two):
    def __init__(self) -> None:
        super().__init__()
        self.aux = nn.Linear(24, 3)

    def forward(self, x: torch.Tensor) -> Any:
        h = self.a(x).relu()
        return (self.b(h), h.mean().item() * self.aux(h)) if self.training else self.b(h)


class InsistsOnInts(Two):
    def __init__(self) -> None:
        super().__init__()
        self.size = 24

    def between(self, x: torch.Tensor) -> torch.Tensor:
        if type(self.size) is not int:
            raise TypeError("an int, please")
        return x


class KeepsActivations(Two):
    def __init__(self) -> None:
        super().__init__()
        self.kept: list[torch.Tensor] = []

    def between(self, x: torch.Tensor) -> torch.Tensor:
        self.kept.append(x)
        return x


@pytest.mark.parametrize(
    "kind", [ChangesItsWeights, MergesOnEval, Counts, ChangesItsInput, RollsDice, KeepsActivations]
)
def test_nothing_of_the_users_is_changed(kind: type[Two]) -> None:
    model, inputs = kind(), TOKENS.clone()
    before, given = snapshot(model), inputs.clone()
    kept = len(getattr(model, "kept", ()))
    states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    done = halve(model, inputs)
    assert done.check.passed and same(model, before) and torch.equal(inputs, given)
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == np.random.get_state()[1].tolist() and states[2] == random.getstate()
    assert len(getattr(model, "kept", ())) == kept and len(getattr(done.model, "kept", ())) == kept
    assert done.model.a.weight.shape[0] == 12
    if kind is Counts:
        assert float(done.model.count) == 0


def test_caches_outside_the_model_hold_no_tensors_of_ours() -> None:
    cached_mask.cache_clear()
    SEEN.clear()
    model = CachesOutside()
    sw.trace(model, TOKENS)
    assert type(model(TOKENS)) is torch.Tensor
    cached_mask.cache_clear()
    SEEN.clear()
    assert halve(model, TOKENS).check.passed
    assert type(cached_mask(5)) is torch.Tensor and all(type(t) is torch.Tensor for t in SEEN.values())


def test_hooks_that_collect_outputs_collect_no_tensors_of_ours() -> None:
    model, inputs = build("plain_chain")
    seen: list[torch.Tensor] = []
    model[0].register_forward_hook(lambda *args: seen.append(args[-1]))
    sw.trace(model, inputs)
    assert all(type(t) in (torch.Tensor, nn.Parameter) for t in seen)


def test_noise_over_the_cut_channels_does_not_hang() -> None:
    done = halve(DropsAlways(), TOKENS)
    assert done.check.passed and "a was left whole" in done.plan.notes[0]


def test_a_model_that_differs_from_run_to_run_is_named() -> None:
    class Clock(Two):
        ticks = 0

        def between(self, x: torch.Tensor) -> torch.Tensor:
            Clock.ticks += 1
            return x * Clock.ticks

    with pytest.raises(sw.SapwoodError, match="run to run"):
        halve(Clock(), TOKENS)


@pytest.mark.parametrize("kind", [LiteralInTraining, AuxiliaryItem])
def test_training_mode_still_runs(kind: type[Two]) -> None:
    done = halve(kind(), TOKENS)
    done.model.train()(TOKENS)
    assert done.check.passed


def test_code_that_insists_on_plain_ints() -> None:
    done = halve(InsistsOnInts(), TOKENS)
    assert done.check.passed and done.model.a.weight.shape[0] == 12 and done.model.a.out_features == 12


@pytest.mark.parametrize("output", ["generator", "none", "slots"])
def test_odd_outputs(output: str) -> None:
    class Slot:
        __slots__ = ("value",)

        def __init__(self, value: torch.Tensor) -> None:
            self.value = value

    class Odd(Two):
        def forward(self, x: torch.Tensor) -> Any:
            h = self.a(x)
            if output == "slots":
                return self.b(h), Slot(h)
            return (t for t in [h]) if output == "generator" else self.b(h).argmax(-1).tolist()

    if output == "slots":
        assert halve(Odd(), TOKENS).model.a.weight.shape[0] == 24  # it is an output
    else:
        with pytest.raises(sw.SapwoodError, match="the model's output"):
            halve(Odd(), TOKENS)


class WrongScale(nn.Module):
    """Divides by the root of a size that no tag survives: cutting the head width changes the function."""

    def __init__(self, gain: float = 1.0, fill: float = 0.0) -> None:
        super().__init__()
        self.q, self.k, self.v, self.proj = (nn.Linear(16, 16) for _ in range(4))
        self.gain, self.fill = nn.Parameter(torch.full((16,), gain)), fill

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k = self.q(x), self.k(x)
        a = q @ k.transpose(-1, -2) * 5 / np.sqrt(self.k.weight.untyped_storage().nbytes() / q.element_size() / 16)
        x = x + self.proj(a.softmax(-1) @ self.v(x)) * self.gain
        return x.masked_fill(x > 2.5, self.fill) if self.fill else x


@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        (WrongScale(), torch.float32),
        (WrongScale(), torch.bfloat16),
        (WrongScale(gain=1e-6), torch.float32),
        (WrongScale(gain=0.0), torch.float32),
        (WrongScale(fill=-1e9), torch.float32),
        (WrongScale(fill=torch.finfo(torch.float32).min), torch.float32),
    ],
    ids=["plain", "bf16", "layer scale", "zero head", "mask -1e9", "mask finfo.min"],
)
def test_the_check_has_teeth(model: nn.Module, dtype: torch.dtype) -> None:
    done = halve(model.to(dtype), TOKENS.to(dtype))
    assert done.model.k.weight.shape[0] == 16, "a wrong cut passed"
    assert done.model.v.weight.shape[0] == 8
    assert any("left whole" in note for note in done.plan.notes)


def test_an_idle_output_is_told() -> None:
    class Idle(Two):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 0

    result = halve(Idle(), TOKENS).check
    assert result.passed and "proves little" in result.notes[-1]


def test_parameters_of_others_are_told() -> None:
    other = nn.Parameter(torch.randn(24))

    class Borrows(Two):
        def between(self, x: torch.Tensor) -> torch.Tensor:
            return x * other

    assert "not its own" in halve(Borrows(), TOKENS).plan.notes[0]


def test_inference_mode() -> None:
    with torch.inference_mode():
        done = halve(Two(), TOKENS)
    done.model(TOKENS).sum().backward()
    assert done.model.a.weight.grad is not None


def test_sparse_buffers_are_carried() -> None:
    class Graph(Two):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("edges", torch.eye(5).to_sparse())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(torch.sparse.mm(self.edges, self.a(x[0])))

    assert halve(Graph(), TOKENS).check.passed


def test_ties_do_not_stop_a_global_plan() -> None:
    model = nn.Sequential(conv(3, 16), nn.BatchNorm2d(16), nn.ReLU(), conv(16, 16), nn.BatchNorm2d(16), Pool(16))
    inputs = torch.randn(2, 3, 8, 8)
    for budget in (sw.Budget(params=0.5), HALF):
        plan = sw.make_plan(model, inputs, budget, score="bn_scale", allocate="global")
        assert plan.achieved[budget.kind] <= 0.5 * plan.achieved[f"dense_{budget.kind}"]


def test_coarse_steps_do_not_waste_the_budget() -> None:
    model, inputs = build("transformer_decoder")
    plan = sw.make_plan(model, inputs, sw.Budget(params=0.5))
    assert 0.47 <= plan.achieved["params"] / plan.achieved["dense_params"] <= 0.5


def test_rounding_holds_where_sizes_are_tied() -> None:
    model, inputs = build("transformer_from_projection")  # 24 wide, 6 heads of 4
    done = sw.prune(model, inputs, sw.Budget(params=0.6), round_to=8)
    assert done.model.embed.weight.shape[0] % 8 == 0 and done.check.passed


def test_outputs_of_the_small_model_are_left_alone() -> None:
    model, inputs = build("plain_chain")
    done = halve(model, inputs)
    before = snapshot(done.model)
    sw.check(model, done.model, done.plan, inputs)
    assert same(done.model, before)
    assert outputs(done.model, inputs)[0].shape == (2, 4)
