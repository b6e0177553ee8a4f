"""Up to how many rows of inputs a packed weight is faster than a dense one: measured, once for weights of a kind."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from sapwood.sparse.format import Packed
from sapwood.sparse.operator import dense, most_of, sparse_linear, unready

_known: dict[tuple[object, ...], int] = {}


def most_rows(packed: Packed, keep_dense: bool = False) -> int:
    """0 where there is no kernel. Without a dense copy the other way is to unpack at every call."""
    device, dtype = packed.values.device, packed.values.dtype
    if device.type == "meta" or unready(device, dtype) or not all(packed.shape):
        return 0
    full = round(8 * packed.values.numel() / (packed.shape[0] * packed.shape[1]))
    key = (str(device), dtype, packed.shape, full, keep_dense, torch.get_num_threads())
    if key not in _known:
        _known[key] = _measure(packed, keep_dense)
    return _known[key]


def _measure(packed: Packed, keep_dense: bool) -> int:
    """Batches double until the dense way is as fast."""
    most = most_of(packed.values.device)
    weight, best, batch = dense(packed), 0, 1
    given = (packed.values, packed.places, packed.starts, None, packed.shape[1], most)

    def packed_way(x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = sparse_linear(x, *given)
        return made

    def dense_way(x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weight if keep_dense else dense(packed))

    while batch <= most:
        x = torch.ones((batch, packed.shape[1]), dtype=packed.values.dtype, device=packed.values.device)
        if _took(packed_way, x) > _took(dense_way, x):
            break
        best, batch = batch, 2 * batch
    return best


def _took(call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, times: int = 7) -> float:
    with torch.no_grad():
        call(x)
        if x.is_cuda:
            return statistics.median(_events(call, x) for _ in range(times))
        found = []
        for _ in range(times):
            before = time.perf_counter()
            call(x)
            found.append(time.perf_counter() - before)
        return statistics.median(found)


def _events(call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> float:
    """Ten calls in a row: what the host takes to launch them does not count as long as it is the lesser part."""
    with torch.cuda.device(x.device):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        for _ in range(10):
            call(x)
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))
