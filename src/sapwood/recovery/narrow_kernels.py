"""Triton kernels for the training of convolutions with few channels: forward, gradient of inputs, gradient of weights.

Images and weights are channels-last, sums are in float32. A window of a row is one run of neighbours in memory,
whatever the number of channels, so that few and odd ones are read as well as many. Imported only where Triton is.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

Tensor = torch.Tensor
TILE, CHUNKS = 128, 256
"""Pixels of a block, and parts in which the gradient of a weight is summed."""


@triton.jit
def _windows(
    x, m, i, j, pixels, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
    C: tl.constexpr, PER: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Row ``i`` of the windows of pixels ``m``, ``PER`` columns from ``j`` on: (pixels, PER * C), zero outside."""
    k = tl.arange(0, K)
    line, side = m // WIDTH % HEIGHT + i - HIGH // 2, m % WIDTH + j - WIDE // 2
    seen = (m < pixels) & (line >= 0) & (line < HEIGHT)
    if PER == 1:
        seen = (seen & (side >= 0) & (side < WIDTH))[:, None] & (k < C)[None, :]
    else:
        sides = side[:, None] + (k // C)[None, :]
        seen = seen[:, None] & (sides >= 0) & (sides < WIDTH) & (k < PER * C)[None, :]
    first = (m + (i - HIGH // 2) * WIDTH + j - WIDE // 2) * C
    return tl.load(x + first[:, None] + k[None, :], seen, 0.0)


@triton.jit(do_not_specialize=["pixels"])
def _product(
    x, weight, out, pixels, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
    C: tl.constexpr, MADE: tl.constexpr, BACK: tl.constexpr, PER: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """``BACK``: x is the gradient of the output, and the weight is read the other way round."""
    m = tl.program_id(0) * M + tl.arange(0, M)
    n, k = tl.arange(0, N), tl.arange(0, K)
    real = (n < MADE)[None, :] & (k < PER * C)[:, None]
    total = tl.zeros((M, N), dtype=tl.float32)
    for i in tl.static_range(HIGH):
        for j in tl.static_range(0, WIDE, PER):
            left = _windows(x, m, i, j, pixels, HEIGHT, WIDTH, HIGH, WIDE, C, PER, K)
            if BACK:
                tap = (HIGH - 1 - i) * WIDE + WIDE - 1 - j - k // C
                at = (k % C * (HIGH * WIDE) + tap)[:, None] * MADE + n[None, :]
            else:
                at = n[None, :] * (HIGH * WIDE * C) + ((i * WIDE + j) * C + k)[:, None]
            total = tl.dot(left, tl.load(weight + at, real, 0.0), total)
    where = m[:, None] * MADE + n[None, :]
    tl.store(out + where, total.to(out.dtype.element_ty), (m < pixels)[:, None] & (n < MADE)[None, :])


@triton.jit(do_not_specialize=["pixels"])
def _weights(
    x, grad, parts, pixels, CHUNK: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, HIGH: tl.constexpr,
    WIDE: tl.constexpr, C: tl.constexpr, MADE: tl.constexpr, PER: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """The gradient of PER taps of the weight, from one chunk of pixels."""
    i, j = tl.program_id(1) * PER // WIDE, tl.program_id(1) * PER % WIDE
    n, k = tl.arange(0, N), tl.arange(0, K)
    total = tl.zeros((N, K), dtype=tl.float32)
    for begin in range(0, CHUNK, M):
        m = tl.program_id(0) * CHUNK + begin + tl.arange(0, M)
        made = tl.load(grad + m[:, None] * MADE + n[None, :], (m < pixels)[:, None] & (n < MADE)[None, :], 0.0)
        seen = _windows(x, m, i, j, pixels, HEIGHT, WIDTH, HIGH, WIDE, C, PER, K)
        total = tl.dot(tl.trans(made), seen, total)
    place = ((tl.program_id(0) * MADE + n[:, None]) * HIGH * WIDE + i * WIDE + j) * C + k[None, :]
    tl.store(parts + place, total, (n < MADE)[:, None] & (k < PER * C)[None, :])


def _power(size: int) -> int:
    """What a product of matrices takes: a power of two of at least 16."""
    return max(16, int(triton.next_power_of_2(size)))


def _per(channels: int, wide: int, summed: bool = False) -> int:
    """Columns of a window that are read at once, by counting instructions: one, unless a row is as short as that.

    Where pixels are ``summed``, a row that is read in whole vectors saves reading the gradient again, as long as what
    is under way fits into shared memory.
    """
    whole = summed and channels % 8 == 0 and _power(wide * channels) <= 128
    return wide if wide * channels <= 16 or whole else 1


def _last(*tensors: Tensor) -> list[Tensor]:
    return [t.contiguous(memory_format=torch.channels_last) for t in tensors]


@torch.library.custom_op("sapwood::narrow_product", mutates_args=())
def product(x: Tensor, weight: Tensor, back: bool) -> Tensor:
    """The output of a convolution that keeps sizes; with ``back`` the gradient of its input from that of its output."""
    return product_with(x, weight, back, TILE, _per(x.shape[1], weight.shape[3]))


def product_with(x: Tensor, weight: Tensor, back: bool, tile: int, per: int, warps: int = 4) -> Tensor:
    """With settings: pixels of a block, columns of a window that are read at once, warps of a block."""
    x, weight = _last(x, weight)
    images, channels, height, width = x.shape
    high, wide = weight.shape[2:]
    out: Tensor = _like(x, weight, back)
    made, pixels = out.shape[1], images * height * width
    with torch.cuda.device_of(x):
        _product[(triton.cdiv(pixels, tile),)](
            x, weight, out, pixels, height, width, high, wide, channels, made, back, per,
            tile, _power(made), _power(per * channels), num_warps=warps,
        )  # fmt: skip
    return out


@product.register_fake
def _like(x: Any, weight: Any, back: bool) -> Tensor:
    images, _, height, width = x.shape
    size = (images, weight.shape[1 if back else 0], height, width)
    return torch.empty(size, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)


@torch.library.custom_op("sapwood::narrow_weights", mutates_args=())
def weights(x: Tensor, grad: Tensor, weight: Tensor) -> Tensor:
    """The gradient of the weight, from that of the output."""
    return weights_with(x, grad, weight, TILE, _per(x.shape[1], weight.shape[3], summed=True), CHUNKS)


def weights_with(
    x: Tensor, grad: Tensor, weight: Tensor, tile: int, per: int, chunks: int, warps: int = 4, stages: int = 3
) -> Tensor:
    """With settings, as above; the sum over pixels is made in so many chunks."""
    x, grad = _last(x, grad)
    images, channels, height, width = x.shape
    made, _, high, wide = weight.shape
    pixels = images * height * width
    chunk = triton.cdiv(triton.cdiv(pixels, chunks), tile) * tile
    parts = torch.empty((triton.cdiv(pixels, chunk), made, high, wide, channels), dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):
        _weights[(len(parts), high * wide // per)](
            x, grad, parts, pixels, chunk, height, width, high, wide, channels, made, per,
            tile, _power(made), _power(per * channels), num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return parts.sum(0).to(weight.dtype).permute(0, 3, 1, 2)


@weights.register_fake
def _(x: Any, grad: Any, weight: Any) -> Tensor:
    return torch.empty_like(weight, memory_format=torch.channels_last)
