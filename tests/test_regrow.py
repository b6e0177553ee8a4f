"""Zeros that may come back: the model has its zeros after each step, what they would be follows the optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import sapwood as sw
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
def test_what_is_hidden_is_what_training_all_weights_by_these_gradients_gives(given: dict[str, Any]) -> None:
    model, whole = linear(), linear()
    sw.mask_(model, sw.Budget(sparsity=0.75))
    kept = model.weight.detach() != 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **given)
    growing = Regrow(held_weights(model), optimizer)
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
    assert torch.allclose(growing.reveal()["weight"], whole.weight, atol=1e-6)
    assert torch.allclose(model.weight, whole.weight, atol=1e-6)


@pytest.mark.parametrize("clip", [None, 1e-3])
def test_what_is_hidden_moves_at_its_pace(clip: float | None) -> None:
    model = linear()
    loop = Loop(model, batches(1), Settings(1.0, weight_decay=0.0, clip=clip), loss=loss)
    whole = model.weight.detach().clone()
    loop.remask(lambda: sw.mask_(model, sw.Budget(sparsity=0.75)))
    masked, kept = model.weight.detach().clone(), model.weight.detach() != 0
    gradient = torch.autograd.grad(loss(model, batches(1)[0]), model.weight)[0]
    seen, hidden = gradient * kept, gradient * ~kept
    (event,) = loop.epoch(0, 0, 1)
    length = seen.norm() if clip is None else clip
    expected = seen / seen.norm() + PACE * hidden / hidden.norm()
    expected *= -length * event["lr"] * 1.9  # Nesterov momentum, its first step
    assert torch.allclose(model.weight - masked, expected * kept, atol=1e-6)
    assert torch.allclose(loop.hidden["weight"] - whole * ~kept, expected * ~kept, atol=1e-6)


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
    given |= {"lr": 0.02, "optimizer": optimizer, "weight_decay": 0.0}
    stuck = sw.prune_and_recover(model, data[0][0], data, sw.Budget(sparsity=0.75), **given)
    grown = sw.prune_and_recover(model, data[0][0], data, sw.Budget(sparsity=0.75), regrow=0.9, **given)
    assert sw.sparsity(stuck.model).zeros == sw.sparsity(grown.model).zeros == 6
    assert grown.model.weight.detach().nonzero()[:, 1].tolist() == [6, 7]
    wrong, right = (sum(loss(m.model, b).item() for b in data) for m in (stuck, grown))
    assert right < 0.5 * wrong


def test_rounds_go_on_as_far_apart_as_before() -> None:
    assert Schedule("cubic", 4, until=0.25, regrow=0.5).moments(80) == [[0, 5, 10, 15, 20, 25, 30, 35]]
    assert Schedule("cubic", 4, until=0.5, regrow=0.5).moments(80) == Schedule("cubic", 4).moments(80)


def test_as_many_zeros_and_as_good() -> None:
    model, (loader, x, y) = trained_net(), blobs()
    seen: list[int] = []
    done = sw.prune_and_recover(
        model, x[:2], loader, sw.Budget(sparsity=0.9), schedule="cubic", rounds=4, regrow=0.9, epochs=4, lr=0.05,
        validate=lambda m: seen.append(sw.sparsity(m).zeros) or accuracy(m, x, y), marks=(0.0, 0.5, 1.0),
    )  # fmt: skip
    total = sw.sparsity(done.model)
    assert total.zeros == round(0.9 * total.weights) == seen[-1] and seen == sorted(seen)
    assert done.metric is not None and done.metric > 0.9
    assert not any("hidden" in name for name in done.model.state_dict())


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"schedule": "one-shot"}, "cubic schedule"),
        ({"schedule": "cubic", "rounds": 4, "until": 0.5, "regrow": 0.3}, "from until to 1"),
        ({"schedule": "cubic", "rounds": 4, "regrow": 1.2}, "from until to 1"),
        ({"schedule": "cubic", "rounds": 4, "regrow": "yes"}, "regrow"),
        ({"schedule": "cubic", "rounds": 4, "mixed_precision": "fp16"}, "bf16"),
        ({"schedule": "cubic", "rounds": 4, "budget": sw.Budget(channels=0.5)}, "zeros that come back"),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, Any], match: str) -> None:
    model, data = needing_small_weights()
    whole = {"budget": sw.Budget(sparsity=0.5), "regrow": 0.8, "lr": 0.1, "epochs": 1, **given}
    with pytest.raises(sw.SapwoodError, match=match):
        sw.prune_and_recover(model, data[0][0], data, **whole)
