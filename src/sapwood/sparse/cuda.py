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
    "sparse_tiles": ("device.cu", "common.cu", "tiles.cu"),
    "sum_parts": ("device.cu", "common.cu", "whole.cu"),
    "unpack": ("device.cu", "common.cu", "whole.cu"),
}
KINDS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
MOST = 32
"""Rows of x for which a product may be tried; as many as have room are taken at once."""
WAYS = {1: (16, 2, 100, 2), 2: (32, 1, 100, 1), 4: (32, 1, 300, 1), 8: (24, 1, 0, 2), 16: (20, 1, 0, 1)}
"""For rows of x: warps of a block, blocks of a multiprocessor, from how many chunks in a row of W on a warp loads the
next while it works on these, and how many sets of them at once."""
FEW = 32
"""With fewer rows of W for a multiprocessor, fewer warps go by tensor cores, and rows must be longer for two sets."""
EIGHT = 5
"""From so many rows of x on there are as good as eight: those of 16 bits go by tensor cores."""
ROOM = 128 * 1024
"""Bytes of x that a block has at most: each reads them all before it starts."""
TILED, CLUSTERED, CLUSTER, WRITERS, DEPTH, AHEAD = 9, 3, 2, 12, 3, 4
"""From so many rows of x of 16 bits on by dense products: how many tiles may make a cluster, how many blocks of one
tile, warps that write W out, sets of chunks on their way, and rows of W, eight at a time, whose sums wait."""
CHUNKS = 75
"""In each row of a tile, where a multiprocessor has many rows: with fewer chunks dense products do not pay."""
FULL = 0.9
"""A warp takes two or four rows of W at once where so many of the warps are busy then; where fewer are, they share."""


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
    return _known(SOURCES, name, device)


@functools.cache
def _known(sources: Path, name: str, device: int) -> Kernel:
    return kernel(tuple(sources / file for file in FILES[name.partition("<")[0]]), name, device)


def linear(x: torch.Tensor, packed: Packed, bias: torch.Tensor | None) -> torch.Tensor:
    """x [batch, columns] times the weight: contiguous, of one dtype, on one device."""
    most = _most(x.device.index, x.element_size())
    if len(x) > most:
        return torch.cat([linear(part, packed, bias) for part in x.split(most)])
    out = torch.empty((len(x), packed.shape[0]), dtype=x.dtype, device=x.device)
    if out.numel() and (len(x) < TILED or not _launch_tiles(x, packed, bias, out)):
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
    return min(ROOM, int(properties.shared_memory_per_block_optin) - 1024 - 128 * batch)


def _launch(x: torch.Tensor, packed: Packed, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """Where the columns do not fit into shared memory at once, each part has its own sums, which are then added up."""
    rows, columns = packed.shape
    batch, size, device, kind = len(x), x.element_size(), x.device.index, KINDS[x.dtype]
    padded = 1 << (batch - 1).bit_length()
    padded = max(padded, 8) if batch >= EIGHT and size == 2 else padded
    properties: Any = torch.cuda.get_device_properties(device)
    processors = properties.multi_processor_count
    parts, here = _parts(columns, _room(device, padded) // (TILE * padded * size), processors)
    needed = -(-min(here * TILE, columns) * padded * size // 16) * 16
    warps, per, many, sets = WAYS[padded]
    if rows * parts < FEW * processors:
        warps, many = 16 if padded >= 8 else warps, 5 * many // 2
    ahead = sets * int(len(packed.places) > many * rows * parts)
    if per * (needed + 64 * padded + 1024) > properties.shared_memory_per_multiprocessor:
        per = 1
    blocks = max(1, per * processors // parts)
    at_once, split = _shared(rows, blocks, warps)
    units = -(-rows // at_once)
    active = warps // split * split if split > 1 else -(-units // (blocks * -(-units // (blocks * warps))))
    blocks = min(blocks, -(-units * split // active))
    name = f"sparse_linear<{kind}, {padded}, {at_once}, {split}, {warps}, {per}, {ahead}>"
    threads, shared = 32 * (active if split > 1 else warps), needed + 4 * warps * padded
    partial = _sums(parts, x, rows) if parts > 1 else None
    tensors = (packed.values, packed.places, packed.starts, x, None if parts > 1 else bias, out, partial)
    numbers = (rows, columns, tiles_of(columns), batch, here, len(packed.places), active)
    _kernel(name, device)((blocks, parts), threads, shared, (*tensors, *numbers))
    _add_up(partial, bias, out)


def _launch_tiles(x: torch.Tensor, packed: Packed, bias: torch.Tensor | None, out: torch.Tensor) -> bool:
    """False where it cannot be done so, or is slower: x must lie in whole words of 16 bytes, and registers change hands
    only where kernels are compiled for all that a device has, which is for compute capability 9."""
    (rows, columns), device = packed.shape, x.device.index
    tiles, units, threads = tiles_of(columns), -(-rows // 8), 32 * (8 + WRITERS)
    properties: Any = torch.cuda.get_device_properties(device)
    processors = properties.multi_processor_count
    if properties.major != 9 or columns % 8 or x.data_ptr() % 16 or tiles > processors:
        return False
    if len(packed.places) < CHUNKS * rows * tiles and rows * tiles > 2 * FEW * processors:
        return False
    # twice eight rows of a tile (and what x is wider), chunks, barriers; then half of x, where afterwards the sums of
    # eight warps are and those of other tiles
    least, sums = 2 * 8 * TILE * 2 + 512 + WRITERS * DEPTH * 32 * 24 + 64 + 8 * AHEAD, AHEAD * 8 * 512
    alone = least + 8 * (TILE * 2 + 64)
    kernels, partial = [f"sparse_tiles<{KINDS[x.dtype]}, {form}>" for form in (0, 1, 2)], None

    def blocks_of(down: int) -> tuple[int, int]:
        """How many there are for each tile if so many tiles are in one cluster, and how many of them share what they
        read of x: as many as can without one more turn."""
        found, known = {}, _kernel(kernels[2], device)
        for across in (1, CLUSTER):
            many = known.clusters((across, down), threads, alone) if across * down > 1 else processors
            at_once = many * down // tiles
            found[across] = across * min(at_once, -(-units // across))
        alike = found[1] and found[CLUSTER] and -(-units // found[CLUSTER]) <= -(-units // found[1])
        return (found[CLUSTER], CLUSTER) if alike else (found[1], 1)

    blocks, across = blocks_of(tiles) if tiles <= CLUSTERED else (0, 1)
    kept = 512 * tiles * -(-units // max(1, blocks * tiles)) * (tiles > 1)
    shared, down = max(alone, least + sums + kept), tiles
    if not blocks or shared > properties.shared_memory_per_block_optin:
        (blocks, across), shared, down = blocks_of(1), alone, 1
        partial = _sums(tiles, x, rows) if tiles > 1 else None
    tensors = (packed.values, packed.places, packed.starts, x, bias if partial is None else None, out, partial)
    kernel, numbers = (
        _kernel(kernels[2 if across > 1 else int(down > 1)], device),
        (rows, columns, tiles, len(packed.places), len(x), across),
    )
    kernel((blocks, tiles), threads, shared, (*tensors, *numbers), (across, down))
    _add_up(partial, bias, out)
    return True


def _sums(parts: int, x: torch.Tensor, rows: int) -> torch.Tensor:
    """Room for those of each part of the columns, in float32 whatever the default is."""
    return torch.empty((parts, len(x), rows), dtype=torch.float32, device=x.device)


def _add_up(partial: torch.Tensor | None, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    if partial is not None:
        totals = (partial, bias, out, len(partial), out.shape[1], ctypes.c_longlong(out.numel()))
        blocks = min(4096, -(-out.numel() // 256))
        _kernel(f"sum_parts<{KINDS[out.dtype]}>", out.device.index)((blocks, 1), 256, 0, totals)


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


def _shared(rows: int, blocks: int, warps: int) -> tuple[int, int]:
    """How many rows a warp has at once, or how many warps share a row."""
    at_once = split = 1
    while at_once < 4 and rows >= 2 * at_once * blocks * warps * FULL:
        at_once *= 2
    while split < 16 and 2 * split <= warps and rows * split < blocks * warps * FULL:
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
