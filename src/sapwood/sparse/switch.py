"""Up to how many rows of inputs a packed weight is faster than a dense one: measured, once for weights of a kind."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from sapwood.sparse.format import Packed
from sapwood.sparse.operator import dense, most_of, sparse_linear, unready

CACHE = 120_000_000
"""Bytes of weights that no cache of a GPU holds."""
COPIES = 10
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
    """Batches double until the dense way is as fast. Copies take turns, so that no weight comes from a cache."""
    most = most_of(packed.values.device)
    count = min(COPIES, -(-CACHE // max(1, packed.nbytes))) if packed.values.is_cuda else 1
    copies = [packed, *(packed.clone() for _ in range(count - 1))]
    size = packed.values.element_size() * math.prod(packed.shape)
    weights = [dense(p) for p in copies[: -(-CACHE // size)]] if keep_dense else []
    best, batch = 0, 1

    def packed_way(x: torch.Tensor, i: int) -> torch.Tensor:
        own = copies[i % count]
        made: torch.Tensor = sparse_linear(x, own.values, own.places, own.starts, None, own.shape[1], most)
        return made

    def dense_way(x: torch.Tensor, i: int) -> torch.Tensor:
        return F.linear(x, weights[i % len(weights)] if keep_dense else dense(copies[i % count]))

    while batch <= most:
        x = torch.ones((batch, packed.shape[1]), dtype=packed.values.dtype, device=packed.values.device)
        if _took(packed_way, x) > _took(dense_way, x):
            break
        best, batch = batch, 2 * batch
    return best


def _took(call: Callable[[torch.Tensor, int], torch.Tensor], x: torch.Tensor, times: int = 7) -> float:
    """On a GPU ten calls as a graph: what the host takes to launch them does not count."""
    with torch.no_grad():
        call(x, 0)
        if x.is_cuda:
            with torch.cuda.device(x.device):
                return _replayed(lambda: [call(x, i) for i in range(10)], times)
        found = []
        for i in range(times):
            before = time.perf_counter()
            call(x, i)
            found.append(time.perf_counter() - before)
        return statistics.median(found)


def _replayed(calls: Callable[[], object], times: int) -> float:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
        calls()
    graph.replay()
    found = []
    for _ in range(times):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(float(start.elapsed_time(end)))
    return statistics.median(found)
