"""CUDA kernels for the training of convolutions with few channels: forward, gradient of inputs, gradient of weights.

Images and weights are channels-last, sums are in float32. Compiled for the sizes of a layer when first used.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from sapwood.errors import SapwoodError
from sapwood.sparse import cuda
from sapwood.sparse.nvrtc import Kernel, kernel

Tensor = torch.Tensor
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


def _processors(x: Tensor) -> int:
    return int(torch.cuda.get_device_properties(x.device).multi_processor_count)


def _named(name: str, *sizes: int | bool) -> str:
    return f"{name}<{', '.join(str(int(s)) for s in sizes)}>"


@torch.library.custom_op("sapwood::narrow_product", mutates_args=())
def product(x: Tensor, weight: Tensor, back: bool, way: int) -> Tensor:
    """The output of a convolution that keeps sizes; with ``back`` the gradient of its input from that of its output.
    ``way`` is one of PRODUCTS, counted from 1."""
    return product_with(x, weight, back, *PRODUCTS[way - 1])


def product_with(x: Tensor, weight: Tensor, back: bool, eights: int, ahead: int) -> Tensor:
    """A block, whose warps share the weights, has up to 32 outputs."""
    x, weight = _last(x, weight)
    images, channels, height, width = x.shape
    out: Tensor = _like(x, weight, back, 0)
    if not out.numel():
        return out
    made, pixels = out.shape[1], images * height * width
    if made > 16:
        eights = max(1, eights // 2)  # registers for twice the sums
    while eights > 1 and -(-pixels // (8 * eights * WARPS)) * -(-made // 32) < 0.9 * _processors(x):
        eights //= 2  # work for all multiprocessors
    shared = -(-weight[0, 0].numel() * -(-channels // 4) // 4) * min(2, -(-made // 16)) * 32 * 16
    sizes = (KINDS[x.dtype], channels, made, height, width, *weight.shape[2:], back, eights, ahead, WARPS)
    grid = (-(-pixels // (8 * eights * WARPS)), -(-made // 32))
    _kernel(_named("narrow_product", *sizes), x.device.index)(grid, 32 * WARPS, shared, (x, weight, out, pixels))
    return out


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
    images, channels, height, width = x.shape
    made, _, high, wide = weight.shape
    out: Tensor = _like_weight(x, grad, weight, 0)
    if not x.numel():
        return out.zero_()
    device, kind, count = x.device.index, KINDS[x.dtype], out.numel()
    strip = min(height, max(1, pixels // width))
    while strip > 1 and _room(channels, width, high, wide, strip)[1] > ROOM:
        strip -= 1
    threads, shared = _room(channels, width, high, wide, strip)
    if shared > ROOM:
        raise SapwoodError(f"rows of {width} pixels with {channels} channels do not fit into shared memory")
    tiles = -(-made // 16)
    parts = max(1, min(images * -(-height // strip), blocks * _processors(x) // tiles))
    sums = torch.empty((parts, count), dtype=torch.float32, device=x.device)
    sizes = (kind, channels, made, height, width, high, wide, strip)
    _kernel(_named("narrow_weights", *sizes), device)((parts, tiles), threads, shared, (x, grad, sums, images))
    _kernel(_named("narrow_sum", kind), device)((-(-count // 32), 1), 1024, 4096, (sums, out, parts, count))
    return out


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
