"""Sharpness-aware steps: by the gradient of the worst point near by; weights, zeros and norms are back afterwards."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import sapwood as sw

pytestmark = pytest.mark.usefixtures("on_the_cpu")


def plain_sgd(groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for g in groups for p in g["params"]], lr=lr)


def norm_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def batch(count: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    dice = torch.Generator().manual_seed(1)
    return torch.randn(count, 6, generator=dice), torch.randint(0, 3, (count,), generator=dice)


def test_a_step_by_its_formula() -> None:
    """Loss w^2 / 2 summed: the gradient at w is w, so w goes up by radius w^3 / |w^2| and steps by what it is there."""
    model = nn.Linear(3, 1, bias=False)
    start = torch.tensor([[1.0, -2.0, 0.0]])
    model.weight.data = start.clone()
    sw.recover(
        model, [torch.zeros(1, 3)], lr=0.1, epochs=1, warmup=0.0, anneal="none", optimizer=plain_sgd, sam=0.5,
        loss=lambda m, b: (m.weight**2).sum() / 2,
    )  # fmt: skip
    worst = start + 0.5 * start**3 / (start**2).norm()
    assert torch.allclose(model.weight.detach(), start - 0.1 * worst, atol=1e-6)


def test_norms_see_each_batch_once_and_the_teacher_answers_once() -> None:
    asked = []
    teacher, data = norm_net(), [batch()]
    teacher.register_forward_hook(lambda *_: asked.append(1))
    plain, flat = norm_net(), norm_net()
    given: dict[str, Any] = {"lr": 0.1, "epochs": 3, "seed": 3}
    sw.recover(plain, data, **given)
    sw.recover(flat, data, sam=1.0, teacher=teacher, **given)
    assert len(asked) == 3
    assert flat[1].num_batches_tracked == plain[1].num_batches_tracked == 3
    once, twice = norm_net(), norm_net()
    for model, more in ((once, {}), (twice, {"sam": 1.0})):
        sw.recover(model, data, lr=0.1, epochs=1, optimizer=plain_sgd, **more)
    assert torch.equal(once[1].running_mean, twice[1].running_mean)
    assert not torch.equal(once[0].weight, twice[0].weight)


def test_zeros_stay_zero_on_the_way() -> None:
    masked = sw.mask(norm_net(), sw.Budget(sparsity=0.6))
    zeros = {n: p == 0 for n, p in masked.named_parameters() if p.dim() > 1}
    seen = []

    def loss(model: nn.Module, given: Any) -> torch.Tensor:
        seen.append(all(bool((p[zeros[n]] == 0).all()) for n, p in masked.named_parameters() if n in zeros))
        return nn.functional.cross_entropy(model(given[0]), given[1])

    sw.recover(masked, [batch(), batch()], lr=0.1, epochs=2, sam=2.0, loss=loss)
    assert len(seen) == 8 and all(seen)  # four steps, two passes each


def test_a_loss_that_raises_uphill_leaves_the_weights_as_they_were() -> None:
    model = norm_net()
    before = copy.deepcopy(model.state_dict())
    calls = []

    def loss(model: nn.Module, given: Any) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise ValueError("no")
        return nn.functional.cross_entropy(model(given[0]), given[1])

    with pytest.raises(ValueError, match="no"):
        sw.recover(model, [batch()], lr=0.1, epochs=1, sam=2.0, loss=loss)
    after = model.state_dict()
    assert all(torch.equal(after[n], t) for n, t in before.items() if "running" not in n and "tracked" not in n)


def test_parts_without_gradients_are_left_out() -> None:
    """A weight that the loss does not reach, and one that is not trained."""
    model = nn.ModuleDict({"used": nn.Linear(6, 3), "idle": nn.Linear(2, 2), "fixed": nn.Linear(3, 3)})
    model["fixed"].requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    sw.recover(
        model, [batch()], lr=0.1, epochs=2, sam=0.5,
        loss=lambda m, b: nn.functional.cross_entropy(m["fixed"](m["used"](b[0])), b[1]),
    )  # fmt: skip
    moved = {n for n, t in model.state_dict().items() if not torch.equal(t, before[n])}
    assert moved == {"used.weight", "used.bias"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"sam": 0}, "a radius above 0"),
        ({"sam": True}, "a radius above 0"),
        ({"sam": 0.5, "accumulate": 2}, "one batch with sam"),
    ],
)
def test_what_cannot_be(given: dict[str, Any], said: str) -> None:
    with pytest.raises(sw.SapwoodError, match=said):
        sw.recover(norm_net(), [batch()], lr=0.1, epochs=1, **given)


def test_it_belongs_to_a_checkpoint(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sapwood.pipeline.keeping.APART", 0.0)

    class StopError(Exception):
        pass

    def stop(step: int, total: int) -> None:
        if step == 3:
            raise StopError

    given: dict[str, Any] = {"lr": 0.1, "epochs": 2, "checkpoint": tmp_path / "run.safetensors"}
    one, data = batch(1)[0], [batch(), batch()]
    with pytest.raises(StopError):
        sw.prune_and_recover(norm_net(), one, data, sw.Budget(sparsity=0.5), sam=0.5, on_step=stop, **given)
    with pytest.raises(sw.SapwoodError, match="other arguments"):
        sw.prune_and_recover(norm_net(), one, data, sw.Budget(sparsity=0.5), **given)
    whole = sw.prune_and_recover(
        norm_net(), one, data, sw.Budget(sparsity=0.5), sam=0.5, **{**given, "checkpoint": None}
    )
    again = sw.prune_and_recover(norm_net(), one, data, sw.Budget(sparsity=0.5), sam=0.5, **given)
    for a, b in zip(whole.model.state_dict().values(), again.model.state_dict().values(), strict=True):
        assert torch.equal(a, b)
