"""The least time a model could take here: for each operator the larger of its FLOPs and its bytes, at the ceilings."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sapwood.capture.operators import OpCall, Sized
from sapwood.measurement.machine import Ceilings
from sapwood.measurement.tables import TIMED


def roofline_ms(calls: Sequence[OpCall], kept: Sequence[int], ceiling: Ceilings) -> float:
    """Summed over products, convolutions and attention, as if all else were done in passing."""
    total = 0.0
    for call in calls:
        if call.name in TIMED:
            total += ceiling.floor_ms(flops_of(call, kept), moved_bytes(call, kept))
    return total


def moved_bytes(call: OpCall, kept: Sequence[int]) -> int:
    """Each operand read once, each result written once."""
    return sum(math.prod(s.shape(kept)) * s.dtype.itemsize for s in (*call.tensors(), *call.results))


def flops_of(call: OpCall, kept: Sequence[int]) -> int:
    """2 x multiply-accumulates of a product, a convolution or attention."""
    shapes = {name: value.shape(kept) for name, value in call.args if isinstance(value, Sized)}
    out = math.prod(call.results[0].shape(kept)) if call.results else 0
    if call.name == "aten::convolution":
        made = math.prod(shapes["input"]) if dict(call.args)["transposed"] else out
        return 2 * made * math.prod(shapes["weight"][1:])
    if call.name == "scaled_dot_product_attention":
        query, key, value = shapes["query"], shapes["key"], shapes["value"]
        return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])
    left = next(shapes[name] for name in ("mat1", "batch1", "input", "self") if name in shapes)
    return 2 * out * left[-1]
