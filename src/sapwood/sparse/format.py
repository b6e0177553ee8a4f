"""Packed weights: the nonzeros of a matrix, in chunks of eight, 8 bits of place for each.

A chunk belongs to one row and one tile of columns. It has eight values and one 64-bit word of places: the column of
the first (20 bits) and seven steps to the next (6 bits each). So every lane of a warp finds its columns by itself,
and a nonzero of a 16-bit weight takes 24 bits. Where a step is larger than 63, zeros fill the gap; the end of a row's
tile is filled up with zeros that take no step. Chunks lie row by row, in a row tile by tile; ``starts`` has the first
chunk of each (row, tile) and, last, their number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from sapwood.errors import explain

CHUNK = 8
FIRST_BITS, STEP_BITS = 20, 6
STEP = (1 << STEP_BITS) - 1
MOST_COLUMNS = 1 << FIRST_BITS
TILE = 2048
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_BITS = {2: torch.int16, 4: torch.int32}
_AT_ONCE = 1 << 22  # weights that are packed in one go


@dataclass(frozen=True)
class Packed:
    """A matrix of ``shape`` without its zeros."""

    values: torch.Tensor
    """[chunks, 8], in the weight's dtype."""
    places: torch.Tensor
    """[chunks], int64."""
    starts: torch.Tensor
    """[rows * tiles + 1], int32."""
    shape: tuple[int, int]

    def clone(self) -> Packed:
        return Packed(self.values.clone(), self.places.clone(), self.starts.clone(), self.shape)

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.values, self.places, self.starts))


def tiles_of(columns: int) -> int:
    return max(1, math.ceil(columns / TILE))


def pack_weight(weight: torch.Tensor) -> Packed:
    """Every value but +0, exactly; -0 and nan are values like any other."""
    if weight.dim() != 2 or weight.dtype not in DTYPES:
        names = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
        raise explain(
            f"a matrix of {names}",
            f"{weight.dim()} dimensions of {str(weight.dtype).removeprefix('torch.')}",
            "Pack linear layers only.",
            "pack",
        )
    rows, columns = weight.shape
    if columns > MOST_COLUMNS:
        raise explain(f"at most {MOST_COLUMNS} columns", f"{columns}", "Leave this layer dense.", "pack")
    weight = weight.detach()
    step = max(1, _AT_ONCE // max(columns, 1))
    parts = [_pack_rows(weight[r : r + step].contiguous()) for r in range(0, rows, step)]
    counts = torch.cat([p[2] for p in parts]) if parts else weight.new_zeros(0, dtype=torch.int64)
    total = int(counts.sum())
    if total >= 1 << 31:
        raise explain("fewer than 2**31 chunks", f"{total}", "Leave this layer dense.", "pack")
    starts = torch.zeros(len(counts) + 1, dtype=torch.int32, device=weight.device)
    starts[1:] = counts.cumsum(0)
    values = torch.cat([p[0] for p in parts]) if parts else weight.new_zeros((0, CHUNK))
    places = torch.cat([p[1] for p in parts]) if parts else weight.new_zeros(0, dtype=torch.int64)
    return Packed(values, places, starts, (rows, columns))


def _pack_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values and places of the chunks, and how many each (row, tile) has."""
    rows, columns = weight.shape
    tiles = tiles_of(columns)
    bits = weight.view(_BITS[weight.element_size()])
    row, column = bits.nonzero(as_tuple=True)
    value = weight[row, column]
    cell = row * tiles + column // TILE
    step = torch.zeros_like(column)
    step[1:] = torch.where(cell[1:] == cell[:-1], column[1:] - column[:-1], 0)
    fillers = (step - 1).clamp(min=0) // STEP
    if bool(fillers.any()):
        cell, column, value = _filled(cell, column, value, step, fillers)
    count = torch.bincount(cell, minlength=rows * tiles)
    within = torch.arange(len(cell), device=cell.device) - (count.cumsum(0) - count)[cell]
    chunks = (count + CHUNK - 1) // CHUNK
    chunk = (chunks.cumsum(0) - chunks)[cell] + within // CHUNK
    slot = within % CHUNK
    total = int(chunks.sum())
    values = weight.new_zeros((total, CHUNK))
    values.view(bits.dtype)[chunk, slot] = value.view(bits.dtype)
    before = torch.zeros_like(column)
    before[1:] = column[:-1]
    field = torch.where(slot == 0, column, (column - before) << (FIRST_BITS + STEP_BITS * (slot - 1)).clamp(min=0))
    places = torch.zeros(total, dtype=torch.int64, device=weight.device).index_add_(0, chunk, field)
    return values, places, chunks


def _filled(
    cell: torch.Tensor, column: torch.Tensor, value: torch.Tensor, step: torch.Tensor, fillers: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """With zeros put in before each value that is too far from the one before."""
    place = torch.arange(len(cell), device=cell.device) + fillers.cumsum(0)
    source = torch.repeat_interleave(fillers + 1)
    own = torch.zeros(len(source), dtype=torch.bool, device=cell.device)
    own[place] = True
    back = place[source] - torch.arange(len(source), device=cell.device)  # places before the value itself
    columns = column[source] - step[source] + STEP * (fillers[source] + 1 - back)
    columns = torch.where(own, column[source], columns)
    bits = value.view(_BITS[value.element_size()])
    return cell[source], columns, torch.where(own, bits[source], 0).view(value.dtype)


def columns_of(places: torch.Tensor) -> torch.Tensor:
    """[chunks, 8] columns."""
    first = places & (MOST_COLUMNS - 1)
    shifts = FIRST_BITS + STEP_BITS * torch.arange(CHUNK - 1, device=places.device)
    steps = (places[:, None] >> shifts) & STEP
    return torch.cat([first[:, None], first[:, None] + steps.cumsum(1)], 1)


def unpack_weight(packed: Packed) -> torch.Tensor:
    """The matrix as it was."""
    rows, columns = packed.shape
    bits = _BITS[packed.values.element_size()]
    dense = torch.zeros((rows, columns), dtype=bits, device=packed.values.device)
    tiles, step = tiles_of(columns), _AT_ONCE // CHUNK
    counts = packed.starts.diff().long()
    row = torch.repeat_interleave(torch.arange(rows * tiles, device=dense.device) // tiles, counts)
    for first in range(0, len(packed.places), step):
        part = slice(first, first + step)
        values = packed.values[part].view(bits)
        owner = row[part, None].expand(-1, CHUNK)
        real = values != 0
        dense[owner[real], columns_of(packed.places[part])[real]] = values[real]
    return dense.view(packed.values.dtype)
