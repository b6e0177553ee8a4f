"""Other ways to compute a convolution with its bias, sum and activation; which is fastest is measured by shape.

cuDNN computes a convolution, its bias, a sum and the relu in one kernel, where PyTorch's eager path takes up to
four. It is slow with few channels (an image has three). In channels-last memory neighbouring pixels of a row are
simply more channels: read several at once, with a weight arranged for that, and the same function is a convolution of
many channels. No copy is made. For what cuDNN has no such kernel (other activations, a kernel for each channel) there
are ours in ``one_pass``.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from sapwood.measurement.backends import capture
from sapwood.measurement.clock import take_turns
from sapwood.surgery.check import relative_error

Tensor = torch.Tensor
FEW = 65  # input channels below which several pixels are tried as one
AT_ONCE = (1, 2, 4, 8)
HALF = (torch.float16, torch.bfloat16)
TAPS, WIDEST = 9, 7  # of a kernel; one with more takes minutes to compile
MANY = 2**23  # outputs above which large tiles fill any device
AFTER: dict[str, Callable[[Tensor], Tensor]] = {
    "": lambda x: x,
    "relu": F.relu,
    "relu6": F.relu6,
    "silu": F.silu,
    "hardswish": F.hardswish,
}
"""Activations that can be done with a convolution."""


@dataclass(frozen=True)
class Conv:
    """A convolution and what is done to its result at once; ``window`` is the extent of its kernel."""

    window: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int
    after: str
    adds: bool
    biased: bool = True

    def own_kernels(self, weight: Tensor) -> bool:
        """A kernel for each channel."""
        return self.groups > 1 and self.groups == weight.shape[0] and weight.shape[1] == 1

    def all_in_cudnn(self) -> bool:
        """Whether cuDNN leaves nothing to be done after it."""
        return self.after == "relu" or not (self.after or self.adds or self.biased)


def separate(x: Tensor, weight: Tensor, bias: Tensor | None, other: Tensor | None, conv: Conv) -> Tensor:
    """One operator after the other, as PyTorch does."""
    out = F.conv2d(x, weight, bias, conv.stride, conv.padding, conv.dilation, conv.groups)
    out = out if other is None else out + other
    return AFTER[conv.after](out)


def fused(x: Tensor, weight: Tensor, bias: Tensor | None, other: Tensor | None, conv: Conv) -> Tensor:
    """cuDNN's kernel for all of it; without a relu, or on a CPU, there is none."""
    if conv.after != "relu" or not x.is_cuda:
        return separate(x, weight, bias, other, conv)
    places = [list(conv.stride), list(conv.padding), list(conv.dilation), conv.groups]
    aten: Any = torch.ops.aten
    if other is None:
        return aten.cudnn_convolution_relu.default(x, weight, bias, *places)  # type: ignore[no-any-return]
    return aten.cudnn_convolution_add_relu.default(x, weight, other, 1.0, bias, *places)  # type: ignore[no-any-return]


def _joined(x: Tensor, pixels: int) -> Tensor:
    """So many pixels of a row as the channels of one; a view where channels are last in memory."""
    n, c, h, w = x.shape
    return x.permute(0, 2, 3, 1).reshape(n, h, w // pixels, pixels * c).permute(0, 3, 1, 2)


def _reach(weight_width: int, conv: Conv, made: int) -> int:
    """How many joined pixels to the left and right the joined kernel must see."""
    read = made * conv.stride[1]
    first = -(conv.padding[1] // -read) if conv.padding[1] else 0
    last = ((made - 1) * conv.stride[1] - conv.padding[1] + weight_width - 1) // read
    return max(first, last, 0)


def several(made: int, inner: Compute = fused) -> Compute:
    """So many outputs of a row at once; the weight is arranged for that."""

    def compute(x: Tensor, weight: Tensor, bias: Tensor | None, other: Tensor | None, conv: Conv) -> Tensor:
        x = _joined(x, made * conv.stride[1])
        other = None if other is None else _joined(other, made)
        window = (int(weight.shape[2]), int(weight.shape[3]))
        place = (conv.padding[0], weight.shape[3] // 2)
        joined = Conv(window, (conv.stride[0], 1), place, (1, 1), 1, conv.after, conv.adds, conv.biased)
        out = inner(x, weight, bias, other, joined)
        n, c, h, w = out.shape
        return out.permute(0, 2, 3, 1).reshape(n, h, w * made, c // made).permute(0, 3, 1, 2)

    return compute


def several_weight(weight: Tensor, conv: Conv, made: int) -> Tensor:
    """(out, in, kh, kw) as (made x out, made x stride x in, kh, joined pixels), zero where nothing is read."""
    out, c, kh, kw = weight.shape
    read, reach = made * conv.stride[1], _reach(kw, conv, made)
    arranged = weight.new_zeros(made, out, read, c, kh, 2 * reach + 1)
    for o in range(made):
        for tap in range(2 * reach + 1):
            for i in range(read):
                column = (tap - reach) * read + i - (o * conv.stride[1] - conv.padding[1])
                if 0 <= column < kw:
                    arranged[o, :, i, :, :, tap] = weight[:, :, :, column]
    arranged = arranged.reshape(made * out, read * c, kh, 2 * reach + 1)
    return arranged.contiguous(memory_format=torch.channels_last)


Compute = Callable[[Tensor, Tensor, "Tensor | None", "Tensor | None", Conv], Tensor]


def one_pass(
    tile: tuple[int, ...], x: Tensor, weight: Tensor, bias: Tensor | None, other: Tensor | None, conv: Conv
) -> Tensor:
    """Our kernels; ``tile`` is the part of the output that one block computes."""
    kernels: Any = torch.ops.sapwood  # ``triton_works`` has loaded them
    last = torch.channels_last
    x = x.contiguous(memory_format=last)
    other = None if other is None else other.contiguous(memory_format=last)
    places = [list(conv.stride), list(conv.padding)]
    if conv.groups == 1:
        return kernels.convolution(x, weight, bias, other, *places, conv.after, list(tile))  # type: ignore[no-any-return]
    window, dilation = list(conv.window), list(conv.dilation)
    made: Tensor = kernels.depthwise(x, weight, bias, other, window, *places, dilation, conv.after, list(tile))
    return made


@dataclass(frozen=True)
class Way:
    """A way to compute it, and how it wants the weight."""

    name: str
    compute: Compute
    made: int = 0  # outputs of a row at once; 0 leaves the weight as it is
    taps_first: bool = False

    def weight(self, weight: Tensor, conv: Conv) -> Tensor:
        if self.taps_first:
            return weight.flatten(1).t().contiguous()
        return several_weight(weight, conv, self.made) if self.made else weight

    def bias(self, bias: Tensor | None) -> Tensor | None:
        return bias.repeat(self.made) if self.made and bias is not None else bias


SEPARATE, FUSED = Way("separate", separate), Way("fused", fused)
SEVERAL = tuple(Way(f"{made} at once", several(made), made) for made in AT_ONCE)
ONE_PASS = tuple(Way(f"one pass {m}x{n}", partial(one_pass, (m, n))) for m, n in ((128, 64), (64, 64)))
JOINED = tuple(
    Way(f"{made} at once in one pass", several(made, partial(one_pass, (128, 128))), made) for made in AT_ONCE
)
OWN_KERNELS = tuple(
    Way(f"one pass {w} by {c}", partial(one_pass, (w, c)), taps_first=True) for w, c in ((2, 32), (2, 64), (4, 16))
)


class Arranged(nn.Module):
    """A convolution in the way that was found to be fastest."""

    def __init__(self, way: Way, weight: Tensor, bias: Tensor | None, conv: Conv) -> None:
        super().__init__()
        self.compute, self.conv = way.compute, conv
        self.register_buffer("weight", way.weight(weight, conv))
        self.register_buffer("bias", way.bias(bias))
        self.weight: Tensor
        self.bias: Tensor | None

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        return self.compute(x, self.weight, self.bias, other, self.conv)


def ways_for(x: Tensor, weight: Tensor, conv: Conv) -> Iterator[Way]:
    """Those that can be tried on a convolution; the first is PyTorch's own."""
    yield SEPARATE
    if conv.after == "relu":
        yield FUSED
    ours = one_pass_ways(x, weight, conv)
    yield from ours
    if not ours and _joinable(weight, conv):
        yield from (way for way in SEVERAL if _fits(x, weight, conv, way.made))


def one_pass_ways(x: Tensor, weight: Tensor, conv: Conv) -> tuple[Way, ...]:
    """Our kernels where cuDNN has none that does it all; the first is a good guess."""
    if not weight.is_cuda or not _small(x, weight, conv) or not triton_works(weight.device):
        return ()
    if conv.own_kernels(weight):
        ways = OWN_KERNELS[2:] if len(weight) <= 16 else OWN_KERNELS[:2]
        return ways if weight.dtype in (*HALF, torch.float32) and max(conv.window) <= WIDEST else ()
    half = weight.dtype in HALF and conv.dilation == (1, 1) and conv.groups == 1
    if not half or conv.all_in_cudnn() or conv.window[0] * conv.window[1] > TAPS:
        return ()
    joined = [way for way in JOINED if _joinable(weight, conv) and _fits(x, weight, conv, way.made)]
    joined = [way for way in joined if conv.window[0] * (2 * _reach(conv.window[1], conv, way.made) + 1) <= TAPS]
    if weight.shape[1] % 8 == 0:  # pixels wide enough to be read as they are
        joined = [way for way in joined if weight.shape[0] * way.made <= 64][-1:]
    pixels = x.numel() // x.shape[1] // (conv.stride[0] * conv.stride[1])
    return (*joined, *(ONE_PASS if pixels * weight.shape[0] < MANY else ONE_PASS[:1]))


def _small(x: Tensor, weight: Tensor, conv: Conv) -> bool:
    """Whether 32 bits count the values that are read and made."""
    made = x.shape[0] * weight.shape[0]
    for size, window, stride, padding in zip(x.shape[2:], conv.window, conv.stride, conv.padding, strict=True):
        made *= (size + 2 * padding) // stride + window
    return max(x.numel(), made) < 2**31


@lru_cache
def triton_works(device: torch.device) -> bool:
    """Tried on a convolution of four values; where there is no compiler, or the GPU is too old, it does not."""
    if importlib.util.find_spec("triton") is None or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    ones = torch.ones(1, 1, 2, 2, device=device)
    conv = Conv((1, 1), (1, 1), (0, 0), (1, 1), 2, "", False)
    try:
        importlib.import_module("sapwood.measurement.one_pass")
        return bool((one_pass((2, 8), ones, ones[:, :, 0, 0], None, None, conv) == 1).all())
    except Exception:
        return False


def _joinable(weight: Tensor, conv: Conv) -> bool:
    return conv.groups == 1 and conv.dilation == (1, 1) and weight.shape[1] < FEW


def _fits(x: Tensor, weight: Tensor, conv: Conv, made: int) -> bool:
    """Rows divide, the output is as wide as it was, and the joined channels are what matrix units like."""
    read, width = made * conv.stride[1], x.shape[3]
    out = (width + 2 * conv.padding[1] - weight.shape[3]) // conv.stride[1] + 1
    useful = weight.shape[1] * read % 8 == 0 and weight.shape[1] * read <= 128 and weight.shape[0] * made <= 1024
    return read > 1 and useful and width % read == 0 and out == width // read * made


_KNOWN: dict[tuple[Any, ...], str] = {}


def fastest_way(x: Tensor, weight: Tensor, conv: Conv) -> Way:
    """The fastest for these shapes on this device, each measured in a graph; wrong or failing ones are left out.

    ``x`` may be without data: only its shape counts.
    """
    ways = list(ways_for(x, weight, conv))
    key = (str(weight.device), x.dtype, tuple(x.shape), tuple(weight.shape), conv)
    if key not in _KNOWN:
        _KNOWN[key] = ways[0].name if len(ways) == 1 else _race(ways, x, weight, conv)
    return next(way for way in ways if way.name == _KNOWN[key])


def _race(ways: list[Way], x: Tensor, weight: Tensor, conv: Conv) -> str:
    device, dtype = weight.device, weight.dtype
    some = torch.randn(x.shape, device=device).to(dtype).contiguous(memory_format=torch.channels_last)
    kernel = (torch.randn(weight.shape, device=device) / weight[0].numel() ** 0.5).to(dtype)
    kernel = kernel.contiguous(memory_format=torch.channels_last)
    bias = torch.randn(len(weight), device=device).to(dtype) if conv.biased else None
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
