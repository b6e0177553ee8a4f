"""What a trace says: groups, frozen channels with reasons, costs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import sapwood as sw
from sapwood.capture.modes import plain_paths
from sapwood.capture.registry import RULES, rule
from sapwood.capture.run import as_call, watch
from sapwood.capture.skeleton import named_parts, named_tensors, unchanging
from tests.helpers import build, outputs, same, snapshot
from tests.nets import CASES, conv


def test_a_chain_has_one_group_per_layer() -> None:
    model, inputs = build("plain_chain")
    trace = sw.trace(model, inputs)
    first, second = trace.groups
    assert (first.name, first.width, first.exact, first.approximate) == ("0", 8, True, False)
    assert set(first.sites) == {
        ("0.weight", 0),
        ("0.bias", 0),
        ("1.weight", 0),
        ("1.bias", 0),
        ("1.running_mean", 0),
        ("1.running_var", 0),
        ("3.weight", 1),
    }
    # one output channel of conv 0, its bias and norm, and one input channel of conv 3
    assert first.params_per_channel == 3 * 9 + 1 + 2 + 16 * 9
    assert first.flops_per_channel == 2 * (2 * 64) * (3 * 9 + 16 * 9)
    assert second.params_per_channel == 8 * 9 + 1 + 4


def test_residual_branches_share_a_group() -> None:
    model, inputs = build("residual")
    group = next(g for g in sw.trace(model, inputs).groups if g.name == "stem")
    assert {("stem.weight", 0), ("b.weight", 0), ("a.weight", 1), ("head.fc.weight", 1)} <= set(group.sites)


def test_flattening_gives_each_channel_a_block_of_inputs() -> None:
    model, inputs = build("flatten_before_linear")
    group = sw.trace(model, inputs).groups[0]
    assert group.members["4.weight", 1].tolist() == [list(range(16 * c, 16 * c + 16)) for c in range(8)]


def test_outputs_and_inputs_are_frozen_with_reasons() -> None:
    model, inputs = build("plain_chain")
    reasons = {site: f.reason for f in sw.trace(model, inputs).frozen for site in f.sites}
    assert "model's output" in reasons["5.fc.weight", 0]
    assert "fixed size" in reasons["0.weight", 1]


def test_an_unknown_operator_is_named_with_module_and_line() -> None:
    model, inputs = build("unknown_operator")
    reason = next(f.reason for f in sw.trace(model, inputs).frozen if ("a.weight", 0) in f.sites)
    assert "_cdist_forward has no rule" in reason and "nets.py:" in reason


def test_a_literal_size_is_named() -> None:
    model, inputs = build("slice_by_literal")
    frozen = next(f for f in sw.trace(model, inputs).frozen if ("a.weight", 0) in f.sites)
    assert "the number 6" in frozen.reason and frozen.channels == 6


@pytest.mark.parametrize("name", [n for n in CASES if n not in ("recurrent", "embedding_bag")])
def test_costs_agree_with_torch(name: str) -> None:
    model, inputs = build(name)
    trace = sw.trace(model, inputs)
    assert trace.params == sum(p.numel() for p in model.parameters())
    with FlopCounterMode(display=False) as counter, plain_paths():
        outputs(model, inputs)
    ours, theirs = trace.flops, counter.get_total_flops()
    if "spectral" not in name and "grouped_product" not in name:  # torch counts neither these nor products with vectors
        assert ours == pytest.approx(theirs, rel=1e-6)


def test_planned_costs_are_those_of_the_cut_model() -> None:
    for name in CASES:
        model, inputs = build(name)
        plan = sw.make_plan(model, inputs, sw.Budget(channels=0.5), allocate="uniform")
        small = sw.cut(model, plan)
        assert plan.achieved["params"] == sum(p.numel() for p in small.parameters()), name


def test_tracing_leaves_no_trace() -> None:
    model, inputs = build("weight_norm_old")
    model.train()
    before, attributes = snapshot(model), {k: dict(vars(m)) for k, m in model.named_modules()}
    sw.trace(model, inputs)
    assert same(model, before) and all(m.training for m in model.modules())
    for name, module in model.named_modules():
        assert {k: id(v) for k, v in vars(module).items()} == {k: id(v) for k, v in attributes[name].items()}


def test_functions_are_restored_after_an_exception() -> None:
    class Bad(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("no")

    before = F.has_torch_function_unary
    fast = torch.backends.mha.get_fastpath_enabled()
    with pytest.raises(sw.SapwoodError, match="no"):
        sw.trace(Bad(), torch.randn(2, 4))
    assert F.has_torch_function_unary is before
    assert torch.backends.mha.get_fastpath_enabled() == fast


def test_two_rules_for_one_operator_are_refused() -> None:
    with pytest.raises(sw.SapwoodError, match="second one for aten::permute"):
        rule("aten::permute")(lambda call: None)


def test_rules_name_operators_that_exist() -> None:
    known = {str(n).split(".")[0] for n in torch._C._dispatch_get_all_op_names()}
    plain = {n[:-1] if n.endswith("_") else n for n in known} | known
    missing = [n for n in RULES if n != "pointwise" and n not in plain and not n.startswith("prim::")]
    assert not missing


def test_channels_that_only_meet_in_code_sizes_are_tied() -> None:
    """Swin-like code: the head width is computed from the input's channels."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads, self.embed = 4, conv(3, 16, 1)
            self.qkv, self.proj, self.head = nn.Linear(16, 48), nn.Linear(16, 16), nn.Linear(16, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.embed(x).flatten(2).transpose(1, 2)
            b, n, c = x.shape
            q, k, v = self.qkv(x).reshape(b, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
            q = q * (c // self.heads) ** -0.5
            x = ((q @ k.transpose(-2, -1)).softmax(-1) @ v).transpose(1, 2).reshape(b, n, c)
            return self.head(self.proj(x).mean(1))

    model, inputs = Attention(), torch.randn(2, 3, 4, 4)
    done = sw.prune(model, inputs, sw.Budget(params=0.4))
    assert done.check.passed
    assert done.model.embed.weight.shape[0] == 4 * done.model.heads < 16


def test_a_model_is_run_in_training_mode_only_if_it_asks() -> None:
    layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout(), nn.Flatten(), nn.LazyLinear(4)).eval()
    layers(torch.randn(2, 3, 8, 8))
    plain, asking = (layers, torch.randn(2, 3, 8, 8)), build("auxiliary_head_in_training")
    for (model, inputs), alike in ((plain, True), (asking, False)):
        tracker = watch(model, as_call(inputs), data=True).tracker
        assert tracker.alike is alike and tracker.trains
    assert "training" not in vars(nn.Module)


class _OnlyInTraining(nn.Module):
    """What a model does in training mode only, by functions that it calls in evaluation mode, too."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.width = what, 16
        self.first, self.last = nn.Linear(5, 16), nn.Linear(16, 3)
        self.own = nn.Parameter(torch.ones(16), requires_grad=False)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.first(x).relu()
        if self.what == "a literal size":
            y = y * torch.ones(1, 16 if self.training else self.width)
        if self.what == "a check" and self.training and self.width != 16:
            raise ValueError(self.width)
        if self.what == "a write":
            F.dropout(self.own, 0.5, self.training, inplace=True)
        if self.what == "statistics":
            F.batch_norm(x[:, :1].expand(-1, 16), self.own, self.own, None, None, self.training)
        return (self.last(y), y) if self.what == "a result" and self.training else self.last(y)


@pytest.mark.parametrize("what", ["a result", "a literal size", "a check", "a write", "statistics"])
def test_what_happens_only_in_training_mode_counts(what: str) -> None:
    model, x = _OnlyInTraining(what).eval(), torch.randn(4, 5)
    done = sw.prune(model, x, sw.Budget(channels=0.5))
    assert torch.equal(model.own, torch.ones(16))
    found = done.model.train()(x)
    if what == "a result":
        assert found[1].shape == (4, 16)


def test_the_parts_of_a_model_are_looked_up_anew_once_it_may_change() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with unchanging(model), unchanging(model):
        assert named_parts(model) is named_parts(model)
        assert list(named_tensors(model)) == ["0.weight", "0.bias"]
    model.append(nn.Linear(2, 2))
    assert len(named_parts(model)) == 3 and len(named_tensors(model)) == 4
