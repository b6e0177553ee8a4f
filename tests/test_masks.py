"""Masks: exactly the zeros asked for, in the pattern asked for, and they stay."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import sapwood as sw
from sapwood.masking import select
from tests.helpers import snapshot


def net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(4, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(32, 12),
    )  # fmt: skip


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([m.weight.detach().reshape(-1) for m in model if isinstance(m, (nn.Conv2d, nn.Linear))])


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_the_smallest_of_all_weights_go(share: float) -> None:
    model = net()
    before = snapshot(model)
    masked = sw.mask(model, sw.Budget(sparsity=share))
    old, new = weights(model), weights(masked)
    count = round(share * len(old))
    assert int((new == 0).sum()) == count
    assert torch.equal(new == 0, torch.zeros_like(new, dtype=torch.bool).scatter(0, old.abs().argsort()[:count], True))
    assert torch.equal(new[new != 0], old[new != 0])
    for name, tensor in masked.state_dict().items():  # names stay, norms and biases are left alone
        if tensor.dim() < 2:
            assert torch.equal(tensor, before[name])
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())  # ours is a copy
    assert list(masked.state_dict()) == list(before)


def test_local_and_row_scopes_count_per_tensor_and_per_output() -> None:
    model = net()
    found = sw.sparsity(sw.mask(model, sw.Budget(sparsity=0.7), scope="local"))
    for name, layer in found.layers.items():
        assert abs(layer.zeros - 0.7 * layer.weights) <= 1, name
    assert found.zeros == round(0.7 * found.weights)  # roundings do not add up
    linear = nn.Linear(10, 6)
    masked = sw.mask(linear, sw.Budget(sparsity=0.3), scope="row")
    assert (masked.weight == 0).sum(1).tolist() == [3] * 6
    odd = (sw.mask(nn.Linear(7, 5), sw.Budget(sparsity=0.5), scope="row").weight == 0).sum(1)
    assert int(odd.sum()) == 18 and set(odd.tolist()) == {3, 4}
    rows = sw.sparsity(sw.mask(model, sw.Budget(sparsity=0.7), scope="row"))
    assert rows.zeros == round(0.7 * rows.weights)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 300), min_size=1, max_size=5),
    levels=st.integers(1, 50),
    share=st.floats(0, 1),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_exactly_so_many_go_also_among_equals(
    sizes: list[int], levels: int, share: float, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    tensors = [(torch.randint(-levels, levels + 1, (n,)).double() / 3).to(dtype) for n in sizes]
    everything = torch.cat(tensors).abs()
    count = round(share * len(everything))
    if not count:
        return
    cutoff = select.smallest(tensors, count, absolute=True)
    made = [t.clone() for t in tensors]
    for i, tensor in enumerate(made):
        select.zero_below(tensor, tensors[i], cutoff, i, absolute=True)
    gone = torch.cat([(m == 0) & (t != 0) for m, t in zip(made, tensors, strict=True)])
    zeros_before = int((everything == 0).sum())
    assert int((torch.cat(made) == 0).sum()) == max(count, zeros_before)
    if bool(gone.any()) and not bool(gone.all()):
        left = torch.cat(made).abs()
        assert everything[gone].max() <= left[left > 0].min() if bool((left > 0).any()) else True


def test_a_large_model_is_ranked_by_sampling_and_still_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "_SAMPLE", 500)
    monkeypatch.setattr(select, "_CHUNK", 3000)
    torch.manual_seed(1)
    tensors = [torch.randn(n) * scale for n, scale in ((50_000, 1.0), (0, 1.0), (7, 9.0), (20_001, 0.01))]
    for share in (0.001, 0.28, 0.5, 0.9, 0.9999):
        count = round(share * sum(t.numel() for t in tensors))
        cutoff = select.smallest(tensors, count, absolute=True)
        made = [t.clone() for t in tensors]
        for i, tensor in enumerate(made):
            select.zero_below(tensor, tensors[i], cutoff, i, absolute=True)
        assert torch.equal(
            torch.cat(made) == 0, torch.cat(tensors).abs() <= torch.cat(tensors).abs().kthvalue(count).values
        )


def test_equal_weights_are_spread_over_the_layers() -> None:
    model = nn.Sequential(nn.Linear(100, 10), nn.Linear(10, 50))
    for layer in model:
        nn.init.ones_(layer.weight)
    masked = sw.mask(model, sw.Budget(sparsity=0.5))
    assert [layer.total for layer in sw.sparsity(masked).layers.values()] == [0.5, 0.5]
    assert (masked[0].weight == 0).sum(1).tolist() == [50] * 10  # not the first half of it


def test_negative_zero_is_a_zero() -> None:
    linear = nn.Linear(4, 4, bias=False)
    with torch.no_grad():
        linear.weight.copy_(torch.arange(1.0, 17).view(4, 4))
        linear.weight[0, :2] = -0.0
    masked = sw.mask(linear, sw.Budget(sparsity=0.25), score="random")
    assert sw.sparsity(masked).zeros == 4  # the two that were there, and two more
    assert not torch.signbit(masked.weight[masked.weight == 0]).any()


def test_tied_weights_count_once_and_stay_tied() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    masked = sw.mask(model, sw.Budget(sparsity=0.5))
    assert masked[0].weight is masked[1].weight and int((masked[0].weight == 0).sum()) == 32


def test_embeddings_and_what_is_tied_to_them_are_left_alone_unless_asked_for() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.inner, self.head = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 20, bias=False)
            self.position = nn.Parameter(torch.randn(1, 5, 8))
            self.head.weight = self.embed.weight

    masked = sw.mask(Tied(), sw.Budget(sparsity=0.5))
    assert int((masked.inner.weight == 0).sum()) == 32 and masked.embed.weight.all() and masked.position.all()
    asked = sw.mask(Tied(), sw.Budget(sparsity=0.5), include=("embed",), ignore=("re:inner.*",))
    assert int((asked.embed.weight == 0).sum()) == 80 and asked.inner.weight.all()


@pytest.mark.parametrize(("pattern", "kept", "of"), [("2:4", 2, 4), ("1:4", 1, 4), ("4:8", 4, 8), ("3:16", 3, 16)])
def test_n_of_every_m_along_the_inputs(pattern: str, kept: int, of: int) -> None:
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.Conv2d(16, 32, 3), nn.ConvTranspose2d(32, 5, 3))
    masked = sw.mask(model, pattern=pattern)
    assert masked[0].weight.all()  # three inputs have no whole groups
    for weight, dim in ((masked[1].weight, 1), (masked[2].weight, 0)):
        groups = weight.movedim(dim, -1).reshape(-1, of)
        assert (groups != 0).sum(1).eq(kept).all()
        dense = dict(zip((id(m) for m in masked), model, strict=True))[id(masked[1 if dim else 2])].weight
        sizes = dense.detach().abs().movedim(dim, -1).reshape(-1, of)
        assert torch.equal((groups != 0), sizes >= sizes.topk(kept, dim=1).values[:, -1:])


def test_equal_neighbours_keep_the_first() -> None:
    linear = nn.Linear(4, 2)
    nn.init.ones_(linear.weight)
    assert sw.mask(linear, pattern="2:4").weight.tolist() == [[1, 1, 0, 0]] * 2


def test_whole_blocks_go() -> None:
    linear = nn.Linear(40, 24)
    masked = sw.mask(linear, sw.Budget(sparsity=0.5), pattern="block:8x16")
    blocks = torch.nn.functional.pad(masked.weight.detach(), (0, 8)).view(3, 8, 3, 16).abs().sum((1, 3))
    means = torch.nn.functional.pad(linear.weight.detach(), (0, 8)).view(3, 8, 3, 16).abs().sum((1, 3))
    means = means / torch.tensor([128.0, 128, 64])
    assert means[blocks == 0].max() < means[blocks != 0].min()
    zeros = sw.sparsity(masked).zeros
    assert 480 - 128 < zeros <= 480 and zeros == 128 * int((blocks[:, :2] == 0).sum()) + 64 * int(
        (blocks[:, 2] == 0).sum()
    )


def test_lamp_is_the_square_over_those_at_least_as_large() -> None:
    linear = nn.Linear(3, 1, bias=False)
    with torch.no_grad():
        linear.weight.copy_(torch.tensor([[1.0, -2.0, 3.0]]))
    from sapwood.scoring.elements import lamp

    assert torch.allclose(lamp(linear.weight), torch.tensor([[1 / 14, 4 / 13, 1.0]]))


def test_wanda_looks_at_inputs() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    x = torch.randn(64, 4) * torch.tensor([100.0, 1, 1, 0.01])
    masked = sw.mask(model, sw.Budget(sparsity=0.5), score="wanda", scope="row", calibration=[x[:32], x[32:]])
    expected = model[0].weight.detach().abs() * x.norm(dim=0)
    assert torch.equal(masked[0].weight != 0, expected >= expected.topk(2, dim=1).values[:, -1:])
    hidden = model[:2](x).norm(dim=0)
    expected = model[2].weight.detach().abs() * hidden
    alive = (expected > 0).sum(1)
    assert ((masked[2].weight != 0).sum(1) == alive.clamp(max=4)).all()


def test_wanda_sees_convolutions_and_packed_attention() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.attention = nn.Conv2d(4, 16, 2, stride=2), nn.MultiheadAttention(16, 4, batch_first=True)
            self.up, self.head = nn.ConvTranspose1d(16, 8, 2), nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.conv(x).flatten(2).transpose(1, 2)
            x = x + self.attention(x, x, x)[0]
            return self.head(self.up(x.transpose(1, 2)).mean(2))

    model = Mixed().train()
    masked = sw.mask(model, sw.Budget(sparsity=0.5), score="wanda", calibration=[torch.randn(2, 4, 8, 8)])
    assert sw.sparsity(masked).total == pytest.approx(0.5, abs=1e-3) and model.training


def test_taylor_is_gradient_times_weight() -> None:
    torch.manual_seed(3)
    model = nn.Linear(6, 3)
    x, y = torch.randn(10, 6), torch.randint(0, 3, (10,))
    masked = sw.mask(model, sw.Budget(sparsity=0.5), score="taylor", calibration=[(x, y)])
    nn.functional.cross_entropy(model(x), y).backward()
    expected = (model.weight * model.weight.grad).abs()
    assert torch.equal(masked.weight != 0, expected > expected.view(-1).kthvalue(9).values)
    assert masked.weight.grad is None


def test_a_score_of_ones_own() -> None:
    linear = nn.Linear(5, 4)
    masked = sw.mask(linear, sw.Budget(sparsity=0.5), score=lambda w: torch.arange(20.0).view(4, 5))
    assert (masked.weight[:2] == 0).all() and masked.weight[2:].all()


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "adam_amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "muonlike": lambda p: torch.optim.NAdam(p),
    "rprop": lambda p: torch.optim.Rprop(p),
    "asgd": lambda p: torch.optim.ASGD(p),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_zeros_stay_through_any_optimizer(name: str) -> None:
    model = net()
    before = snapshot(model)
    sw.mask_(model, sw.Budget(sparsity=0.8))
    zeros = {n: t == 0 for n, t in model.state_dict().items() if t.dim() > 1}
    optimizer = OPTIMIZERS[name](model.parameters())
    sw.hold(model, optimizer)
    for step in range(6):
        with torch.autocast("cpu", torch.bfloat16, enabled=step % 2 == 0):
            loss = model(torch.randn(4, 4, 8, 8)).square().mean()
        loss.backward()
        if step % 2:  # every other one accumulates
            optimizer.step()
            optimizer.zero_grad()
        assert list(model.state_dict()) == list(before)
        assert all(bool((model.state_dict()[n][z] == 0).all()) for n, z in zeros.items())
    assert any(not torch.equal(model.state_dict()[n][~z], before[n][~z]) for n, z in zeros.items())  # it trained


@pytest.mark.parametrize("way", ["by hand", "as they are computed"])
def test_gradients_of_zeros_do_not_count_where_gradients_are_clipped(way: str) -> None:
    """The gradient is the input: 3 where the weight is kept, 400 where it is zero."""
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[5.0, 1.0]]))
    sw.mask_(model, sw.Budget(sparsity=0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    held = sw.hold(model, optimizer, gradients=way != "by hand")
    for _ in range(2):  # accumulated
        model(torch.tensor([[1.5, 200.0]])).sum().backward()
    if way == "by hand":
        assert model.weight.grad is not None and model.weight.grad.tolist() == [[3.0, 400.0]]
        held.clear_gradients()
    assert float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)) == 3.0
    optimizer.step()
    assert model.weight.tolist() == [[pytest.approx(4.0, abs=1e-5), 0.0]]  # a step of length one
    held.release()
    optimizer.zero_grad()
    model(torch.tensor([[1.5, 200.0]])).sum().backward()
    assert model.weight.grad is not None and model.weight.grad.tolist() == [[1.5, 200.0]]


def test_gradients_of_gradients_pass_through_what_clears_them() -> None:
    model = sw.mask(nn.Linear(4, 3, bias=False), sw.Budget(sparsity=0.5))
    sw.hold(model, torch.optim.SGD(model.parameters(), lr=0.1), gradients=True)
    (gradient,) = torch.autograd.grad(model(torch.randn(5, 4)).square().sum(), model.weight, create_graph=True)
    assert gradient.requires_grad and not gradient[model.weight == 0].any()
    gradient.square().sum().backward()
    assert model.weight.grad is not None and model.weight.grad.any()


def test_lbfgs_and_a_closure() -> None:
    model = sw.mask(nn.Linear(6, 2), sw.Budget(sparsity=0.5))
    zeros = model.weight == 0
    optimizer = torch.optim.LBFGS(model.parameters())
    sw.hold(model, optimizer)
    x = torch.randn(8, 6)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(x) - 1).square().mean()
        loss.backward()
        return loss

    before = closure().item()
    for _ in range(3):
        optimizer.step(closure)
    assert (model.weight[zeros] == 0).all() and int((model.weight == 0).sum()) == 6
    assert closure().item() < 0.5 * before


def test_nan_and_infinity_do_not_survive_in_masked_places() -> None:
    model = sw.mask(nn.Linear(4, 4, bias=False), sw.Budget(sparsity=0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    sw.hold(model, optimizer)
    zeros = model.weight == 0
    model.weight.grad = torch.full_like(model.weight, torch.inf)
    optimizer.step()
    assert (model.weight[zeros] == 0).all()


def test_a_released_hold_lets_go() -> None:
    model = sw.mask(nn.Linear(4, 4), sw.Budget(sparsity=0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    held = sw.hold(model, optimizer)
    held.release()
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    assert model.weight.all()
    held.apply()
    assert sw.sparsity(model).total == 0.5


def test_a_masked_model_is_saved_loaded_and_trained_on(tmp_path: Path) -> None:
    model = sw.mask(net(), sw.Budget(sparsity=0.9))
    sw.save(tmp_path / "masked", model)
    assert (tmp_path / "masked" / "model.safetensors").stat().st_size < 0.35 * 4 * sum(
        p.numel() for p in model.parameters()
    )
    again = sw.load(tmp_path / "masked", net())
    assert all(torch.equal(a, b) for a, b in zip(again.state_dict().values(), model.state_dict().values(), strict=True))
    optimizer = torch.optim.AdamW(again.parameters(), lr=0.1)
    sw.hold(again, optimizer)
    again(torch.randn(4, 4, 8, 8)).sum().backward()
    optimizer.step()
    assert sw.sparsity(again).zeros == sw.sparsity(model).zeros


def test_masks_survive_copies_and_cuts() -> None:
    model = sw.mask(net(), sw.Budget(sparsity=0.6))
    twin = copy.deepcopy(model)
    assert len(sw.hold(twin).held) == 3
    small = sw.prune(model, torch.randn(2, 4, 8, 8), sw.Budget(channels=0.5)).model
    held = sw.hold(small).held
    assert [tuple(z.shape) for _, z in held] == [tuple(p.shape) for p in small.parameters() if p.dim() > 1]


def test_a_model_without_a_note_holds_what_is_zero() -> None:
    model, fresh = sw.mask(net(), sw.Budget(sparsity=0.6)), net()
    fresh.load_state_dict(model.state_dict())
    assert sw.hold(fresh).zeros == sw.sparsity(model).zeros


def test_masking_further_keeps_the_zeros() -> None:
    model = sw.mask(net(), sw.Budget(sparsity=0.5))
    more = sw.mask(model, sw.Budget(sparsity=0.8), score="random")
    assert (weights(more)[weights(model) == 0] == 0).all()
    assert int((weights(more) == 0).sum()) == round(0.8 * len(weights(model)))


def test_masks_of_a_part_are_found_from_the_whole() -> None:
    part = sw.mask(nn.Linear(8, 8), sw.Budget(sparsity=0.5))
    whole = nn.Sequential(part, nn.Linear(8, 8))
    assert sw.hold(whole).zeros == 32
    sw.mask_(whole, sw.Budget(sparsity=0.75))
    assert sw.hold(whole).zeros == 96
    compiled = nn.Sequential(torch.compile(nn.Linear(8, 8)), nn.Linear(8, 8))
    sw.mask_(compiled, sw.Budget(sparsity=0.5))
    assert sw.hold(compiled).zeros == 64 and sw.sparsity(compiled).total == 0.5


def test_zero_blocks_stay_the_first_to_go() -> None:
    linear = nn.Linear(16, 16)
    options: dict[str, Any] = {"pattern": "block:4x4", "score": lambda w: w}
    once = sw.mask(linear, sw.Budget(sparsity=0.25), **options)
    assert torch.equal(sw.mask(once, sw.Budget(sparsity=0.25), **options).weight, once.weight)


def test_wanda_takes_each_group_of_a_convolution_by_itself() -> None:
    conv = nn.Conv2d(4, 4, 1, groups=2, bias=False)
    nn.init.ones_(conv.weight)
    x = torch.randn(8, 4, 5, 5) * torch.tensor([100.0, 1, 1, 50]).view(1, 4, 1, 1)
    masked = sw.mask(conv, sw.Budget(sparsity=0.5), score="wanda", calibration=[x])
    assert (masked.weight != 0).view(4, 2).tolist() == [[True, False]] * 2 + [[False, True]] * 2


def test_taylor_leaves_statistics_and_dice_alone() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3)).train()
    data = [(torch.randn(10, 6), torch.randint(0, 3, (10,)))]
    state = torch.get_rng_state()
    first, second = (sw.mask(model, sw.Budget(sparsity=0.5), score="taylor", calibration=data) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state) and first.training
    assert all(
        torch.equal(a, b) for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    )
    assert first[1].num_batches_tracked == 0


def test_names_that_look_like_wrappers_are_names(tmp_path: Path) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module, self.head = nn.Linear(8, 8), nn.Linear(8, 8)

    model = sw.mask(Odd(), sw.Budget(sparsity=0.5))
    sw.save(tmp_path / "odd", model)
    assert sw.hold(sw.load(tmp_path / "odd", Odd())).zeros == 64
    assert sw.hold(nn.DataParallel(model)).zeros == 64


def test_the_gain_of_weight_norm_is_not_a_weight() -> None:
    model = torch.nn.utils.weight_norm(nn.Linear(8, 8))
    assert list(sw.sparsity(model).layers) == ["weight_v"]


def test_a_tied_weight_goes_by_any_of_its_names() -> None:
    model = nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    assert set(sw.sparsity(sw.mask(model, sw.Budget(sparsity=0.5), include=("1",))).layers) == {"0.weight", "2.weight"}


def test_a_layer_that_dies_is_told() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 2))
    with torch.no_grad():
        model[1].weight.mul_(1e-3)
    with pytest.warns(UserWarning, match=r"1\.weight is all zero"):
        sw.mask(model, sw.Budget(sparsity=0.5))
    data = [torch.randn(8, 16)]
    masked = sw.mask(model, sw.Budget(sparsity=0.5), score="wanda", calibration=data)
    assert sw.sparsity(masked).layers["1.weight"].total == 0.5  # wanda ranks within each output


def test_edge_blocks_fill_what_is_left() -> None:
    masked = sw.mask(nn.Linear(20, 4), sw.Budget(sparsity=0.25), pattern="block:4x16")
    assert sw.sparsity(masked).zeros == 16


BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "budget": (lambda: sw.mask(net(), sw.Budget(channels=0.5)), "Budget\\(sparsity=0.9\\)"),
    "bare number": (lambda: sw.mask(net(), 0.9), "Budget\\(sparsity=0.9\\)"),  # type: ignore[arg-type]
    "no budget": (lambda: sw.mask(net()), "expected a budget"),
    "all": (lambda: sw.Budget(sparsity=1.0), "below 1"),
    "pattern": (lambda: sw.mask(net(), sw.Budget(sparsity=0.5), pattern="2/4"), "2:4"),
    "contradiction": (lambda: sw.mask(net(), sw.Budget(sparsity=0.9), pattern="2:4"), "sparsity=0.5"),
    "scope": (lambda: sw.mask(net(), sw.Budget(sparsity=0.5), scope="layer"), "global, local, row"),
    "score": (lambda: sw.mask(net(), sw.Budget(sparsity=0.5), score="l1"), "magnitude"),
    "no data": (lambda: sw.mask(net(), sw.Budget(sparsity=0.5), score="wanda"), "calibration"),
    "name": (lambda: sw.mask(net(), sw.Budget(sparsity=0.5), ignore=("nothing",)), "'nothing'"),
    "shape": (lambda: sw.mask(net(), sw.Budget(sparsity=0.5), score=lambda w: w.sum()), "score function"),
    "nothing": (lambda: sw.mask(nn.BatchNorm1d(3), sw.Budget(sparsity=0.5)), "weights to mask"),
    "too large blocks": (
        lambda: sw.mask(nn.Linear(8, 8), sw.Budget(sparsity=0.9), pattern="block:16x16"),
        "at most 58",
    ),
    "expression": (lambda: sw.mask(net(), sw.Budget(sparsity=0.5), ignore=("re:[",)), "regular expression"),
    "no model": (lambda: sw.sparsity(3), "torch.nn.Module"),  # type: ignore[arg-type]
    "no score": (lambda: sw.mask(net(), sw.Budget(sparsity=0.5), score=None), "magnitude"),  # type: ignore[arg-type]
    "not masked": (lambda: sw.hold(nn.Linear(2, 2)), "Call sw.mask first"),
    "prune": (lambda: sw.prune(net(), torch.randn(1, 4, 8, 8), sw.Budget(sparsity=0.5)), "sw.mask"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_explained(name: str) -> None:
    call, words = BAD[name]
    with pytest.raises(sw.SapwoodError, match=words):
        call()


def test_nan_weights_are_refused_before_anything_changes() -> None:
    half = sw.Budget(sparsity=0.5)
    for options in ({"budget": half}, {"pattern": "2:4"}, {"budget": half, "scope": "local"}):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        with torch.no_grad():
            model[1].weight[0, 0] = torch.nan
        with pytest.raises(sw.SapwoodError, match="nan"):
            sw.mask_(model, **options)  # type: ignore[arg-type]
        assert model[0].weight.all() and model[1].weight.all()
