"""Products with packed weights on a CUDA device."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch

from sapwood.sparse.format import TILE, Packed, tiles_of
from sapwood.sparse.nvrtc import Kernel, kernel

SOURCE = Path(__file__).parent / "kernels" / "linear.cu"
KINDS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
WARPS = 16
MOST = 32
"""Rows of x that the kernel takes at once."""
BUSY = 24
"""Warps that a multiprocessor should have; with fewer rows than that, warps share a row."""


@functools.cache
def unready(device: int) -> str:
    """Why the kernels cannot be used there; empty where they can."""
    if torch.version.hip or torch.cuda.get_device_capability(device) < (8, 0):
        return f"{torch.cuda.get_device_name(device)} is no CUDA device of compute capability 8.0 or more"
    try:
        _kernel("unpack<2>", device)
    except Exception as error:
        return f"the kernels could not be compiled: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return ""


def _kernel(name: str, device: int) -> Kernel:
    return kernel(SOURCE, name, device)


def linear(x: torch.Tensor, packed: Packed, bias: torch.Tensor | None) -> torch.Tensor:
    """x [batch, columns] times the weight: contiguous, of one dtype, on one device."""
    rows, columns = packed.shape
    most = MOST * 2 // x.element_size()  # what a tile's columns leave room for
    if len(x) > most:
        return torch.cat([linear(part, packed, bias) for part in x.split(most)])
    batch, device, kind = len(x), x.device.index, KINDS[x.dtype]
    out = torch.empty((batch, rows), dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    padded = 1 << (batch - 1).bit_length()
    properties: Any = torch.cuda.get_device_properties(device)
    room = properties.shared_memory_per_block_optin - 4 * WARPS * padded - 1024
    tiles = tiles_of(columns)
    here = min(tiles, room // (TILE * padded * x.element_size()))
    parts = -(-tiles // here)
    split = _split(rows * parts, properties.multi_processor_count)
    width = min(here * TILE, columns)
    shared = -(-width * padded * x.element_size() // 16) * 16 + 4 * WARPS * padded
    per_processor = max(1, min(2 if padded <= 8 else 1, properties.shared_memory_per_multiprocessor // (shared + 1024)))
    blocks = min(-(-rows * split // WARPS), max(1, per_processor * properties.multi_processor_count // parts))
    if split > 1:
        blocks = -(-rows * split // WARPS)
    partial = torch.empty((parts, batch, rows), device=x.device) if parts > 1 else None
    tensors = (packed.values, packed.places, packed.starts, x, None if parts > 1 else bias, out, partial)
    numbers = (rows, columns, tiles, batch, here)
    _kernel(f"sparse_linear<{kind}, {padded}, {split}>", device)((blocks, parts), 32 * WARPS, shared, tensors + numbers)
    if partial is not None:
        count = batch * rows
        given = (partial, bias, out, parts, rows, ctypes.c_longlong(count))
        _kernel(f"sum_parts<{kind}>", device)((min(4096, -(-count // 256)), 1), 256, 0, given)
    return out


def _split(rows: int, processors: int) -> int:
    """How many warps share a row."""
    split = 1
    while split < WARPS and rows * split < BUSY * processors:
        split *= 2
    return split


def unpack(packed: Packed) -> torch.Tensor:
    """The dense matrix."""
    rows, columns = packed.shape
    values = packed.values
    dense = torch.empty((rows, columns), dtype=values.dtype, device=values.device)
    if dense.numel():
        tiles, warps = tiles_of(columns), 8
        blocks = min(65535, -(-rows * tiles // warps))
        given = (values, packed.places, packed.starts, dense, rows, columns, tiles)
        shared = warps * TILE * values.element_size()
        _kernel(f"unpack<{KINDS[values.dtype]}>", values.device.index)((blocks, 1), 32 * warps, shared, given)
    return dense
