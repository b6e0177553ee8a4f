"""Products with packed weights on a CUDA device."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sapwood.sparse.format import TILE, Packed, tiles_of
from sapwood.sparse.nvrtc import Kernel, kernel

SOURCES = Path(__file__).parent / "kernels"
FILES = {
    "sparse_linear": ("common.cu", "columns.cu", "linear.cu"),
    "vector_linear": ("common.cu", "columns.cu", "vector.cu"),
    "tensor_linear": ("common.cu", "tensor.cu"),
    "sum_parts": ("common.cu", "whole.cu"),
    "unpack": ("common.cu", "whole.cu"),
}
KINDS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
WARPS = 16
MOST = 32
"""Rows of x that the kernel takes at once."""
ROWS = 16
"""Rows of the weight that tensor cores take at once."""
LANES = 32
"""So few lanes may share a row: not fewer before that is known to pay."""
TENSOR = MOST + 1
"""From so many rows of x on, by tensor cores: not before it is known to pay."""
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
    return kernel(tuple(SOURCES / file for file in FILES[name.partition("<")[0]]), name, device)


def linear(x: torch.Tensor, packed: Packed, bias: torch.Tensor | None) -> torch.Tensor:
    """x [batch, columns] times the weight: contiguous, of one dtype, on one device."""
    most = MOST * 2 // x.element_size()  # what a tile's columns leave room for
    if len(x) > most:
        return torch.cat([linear(part, packed, bias) for part in x.split(most)])
    out = torch.empty((len(x), packed.shape[0]), dtype=x.dtype, device=x.device)
    if out.numel():
        by_tensor_cores = len(x) >= TENSOR and x.element_size() == 2
        (_tensor if by_tensor_cores else _gather)(x, packed, bias, out)
    return out


def _gather(x: torch.Tensor, packed: Packed, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """Every nonzero meets its column of x in shared memory."""
    rows, columns = packed.shape
    batch, device, kind = len(x), x.device.index, KINDS[x.dtype]
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
    launch = _kernel(f"sparse_linear<{kind}, {padded}, {split}>", device)
    if batch == 1 and split == 1 and (lanes := _lanes(packed, properties.multi_processor_count)) < 32:
        blocks = min(-(-rows * lanes // (32 * WARPS)), blocks)
        launch = _kernel(f"vector_linear<{kind}, {lanes}>", device)
    _in_parts(packed, x, bias, out, parts, lambda given: launch((blocks, parts), 32 * WARPS, shared, (*given, here)))


def _tensor(x: torch.Tensor, packed: Packed, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """Rows are unpacked in shared memory, for tensor cores."""
    rows, columns = packed.shape
    batch, device, tiles = len(x), x.device.index, tiles_of(columns)
    eights = 1 << (-(-batch // 8) - 1).bit_length()
    shared = 2 * ROWS * (TILE + 8) + 4 * WARPS * eights * 8 * ROWS
    properties: Any = torch.cuda.get_device_properties(device)
    per_processor = 2 if eights <= 2 and 2 * (shared + 1024) <= properties.shared_memory_per_multiprocessor else 1
    blocks = min(-(-rows // ROWS), max(1, per_processor * properties.multi_processor_count // tiles))
    launch = _kernel(f"tensor_linear<{KINDS[x.dtype]}, {eights}>", device)
    _in_parts(packed, x, bias, out, tiles, lambda given: launch((blocks, tiles), 32 * WARPS, shared, given))


def _in_parts(
    packed: Packed,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    parts: int,
    launch: Callable[[tuple[Any, ...]], None],
) -> None:
    """Where the columns are shared out, each part has its own sums, which are then added up."""
    (rows, columns), batch = packed.shape, len(x)
    partial = torch.empty((parts, batch, rows), device=x.device) if parts > 1 else None
    tensors = (packed.values, packed.places, packed.starts, x, None if parts > 1 else bias, out, partial)
    launch((*tensors, rows, columns, tiles_of(columns), batch))
    if partial is not None:
        count = batch * rows
        given = (partial, bias, out, parts, rows, ctypes.c_longlong(count))
        _kernel(f"sum_parts<{KINDS[x.dtype]}>", x.device.index)((min(4096, -(-count // 256)), 1), 256, 0, given)


def _split(rows: int, processors: int) -> int:
    """How many warps share a row."""
    split = 1
    while split < WARPS and rows * split < BUSY * processors:
        split *= 2
    return split


def _lanes(packed: Packed, processors: int) -> int:
    """How many lanes share a row, for one row of x: fewer where there are many rows, and each has few chunks."""
    rows, lanes = packed.shape[0], 32
    while lanes > LANES and rows * lanes // 64 >= BUSY * processors and len(packed.places) < 2 * lanes * rows:
        lanes //= 2
    return lanes


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
