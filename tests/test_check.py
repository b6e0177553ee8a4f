"""The check has teeth, the reference is what it says, and what fails is mended."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sapwood as sw
from sapwood.capture.registry import RULES, find_rule
from sapwood.capture.run import as_call, watch
from sapwood.surgery.reference import run_reference
from tests.helpers import HALF, build, halve, outputs, same, snapshot
from tests.nets import Pool, conv


def removed(plan: sw.Plan, name: str, dim: int) -> list[int]:
    kept = set(plan.keep[name][dim])
    return [i for i in range(plan.shapes[name][dim]) if i not in kept]


def test_the_reference_is_the_dense_model_with_consumers_zeroed() -> None:
    model, inputs = build("plain_chain")
    plan = sw.make_plan(model, inputs, HALF, allocate="uniform")
    by_hand, _ = build("plain_chain")
    by_hand.load_state_dict(model.state_dict())
    with torch.no_grad():
        by_hand[3].weight[:, removed(plan, "3.weight", 1)] = 0
        by_hand[5].fc.weight[:, removed(plan, "5.fc.weight", 1)] = 0
    wanted = outputs(by_hand, inputs)[0]
    torch.testing.assert_close(outputs(sw.masked_reference(model, plan), inputs)[0], wanted)


def test_the_reference_normalises_over_survivors() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 2))
    inputs = torch.randn(3, 4)
    plan = sw.make_plan(model, inputs, HALF, allocate="uniform")
    kept = list(plan.keep["0.weight"][0])
    hidden = F.layer_norm(model[0](inputs)[:, kept], (3,), model[1].weight[kept], model[1].bias[kept])
    wanted = hidden @ model[2].weight[:, kept].T + model[2].bias
    torch.testing.assert_close(outputs(sw.masked_reference(model, plan), inputs)[0], wanted.detach())


def test_the_reference_accepts_other_inputs_and_leaves_the_model_alone() -> None:
    model, inputs = build("transformer_from_projection")
    before = snapshot(model)
    done = halve(model, inputs)
    other = torch.randn(3, 7, 16)
    reference = sw.masked_reference(model, done.plan)
    torch.testing.assert_close(outputs(reference, other)[0], outputs(done.model, other)[0], rtol=1e-4, atol=1e-5)
    assert same(model, before)


@pytest.mark.parametrize("name", ["attention_by_hand", "group_norm", "recurrent"])
def test_the_reference_is_the_same_when_the_model_has_to_be_followed_anew(name: str) -> None:
    model, inputs = build(name)
    plan, seen = halve(model, inputs).plan, watch(model, as_call(inputs), data=True)
    assert seen.tracker.readings
    first = run_reference(model, plan, as_call(inputs), seen)
    seen.tracker.readings.clear()
    torch.testing.assert_close(run_reference(model, plan, as_call(inputs), seen), first)


class WritesToAWeight(nn.Module):
    """Its own code clips a weight before it is used."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.a.weight.data.clamp_(-0.1, 0.1)
        return self.b(F.relu(self.a(x)))


def test_a_forward_that_writes_to_weights_writes_to_copies() -> None:
    model, x = WritesToAWeight(), torch.randn(2, 8)
    before = snapshot(model)
    done = sw.prune(model, x, HALF)
    assert done.check.status == "exact" and done.model.a.weight.shape == (8, 8) and same(model, before)
    assert float(done.model.a.weight.detach().abs().max()) > 0.1


def test_batch_statistics_are_never_updated() -> None:
    model, inputs = build("plain_chain")
    model.train()
    before = snapshot(model)
    halve(model, inputs)
    assert same(model, before) and model.training


@pytest.mark.parametrize("name", ["plain_chain", "transformer_from_projection", "group_norm", "einsum"])
def test_a_wrong_weight_fails_the_check(name: str) -> None:
    model, inputs = build(name)
    done = halve(model, inputs)
    with torch.no_grad():
        next(done.model.parameters()).view(-1)[0] += 0.1
    result = sw.check(model, done.model, done.plan, inputs)
    assert result.status == "failed" and not result.passed and result.max_error > 1e-4


def test_the_wrong_channel_fails_the_check() -> None:
    model, inputs = build("plain_chain")
    plan = sw.make_plan(model, inputs, HALF, allocate="uniform")
    dims = {n: dict(d) for n, d in plan.keep.items()}
    dims["3.weight"][1] = tuple(sorted(removed(plan, "3.weight", 1)))
    wrong = sw.cut(model, sw.Plan(keep=dims, attributes=plan.attributes, shapes=plan.shapes))
    assert sw.check(model, wrong, plan, inputs).status == "failed"


def test_a_changed_output_shape_fails_the_check() -> None:
    model, inputs = build("plain_chain")
    done = halve(model, inputs)
    done.model[5].fc = nn.Linear(8, 5)
    result = sw.check(model, done.model, done.plan, inputs)
    assert result.status == "failed" and "output 0 changed" in result.notes[0]


def test_nan_never_passes() -> None:
    model, inputs = build("plain_chain")
    done = halve(model, inputs)
    with torch.no_grad():
        done.model[5].fc.bias[0] = float("nan")
    assert sw.check(model, done.model, done.plan, inputs).status == "failed"


class HidesASize(nn.Module):
    """Reads a size in a way no tag survives: the cut runs into it, and must be taken back."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = conv(3, 8), conv(8, 12), Pool(12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.a(x))
        if len(self.a.bias.tolist()) != 8:
            raise ValueError("eight channels, please")
        return self.head(F.relu(self.b(x)))


class HidesAFactor(nn.Module):
    """The cut runs, but computes something else."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = conv(3, 8), conv(8, 12), Pool(12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.a(x)) * (self.a.weight.untyped_storage().nbytes() / 864)
        return self.head(F.relu(self.b(x)))


@pytest.mark.parametrize("net", [HidesASize, HidesAFactor])
def test_what_breaks_is_isolated_left_whole_and_said(net: type[nn.Module]) -> None:
    model, inputs = net(), torch.randn(2, 3, 8, 8)
    done = halve(model, inputs)
    assert done.check.passed
    assert done.model.a.weight.shape[0] == 8 and done.model.b.weight.shape[0] == 6
    assert len(done.plan.notes) == 1 and "group a was left whole" in done.plan.notes[0]


def test_a_wrong_rule_cannot_break_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if our own knowledge of an operator is wrong, what comes out is right."""
    monkeypatch.setitem(RULES, "aten::flip", RULES["pointwise"])
    find_rule.cache_clear()

    class Flips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.head = conv(3, 8), conv(8, 12), Pool(12)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.b(self.a(x).flip(1)))

    done = halve(Flips(), torch.randn(2, 3, 8, 8))
    find_rule.cache_clear()
    assert done.check.passed and done.model.a.weight.shape[0] == 8 and done.model.b.weight.shape[0] == 6
