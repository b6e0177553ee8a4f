"""What numba compiles. Kept apart, since numba may be missing, and flat, since it caches functions of a module only.

Values are float32, or bf16 as 16 bits; all steps count by ones. ``x`` has a row for each column of the weight.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.extending import intrinsic, overload

from sapwood.sparse.format import MOST_COLUMNS, STEP, STEP_BITS, STEPS

BATCH = 16
"""Rows of inputs that ``several`` multiplies at once: whole vector registers."""
FIRST, NEXT = np.int64(MOST_COLUMNS - 1), np.int64(STEP)
S1, S2, S3, S4, S5, S6, S7 = (STEP_BITS * i for i in range(7))


@intrinsic
def as_float(context: Any, bits: Any) -> Any:
    def make(_: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return numba.types.float32(numba.types.uint32), make


def value_of(values, chunk, i):  # type: ignore[no-untyped-def]
    """Value i of a chunk, as float32; bf16 is the upper half of one."""


@overload(value_of)
def _value_of(values, chunk, i):  # type: ignore[no-untyped-def]
    # no annotations: numba compares them with those of what is returned
    def plain(values, chunk, i):  # type: ignore[no-untyped-def]
        return values[chunk, i]

    def half(values, chunk, i):  # type: ignore[no-untyped-def]
        return as_float(np.uint32(values[chunk, i]) << np.uint32(16))  # type: ignore[call-arg]

    return plain if values.dtype is numba.types.float32 else half


@numba.njit(parallel=True, fastmath={"contract"}, cache=True, nogil=True)
def single(values, places, starts, x, out, tiles):  # type: ignore[no-untyped-def]
    for row in numba.prange(out.shape[0]):
        a0 = a1 = a2 = a3 = a4 = a5 = a6 = a7 = np.float32(0)
        for chunk in range(starts[row * tiles], starts[(row + 1) * tiles]):
            p = places[chunk]
            c0 = (p >> STEPS) & FIRST
            c1 = c0 + ((p >> S1) & NEXT)
            c2 = c1 + ((p >> S2) & NEXT)
            c3 = c2 + ((p >> S3) & NEXT)
            c4 = c3 + ((p >> S4) & NEXT)
            c5 = c4 + ((p >> S5) & NEXT)
            c6 = c5 + ((p >> S6) & NEXT)
            c7 = c6 + ((p >> S7) & NEXT)
            a0 += value_of(values, chunk, 0) * x[c0, 0]
            a1 += value_of(values, chunk, 1) * x[c1, 0]
            a2 += value_of(values, chunk, 2) * x[c2, 0]
            a3 += value_of(values, chunk, 3) * x[c3, 0]
            a4 += value_of(values, chunk, 4) * x[c4, 0]
            a5 += value_of(values, chunk, 5) * x[c5, 0]
            a6 += value_of(values, chunk, 6) * x[c6, 0]
            a7 += value_of(values, chunk, 7) * x[c7, 0]
        out[row, 0] = ((a0 + a1) + (a2 + a3)) + ((a4 + a5) + (a6 + a7))


@numba.njit(parallel=True, fastmath={"contract"}, cache=True, nogil=True)
def several(values, places, starts, x, out, tiles):  # type: ignore[no-untyped-def]
    for row in numba.prange(out.shape[0]):
        total = np.zeros(BATCH, np.float32)
        for chunk in range(starts[row * tiles], starts[(row + 1) * tiles]):
            p = places[chunk]
            c0 = (p >> STEPS) & FIRST
            c1 = c0 + ((p >> S1) & NEXT)
            c2 = c1 + ((p >> S2) & NEXT)
            c3 = c2 + ((p >> S3) & NEXT)
            c4 = c3 + ((p >> S4) & NEXT)
            c5 = c4 + ((p >> S5) & NEXT)
            c6 = c5 + ((p >> S6) & NEXT)
            c7 = c6 + ((p >> S7) & NEXT)
            v0, v1 = value_of(values, chunk, 0), value_of(values, chunk, 1)
            v2, v3 = value_of(values, chunk, 2), value_of(values, chunk, 3)
            v4, v5 = value_of(values, chunk, 4), value_of(values, chunk, 5)
            v6, v7 = value_of(values, chunk, 6), value_of(values, chunk, 7)
            for b in range(BATCH):  # short sums first: longer ones lose more
                near = (v0 * x[c0, b] + v1 * x[c1, b]) + (v2 * x[c2, b] + v3 * x[c3, b])
                far = (v4 * x[c4, b] + v5 * x[c5, b]) + (v6 * x[c6, b] + v7 * x[c7, b])
                total[b] += near + far
        for b in range(BATCH):
            out[row, b] = total[b]
