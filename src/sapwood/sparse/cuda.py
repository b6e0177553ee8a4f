"""Products with packed weights on a CUDA device."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch

from sapwood.sparse.format import TILE, Packed, tiles_of
from sapwood.sparse.nvrtc import Kernel, kernel

SOURCES = Path(__file__).parent / "kernels"
FILES = {
    "sparse_linear": ("device.cu", "common.cu", "columns.cu", "tensor.cu", "linear.cu"),
    "sparse_rows": ("device.cu", "common.cu", "next/columns.cu", "next/tensor.cu", "next/linear.cu"),
    "sum_parts": ("device.cu", "common.cu", "whole.cu"),
    "unpack": ("device.cu", "common.cu", "whole.cu"),
}
KINDS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
MOST = 32
"""Rows of x for which a product may be tried; as many as have room are taken at once."""
WIDE = 2
"""From so many rows of x on, one block for a multiprocessor instead of two: x is then read by half as many."""
NEXT = False
"""Whether the kernels in ``next`` are used; off until measured."""
EIGHT = 5
"""From so many rows of x on there are as good as eight: those of 16 bits go by tensor cores."""
BUSY, MANY = 24, 20
"""Warps that a multiprocessor should have: with fewer rows than the first, warps share a row; a warp takes two or four
rows at once as long as there are as many as the second."""


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
    return kernel(tuple(SOURCES / file for file in FILES[name.partition("<")[0]]), name, device)


def linear(x: torch.Tensor, packed: Packed, bias: torch.Tensor | None) -> torch.Tensor:
    """x [batch, columns] times the weight: contiguous, of one dtype, on one device."""
    most = _most(x.device.index, x.element_size())
    if len(x) > most:
        return torch.cat([linear(part, packed, bias) for part in x.split(most)])
    out = torch.empty((len(x), packed.shape[0]), dtype=x.dtype, device=x.device)
    if out.numel():
        _launch(x, packed, bias, out)
    return out


@functools.cache
def _most(device: int, size: int) -> int:
    """Rows of x that a tile's columns leave room for in shared memory, at most 16 of 16 bits."""
    most = 32 // size
    while most > 1 and _room(device, most) < TILE * most * size:
        most //= 2
    return most


def _room(device: int, batch: int) -> int:
    """Bytes of shared memory for columns of x."""
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin) - 1024 - 128 * batch


def _launch(x: torch.Tensor, packed: Packed, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """Where the columns do not fit into shared memory at once, each part has its own sums, which are then added up."""
    rows, columns = packed.shape
    batch, size, device, kind = len(x), x.element_size(), x.device.index, KINDS[x.dtype]
    padded = 1 << (batch - 1).bit_length()
    padded = max(padded, 8) if batch >= EIGHT and size == 2 else padded
    properties: Any = torch.cuda.get_device_properties(device)
    processors, tiles = properties.multi_processor_count, tiles_of(columns)
    parts, here = _parts(columns, _room(device, padded) // (TILE * padded * size), processors)
    needed = -(-min(here * TILE, columns) * padded * size // 16) * 16
    two = 2 * (needed + 64 * padded + 1024) <= properties.shared_memory_per_multiprocessor
    warps = 16 if two and batch < WIDE else 32
    partial = torch.empty((parts, batch, rows), device=x.device) if parts > 1 else None
    tensors = (packed.values, packed.places, packed.starts, x, None if parts > 1 else bias, out, partial)
    at_once, split = _shared(rows * parts, processors) if NEXT else (1, _shared(rows * parts, processors)[1])
    blocks = -(-rows * split // (at_once * warps))
    if split == 1:
        if NEXT:  # rows go round the blocks: as many of these as there is room for
            blocks = -(-rows // at_once)
        blocks = min(blocks, max(1, 32 // warps * processors // parts))
    given: tuple[Any, ...] = (*tensors, rows, columns, tiles, batch, here)
    name = f"sparse_linear<{kind}, {padded}, {split}, {warps}>"
    if NEXT:
        given, name = (*given, len(packed.places)), f"sparse_rows<{kind}, {padded}, {at_once}, {split}, {warps}>"
    _kernel(name, device)((blocks, parts), 32 * warps, needed + 4 * warps * padded, given)
    if partial is not None:
        count = batch * rows
        sizes = (parts, rows, ctypes.c_longlong(count))
        _kernel(f"sum_parts<{kind}>", device)((min(4096, -(-count // 256)), 1), 256, 0, (partial, bias, out, *sizes))


def _parts(columns: int, most: int, processors: int) -> tuple[int, int]:
    """How many parts, of how many tiles each: few, and with work for all multiprocessors."""
    tiles = tiles_of(columns)
    if tiles <= most:
        return 1, tiles

    def used(parts: int) -> float:
        here = -(-tiles // parts)
        return columns / (parts * here * TILE) * (processors // parts * parts / processors) - 0.01 * parts

    parts = max(range(-(-tiles // most), tiles + 1), key=used)
    return parts, -(-tiles // parts)


def _shared(rows: int, processors: int) -> tuple[int, int]:
    """How many rows a warp has at once, or how many warps share a row."""
    at_once = split = 1
    while at_once < 4 and rows >= 2 * at_once * MANY * processors:
        at_once *= 2
    while split < 16 and rows * split < BUSY * processors:
        split *= 2
    return at_once, split


def unpack(packed: Packed) -> torch.Tensor:
    """The dense matrix."""
    rows, columns = packed.shape
    values = packed.values
    dense = torch.empty((rows, columns), dtype=values.dtype, device=values.device)
    if dense.numel():
        tiles, warps = tiles_of(columns), 16 // values.element_size()
        blocks = min(65535, -(-rows * tiles // warps))
        given = (values, packed.places, packed.starts, dense, rows, columns, tiles)
        shared = warps * TILE * values.element_size()
        _kernel(f"unpack<{KINDS[values.dtype]}>", values.device.index)((blocks, 1), 32 * warps, shared, given)
    return dense
