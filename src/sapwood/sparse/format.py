"""Packed weights: the nonzeros of a matrix, in chunks of eight, 8 bits of place for each.

A chunk belongs to one row and one tile of columns. It has eight values and one 64-bit word of places: seven steps to
the next column (6 bits each, from bit 0), the column of the first (20 bits), and whether steps count by ones or by
eights. So every lane of a warp finds its columns by itself, and a nonzero of a 16-bit weight takes 24 bits. Chunks
lie row by row, in a row tile by tile; ``starts`` has the first chunk of each (row, tile) and, last, their number.

For a GPU, the chunks of a tile that has enough nonzeros come in eight kinds, in turn: steps by eights, so that all
columns of a chunk are alike modulo eight. Eight chunks in a row then never read the same bank of a shared memory that
has 16 bytes for each column. What does not fill a chunk of its kind goes into chunks with steps by ones, in the order
of columns. Where a step would be larger than 63, zeros fill the gap there; the last chunk is filled up with zeros that
take no step. The sign of the very first word says whether there are any chunks with steps by eights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from sapwood.errors import explain

CHUNK = 8
FIRST_BITS, STEP_BITS = 20, 6
STEP = (1 << STEP_BITS) - 1
STEPS = STEP_BITS * (CHUNK - 1)
"""Bits of all steps, after which the first column lies, and then whether steps count by ``KINDS``."""
MOST_COLUMNS, MOST_ROWS = 1 << FIRST_BITS, 1 << 30
MOST_CHUNKS = (1 << 31) - (1 << 20)
"""The kernels count beyond the last one, in 32 bits."""
TILE = 4096
KINDS = 8
ENOUGH = 256  # nonzeros of a tile that make it worth while to sort them by kind
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
    def by_kind(self) -> bool:
        """Whether steps count by eights in some chunks."""
        return len(self.places) > 0 and int(self.places[0]) < 0

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.values, self.places, self.starts))


def tiles_of(columns: int) -> int:
    return max(1, math.ceil(columns / TILE))


def pack_weight(weight: torch.Tensor, by_kind: bool | None = None) -> Packed:
    """Every value but +0, exactly; -0 and nan are values like any other. ``by_kind``: as a GPU likes it."""
    if weight.dim() != 2 or weight.dtype not in DTYPES:
        names = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
        raise explain(
            f"a matrix of {names}",
            f"{weight.dim()} dimensions of {str(weight.dtype).removeprefix('torch.')}",
            "Pack linear layers only.",
            "pack",
        )
    rows, columns = weight.shape
    if columns > MOST_COLUMNS or rows > MOST_ROWS:
        most = f"at most {MOST_ROWS} x {MOST_COLUMNS} weights"
        raise explain(most, f"{rows} x {columns}", "Leave this layer dense.", "pack")
    weight = weight.detach()
    step = max(1, _AT_ONCE // (tiles_of(columns) * TILE))
    enough = ENOUGH if (weight.is_cuda if by_kind is None else by_kind) else TILE + 1
    parts = [_pack_rows(weight[r : r + step].contiguous(), enough) for r in range(0, rows, step)]
    counts = torch.cat([p[2] for p in parts]) if parts else weight.new_zeros(0, dtype=torch.int64)
    total = int(counts.sum())
    if total > MOST_CHUNKS:
        raise explain(f"at most {MOST_CHUNKS} chunks", f"{total}", "Leave this layer dense.", "pack")
    starts = torch.zeros(len(counts) + 1, dtype=torch.int32, device=weight.device)
    starts[1:] = counts.cumsum(0)
    values = torch.cat([p[0] for p in parts]) if parts else weight.new_zeros((0, CHUNK))
    places = torch.cat([p[1] for p in parts]) if parts else weight.new_zeros(0, dtype=torch.int64)
    if bool((places >> (STEPS + FIRST_BITS)).any()):
        places[0] |= -1 << 63
    return Packed(values, places, starts, (rows, columns))


def _pack_rows(weight: torch.Tensor, enough: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values and places of the chunks, and how many each (row, tile) has."""
    rows, columns = weight.shape
    tiles = tiles_of(columns)
    bits = F.pad(weight.view(_BITS[weight.element_size()]), (0, tiles * TILE - columns))
    bits = bits.view(rows * tiles, TILE // KINDS, KINDS).transpose(1, 2).contiguous()
    cell, kind, place = bits.nonzero(as_tuple=True)
    value, column = bits[cell, kind, place], place * KINDS + kind
    rank, full = _by_kind(cell * KINDS + kind, place, rows * tiles, enough)
    chunks = torch.arange(TILE // KINDS // CHUNK, device=full.device)[:, None] < full[:, None]  # [cell, level, kind]
    before = chunks.flatten(1).cumsum(1).view(chunks.shape) - 1
    alike = rank < CHUNK * full[cell, kind]
    own = chunks.sum((1, 2))

    rest = (~alike).nonzero()[:, 0]
    rest = rest[(cell[rest] * TILE + column[rest]).argsort()]
    others = _filled(cell[rest], column[rest], value[rest])
    slots = torch.bincount(others[0], minlength=len(own))
    count = own + (slots + CHUNK - 1) // CHUNK
    first = count.cumsum(0) - count
    within = torch.arange(len(others[0]), device=own.device) - (slots.cumsum(0) - slots)[others[0]]

    total = int(count.sum())
    values = torch.zeros((total, CHUNK), dtype=bits.dtype, device=weight.device)
    columns_at = torch.full((total, CHUNK), -1, device=weight.device)
    chunk = first[cell[alike]] + before[cell[alike], rank[alike] // CHUNK, kind[alike]]
    last = (first + own)[others[0]] + within // CHUNK
    for cells, within_cell, content, chunk_of, slot in (
        (cell[alike], column[alike], value[alike], chunk, rank[alike] % CHUNK),
        (*others, last, within % CHUNK),
    ):
        values[chunk_of, slot] = content
        columns_at[chunk_of, slot] = cells % tiles * TILE + within_cell
    by_eights = torch.zeros(total, dtype=torch.int64, device=weight.device)
    by_eights[chunk] = 1
    steps = columns_at.diff(dim=1).clamp(min=0) // torch.where(by_eights == 1, KINDS, 1)[:, None]
    shifts = STEP_BITS * torch.arange(CHUNK - 1, device=weight.device)
    places = (by_eights << (FIRST_BITS + STEPS)) + (columns_at[:, 0] << STEPS) + (steps << shifts).sum(1)
    return values.view(weight.dtype), places, count


def _by_kind(owner: torch.Tensor, place: torch.Tensor, cells: int, least: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The number of each nonzero among those of its cell and kind, and how many chunks those fill: [cells, kinds].

    Where a step within a chunk is too long, that chunk and what follows are left to the others.
    """
    count = torch.bincount(owner, minlength=cells * KINDS)
    rank = torch.arange(len(owner), device=owner.device) - (count.cumsum(0) - count)[owner]
    full = count // CHUNK
    far = ((place[1:] - place[:-1] > STEP) & (rank[1:] % CHUNK != 0)).nonzero()[:, 0] + 1
    full.scatter_reduce_(0, owner[far], rank[far] // CHUNK, "amin")
    enough = count.view(cells, KINDS).sum(1, keepdim=True) >= least
    return rank, torch.where(enough, full.view(cells, KINDS), 0)


def _filled(
    cell: torch.Tensor, column: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """With zeros put in before each value that is too far from the one before in its cell."""
    step = torch.zeros_like(column)
    step[1:] = torch.where(cell[1:] == cell[:-1], column[1:] - column[:-1], 0)
    fillers = (step - 1).clamp(min=0) // STEP
    if not bool(fillers.any()):
        return cell, column, value
    place = torch.arange(len(cell), device=cell.device) + fillers.cumsum(0)
    source = torch.repeat_interleave(fillers + 1)
    own = torch.zeros(len(source), dtype=torch.bool, device=cell.device)
    own[place] = True
    back = place[source] - torch.arange(len(source), device=cell.device)  # places before the value itself
    columns = column[source] - step[source] + STEP * (fillers[source] + 1 - back)
    columns = torch.where(own, column[source], columns)
    return cell[source], columns, torch.where(own, value[source], 0)


def columns_of(places: torch.Tensor) -> torch.Tensor:
    """[chunks, 8] columns."""
    first = (places >> STEPS) & (MOST_COLUMNS - 1)
    unit = torch.where(places >> (STEPS + FIRST_BITS) & 1 == 0, 1, KINDS)
    steps = (places[:, None] >> (STEP_BITS * torch.arange(CHUNK - 1, device=places.device))) & STEP
    return first[:, None] + torch.cat([torch.zeros_like(steps[:, :1]), (steps * unit[:, None]).cumsum(1)], 1)


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
