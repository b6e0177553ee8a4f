"""Budgets, allocations, scores, ignoring and rounding."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import sapwood as sw
from sapwood.errors import SapwoodError
from sapwood.planning.counts import Steps
from sapwood.scoring.weights import lamp
from tests.helpers import build, size
from tests.nets import Pool, conv


def wide() -> nn.Module:
    layers: list[nn.Module] = []
    for i, o in ((3, 32), (32, 64), (64, 64), (64, 128)):
        layers += [conv(i, o), nn.BatchNorm2d(o), nn.ReLU()]
    return nn.Sequential(*layers, Pool(128, 10))


IMAGE = torch.randn(2, 3, 8, 8)


@pytest.mark.parametrize("kind", ["params", "flops"])
@pytest.mark.parametrize("fraction", [0.9, 0.7, 0.5, 0.3, 0.1])
@pytest.mark.parametrize("allocate", ["uniform", "global"])
def test_budgets_are_met_closely(kind: str, fraction: float, allocate: str) -> None:
    plan = sw.make_plan(wide(), IMAGE, sw.Budget(**{kind: fraction}), allocate=allocate)
    left = plan.achieved[kind] / plan.achieved[f"dense_{kind}"]
    assert fraction - 0.02 <= left <= fraction


@pytest.mark.parametrize("name", ["transformer_from_projection", "transformer_decoder", "grouped_convolution"])
def test_coarse_models_stay_under_budget(name: str) -> None:
    model, inputs = build(name)
    plan = sw.make_plan(model, inputs, sw.Budget(params=0.6))
    assert plan.achieved["params"] <= 0.6 * plan.achieved["dense_params"]


def test_absolute_budget() -> None:
    model = wide()
    small = sw.cut(model, sw.make_plan(model, IMAGE, sw.Budget(params=40_000)))
    assert 0.96 * 40_000 <= size(small) <= 40_000


def test_a_full_budget_changes_nothing() -> None:
    model = wide()
    plan = sw.make_plan(model, IMAGE, sw.Budget(params=1.0))
    assert not plan.keep and size(sw.cut(model, plan)) == size(model)


def test_uniform_takes_the_same_fraction_everywhere() -> None:
    trace = sw.trace(wide(), IMAGE)
    plan = sw.make_plan(wide(), IMAGE, sw.Budget(channels=0.25), allocate="uniform")
    assert [len(plan.groups[g.name]) for g in trace.groups] == [g.width // 4 for g in trace.groups]


@pytest.mark.parametrize("fraction", [0.7, 0.4])
def test_shares_by_name_are_kept_in_relation(fraction: float) -> None:
    shares = {"re:[03]": 0.5, "6": np.float32(0.8)}  # of the last layer as much again as of the first two
    model = wide()
    plan = sw.make_plan(model, IMAGE, sw.Budget(flops=fraction), allocate=shares)
    left = [len(plan.groups.get(g.name, range(g.width))) / g.width for g in sw.trace(model, IMAGE).groups]
    assert left == pytest.approx([min(1.0, left[1] * more) for more in (1, 1, 1.6, 2)], abs=0.04)
    assert fraction - 0.02 <= plan.achieved["flops"] / plan.achieved["dense_flops"] <= fraction
    assert plan.budget["allocate"] == pytest.approx(shares) and json.dumps(dict(plan.budget))
    even = sw.make_plan(model, IMAGE, sw.Budget(flops=fraction), allocate={"re:.*": 3})
    assert even.groups == sw.make_plan(model, IMAGE, sw.Budget(flops=fraction), allocate="uniform").groups


@pytest.mark.parametrize("allocate", ["uniform", {"9": 0.25}])
def test_what_is_left_over_does_not_undo_a_share(allocate: Any) -> None:
    model = wide()  # of the last layer channels cost the least
    plan = sw.make_plan(model, IMAGE, sw.Budget(flops=0.5), allocate=allocate)
    left = [len(plan.groups.get(g.name, range(g.width))) / g.width for g in sw.trace(model, IMAGE).groups]
    asked = left[2] * (1.0 if allocate == "uniform" else 0.25)
    assert asked - 0.05 <= left[3] <= asked + 0.11
    assert 0.45 <= plan.achieved["flops"] / plan.achieved["dense_flops"] <= 0.5


def test_shares_are_of_channels_too() -> None:
    plan = sw.make_plan(wide(), IMAGE, sw.Budget(channels=0.5), allocate={"9": 0.5})
    assert plan.achieved["channels"] == pytest.approx(0.5 * 288, abs=3) and len(plan.groups["9"]) < 0.4 * 128


def test_global_ranks_all_channels_together() -> None:
    model = wide()
    with torch.no_grad():
        model[0].weight[:24] *= 1e-3  # most of the first layer is worth little
        model[3].weight[:, :24] *= 1e-3
    plan = sw.make_plan(model, IMAGE, sw.Budget(channels=0.9), allocate="global")
    assert set(range(24)).isdisjoint(plan.groups["0"]) or len(plan.groups["0"]) <= 10


def test_l1_removes_the_smallest_filters() -> None:
    model = nn.Sequential(conv(3, 8), nn.ReLU(), Pool(8))
    with torch.no_grad():
        for index in range(8):
            model[0].weight[index] = 0.1 * (8 - index)
            model[2].fc.weight[:, index] = 0.1 * (8 - index)
    plan = sw.make_plan(model, IMAGE, sw.Budget(channels=0.5), score="l1", allocate="uniform")
    assert plan.keep["0.weight"][0] == (0, 1, 2, 3)


def test_bn_scale_follows_the_norm() -> None:
    model = nn.Sequential(conv(3, 8), nn.BatchNorm2d(8), Pool(8))
    with torch.no_grad():
        model[1].weight.copy_(torch.tensor([1.0, -9, 2, 8, 3, 7, 4, 6]))
    plan = sw.make_plan(model, IMAGE, sw.Budget(channels=0.5), score="bn_scale", allocate="uniform")
    assert plan.keep["0.weight"][0] == (1, 3, 5, 7)


def test_random_scores_are_seeded() -> None:
    plans = [sw.make_plan(wide(), IMAGE, sw.Budget(channels=0.5), score="random") for _ in range(2)]
    assert plans[0].groups == plans[1].groups


def test_a_callable_scores_each_site() -> None:
    def last_is_best(weight: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.arange(1.0, weight.shape[dim] + 1)

    model = nn.Sequential(conv(3, 8), nn.ReLU(), Pool(8))
    plan = sw.make_plan(model, IMAGE, sw.Budget(channels=0.5), score=last_is_best, allocate="uniform")
    assert plan.keep["0.weight"][0] == (4, 5, 6, 7)


def test_lamp_is_each_over_those_no_smaller() -> None:
    """Squares 1, 4, 9, 16: 1/30, 4/29, 9/25, 1. A head's square is that of all its rows."""
    from sapwood.scoring import score_groups

    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 2, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.diag(torch.tensor([2.0, 4, 1, 3])))
        model[1].weight.copy_(torch.tensor([[2.0, 0, 1, 0], [0, 4, 0, 3]]))
    trace = sw.trace(model, torch.zeros(1, 4))
    (values,) = score_groups(dict(model.named_parameters()), trace.groups, "lamp")
    wanted = np.array([4 / 29, 1, 1 / 30, 9 / 25])
    assert np.allclose(values, wanted / wanted.mean())
    heads = replace(trace.groups[0], width=2, members={s: np.array([[0, 2], [1, 3]]) for s in trace.groups[0].members})
    (values,) = score_groups(dict(model.named_parameters()), [heads], "lamp")
    assert np.allclose(values, np.array([5 / 30, 1]) / (35 / 60))
    assert (lamp(np.zeros(3)) == 0).all()  # of a layer without values


@pytest.mark.parametrize("score", ["l1", "l2", "lamp", "bn_scale", "random"])
def test_scores_of_a_group_average_to_one(score: str) -> None:
    from sapwood.scoring import score_groups

    model = wide()
    trace = sw.trace(model, IMAGE)
    for values in score_groups(
        dict(model.named_parameters()) | dict(model.named_buffers()), trace.groups, score, trace.scales
    ):
        assert np.isclose(values.mean(), 1.0, atol=0.15 if score == "random" else 1e-6) and (values >= 0).all()


def test_ignore_keeps_what_a_module_makes() -> None:
    model = wide()
    plan = sw.make_plan(model, IMAGE, sw.Budget(channels=0.5), allocate="uniform", ignore=("0", "re:6.*"))
    small = sw.cut(model, plan)
    assert [small[i].weight.shape[0] for i in (0, 3, 6, 9)] == [32, 32, 64, 64]


def test_ignoring_a_classifier_lets_its_inputs_shrink() -> None:
    model = wide()
    plan = sw.make_plan(model, IMAGE, sw.Budget(channels=0.5), allocate="uniform", ignore="12.fc")
    assert sw.cut(model, plan)[12].fc.weight.shape == (10, 64)


def test_ignoring_a_parameter_keeps_all_of_it() -> None:
    model = wide()
    plan = sw.make_plan(model, IMAGE, sw.Budget(channels=0.5), allocate="uniform", ignore=("3.weight",))
    assert sw.cut(model, plan)[3].weight.shape == model[3].weight.shape


@pytest.mark.parametrize("step", [4, 8, 16])
def test_rounding(step: int) -> None:
    model = wide()
    for budget in (sw.Budget(channels=0.4), sw.Budget(flops=0.45)):
        small = sw.cut(model, sw.make_plan(model, IMAGE, budget, round_to=step))
        assert all(small[i].weight.shape[0] % step == 0 for i in (0, 3, 6, 9))


def test_no_group_is_ever_emptied() -> None:
    model = wide()
    small = sw.prune(model, IMAGE, sw.Budget(channels=0.001), allocate="uniform").model
    assert [small[i].weight.shape[0] for i in (0, 3, 6, 9)] == [1, 1, 1, 1]


def test_a_plan_is_plain_data() -> None:
    import json

    model, inputs = build("transformer_from_projection")
    plan = sw.make_plan(model, inputs, sw.Budget(params=0.5))
    json.dumps([plan.keep, plan.attributes, plan.shapes, plan.groups, plan.budget, plan.achieved])
    assert plan.attributes["encoder.layers.0.norm1.normalized_shape"] == (len(plan.groups["embed"]),)


def test_attributes_that_only_tell_are_kept_right() -> None:
    model, inputs = build("grouped_convolution")
    small = sw.prune(model, inputs, sw.Budget(channels=0.5), allocate="uniform").model
    for module in small.modules():
        if isinstance(module, nn.Conv2d):
            assert module.out_channels == module.weight.shape[0]
            assert module.in_channels == module.weight.shape[1] * module.groups
        if isinstance(module, nn.Linear):
            assert (module.out_features, module.in_features) == tuple(module.weight.shape)


def test_more_channels_than_asked_for_are_told() -> None:
    model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 96, 3), nn.ReLU(), nn.Conv2d(96, 8, 1)).eval()
    for allocate in ("uniform", "global"):
        wide = sw.make_plan(model, IMAGE, sw.Budget(channels=0.1), round_to=32, allocate=allocate)
        assert any("40% of the channels stay, not 10%: no layer is cut below round_to, 32" in n for n in wide.notes)
        near = sw.make_plan(model, IMAGE, sw.Budget(channels=0.5), round_to=32, allocate=allocate)
        assert not any("stay, not" in note for note in near.notes)
    held = sw.make_plan(model, IMAGE, sw.Budget(channels=0.5), round_to=8, allocate="uniform", ignore=("2",))
    assert held.achieved["channels"] == 96 + 32 and not any("stay, not" in note for note in held.notes)
    with pytest.raises(SapwoodError, match="use a smaller round_to"):
        sw.make_plan(model, IMAGE, sw.Budget(params=0.02), round_to=32)


@pytest.mark.parametrize("allocate", ["uniform", "global"])
def test_steps_that_a_device_likes_give_way_to_the_budget(allocate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["sapwood.pipeline.prune"], "preferred", lambda *_: Steps(64, 8))
    layers = (nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 256, 3), nn.ReLU(), nn.Conv2d(256, 8, 1))
    model = nn.Sequential(*layers).eval()
    shares = {}
    for share in (0.9, 0.5, 0.25, 0.1):
        plan = sw.make_plan(model, IMAGE, sw.Budget(channels=share), round_to="auto", allocate=allocate)
        shares[share] = plan.achieved["channels"] / 320
        assert all(len(kept) % 8 == 0 for kept in plan.groups.values())
        assert shares[share] <= 1.05 * share and not any("stay, not" in note for note in plan.notes)
    if allocate == "uniform":
        assert shares[0.5] == 0.5 and shares[0.1] == (8 + 16) / 320  # steps of 16 and 64, and of 8 and 16
    assert sw.make_plan(model, IMAGE, sw.Budget(params=0.02), round_to="auto").achieved["params"] <= 0.02 * size(model)
