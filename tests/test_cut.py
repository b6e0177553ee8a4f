"""A cut gives a new model and leaves everything else as it was."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

import sapwood as sw
from tests.helpers import HALF, build, halve, outputs, same, snapshot
from tests.nets import Pool, conv


def plan_for(model: nn.Module, inputs: object) -> sw.Plan:
    return sw.make_plan(model, inputs, HALF, allocate="uniform")


def test_kept_weights_are_the_dense_ones() -> None:
    model, inputs = build("plain_chain")
    plan = plan_for(model, inputs)
    small = sw.cut(model, plan)
    kept0, kept3 = list(plan.keep["0.weight"][0]), list(plan.keep["3.weight"][0])
    assert torch.equal(small[0].weight, model[0].weight[kept0])
    assert torch.equal(small[3].weight, model[3].weight[kept3][:, kept0])
    assert torch.equal(small[1].running_var, model[1].running_var[kept0])


def test_nothing_is_shared_with_the_dense_model() -> None:
    model, inputs = build("residual")
    small = sw.cut(model, plan_for(model, inputs))
    before = snapshot(model)
    with torch.no_grad():
        for tensor in [*small.parameters(), *small.buffers()]:
            tensor.fill_(7)
    assert same(model, before)


def test_modes_gradients_and_hooks_are_kept() -> None:
    model, inputs = build("plain_chain")
    model.train()
    model[1].eval()
    model[0].weight.requires_grad_(False)
    calls: list[str] = []
    model[3].register_forward_hook(lambda *_: calls.append("hook"))
    small = sw.cut(model, plan_for(model, inputs))
    assert small.training and not small[1].training and model.training and not model[1].training
    assert not small[0].weight.requires_grad and small[3].weight.requires_grad
    calls.clear()
    small(inputs)
    assert calls == ["hook"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_any_dtype(dtype: torch.dtype) -> None:
    model, inputs = build("plain_chain")
    done = halve(model.to(dtype), inputs.to(dtype))
    assert done.check.passed and all(p.dtype == dtype for p in done.model.parameters())


def test_complex_weights() -> None:
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.randn(4, 8, dtype=torch.complex64))
            self.b = nn.Parameter(torch.randn(8, 3, dtype=torch.complex64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x @ self.a) @ self.b

    done = halve(Complex(), torch.randn(2, 4, dtype=torch.complex64))
    assert done.check.status == "exact" and done.model.a.shape == (4, 4)


def test_channels_last_stays() -> None:
    model, inputs = build("plain_chain")
    model = model.to(memory_format=torch.channels_last)
    small = halve(model, inputs.to(memory_format=torch.channels_last)).model
    assert small[3].weight.is_contiguous(memory_format=torch.channels_last)


def test_meta_device() -> None:
    with torch.device("meta"):
        model = nn.Sequential(conv(3, 8), nn.BatchNorm2d(8), nn.ReLU(), Pool(8))
    done = halve(model, torch.randn(2, 3, 8, 8))
    assert done.model[0].weight.shape == (4, 3, 3, 3) and done.model[0].weight.is_meta
    assert "only shapes" in done.check.notes[-1]


def test_compiled_wrappers_are_unwrapped() -> None:
    model, inputs = build("plain_chain")
    done = halve(torch.compile(model), inputs)
    assert type(done.model) is nn.Sequential and list(done.model.state_dict()) == list(model.state_dict())


def test_parallel_wrappers_are_unwrapped() -> None:
    model, inputs = build("plain_chain")
    wrapped = nn.DataParallel(model)  # moves the model to a GPU where there is one
    inputs = inputs.to(next(wrapped.parameters()).device)
    assert type(halve(wrapped, inputs).model) is nn.Sequential


def test_a_plan_replays_on_a_fresh_model() -> None:
    model, inputs = build("transformer_from_projection")
    plan = plan_for(model, inputs)
    fresh, _ = build("transformer_from_projection")
    fresh.load_state_dict(model.state_dict())
    assert same(sw.cut(fresh, plan), snapshot(sw.cut(model, plan)))


def test_a_cut_model_can_be_cut_again_and_copied() -> None:
    model, inputs = build("transformer_from_projection")
    once = halve(model, inputs).model
    twice = sw.prune(copy.deepcopy(once), inputs, sw.Budget(params=0.7))
    assert twice.check.passed and sum(p.numel() for p in twice.model.parameters()) < sum(
        p.numel() for p in once.parameters()
    )


def test_two_names_for_one_memory() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
            self.b.weight = nn.Parameter(self.a.weight.data)  # another parameter, the same memory
            self.head = nn.Linear(8, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.a(x).relu() + self.b(x))

    done = halve(Shared(), torch.randn(2, 8))
    assert done.check.passed
    assert done.model.a.weight.data_ptr() == done.model.b.weight.data_ptr()


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        lambda p: torch.optim.Adam(p, lr=1e-3, amsgrad=True),
        lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1),
        lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9),
        lambda p: torch.optim.NAdam(p, lr=1e-3),
    ],
)
def test_optimizer_state_follows(make: object) -> None:
    model, inputs = build("plain_chain")
    optimizer = make(model.parameters())
    model.train()
    for _ in range(3):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    plan = plan_for(model, inputs)
    small = sw.cut(model, plan)
    new = sw.cut_optimizer(optimizer, model, small, plan)
    assert type(new) is type(optimizer)
    assert new.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    kept = list(plan.keep["0.weight"][0])
    for key, value in optimizer.state[model[0].weight].items():
        mine = new.state[small[0].weight][key]
        if isinstance(value, torch.Tensor) and value.dim():
            assert torch.equal(mine, value[kept])
        else:
            assert mine == value
    small.train()(inputs).square().mean().backward()
    new.step()


def test_parameter_groups_keep_their_settings() -> None:
    model, inputs = build("plain_chain")
    groups = [
        {"params": list(model[0].parameters()), "lr": 0.5, "weight_decay": 0.0},
        {"params": [p for m in model[1:] for p in m.parameters()]},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.01)
    plan = plan_for(model, inputs)
    small = sw.cut(model, plan)
    new = sw.cut_optimizer(optimizer, model, small, plan)
    assert [(g["lr"], g["weight_decay"]) for g in new.param_groups] == [(0.5, 0.0), (0.1, 0.01)]
    assert new.param_groups[0]["params"][0] is small[0].weight


def test_an_optimizer_of_another_model_is_refused() -> None:
    model, inputs = build("plain_chain")
    other, _ = build("plain_chain")
    plan = plan_for(model, inputs)
    with pytest.raises(sw.SapwoodError, match="optimizer"):
        sw.cut_optimizer(torch.optim.SGD(other.parameters(), lr=1), model, sw.cut(model, plan), plan)


def test_no_warnings_reach_the_user() -> None:
    model, inputs = build("transformer_from_projection")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        halve(model, inputs)


def test_scripts_of_outputs_do_not_change_when_nothing_is_cut() -> None:
    model, inputs = build("plain_chain")
    plan = sw.make_plan(model, inputs, sw.Budget(channels=1.0))
    assert torch.equal(outputs(sw.cut(model, plan), inputs)[0], outputs(model, inputs)[0])
