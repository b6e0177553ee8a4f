"""What a trace says: groups, frozen channels with reasons, costs."""

from __future__ import annotations

from collections.abc import Callable
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


class _Asks(nn.Module):
    """Code of its own that asks for the mode, and what it does in training mode."""

    def __init__(self, more: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.conv, self.norm, self.other = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(3, 8, 3)
        self.head, self.more = nn.Linear(8, 4), more
        self.register_buffer("shift", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.dropout(self.norm(self.conv(x)).mean((2, 3)), 0.1, self.training)
        return self.head(self.more(self, y) if self.training else y)


def _writes(model: Any, y: torch.Tensor) -> torch.Tensor:
    model.head.weight.data.zero_()
    return y


@pytest.mark.parametrize(
    ("more", "alike"),
    [
        (lambda m, y: y, True),
        (lambda m, y: y + m.shift, False),
        (lambda m, y: y[:, :8] if y.shape[1] == 8 else y, False),
        (lambda m, y: y.relu(), False),
        (_writes, False),
    ],
    ids=["nothing", "another buffer", "another size", "another function", "a write"],
)
def test_training_mode_counts_where_it_does_something_else(more: Any, alike: bool) -> None:
    model = _Asks(more).eval()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    seen = watch(model, as_call(torch.randn(2, 3, 8, 8)), data=True)
    assert seen.tracker.alike is alike and seen.tracker.trains
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())


class _Sized(nn.Module):
    """Compares sizes with attributes; asks for the mode if told so."""

    def __init__(self, asks: bool) -> None:
        super().__init__()
        self.dim, self.asks = 16, asks
        self.first, self.heads, self.last = nn.Linear(5, 16), nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        assert x.shape[-1] == self.dim
        x = self.heads(x).reshape(len(x), self.dim)
        return self.last(F.dropout(x, 0.0, self.training if self.asks else False))


def test_a_question_about_the_mode_freezes_nothing() -> None:
    plain, asking = (sw.trace(_Sized(asks).eval(), torch.randn(2, 5)) for asks in (False, True))
    assert [g.name for g in plain.groups] == [g.name for g in asking.groups] == ["first", "heads"]
    assert plain.frozen == asking.frozen


def test_the_parts_of_a_model_are_looked_up_anew_once_it_may_change() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with unchanging(model), unchanging(model):
        assert named_parts(model) is named_parts(model)
        assert list(named_tensors(model)) == ["0.weight", "0.bias"]
    model.append(nn.Linear(2, 2))
    assert len(named_parts(model)) == 3 and len(named_tensors(model)) == 4
