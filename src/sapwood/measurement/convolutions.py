"""Other ways to compute a convolution with its bias, sum and relu; which is fastest is measured, shape by shape.

cuDNN computes a convolution, its bias, a sum and the relu in one kernel, where PyTorch's eager path takes up to
four. Few input channels (an image has three) keep it from its fast kernels; zeros beside them, or every window of
stride x stride pixels read as channels, give it what it wants. All of these compute the same function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from sapwood.measurement.backends import capture
from sapwood.measurement.clock import take_turns
from sapwood.surgery.check import relative_error

Tensor = torch.Tensor
ALIGNED = 8
FEW = 16  # input channels below which a convolution is rearranged


@dataclass(frozen=True)
class Conv:
    """A convolution and what is done to its result at once; ``window`` is the extent of its kernel."""

    window: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int
    relu: bool
    adds: bool


def separate(x: Tensor, weight: Tensor, bias: Tensor | None, other: Tensor | None, conv: Conv) -> Tensor:
    """One operator after the other, as PyTorch does."""
    out = F.conv2d(x, weight, bias, conv.stride, conv.padding, conv.dilation, conv.groups)
    out = out if other is None else out + other
    return F.relu(out) if conv.relu else out


def fused(x: Tensor, weight: Tensor, bias: Tensor | None, other: Tensor | None, conv: Conv) -> Tensor:
    """cuDNN's kernel for all of it; without a relu there is none."""
    places = [list(conv.stride), list(conv.padding), list(conv.dilation), conv.groups]
    aten: Any = torch.ops.aten
    if not conv.relu:
        return separate(x, weight, bias, other, conv)
    if other is None:
        return aten.cudnn_convolution_relu.default(x, weight, bias, *places)  # type: ignore[no-any-return]
    return aten.cudnn_convolution_add_relu.default(x, weight, other, 1.0, bias, *places)  # type: ignore[no-any-return]


def padded(x: Tensor, weight: Tensor, bias: Tensor | None, other: Tensor | None, conv: Conv) -> Tensor:
    """Zeros beside the channels; the weight has them already."""
    return fused(F.pad(x, (0, 0, 0, 0, 0, weight.shape[1] - x.shape[1])), weight, bias, other, conv)


def pad_weight(weight: Tensor, conv: Conv) -> Tensor:
    extra = -weight.shape[1] % ALIGNED
    return F.pad(weight, (0, 0, 0, 0, 0, extra)).contiguous(memory_format=torch.channels_last)


def gathered(x: Tensor, weight: Tensor, bias: Tensor | None, other: Tensor | None, conv: Conv) -> Tensor:
    """Every window of stride x stride pixels as channels of one; the weight is arranged like that already."""
    n, c, h, w = x.shape
    (sh, sw), (ph, pw) = conv.stride, conv.padding
    kh, kw = weight.shape[2:]
    rows, columns = (h + 2 * ph - conv.window[0]) // sh + kh, (w + 2 * pw - conv.window[1]) // sw + kw
    x = F.pad(x, (pw, sw * columns - w - pw, ph, sh * rows - h - ph)).permute(0, 2, 3, 1)
    x = x.reshape(n, rows, sh, columns, sw, c).permute(0, 1, 3, 2, 4, 5).reshape(n, rows, columns, sh * sw * c)
    x = F.pad(x, (0, weight.shape[1] - sh * sw * c)).permute(0, 3, 1, 2)
    plain = Conv((kh, kw), (1, 1), (0, 0), (1, 1), 1, conv.relu, conv.adds)
    return fused(x, weight, bias, other, plain)


def gather_weight(weight: Tensor, conv: Conv) -> Tensor:
    """(out, in, kh, kw) as (out, stride x stride x in, kh / stride, kw / stride), with zeros at the edges."""
    (sh, sw), (o, c, kh, kw) = conv.stride, weight.shape
    rows, columns = -(-kh // sh), -(-kw // sw)
    wide = F.pad(weight, (0, sw * columns - kw, 0, sh * rows - kh))
    wide = wide.reshape(o, c, rows, sh, columns, sw).permute(0, 3, 5, 1, 2, 4).reshape(o, sh * sw * c, rows, columns)
    return F.pad(wide, (0, 0, 0, 0, 0, -wide.shape[1] % ALIGNED)).contiguous(memory_format=torch.channels_last)


Compute = Callable[[Tensor, Tensor, "Tensor | None", "Tensor | None", Conv], Tensor]


@dataclass(frozen=True)
class Way:
    """A way to compute it, and how it wants the weight."""

    name: str
    compute: Compute
    weight: Callable[[Tensor, Conv], Tensor] = lambda weight, conv: weight


WAYS = (
    Way("separate", separate),
    Way("fused", fused),
    Way("padded", padded, pad_weight),
    Way("gathered", gathered, gather_weight),
)


class Arranged(nn.Module):
    """A convolution in the way that was found to be fastest."""

    def __init__(self, way: Way, weight: Tensor, bias: Tensor | None, conv: Conv) -> None:
        super().__init__()
        self.compute, self.conv = way.compute, conv
        self.register_buffer("weight", way.weight(weight, conv))
        self.register_buffer("bias", bias)
        self.weight: Tensor
        self.bias: Tensor | None

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        return self.compute(x, self.weight, self.bias, other, self.conv)


def ways_for(weight: Tensor, conv: Conv) -> Iterator[Way]:
    """Those that can be tried on a convolution; the first is PyTorch's own."""
    yield WAYS[0]
    if conv.relu:
        yield WAYS[1]
    if conv.groups == 1 and weight.shape[1] < FEW and weight.shape[1] % ALIGNED:
        yield WAYS[2]
        if max(conv.stride) > 1 and conv.dilation == (1, 1):
            yield WAYS[3]


_KNOWN: dict[tuple[Any, ...], str] = {}


def fastest_way(x: Tensor, weight: Tensor, bias: Tensor | None, conv: Conv) -> Way:
    """The fastest for these shapes on this device, each measured in a graph; wrong or failing ones are left out.

    ``x`` may be without data: only its shape counts.
    """
    ways = list(ways_for(weight, conv))
    key = (str(weight.device), x.dtype, tuple(x.shape), tuple(weight.shape), bias is None, conv)
    if key not in _KNOWN:
        _KNOWN[key] = ways[0].name if len(ways) == 1 else _race(ways, x, weight, bias is not None, conv)
    return next(way for way in ways if way.name == _KNOWN[key])


def _race(ways: list[Way], x: Tensor, weight: Tensor, with_bias: bool, conv: Conv) -> str:
    device, dtype = weight.device, weight.dtype
    some = torch.randn(x.shape, device=device).to(dtype).contiguous(memory_format=torch.channels_last)
    kernel = (torch.randn(weight.shape, device=device) / weight[0].numel() ** 0.5).to(dtype)
    kernel = kernel.contiguous(memory_format=torch.channels_last)
    bias = torch.randn(len(weight), device=device).to(dtype) if with_bias else None
    wanted = F.conv2d(some, kernel, bias, conv.stride, conv.padding, conv.dilation, conv.groups)
    other = torch.randn_like(wanted) if conv.adds else None
    wanted = separate(some, kernel, bias, other, conv)
    calls = {}
    for way in ways:
        try:
            run = capture(Arranged(way, kernel, bias, conv), ((some, other), {}), device)
            if relative_error(wanted, run.call()) < 0.05:
                calls[way.name] = run.call
        except Exception:  # cuDNN refuses some shapes: then this way is not for them
            continue
    times = take_turns(calls, seconds=0.05, least=7, warm_up=2, device=device)
    return min(times, key=lambda name: times[name].median_ms)
