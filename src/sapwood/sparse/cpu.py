"""Products with packed weights on a CPU, compiled by numba when first used and kept on disk."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any

import numpy as np
import torch

from sapwood.sparse.format import CHUNK, Packed, pack_weight, tiles_of, unpack_weight

MOST = 16
"""Rows of x that the kernel takes at once."""
KINDS = (torch.float32, torch.bfloat16)
PLAIN: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
"""Whatever the defaults are."""
SMALL = 1 << 17
"""Products that one core does in less time than it takes to wake another."""


@functools.cache
def unready() -> str:
    """Why the kernels cannot be used; empty where they can."""
    if importlib.util.find_spec("numba") is None:
        return "numba is not installed (pip install 'sapwood[numba]')"
    try:
        one, none = torch.zeros((1, CHUNK), **PLAIN), torch.zeros(1, dtype=torch.int64, device="cpu")
        packed = Packed(one, none, torch.tensor([0, 1], dtype=torch.int32, device="cpu"), (1, 1))
        linear(torch.zeros((1, 1), **PLAIN), packed, None)
    except Exception as error:
        return f"numba could not compile the kernels: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return ""


@functools.cache
def _numba() -> tuple[Any, Any]:
    numba = importlib.import_module("numba")
    if numba.config.THREADING_LAYER == "default":
        numba.config.THREADING_LAYER = "threadsafe"  # others end the process when two threads call
    return numba, importlib.import_module("sapwood.sparse.cpu_kernels")


def linear(x: torch.Tensor, packed: Packed, bias: torch.Tensor | None) -> torch.Tensor:
    """x [batch, columns] times the weight; all that is in x must be finite."""
    threads = torch.get_num_threads()
    numba, kernels = _numba()
    rows, columns = packed.shape
    if packed.by_kind:
        packed = pack_weight(unpack_weight(packed), by_kind=False)
    if len(x) > MOST:
        return torch.cat([linear(part, packed, bias) for part in x.split(MOST)])
    batch = 1 if len(x) == 1 else kernels.BATCH
    wide = torch.zeros((columns, batch), **PLAIN)
    wide[:, : len(x)] = x.t()
    half = packed.values.dtype is torch.bfloat16
    values = packed.values.view(torch.int16).numpy().view(np.uint16) if half else packed.values.numpy()
    out = np.empty((rows, batch), np.float32)
    many = packed.values.numel() * batch >= SMALL
    numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS) if many else 1)
    kernel = kernels.single if batch == 1 else kernels.several
    kernel(values, packed.places.numpy(), packed.starts.numpy(), wide.numpy(), out, tiles_of(columns))
    if torch.get_num_threads() != threads:  # numba's first call starts all threads of a runtime that torch shares
        torch.set_num_threads(threads)
    made = torch.from_numpy(out)[:, : len(x)].t()
    if bias is not None:
        made = made + bias
    return made.to(x.dtype).contiguous()
