"""Convolutions computed otherwise, with what is done to their results: the same function, in graphs as well."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from sapwood.measurement import convolutions, rewrite
from sapwood.measurement.backends import prepare
from sapwood.measurement.convolutions import Arranged, Conv, separate, ways_for


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "channels", "size"),
    [(7, 2, 3, 3, 32), (3, 1, 1, 3, 16), (4, 4, 0, 3, 32), (16, 16, 0, 3, 32), (5, 3, 2, 2, 48), (1, 1, 0, 32, 8)],
)
def test_several_pixels_at_once_are_the_same_function(
    kernel: int, stride: int, padding: int, channels: int, size: int, adds: bool
) -> None:
    x, bias = torch.randn(2, channels, 32, size).double(), torch.randn(6).double()
    weight = torch.randn(6, channels, kernel, kernel).double()
    conv = Conv((kernel, kernel), (stride, stride), (padding, padding), (1, 1), 1, "relu", adds)
    plain = torch.nn.functional.conv2d(x, weight, bias, stride, padding)
    other = torch.randn_like(plain) if adds else None
    wanted = separate(x, weight, bias, other, conv)
    ways = list(ways_for(x, weight, conv))
    assert len(ways) > 2  # separate, fused, and at least one that joins pixels
    for way in ways:
        torch.testing.assert_close(Arranged(way, weight, bias, conv)(x, other), wanted)


def test_what_does_not_divide_is_not_joined() -> None:
    conv = Conv((3, 3), (1, 1), (1, 1), (1, 1), 1, "relu", False)
    assert [w.name for w in ways_for(torch.randn(1, 3, 8, 7), torch.randn(4, 3, 3, 3), conv)] == ["separate", "fused"]
    valid = Conv((3, 3), (1, 1), (0, 0), (1, 1), 1, "relu", False)  # the output is narrower than the input
    assert [w.name for w in ways_for(torch.randn(1, 3, 8, 8), torch.randn(4, 3, 3, 3), valid)] == ["separate", "fused"]


class Residual(nn.Module):
    """Sums of two convolutions, of a convolution and its input, outputs used twice, a sum that is broadcast."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.left, self.right = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.block, self.twice = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.Conv2d(8, 8, 1)
        self.shift = nn.Parameter(torch.randn(1, 8, 1, 1))
        self.last = nn.Conv2d(8, 4, 3, stride=2, groups=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.stem(x))
        x = torch.relu(self.left(x) + self.right(x))
        x = torch.relu(self.block(x) + x)
        twice = self.twice(x)
        x = torch.relu(twice) + twice
        return torch.relu(self.last(x + self.shift)) + torch.relu(self.last(x) + self.shift[:, :4])


class Mobile(nn.Module):
    """Activations other than relu, kernels for each channel, sums without activation or into the other's memory."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.wide = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 24, 1)
        self.own, self.narrow = nn.Conv2d(24, 24, 3, 1, 1, groups=24), nn.Conv2d(24, 8, 1)
        self.inner, self.more = nn.ModuleList(nn.Conv2d(8, 8, 1) for _ in range(4)), nn.Conv2d(8, 16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.hardtanh(self.stem(x), 0.0, 6.0)
        x = x + self.narrow(nn.functional.relu6(self.own(nn.functional.relu6(self.wide(x))), inplace=True))
        x = nn.functional.silu(self.inner[0](x), inplace=True)
        x = nn.functional.hardswish(x + self.inner[1](x))
        into = x * 2
        kept = into[:, :4]
        x = torch.cat([into.add_(self.inner[2](x))[:, 4:], kept], 1)
        x = nn.functional.hardtanh(self.inner[3](x), -1, 1)
        return torch.relu(self.more(x))


class Odd(nn.Module):
    """Sums with a factor, values changed in place in between, a bias that is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scaled = torch.relu(torch.add(self.a(x), self.b(x), alpha=0.5))
        h = x * 1
        late = self.a(h)
        h.mul_(2)
        late = torch.relu(late) + self.b(h)
        y = torch.relu(self.a(x))
        z = y * 1
        other = self.c(y) + z
        z.mul_(3)
        other = torch.relu(other) + z
        view = y[:, :4]
        into = torch.relu(y.add_(self.c(y)))
        biased = torch.relu(torch.nn.functional.conv2d(x, self.b.weight, self.b.bias * 2))
        return scaled, late, other, view.clone(), into, biased


@pytest.mark.parametrize("chosen", ["separate", "fused"])
def test_order_matters_where_values_change_in_place(chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewrite, "_on_gpu", lambda node: True)
    ways = {w.name: w for w in (convolutions.SEPARATE, convolutions.FUSED)}
    monkeypatch.setattr(rewrite, "fastest_way", lambda x, w, conv: ways[chosen])
    model, x = Odd().eval(), torch.randn(2, 3, 8, 8)
    made, _ = rewrite.rewrite(model, ((x,), {}))
    with torch.no_grad():
        for found, wanted in zip(made(x), model(x), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("chosen", ["separate", "fused", "8 at once", "2 at once"])
def test_a_rewritten_graph_is_the_same_function(chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(x: Any, weight: Any, conv: Conv) -> Any:
        ways = list(ways_for(x, weight, conv))
        return next((w for w in ways if w.name == chosen), ways[min(1, len(ways) - 1)])

    monkeypatch.setattr(rewrite, "_on_gpu", lambda node: True)
    monkeypatch.setattr(rewrite, "fastest_way", choose)
    model, x = Residual().eval(), torch.randn(2, 3, 16, 16)
    made, used = rewrite.rewrite(model, ((x,), {}))
    assert sum(used.values()) == 7 and chosen in used
    torch.testing.assert_close(made(x), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("chosen", ["separate", "ours"])
def test_activations_and_sums_are_done_with_the_convolution(chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, bool]] = []
    ours = convolutions.Way("ours", separate)

    def choose(x: Any, weight: Any, conv: Conv) -> Any:
        seen.append((conv.after, conv.adds))
        return ours if chosen == "ours" else convolutions.SEPARATE

    monkeypatch.setattr(rewrite, "_on_gpu", lambda node: True)
    monkeypatch.setattr(rewrite, "fastest_way", choose)
    model, x = Mobile().eval(), torch.randn(2, 3, 16, 16)
    made, used = rewrite.rewrite(model, ((x,), {}))
    assert used == {chosen: 9}
    first = [("relu6", False), ("relu6", False), ("relu6", False), ("", True), ("silu", False), ("hardswish", True)]
    assert seen == [*first, ("", False), ("", False), ("relu", False)]
    given = x.clone()
    torch.testing.assert_close(made(given), model(x), rtol=1e-4, atol=1e-5)
    assert torch.equal(given, x)


class Turned(nn.Module):
    """A sum that lies otherwise in memory than the convolution, and values changed where autocast is switched."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        flat = (x + self.a(x)).view(len(x), -1)
        z = x * 1
        y = self.b(z)
        with torch.autocast("cpu", enabled=False):
            z.mul_(3)
        return flat, nn.functional.silu(y) + z


def test_layouts_and_hidden_changes_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def channels_last(*given: Any) -> torch.Tensor:
        return separate(*given).contiguous(memory_format=torch.channels_last)

    monkeypatch.setattr(rewrite, "_on_gpu", lambda node: True)
    monkeypatch.setattr(rewrite, "fastest_way", lambda x, w, conv: convolutions.Way("ours", channels_last))
    model: Any = Turned().eval().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = torch.randn(2, 4, 8, 8)
    made, used = rewrite.rewrite(model, ((x,), {}))
    assert used == {"ours": 2}
    for found, wanted in zip(made(x), model(x), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_kernels_of_our_own_are_for_what_they_can_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU none; on one those for the shape, unless they would take minutes to compile."""
    weight = torch.empty(32, 24, 1, 1, dtype=torch.bfloat16)
    conv = Conv((1, 1), (1, 1), (0, 0), (1, 1), 1, "relu6", False)
    x = torch.empty(2, 24, 8, 8, device="meta", dtype=torch.bfloat16)
    assert convolutions.one_pass_ways(x, weight, conv) == ()
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
    monkeypatch.setattr(convolutions, "triton_works", lambda device: True)

    def ways(made: int, channels: int, window: int, groups: int = 1, after: str = "relu6", **size: Any) -> list[str]:
        kernel = torch.empty(made, channels // groups, window, window, device="meta", dtype=torch.bfloat16)
        padding = window // 2
        conv = Conv(
            (window, window), (1, 1), (padding, padding), (1, 1), groups, after, False, size.get("biased", True)
        )
        x = torch.empty(size.get("batch", 2), channels, 8, 8, device="meta", dtype=torch.bfloat16)
        return [way.name for way in convolutions.one_pass_ways(x, kernel, conv)]

    assert ways(96, 24, 1) == ["one pass 128x64", "one pass 64x64"]
    assert ways(32, 16, 1)[0] == "2 at once in one pass"
    assert ways(96, 24, 3, after="") and not ways(96, 24, 3, after="", biased=False)
    assert not ways(96, 24, 3, after="relu") and not ways(96, 24, 5)
    assert ways(24, 24, 7, 24) == ["one pass 2 by 32", "one pass 2 by 64"] and not ways(24, 24, 9, 24)
    assert ways(16, 16, 3, 16, "relu") == ["one pass 4 by 16"]
    assert not ways(24, 24, 3, 4) and not ways(96, 24, 1, batch=2**20)


def test_the_race_leaves_out_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """A way that computes something else can never win."""

    def run_now(function: Any, inputs: Any, device: Any) -> Any:
        return prepare(function, inputs, "eager")

    wrong = convolutions.Way("wrong", lambda x, w, b, o, c: torch.zeros_like(separate(x, w, b, o, c)))
    monkeypatch.setattr(convolutions, "capture", run_now)
    conv = Conv((3, 3), (1, 1), (1, 1), (1, 1), 1, "relu", False)
    name = convolutions._race([wrong, convolutions.SEPARATE], torch.randn(2, 3, 4, 4), torch.randn(4, 3, 3, 3), conv)
    assert name == "separate"
