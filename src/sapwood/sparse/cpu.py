"""Products with packed weights on a CPU, compiled by numba when first used and kept on disk."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import numpy as np
import torch

from sapwood.sparse.format import CHUNK, FIRST_BITS, MOST_COLUMNS, STEP, STEP_BITS, Packed, tiles_of

MOST = 16
"""Rows of x that the kernel takes at once."""
KINDS = (torch.float32, torch.bfloat16)


@functools.cache
def unready() -> str:
    """Why the kernels cannot be used; empty where they can."""
    if importlib.util.find_spec("numba") is None:
        return "numba is not installed (pip install 'sapwood[numba]')"
    try:
        _compiled(1, False)
    except Exception as error:
        return f"numba could not compile the kernels: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return ""


def _numba() -> Any:
    import numba

    return numba


@functools.cache
def _compiled(batch: int, half: bool) -> Any:
    """A kernel for so many rows of x; ``half`` for bf16 values, which come as their bits."""
    numba = _numba()
    if numba.config.THREADING_LAYER == "default":
        numba.config.THREADING_LAYER = "threadsafe"
    first_mask, step_mask = np.int64(MOST_COLUMNS - 1), np.int64(STEP)
    first_bits, step_bits = FIRST_BITS, STEP_BITS

    def kernel(values, places, starts, x, out, tiles):  # type: ignore[no-untyped-def]
        for row in numba.prange(out.shape[0]):
            total = np.zeros(batch, np.float32)
            part = np.zeros(batch, np.float32)
            wide = np.zeros(CHUNK, np.uint32)
            floats = wide.view(np.float32)
            for chunk in range(starts[row * tiles], starts[(row + 1) * tiles]):
                place = places[chunk]
                column = place & first_mask
                place >>= first_bits
                part[:] = 0
                for i in range(CHUNK):
                    if half:
                        wide[i] = np.uint32(values[chunk, i]) << np.uint32(16)
                        value = floats[i]
                    else:
                        value = values[chunk, i]
                    for b in range(batch):
                        part[b] += value * x[column, b]
                    column += place & step_mask
                    place >>= step_bits
                for b in range(batch):  # short sums first: longer ones lose more
                    total[b] += part[b]
            for b in range(batch):
                out[row, b] = total[b]

    def single(values, places, starts, x, out, tiles):  # type: ignore[no-untyped-def]
        for row in numba.prange(out.shape[0]):
            a0 = a1 = a2 = a3 = a4 = a5 = a6 = a7 = np.float32(0)
            for chunk in range(starts[row * tiles], starts[(row + 1) * tiles]):
                p = places[chunk]
                c0 = p & first_mask
                c1 = c0 + ((p >> 20) & step_mask)
                c2 = c1 + ((p >> 26) & step_mask)
                c3 = c2 + ((p >> 32) & step_mask)
                c4 = c3 + ((p >> 38) & step_mask)
                c5 = c4 + ((p >> 44) & step_mask)
                c6 = c5 + ((p >> 50) & step_mask)
                c7 = c6 + ((p >> 56) & step_mask)
                a0 += values[chunk, 0] * x[c0, 0]
                a1 += values[chunk, 1] * x[c1, 0]
                a2 += values[chunk, 2] * x[c2, 0]
                a3 += values[chunk, 3] * x[c3, 0]
                a4 += values[chunk, 4] * x[c4, 0]
                a5 += values[chunk, 5] * x[c5, 0]
                a6 += values[chunk, 6] * x[c6, 0]
                a7 += values[chunk, 7] * x[c7, 0]
            out[row, 0] = ((a0 + a1) + (a2 + a3)) + ((a4 + a5) + (a6 + a7))

    made = numba.njit(parallel=True, fastmath={"contract", "nsz", "arcp"}, cache=True, nogil=True)(
        single if batch == 1 and not half else kernel
    )
    return made


def linear(x: torch.Tensor, packed: Packed, bias: torch.Tensor | None) -> torch.Tensor:
    """x [batch, columns] times the weight; all that is in x must be finite."""
    numba = _numba()
    rows, columns = packed.shape
    if len(x) > MOST:
        return torch.cat([linear(part, packed, bias) for part in x.split(MOST)])
    half = packed.values.dtype is torch.bfloat16
    batch = 1 << (len(x) - 1).bit_length()
    wide = torch.zeros((columns, batch))
    wide[:, : len(x)] = x.t()
    values = packed.values.view(torch.int16).numpy().view(np.uint16) if half else packed.values.numpy()
    out = np.empty((rows, batch), np.float32)
    numba.set_num_threads(min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS))
    kernel = _compiled(batch, half)
    kernel(values, packed.places.numpy(), packed.starts.numpy(), wide.numpy(), out, tiles_of(columns))
    made = torch.from_numpy(out)[:, : len(x)].t()
    if bias is not None:
        made = made + bias
    return made.to(x.dtype).contiguous()
