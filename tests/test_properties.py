"""Random networks out of the operators we have rules for: every cut passes the check.

A network is a list of steps. Each step works on a stack of feature maps (all of the same spatial
size) and pushes one; its numbers choose widths, groups and which maps it reads, modulo what is there.
"""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import sapwood as sw
from tests.helpers import outputs, same, snapshot
from tests.zoo.harness import randomise

WIDTHS = (4, 6, 8, 12, 16)
SIZE = 4


class Step(nn.Module):
    """Takes the stack of feature maps, gives one more."""

    def __init__(self, widths: list[int], number: int) -> None:
        super().__init__()
        self.pick = random.Random(number)
        self.source = self.pick.randrange(len(widths))
        self.width = widths[self.source]
        self.out = self.width

    def forward(self, maps: list[torch.Tensor]) -> torch.Tensor:
        return self.apply_to(maps[self.source])

    def apply_to(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class Conv(Step):
    def __init__(self, widths: list[int], number: int) -> None:
        super().__init__(widths, number)
        self.out = self.pick.choice(WIDTHS)
        groups = self.pick.choice([g for g in (1, 1, 2, 4) if self.width % g == 0 and self.out % g == 0])
        kernel = self.pick.choice((1, 3))
        self.conv = nn.Conv2d(self.width, self.out, kernel, padding=kernel // 2, groups=groups)

    def apply_to(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x)


class Depthwise(Step):
    def __init__(self, widths: list[int], number: int) -> None:
        super().__init__(widths, number)
        self.conv = nn.Conv2d(self.width, self.width, 3, padding=1, groups=self.width, bias=False)

    def apply_to(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(self.conv(x))


class Norm(Step):
    def __init__(self, widths: list[int], number: int) -> None:
        super().__init__(widths, number)
        groups = self.pick.choice([g for g in (1, 2, 4) if self.width % g == 0])
        kinds = (nn.BatchNorm2d(self.width), nn.GroupNorm(groups, self.width), nn.InstanceNorm2d(self.width))
        self.norm = self.pick.choice(kinds)

    def apply_to(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.norm(x))


class ChannelsLastNorm(Step):
    def __init__(self, widths: list[int], number: int) -> None:
        super().__init__(widths, number)
        self.norm = nn.LayerNorm(self.width)

    def apply_to(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Residual(Step):
    def __init__(self, widths: list[int], number: int) -> None:
        super().__init__(widths, number)
        self.other = self.pick.randrange(len(widths))
        same_width = widths[self.other] == self.width
        self.fit = nn.Identity() if same_width else nn.Conv2d(widths[self.other], self.width, 1)
        self.times = self.pick.random() < 0.3

    def forward(self, maps: list[torch.Tensor]) -> torch.Tensor:
        a, b = maps[self.source], self.fit(maps[self.other])
        return a * b.sigmoid() if self.times else a + b


class Concatenation(Step):
    def __init__(self, widths: list[int], number: int) -> None:
        super().__init__(widths, number)
        self.parts = [self.pick.randrange(len(widths)) for _ in range(self.pick.choice((2, 3)))]
        self.out = sum(widths[p] for p in self.parts)

    def forward(self, maps: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([maps[p] for p in self.parts], dim=1)


class Split(Step):
    def __init__(self, widths: list[int], number: int) -> None:
        super().__init__(widths, number)
        self.cut = self.pick.choice((2, self.width // 2, self.width - 2))
        self.by_chunk = self.pick.random() < 0.5
        sizes = (self.width // 2,) * 2 if self.by_chunk else (self.cut, self.width - self.cut)
        self.out = self.pick.choice(WIDTHS)
        self.a, self.b = (nn.Conv2d(s, self.out, 1) for s in sizes)

    def apply_to(self, x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, 1) if self.by_chunk else torch.split(x, [self.cut, x.shape[1] - self.cut], dim=1)
        return self.a(a) + self.b(b)


class Gate(Step):
    def __init__(self, widths: list[int], number: int) -> None:
        super().__init__(widths, number)
        self.down, self.up = nn.Linear(self.width, 4), nn.Linear(4, self.width)

    def apply_to(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.up(F.relu(self.down(F.adaptive_avg_pool2d(x, 1).flatten(1))))
        return x * gate.sigmoid()[:, :, None, None]


class Linear(Step):
    """A gated unit on the pixels."""

    def __init__(self, widths: list[int], number: int) -> None:
        super().__init__(widths, number)
        self.hidden = self.pick.choice(WIDTHS)
        self.up, self.down = nn.Linear(self.width, 2 * self.hidden), nn.Linear(self.hidden, self.width)

    def apply_to(self, x: torch.Tensor) -> torch.Tensor:
        value, gate = self.up(x.flatten(2).transpose(1, 2)).chunk(2, dim=-1)
        return self.down(value * F.gelu(gate)).transpose(1, 2).reshape(x.shape)


class Shuffle(Step):
    def __init__(self, widths: list[int], number: int) -> None:
        super().__init__(widths, number)
        self.groups = self.pick.choice([g for g in (2, 3, 4) if self.width % g == 0])

    def apply_to(self, x: torch.Tensor) -> torch.Tensor:
        b, c, h, w = x.shape
        return x.view(b, self.groups, c // self.groups, h, w).transpose(1, 2).reshape(b, -1, h, w)


class Attention(Step):
    def __init__(self, widths: list[int], number: int) -> None:
        super().__init__(widths, number)
        self.heads, self.head_dim = self.pick.choice((1, 2, 4)), self.pick.choice((2, 4))
        self.fused, self.by_hand = self.pick.random() < 0.5, self.pick.random() < 0.5
        inner = self.heads * self.head_dim
        self.q, self.k, self.v = (nn.Linear(self.width, inner) for _ in range(3))
        self.qkv, self.proj = nn.Linear(self.width, 3 * inner), nn.Linear(inner, self.width)

    def apply_to(self, x: torch.Tensor) -> torch.Tensor:
        t = x.flatten(2).transpose(1, 2)
        shape = (*t.shape[:2], self.heads, self.head_dim)
        parts = self.qkv(t).chunk(3, -1) if self.fused else (self.q(t), self.k(t), self.v(t))
        q, k, v = (p.view(shape).transpose(1, 2) for p in parts)
        if self.by_hand:
            y = (q @ k.transpose(-2, -1) * self.head_dim**-0.5).softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v)
        return self.proj(y.transpose(1, 2).flatten(2)).transpose(1, 2).reshape(x.shape)


STEPS = (
    Conv,
    Conv,
    Depthwise,
    Norm,
    ChannelsLastNorm,
    Residual,
    Concatenation,
    Split,
    Gate,
    Linear,
    Shuffle,
    Attention,
)


class Network(nn.Module):
    def __init__(self, numbers: list[tuple[int, int]], flatten: bool) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        widths, self.steps = [8], nn.ModuleList()
        for kind, number in numbers:
            step = STEPS[kind](widths, number)
            if step.out <= 64:
                self.steps.append(step)
                widths.append(step.out)
        self.flatten = flatten
        self.head = nn.Linear(widths[-1] * (SIZE * SIZE if flatten else 1), 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        maps = [self.stem(x)]
        for step in self.steps:
            maps.append(step(maps))
        return self.head(maps[-1].flatten(1) if self.flatten else maps[-1].mean((2, 3)))


programs = st.lists(st.tuples(st.integers(0, len(STEPS) - 1), st.integers(0, 2**16)), min_size=1, max_size=9)


@settings(max_examples=120, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(programs, st.booleans(), st.sampled_from((0.5, 0.3, 0.8)), st.sampled_from(("uniform", "global")))
def test_every_cut_passes_the_check(
    program: list[tuple[int, int]], flatten: bool, fraction: float, allocate: str
) -> None:
    torch.manual_seed(0)
    model, inputs = randomise(Network(program, flatten)).double(), torch.randn(2, 3, SIZE, SIZE).double()
    before = snapshot(model)
    wanted = [t.shape for t in outputs(model, inputs)]
    budget = sw.Budget(channels=fraction)
    plan = sw.make_plan(model, inputs, budget, allocate=allocate)
    small = sw.cut(model, plan)
    result = sw.check(model, small, plan, inputs)  # nothing mended: the plan itself must be right
    assert result.passed, result
    assert result.max_error < 1e-8
    assert [t.shape for t in outputs(small, inputs)] == wanted
    assert not plan.notes, plan.notes
    assert plan.achieved["params"] == sum(p.numel() for p in small.parameters())
    assert same(model, before)
