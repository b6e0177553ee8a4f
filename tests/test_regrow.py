"""Zeros that may come back: the model has its zeros after each step, what they would be follows the optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import sapwood as sw
from sapwood.masking import regrow
from sapwood.masking.hold import held_weights
from sapwood.masking.regrow import PACE, Regrow
from sapwood.recovery.loop import Loop, Settings
from sapwood.recovery.schedules import Schedule
from tests.stripes import accuracy, blobs, trained_net

pytestmark = pytest.mark.usefixtures("on_the_cpu")


def linear(seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(8, 4, bias=False)


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(16, 8), torch.randn(16, 4)) for _ in range(count)]


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


@pytest.mark.parametrize("given", [{"momentum": 0.9}, {"weight_decay": 0.1}, {"momentum": 0.9, "nesterov": True}])
def test_what_is_hidden_is_what_training_all_weights_by_these_gradients_gives(
    given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(regrow, "PACE", 1e6)
    model, whole = linear(), linear()
    sw.mask_(model, sw.Budget(sparsity=0.75))
    kept = model.weight.detach() != 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **given)
    growing = Regrow(held_weights(model), optimizer, ["weight"])
    growing.hide({"weight": whole.weight.detach()})
    reference = torch.optim.SGD(whole.parameters(), lr=0.1, **given)
    for batch in batches(5):
        loss(model, batch).backward()
        whole.weight.grad = model.weight.grad.clone()
        for one in (optimizer, reference):
            one.step()
            one.zero_grad()
        assert torch.equal(model.weight != 0, kept)
        assert torch.allclose(model.weight, whole.weight * kept, atol=1e-6)
        assert torch.allclose(growing.hidden["weight"], whole.weight * ~kept, atol=1e-6)
    growing.reveal()
    assert torch.allclose(model.weight, whole.weight, atol=1e-6)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("clip", [None, 1e-3])
def test_what_is_hidden_moves_at_its_pace(clip: float | None, optimizer: str) -> None:
    model = linear()
    loop = Loop(model, batches(12), Settings(0.1, optimizer, weight_decay=0.0, clip=clip), loss=loss)
    loop.remask(lambda: sw.mask_(model, sw.Budget(sparsity=0.75)), {"weight": model.weight})
    seen, hidden, slower = model.weight.detach().clone(), loop.hidden["weight"].clone(), 0
    for _ in loop.epoch(0, 0, 12):
        far, unseen = (model.weight - seen).norm(), (loop.hidden["weight"] - hidden).norm()
        assert 0 < unseen <= PACE * far * 1.001
        slower += int(unseen > PACE * far * 0.999)
        seen, hidden = model.weight.detach().clone(), loop.hidden["weight"].clone()
    assert slower > 6  # held back, most of the time


def test_what_moves_little_by_itself_is_not_driven() -> None:
    model = linear()
    sw.mask_(model, sw.Budget(sparsity=0.75))
    kept = model.weight.detach() != 0
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    growing = Regrow(held_weights(model), optimizer, ["weight"])
    model.weight.grad = torch.where(kept, 1.0, 1e-3)
    optimizer.step()
    assert torch.allclose(growing.hidden["weight"], torch.where(kept, 0.0, -1e-3))


def test_clipping_counts_what_is_seen_and_scales_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regrow, "PACE", 1e6)
    model = linear()
    loop = Loop(model, batches(1), Settings(1.0, weight_decay=0.0, clip=1e-3), loss=loss)
    whole = model.weight.detach().clone()
    loop.remask(lambda: sw.mask_(model, sw.Budget(sparsity=0.75)), {"weight": model.weight})
    masked, kept = model.weight.detach().clone(), model.weight.detach() != 0
    gradient = torch.autograd.grad(loss(model, batches(1)[0]), model.weight)[0]
    (event,) = loop.epoch(0, 0, 1)
    expected = -gradient * 1e-3 / (gradient * kept).norm() * event["lr"] * 1.9  # Nesterov momentum, its first step
    assert torch.allclose(model.weight - masked, expected * kept, atol=1e-6)
    assert torch.allclose(loop.hidden["weight"] - whole * ~kept, expected * ~kept, atol=1e-6)


def test_zeros_are_zeros_by_their_bits_whatever_their_gradients() -> None:
    """-0.0 would be stored as a number; and what is not a number stays out of sight, and is told at the next round."""
    model = linear()
    loop = Loop(model, batches(1), Settings(0.1, clip=1.0), loss=loss)
    loop.remask(lambda: sw.mask_(model, sw.Budget(sparsity=0.75)), {"weight": model.weight})
    kept = model.weight.detach() != 0
    model.weight.grad = torch.ones(4, 8)
    loop._update()
    assert torch.equal(model.weight != 0, kept) and not torch.signbit(model.weight[~kept]).any()
    model.weight.grad = torch.where(kept, 1.0, torch.inf)
    loop._update()
    assert model.weight.isfinite().all() and torch.equal(model.weight != 0, kept)
    with pytest.raises(sw.SapwoodError, match="numbers"):
        loop.remask(lambda: sw.mask_(model, sw.Budget(sparsity=0.75)), {"weight": model.weight})


def needing_small_weights() -> tuple[nn.Linear, list[tuple[torch.Tensor, torch.Tensor]]]:
    """The two weights that answer everything are the smallest at first."""
    torch.manual_seed(0)
    model = nn.Linear(8, 1, bias=False)
    model.weight.data = torch.tensor([[0.5, 0.4, -0.5, 0.6, 0.4, -0.6, 0.01, 0.02]])
    x = torch.randn(64, 8)
    y = x[:, 6:7] * 2 - x[:, 7:8] * 3
    return model, [(x[k : k + 16], y[k : k + 16]) for k in range(0, 64, 16)]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_weights_that_are_needed_come_back(optimizer: str, clip: float | None) -> None:
    model, data = needing_small_weights()
    given: dict[str, Any] = {"schedule": "cubic", "rounds": 8, "until": 0.3, "epochs": 60, "clip": clip, "loss": loss}
    given |= {"lr": 0.02 if optimizer == "sgd" else 0.1, "optimizer": optimizer, "weight_decay": 0.0}
    stuck = sw.prune_and_recover(model, data[0][0], data, sw.Budget(sparsity=0.75), **given)
    grown = sw.prune_and_recover(model, data[0][0], data, sw.Budget(sparsity=0.75), regrow=0.9, **given)
    assert sw.sparsity(stuck.model).zeros == sw.sparsity(grown.model).zeros == 6
    assert grown.model.weight.detach().nonzero()[:, 1].tolist() == [6, 7]
    wrong, right = (sum(loss(m.model, b).item() for b in data) for m in (stuck, grown))
    assert right < 0.5 * wrong


def test_rounds_go_on_as_far_apart_as_before() -> None:
    assert Schedule("cubic", 4, until=0.25, regrow=0.5).moments(80) == [[0, 5, 10, 15, 20, 25, 30, 35]]
    assert Schedule("cubic", 4, until=0.5, regrow=0.5).moments(80) == Schedule("cubic", 4).moments(80)
    assert Schedule("cubic", 1, until=0.5, regrow=0.8).moments(80) == [[0, 40]]
    assert Schedule("cubic", 1, until=0.1, regrow=0.3).moments(80) == [[0, 8, 16]]


def watched(model: nn.Module, steps: int = 32, **given: Any) -> tuple[sw.Shrunk, list[sw.Sparsity]]:
    """Gradual zeros, and where they were after each step."""
    loader, x, y = blobs()
    seen: list[sw.Sparsity] = []
    done = sw.prune_and_recover(
        model, x[:2], loader, schedule="cubic", regrow=0.9, epochs=4, lr=0.05,
        validate=lambda m: seen.append(sw.sparsity(m)) or accuracy(m, x, y), marks=[k / steps for k in range(steps)],
        fraction=1.0, **given,
    )  # fmt: skip
    return done, seen


def test_as_many_zeros_and_as_good() -> None:
    done, seen = watched(trained_net(), budget=sw.Budget(sparsity=0.9), rounds=4)
    assert seen[-1].zeros == round(0.9 * seen[-1].weights) == sw.sparsity(done.model).zeros
    shares = [s.total for s in seen]
    assert shares == sorted(shares) and len({*shares}) == 4  # one for each round
    assert done.metric is not None and done.metric > 0.9


def test_zeros_that_were_there_are_not_fewer_on_the_way() -> None:
    before = sw.mask(trained_net(), sw.Budget(sparsity=0.8))
    _, seen = watched(before, budget=sw.Budget(sparsity=0.9), rounds=6)
    assert min(s.total for s in seen) >= sw.sparsity(before).total and seen[-1].total == pytest.approx(0.9, abs=1e-3)


def test_zeros_of_layers_that_are_ignored_stay() -> None:
    before = sw.mask(trained_net(), sw.Budget(sparsity=0.5))
    name = next(n for n, p in before.named_parameters() if p.dim() > 1)
    done, _ = watched(before, budget=sw.Budget(sparsity=0.8), rounds=4, options={"ignore": [name]})
    first, last = (dict(m.named_parameters())[name] == 0 for m in (before, done.model))
    assert first.any() and torch.equal(first, last)


def test_after_the_last_round_nothing_is_hidden_any_more() -> None:
    model = linear()
    loop = Loop(model, batches(2), Settings(0.1), loss=loss)
    for last in (False, True):
        loop.remask(lambda: sw.mask_(model, sw.Budget(sparsity=0.75)), {"weight": model.weight}, last)
        assert bool(loop.hidden) is not last and loop.held is not None
    zeros = model.weight == 0
    for _ in loop.epoch(0, 0, 2):
        assert torch.equal(model.weight == 0, zeros)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"schedule": "one-shot"}, "cubic schedule"),
        ({"schedule": "cubic", "rounds": 4, "until": 0.5, "regrow": 0.3}, "from until to 1"),
        ({"schedule": "cubic", "rounds": 4, "regrow": 1.2}, "from until to 1"),
        ({"schedule": "cubic", "rounds": 4, "regrow": "yes"}, "got regrow='yes'"),
        ({"schedule": "cubic", "rounds": 4, "regrow": True}, "got regrow=True"),
        ({"schedule": "cubic", "rounds": 4, "mixed_precision": "fp16"}, "bf16"),
        ({"schedule": "cubic", "rounds": 4, "budget": sw.Budget(channels=0.5)}, "which can come back; got a cut"),
        ({"schedule": "cubic", "rounds": 4, "budget": None, "pattern": "2:4"}, "which can come back; got 2:4"),
        (
            {"schedule": "cubic", "regrow": 0.9, "until": 0.3, "options": {"calibration": iter([])}},
            "batches for every round",
        ),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, Any], match: str) -> None:
    model, data = needing_small_weights()
    whole = {"budget": sw.Budget(sparsity=0.5), "regrow": 0.8, "lr": 0.1, "epochs": 1, **given}
    with pytest.raises(sw.SapwoodError, match=match):
        sw.prune_and_recover(model, data[0][0], data, **whole)
