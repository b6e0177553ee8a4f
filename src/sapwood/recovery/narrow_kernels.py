"""CUDA kernels for the training of convolutions with few channels: forward, gradient of inputs, gradient of weights.

Images and weights are channels-last, sums are in float32. Compiled for the sizes of a layer when first used.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from sapwood.errors import SapwoodError
from sapwood.sparse import cuda
from sapwood.sparse.nvrtc import Kernel, kernel

Tensor = torch.Tensor
Sizes = tuple[int, ...]
SHARED = (cuda.SOURCES / "device.cu", cuda.SOURCES / "common.cu")
SOURCES = Path(__file__).parent / "kernels"
FILES = {"narrow_product": "product.cu", "narrow_weights": "weights.cu", "narrow_sum": "weights.cu"}
KINDS = {torch.bfloat16: 0, torch.float16: 1}
WARPS = 8
PRODUCTS = ((16, 1), (8, 3))
"""Ways to compute a product: how many times eight pixels a warp has, and how many steps it loads ahead."""
BLOCKS = (2, 1)
"""Ways to compute the gradient of a weight: how many blocks a multiprocessor has; each writes sums of its own."""
STRIP_PIXELS = 256
"""Of a strip of an image that a block has in shared memory at once."""
ROOM = 99 * 1024
"""Bytes of shared memory that a block may have: all GPUs that compute in bf16 have them, and large ones twice."""


def _kernel(name: str, device: int) -> Kernel:
    return kernel((*SHARED, SOURCES / FILES[name.partition("<")[0]]), name, device)


def _last(*tensors: Tensor) -> list[Tensor]:
    """Channels-last, from a place that is a multiple of 16 bytes."""
    laid = [t.contiguous(memory_format=torch.channels_last) for t in tensors]
    return [t if t.data_ptr() % 16 == 0 else t.clone(memory_format=torch.channels_last) for t in laid]


def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _named(name: str, *sizes: int | bool) -> str:
    return f"{name}<{', '.join(str(int(s)) for s in sizes)}>"


@torch.library.custom_op("sapwood::narrow_product", mutates_args=())
def product(x: Tensor, weight: Tensor, back: bool, way: int) -> Tensor:
    """The output of a convolution that keeps sizes; with ``back`` the gradient of its input from that of its output.
    ``way`` is one of PRODUCTS, counted from 1."""
    return product_with(x, weight, back, *PRODUCTS[way - 1])


def product_with(x: Tensor, weight: Tensor, back: bool, eights: int, ahead: int) -> Tensor:
    x, weight = _last(x, weight)
    out: Tensor = _like(x, weight, back, 0)
    if out.numel():
        sizes = tuple(x.shape), tuple(weight.shape)
        name, grid, shared = _product(x.dtype, *sizes, back, eights, ahead, _processors(x.device))
        pixels = x.numel() // x.shape[1]
        _kernel(name, x.device.index)(grid, 32 * WARPS, shared, (x, weight, out, pixels))
    return out


def _product(
    dtype: torch.dtype, size: Sizes, window: Sizes, back: bool, eights: int, ahead: int, processors: int
) -> tuple[str, tuple[int, int], int]:
    """Name, grid and shared memory of a kernel: a block, whose warps share the weights, has up to 32 outputs."""
    images, channels, height, width = size
    made, pixels = window[1 if back else 0], images * height * width
    if made > 16:
        eights = max(1, eights // 2)  # registers for twice the sums
    while eights > 1 and -(-pixels // (8 * eights * WARPS)) * -(-made // 32) < 0.9 * processors:
        eights //= 2  # work for all multiprocessors
    shared = -(-window[2] * window[3] * -(-channels // 4) // 4) * min(2, -(-made // 16)) * 32 * 16
    sizes = (KINDS[dtype], channels, made, height, width, *window[2:], back, eights, ahead, WARPS)
    return _named("narrow_product", *sizes), (-(-pixels // (8 * eights * WARPS)), -(-made // 32)), shared


@product.register_fake
def _like(x: Any, weight: Any, back: bool, way: int) -> Tensor:
    images, _, height, width = x.shape
    size = (images, weight.shape[1 if back else 0], height, width)
    return torch.empty(size, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)


@torch.library.custom_op("sapwood::narrow_weights", mutates_args=())
def weights(x: Tensor, grad: Tensor, weight: Tensor, way: int) -> Tensor:
    """The gradient of the weight, from that of the output. ``way`` is one of BLOCKS, counted from 1."""
    return weights_with(x, grad, weight, STRIP_PIXELS, BLOCKS[way - 1])


def weights_with(x: Tensor, grad: Tensor, weight: Tensor, pixels: int, blocks: int) -> Tensor:
    x, grad = _last(x, grad)
    out: Tensor = _like_weight(x, grad, weight, 0)
    if not x.numel():
        return out.zero_()
    device, count, images = x.device.index, out.numel(), x.shape[0]
    name, strip, threads, shared = _weights(x.dtype, tuple(x.shape), tuple(weight.shape), pixels)
    tiles = -(-weight.shape[0] // 16)
    parts = max(1, min(images * -(-x.shape[2] // strip), blocks * _processors(x.device) // tiles))
    sums = torch.empty((parts, count), dtype=torch.float32, device=x.device)
    _kernel(name, device)((parts, tiles), threads, shared, (x, grad, sums, images))
    _kernel(_sum(x.dtype), device)((-(-count // 32), 1), 1024, 4096, (sums, out, parts, count))
    return out


def _weights(dtype: torch.dtype, size: Sizes, window: Sizes, pixels: int) -> tuple[str, int, int, int]:
    """Name of a kernel, rows of a strip, threads and shared memory of a block."""
    (_, channels, height, width), (made, _, high, wide) = size, window
    strip = min(height, max(1, pixels // width))
    while strip > 1 and _room(channels, width, high, wide, strip)[1] > ROOM:
        strip -= 1
    threads, shared = _room(channels, width, high, wide, strip)
    if shared > ROOM:
        raise SapwoodError(f"rows of {width} pixels with {channels} channels do not fit into shared memory")
    name = _named("narrow_weights", KINDS[dtype], channels, made, height, width, high, wide, strip)
    return name, strip, threads, shared


def _sum(dtype: torch.dtype) -> str:
    return _named("narrow_sum", KINDS[dtype])


def compile_for(kinds: Iterable[tuple[torch.device, torch.dtype, Sizes, Sizes]], at_once: int) -> None:
    """All kernels that convolutions of these kinds may use, so many at once; those that cannot be are left out."""
    wanted = set()
    for device, dtype, size, window in kinds:
        after = (size[0], window[0], *size[2:])
        for eights, ahead in PRODUCTS:
            for back in (False, True):
                given = dtype, after if back else size, window, back, eights, ahead, _processors(device)
                wanted.add((_product(*given)[0], device.index))
        with contextlib.suppress(SapwoodError):
            wanted |= {(_weights(dtype, size, window, STRIP_PIXELS)[0], device.index), (_sum(dtype), device.index)}
    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(_compiled, sorted(wanted)))


def _compiled(which: tuple[str, int]) -> None:
    with contextlib.suppress(Exception):
        _kernel(*which)


def _room(channels: int, width: int, high: int, wide: int, strip: int) -> tuple[int, int]:
    """Threads of a block and bytes that they share: two strips; afterwards sums."""
    each = 8 if channels <= 8 else 16
    groups = -(-channels // each)
    shares = 8 // groups
    seen = (groups * each // 8 | 1) * 16
    strips = 2 * ((strip + high - 1) * (width + wide - 1) * seen + -(-strip * width // 16) * 16 * 48)
    sums = shares // 2 * groups * high * wide * (each // 8) * 4 * 32 * 4
    return 32 * groups * shares, max(strips, sums)


@weights.register_fake
def _like_weight(x: Any, grad: Any, weight: Any, way: int) -> Tensor:
    return torch.empty(weight.shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
