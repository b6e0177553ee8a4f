"""Triton kernels: a convolution with its bias, a sum and an activation in one pass over memory.

cuDNN does this for relu alone. After anything else (relu6, silu, hardswish, a sum without activation) the result is
written, read and written again, and where channels are few or each has its own kernel, that takes most of the time.
Images are channels-last, and sums are in float32. Imported only where Triton is installed.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

Tensor = torch.Tensor
BOUNDS = {"": (-float("inf"), float("inf")), "relu": (0.0, float("inf")), "relu6": (0.0, 6.0)}
SIZES = ["pixels", "made_steps", "steps", "height", "width", "rows", "columns", "low", "high"]
"""One kernel for all values of these."""


@triton.jit
def _after(value, low, high, AFTER: tl.constexpr):
    """The activation; NaN stays NaN. Bounds serve for relu, relu6 and none."""
    if AFTER == "bounds":
        value = tl.maximum(value, low, propagate_nan=tl.PropagateNan.ALL)
        value = tl.minimum(value, high, propagate_nan=tl.PropagateNan.ALL)
    elif AFTER == "silu":
        value = value / (1.0 + tl.exp(-value))
    elif AFTER == "hardswish":
        gate = tl.where(value < -3.0, 0.0, value + 3.0)
        value = value * tl.where(gate > 6.0, 6.0, gate) / 6.0
    return value


@triton.jit
def _finish(
    total,
    bias,
    other,
    out,
    where,
    mask,
    c,
    real,
    low,
    high,
    BIAS: tl.constexpr,
    ADDS: tl.constexpr,
    AFTER: tl.constexpr,
):
    if BIAS:
        total += tl.load(bias + c, real, 0.0).to(tl.float32)[None, :]
    if ADDS:
        total += tl.load(other + where, mask, 0.0).to(tl.float32)
    tl.store(out + where, _after(total, low, high, AFTER).to(out.dtype.element_ty), mask)


@triton.jit(do_not_specialize=SIZES)
def _product(
    x, weight, bias, other, out, pixels, made_steps, steps, height, width, rows, columns, low, high,
    STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr,
    WINDOW_H: tl.constexpr, WINDOW_W: tl.constexpr, POINT: tl.constexpr, BIAS: tl.constexpr, ADDS: tl.constexpr,
    AFTER: tl.constexpr, MADE_STEP: tl.constexpr, STEP: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Output pixels by output channels. Of each input row a window reads ``run`` neighbours in memory.

    They are read pixel by pixel where that is 16 bytes at once, and in one go where pixels are narrower.
    """
    made, channels = made_steps * MADE_STEP, steps * STEP
    run = WINDOW_W * channels
    tiles = tl.cdiv(made, N)
    m = tl.program_id(0) // tiles * M + tl.arange(0, M)
    n = tl.program_id(0) % tiles * N + tl.arange(0, N)
    k = tl.arange(0, K)
    inside, wanted = m < pixels, n < made
    total = tl.zeros((M, N), dtype=tl.float32)
    if POINT:
        for begin in range(0, run, K):
            there = begin + k < run
            left = tl.load(x + m[:, None] * run + (begin + k)[None, :], inside[:, None] & there[None, :], 0.0)
            right = tl.load(weight + n[None, :] * run + (begin + k)[:, None], wanted[None, :] & there[:, None], 0.0)
            total = tl.dot(left, right, total)
    else:
        image, place = m // (rows * columns), m % (rows * columns)
        top, side = place // columns * STRIDE_H - PAD_H, place % columns * STRIDE_W - PAD_W
        for tap in tl.static_range(WINDOW_H):
            line = top + tap
            whole = inside & (line >= 0) & (line < height)
            for over in tl.static_range(WINDOW_W if STEP == 8 else 1):
                first = ((image * height + line) * width + side + over) * channels
                span = channels if STEP == 8 else run
                for begin in range(0, span, K):
                    at = begin + k
                    if STEP == 8:
                        seen = (whole & (side + over >= 0) & (side + over < width))[:, None] & (at < span)[None, :]
                    else:
                        column = side[:, None] + (at // channels)[None, :]
                        seen = whole[:, None] & (column >= 0) & (column < width) & (at < span)[None, :]
                    left = tl.load(x + first[:, None] + at[None, :], seen, 0.0)
                    behind = n[None, :] * (WINDOW_H * run) + (tap * run + over * channels + at)[:, None]
                    right = tl.load(weight + behind, wanted[None, :] & (at < span)[:, None], 0.0)
                    total = tl.dot(left, right, total)
    where = m[:, None] * made + n[None, :]
    mask = inside[:, None] & wanted[None, :]
    _finish(total, bias, other, out, where, mask, n, wanted, low, high, BIAS, ADDS, AFTER)


@triton.jit
def _tap(
    total,
    value,
    weight,
    c,
    real,
    channels,
    ROW: tl.constexpr,
    AWAY: tl.constexpr,
    APART: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Add what an input column gives to an output so many columns away, where the kernel reaches it."""
    if AWAY >= 0 and AWAY % APART == 0 and AWAY // APART < WIDE:
        factor = tl.load(weight + (ROW * WIDE + AWAY // APART) * channels + c, real, 0.0)
        total = tl.fma(value, tl.broadcast_to(factor.to(tl.float32)[None, :], value.shape), total)
    return total


@triton.jit(do_not_specialize=SIZES[2:])
def _own(
    x, weight, bias, other, out, steps, height, width, rows, columns, low, high,
    STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr,
    APART_H: tl.constexpr, APART_W: tl.constexpr, WINDOW_H: tl.constexpr, WINDOW_W: tl.constexpr,
    BIAS: tl.constexpr, ADDS: tl.constexpr, AFTER: tl.constexpr, STEP: tl.constexpr,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Each channel with its own kernel: H rows of W times four outputs, C channels. The weight lies taps first.

    Four neighbours share what they read.
    """
    channels = steps * STEP
    c = tl.program_id(1) * C + tl.arange(0, C)
    across, down = tl.cdiv(columns, 4 * W), tl.cdiv(rows, H)
    tile = tl.program_id(0)
    image = tile // (across * down)
    p = tl.arange(0, H * W)
    row = tile // across % down * H + p // W
    column = (tile % across * W + p % W) * 4
    real = c < channels
    first = tl.zeros((H * W, C), dtype=tl.float32)
    second, third, fourth = first, first, first
    for i in tl.static_range(WINDOW_H):
        line = row * STRIDE_H - PAD_H + i * APART_H
        whole = (line >= 0) & (line < height)
        for u in tl.static_range(3 * STRIDE_W + APART_W * (WINDOW_W - 1) + 1):
            side = column * STRIDE_W - PAD_W + u
            seen = whole & (side >= 0) & (side < width)
            place = ((image * height + line) * width + side) * channels
            value = tl.load(x + place[:, None] + c[None, :], seen[:, None] & real[None, :], 0.0).to(tl.float32)
            first = _tap(first, value, weight, c, real, channels, i, u, APART_W, WINDOW_W)
            second = _tap(second, value, weight, c, real, channels, i, u - STRIDE_W, APART_W, WINDOW_W)
            third = _tap(third, value, weight, c, real, channels, i, u - 2 * STRIDE_W, APART_W, WINDOW_W)
            fourth = _tap(fourth, value, weight, c, real, channels, i, u - 3 * STRIDE_W, APART_W, WINDOW_W)
    begin = ((image * rows + row) * columns + column)[:, None] * channels + c[None, :]
    lines = (row < rows)[:, None] & real[None, :]
    mask = lines & (column < columns)[:, None]
    _finish(first, bias, other, out, begin, mask, c, real, low, high, BIAS, ADDS, AFTER)
    mask = lines & (column + 1 < columns)[:, None]
    _finish(second, bias, other, out, begin + channels, mask, c, real, low, high, BIAS, ADDS, AFTER)
    mask = lines & (column + 2 < columns)[:, None]
    _finish(third, bias, other, out, begin + 2 * channels, mask, c, real, low, high, BIAS, ADDS, AFTER)
    mask = lines & (column + 3 < columns)[:, None]
    _finish(fourth, bias, other, out, begin + 3 * channels, mask, c, real, low, high, BIAS, ADDS, AFTER)


def _step(size: int) -> int:
    """What divides it: a kernel that knows reads 16 bytes at once."""
    return 1 if size % 8 else 8


def _sizes(x: Tensor, window: list[int], stride: list[int], padding: list[int], dilation: list[int]) -> list[int]:
    pairs = zip(x.shape[2:], window, stride, padding, dilation, strict=True)
    return [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in pairs]


def _empty(x: Tensor, made: int, size: list[int]) -> Tensor:
    return torch.empty((x.shape[0], made, *size), dtype=x.dtype, device=x.device, memory_format=torch.channels_last)


@torch.library.custom_op("sapwood::convolution", mutates_args=())
def convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, other: Tensor | None, stride: list[int], padding: list[int],
    after: str, tile: list[int],
) -> Tensor:  # fmt: skip
    """One group; the weight is channels-last, a tile is so many pixels and channels of the output."""
    weight = weight.contiguous(memory_format=torch.channels_last)
    n, channels, height, width = x.shape
    made, _, kh, kw = weight.shape
    rows, columns = size = _sizes(x, [kh, kw], stride, padding, [1, 1])
    out = _empty(x, made, size)
    pixels, run = n * rows * columns, kw * channels
    point = (kh, kw) == (1, 1) and tuple(stride) == (1, 1) and tuple(padding) == (0, 0)
    tall, wide = tile[0], min(tile[1], max(16, triton.next_power_of_2(made)))
    deep = min(64, max(16, triton.next_power_of_2(run)))
    grid = (triton.cdiv(pixels, tall) * triton.cdiv(made, wide),)
    kind, low_high = ("bounds", BOUNDS[after]) if after in BOUNDS else (after, (0.0, 0.0))
    with torch.cuda.device_of(x):
        _product[grid](
            x, weight, bias, other, out, pixels, made // _step(made), channels // _step(channels), height, width,
            rows, columns, *low_high, *stride, *padding, kh, kw, point, bias is not None, other is not None, kind,
            _step(made), _step(channels), tall, wide, deep,
            num_warps=8 if tall * wide > 8192 else 4, num_stages=3,
        )  # fmt: skip
    return out


@convolution.register_fake
def _(x: Any, weight: Any, bias: Any, other: Any, stride: Any, padding: Any, after: Any, tile: Any) -> Tensor:
    return _empty(x, weight.shape[0], _sizes(x, list(weight.shape[2:]), stride, padding, [1, 1]))


@torch.library.custom_op("sapwood::depthwise", mutates_args=())
def depthwise(
    x: Tensor, weight: Tensor, bias: Tensor | None, other: Tensor | None, window: list[int], stride: list[int],
    padding: list[int], dilation: list[int], after: str, tile: list[int],
) -> Tensor:  # fmt: skip
    """As many groups as channels; the weight is (taps, channels), a tile is so many fours of columns, and channels."""
    n, channels, height, width = x.shape
    rows, columns = size = _sizes(x, window, stride, padding, dilation)
    out = _empty(x, channels, size)
    c = min(tile[1], max(8, triton.next_power_of_2(channels)))
    w = min(tile[0], triton.next_power_of_2(triton.cdiv(columns, 4)))
    h = 1024 // (c * w)
    grid = (n * triton.cdiv(rows, h) * triton.cdiv(columns, 4 * w), triton.cdiv(channels, c))
    kind, low_high = ("bounds", BOUNDS[after]) if after in BOUNDS else (after, (0.0, 0.0))
    with torch.cuda.device_of(x):
        _own[grid](
            x, weight, bias, other, out, channels // _step(channels), height, width, rows, columns, *low_high,
            *stride, *padding, *dilation, *window, bias is not None, other is not None, kind, _step(channels), h, w, c,
            num_warps=4,
        )  # fmt: skip
    return out


@depthwise.register_fake
def _(
    x: Any, weight: Any, bias: Any, other: Any, window: Any, stride: Any, padding: Any, dilation: Any, after: Any,
    tile: Any,
) -> Tensor:  # fmt: skip
    return _empty(x, x.shape[1], _sizes(x, window, stride, padding, dilation))
