"""Channels added with zero weights: the same function, on widths that a GPU likes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import sapwood as sw
from sapwood.measurement import convolutions, deployment, rewrite
from sapwood.measurement.padding import widen, widen_products, worth_while
from sapwood.storage.export import quiet
from sapwood.storage.fold import fold_batch_norms

_aten: Any = torch.ops.aten


def exported(model: nn.Module, *inputs: torch.Tensor) -> Any:
    with quiet(), torch.no_grad():
        return torch.export.export(model.eval(), inputs, strict=False).module()


def widths(made: Any) -> list[int]:
    return [len(n.args[1].meta["val"]) for n in made.graph.nodes if n.target is _aten.conv2d.default]


def copies(made: Any) -> int:
    return sum(n.target is _aten.clone.default for n in made.graph.nodes)


class Odd(nn.Module):
    """A sum, a gate, depthwise and grouped kernels, a concatenation, values that are not zero where weights are."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.left, self.right = nn.Conv2d(3, 13, 3, 2, 1), nn.Conv2d(13, 13, 3, 1, 1), nn.Conv2d(13, 13, 1)
        self.own, self.down, self.up = nn.Conv2d(13, 13, 3, 1, 1, groups=13), nn.Conv2d(13, 5, 1), nn.Conv2d(5, 13, 1)
        self.parts, self.even = nn.Conv2d(26, 26, 1, groups=2), nn.Conv2d(26, 16, 1, bias=False)
        self.last, self.head = nn.Conv2d(16, 11, 1), nn.Linear(11, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.max_pool2d(nn.functional.relu(self.stem(x), inplace=True), 2)
        y = self.left(x)
        y += self.right(x)
        gate = torch.sigmoid(self.up(torch.relu(self.down(y.mean((2, 3), keepdim=True)))))
        y = torch.sigmoid(self.own(y)) * gate
        z = self.even(self.parts(torch.cat([x, y], 1)))
        z = nn.functional.adaptive_avg_pool2d(self.last(torch.relu(z)), 1).flatten(1)
        return self.head(z)


def test_a_wide_graph_is_the_same_function() -> None:
    model, x = Odd().double().eval(), torch.randn(2, 3, 32, 32).double()
    made = exported(model, x)
    assert widen(made) == 7  # all but the grouped one and the one that is even and reads what is narrow
    assert sorted(w % 8 for w in widths(made)) == [0] * 8 + [2]
    assert copies(made) == 3  # two for the concatenation, one for the head
    with torch.no_grad():
        torch.testing.assert_close(made(x), model(x))


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2", "efficientnet_b0", "mobilenet_v3_small", "densenet121"])
def test_models_cut_without_rounding(name: str) -> None:
    torchvision = pytest.importorskip("tests.zoo.torchvision_models").import_torchvision()
    torch.manual_seed(0)
    model, x = getattr(torchvision.models, name)().eval().double(), torch.randn(2, 3, 64, 64).double()
    cut = sw.prune(model, x, sw.Budget(channels=0.7), allocate="uniform").model.eval()
    folded, _ = fold_batch_norms(cut, ((x,), {}))
    made = exported(folded, x)
    assert any(w % 8 for w in widths(made)) and widen(made) > 0
    assert not any(w % 8 for w in widths(made))
    assert copies(made) <= 1 or name == "densenet121"  # its concatenations copy anyway
    with torch.no_grad():
        torch.testing.assert_close(made(x), folded(x))


class Changed(nn.Module):
    """What a convolution makes is changed in place, somehow."""

    def __init__(self, how: Any) -> None:
        super().__init__()
        self.first, self.second, self.how = nn.Conv2d(3, 5, 3, 1, 1), nn.Conv2d(5, 5, 1), how

    def forward(self, x: torch.Tensor) -> Any:
        return self.how(self, x, self.first(x))


def part_seen(own: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    part = y[:, :2]
    return own.second(y.relu_()), part


def part_changed(own: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    y[:, :2].clamp_(-0.1, 0.1)
    return own.second(y)


def part_set(own: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    y[:, 0] = 0
    return own.second(y)


def view_changed(own: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    y.flatten(1).mul_(2)
    return own.second(y)


def other_name_changed(own: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    nn.functional.relu(y.detach(), inplace=True)
    return own.second(y)


def view_kept(own: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    view = y.permute(0, 2, 3, 1)
    z = nn.functional.dropout(y, 0.5, False)
    z += own.first(x)
    return view, own.second(z)


def autocast_changed(own: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    z = own.second(y)
    with torch.autocast("cpu", enabled=False):
        y.mul_(3)
    return z + y


@pytest.mark.parametrize(
    "how", [part_seen, part_changed, part_set, view_changed, other_name_changed, view_kept, autocast_changed]
)
def test_what_others_see_is_left_alone(how: Any) -> None:
    model, x = Changed(how).eval(), torch.randn(2, 3, 8, 8)
    made = exported(model, x)
    assert widen(made) == 0 and widths(made)[:2] == [5, 5]
    with torch.no_grad():
        torch.testing.assert_close(made(x), model(x))


def test_a_change_that_nobody_else_sees_is_passed_on() -> None:
    model, x = (
        Changed(lambda own, x, y: own.second(y.relu_().add_(own.first(x))).relu_()).eval(),
        torch.randn(2, 3, 8, 8),
    )
    made = exported(model, x)
    assert widen(made) == 3 and copies(made) == 1
    with torch.no_grad():
        torch.testing.assert_close(made(x), model(x))


class Gated(nn.Module):
    """Two products, a gate, and one back; a norm over what is odd, and a small head."""

    def __init__(self, width: int = 301, inner: int = 523) -> None:
        super().__init__()
        self.norm, self.gate, self.up = (
            nn.LayerNorm(width),
            nn.Linear(width, inner),
            nn.Linear(width, inner, bias=False),
        )
        self.down, self.even, self.head = nn.Linear(inner, width), nn.Linear(width, 512), nn.Linear(512, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        x = x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))
        return self.head(nn.functional.gelu(self.even(x)).mean(1))


def products(made: Any) -> list[tuple[int, ...]]:
    return [tuple(n.args[1].meta["val"].shape) for n in made.graph.nodes if n.target is _aten.linear.default]


def test_wide_products_are_the_same_function() -> None:
    model, x = Gated().double().eval(), torch.randn(3, 5, 301).double()
    made = exported(model, x)
    assert widen_products(made) == 4
    assert products(made) == [(528, 304), (528, 304), (304, 528), (512, 304), (7, 512)]
    assert copies(made) == 1  # before the sum; between the products nothing is copied
    with torch.no_grad():
        torch.testing.assert_close(made(x), model(x))


@pytest.mark.parametrize("name", ["vit", "swin"])
def test_transformers_cut_without_rounding(name: str) -> None:
    torchvision = pytest.importorskip("tests.zoo.torchvision_models").import_torchvision()
    torch.manual_seed(0)
    if name == "vit":
        model = torchvision.models.VisionTransformer(32, 8, 2, 8, 384, 768, num_classes=10)
    else:
        sizes = {"patch_size": [4, 4], "window_size": [4, 4], "embed_dim": 192, "depths": [2, 2], "num_heads": [6, 12]}
        model = torchvision.models.SwinTransformer(**sizes, num_classes=10)
    model, x = model.eval().double(), torch.randn(2, 3, 32, 32).double()
    cut = sw.prune(model, x, sw.Budget(channels=0.7), allocate="uniform").model.eval()
    made = exported(cut, x)
    odd = [s for s in products(made) if s[0] * s[1] >= 2**16 and any(n % 8 for n in s)]
    assert odd and widen_products(made) == len(odd)
    with torch.no_grad():
        torch.testing.assert_close(made(x), cut(x))


@pytest.mark.parametrize("name", ["gated", "odd", "full precision"])
def test_forms_that_a_gpu_is_offered(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for packs in ("pack_two_of_four", "pack_zeros"):
        monkeypatch.setattr(deployment, packs, lambda *_: None)
    model, x = (Odd(), torch.randn(2, 3, 32, 32)) if name == "odd" else (Gated(), torch.randn(2, 5, 301))
    dtype = torch.float32 if name == "full precision" else torch.bfloat16
    model, x, family = model.eval().to(dtype), x.to(dtype), "arranged" if name == "odd" else "folded"
    forms = {n: build for n, build, _ in deployment._forms(model, ((x,), {}), torch.device("cuda"), ["graph"])}
    padded = [] if name == "full precision" else ["padded, graph"]
    assert list(forms) == [*padded, f"{family}, graph", "plain, graph"]
    for build in forms.values():
        made, notes = build()
        assert any("padded to eights" in n for n in notes) == (build is forms.get("padded, graph"))
        with torch.no_grad():
            torch.testing.assert_close(made(x), model(x), rtol=2e-2, atol=2e-2)


def test_a_product_whose_weight_is_made_on_the_way_is_left_alone() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(301, 401)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(x, 2 * self.one.weight, self.one.bias)

    model, x = Tied().eval(), torch.randn(4, 301)
    made = exported(model, x)
    assert widen_products(made) == 0
    torch.testing.assert_close(made(x), model(x))


def test_both_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Conv2d(3, 5, 1), nn.ReLU(), nn.Conv2d(5, 16, 1), nn.Flatten(), nn.Linear(1024, 301)).eval()
    x = torch.randn(2, 3, 8, 8)
    made, used = rewrite.rewrite(model, ((x,), {}), pad=True)
    assert used == {"padded to eights": 2, "products padded to eights": 1}
    with torch.no_grad():
        torch.testing.assert_close(made(x), model(x), rtol=1e-4, atol=1e-5)


def test_no_weight_is_kept_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewrite, "_on_gpu", lambda node: True)
    monkeypatch.setattr(rewrite, "fastest_way", lambda *_: convolutions.Way("ours", convolutions.separate))
    model, x = nn.Sequential(nn.Conv2d(3, 61, 3), nn.ReLU(), nn.Conv2d(61, 61, 3)).eval(), torch.randn(1, 3, 16, 16)
    made, _ = rewrite.rewrite(model, ((x,), {}), pad=True)
    held = sum(t.numel() for t in (*made.parameters(), *made.buffers()))
    assert held == 64 * 3 * 9 + 64 + 64 * 64 * 9 + 64
    with torch.no_grad():
        torch.testing.assert_close(made(x), model(x), rtol=1e-4, atol=1e-5)


def test_an_image_without_a_batch_is_left_alone() -> None:
    model, x = nn.Sequential(nn.Conv2d(3, 5, 1), nn.ReLU(), nn.Conv2d(5, 8, 1)), torch.randn(3, 8, 8)
    made = exported(model, x)
    assert widen(made) == 0
    torch.testing.assert_close(made(x), model(x))


def test_ways_are_chosen_for_the_wide_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def choose(x: Any, weight: Any, conv: Any) -> Any:
        seen.append((x.shape[1], len(weight), conv.after, conv.adds))
        return convolutions.Way("ours", convolutions.separate)

    monkeypatch.setattr(rewrite, "_on_gpu", lambda node: True)
    monkeypatch.setattr(rewrite, "fastest_way", choose)
    model, x = Odd().eval(), torch.randn(2, 3, 32, 32)
    made, used = rewrite.rewrite(model, ((x,), {}), pad=True)
    assert used == {"padded to eights": 7, "ours": 9}
    assert seen[0] == (3, 16, "relu", False) and (16, 8, "relu", False) in seen and (8, 16, "", False) in seen
    with torch.no_grad():
        torch.testing.assert_close(made(x), model(x), rtol=1e-4, atol=1e-5)


def test_only_odd_widths_in_bfloat16_are_worth_it() -> None:
    assert worth_while(Odd().bfloat16()) and not worth_while(Odd()) and not worth_while(Odd().half())
    assert not worth_while(nn.Sequential(nn.Conv2d(3, 16, 3)).bfloat16())
    assert not worth_while(nn.Sequential(nn.Linear(3, 5)).bfloat16()) and not worth_while(
        nn.Linear(512, 512).bfloat16()
    )
    assert worth_while(Gated().bfloat16()) and not worth_while(Gated())
    assert worth_while(nn.Sequential(nn.MultiheadAttention(300, 3)).bfloat16())
    with pytest.raises(sw.SapwoodError, match="widened"):
        rewrite.rewrite(nn.Conv2d(3, 16, 3).eval(), ((torch.randn(1, 3, 8, 8),), {}), pad=True)
