"""The step in which a device likes widths: measured on a convolution or a product of usual size."""

from __future__ import annotations

from collections.abc import Callable

import torch

from sapwood.capture.forms import Form
from sapwood.capture.operators import OpCall, Sized
from sapwood.measurement.tables import OperatorTimes

WIDTHS = (256, 192)
TRIED = (1, 2, 4, 8, 16, 32, 64)
BYTES = 16  # what a load or a vector unit takes at once; widths that are no multiple of it are never liked


def preferred_steps(times: OperatorTimes, kind: str, dtype: torch.dtype) -> tuple[int, int]:
    """(for wide layers, the least that is not slow). ``kind`` is "convolution" or "product".

    A step is liked if giving up that many of 256 (and of 192) channels saves at least half of its share of the time,
    and if so do all larger ones; it is not slow if the narrower layer is no slower than the whole one.
    """
    least = max(1, BYTES // dtype.itemsize) if times.device.type == "cuda" else 8
    liked, safe = least, least
    for width in WIDTHS:
        full = times.time_of(_probe(kind, width, dtype, times.device), [])
        took = {step: times.time_of(_probe(kind, width - step, dtype, times.device), []) for step in TRIED}
        liked = max(liked, _smallest(_saves(took, full, width)))
        safe = max(safe, _smallest(_not_slower(took, full)))
    safe = min(safe, 4 * least)
    return max(liked, safe), safe


def _saves(took: dict[int, float], full: float, width: int) -> Callable[[int], bool]:
    return lambda step: took[step] <= full * (1 - 0.5 * step / width)


def _not_slower(took: dict[int, float], full: float) -> Callable[[int], bool]:
    return lambda step: took[step] <= full * 1.02


def _smallest(holds: Callable[[int], bool]) -> int:
    """The smallest step for which something holds, as it does for all larger ones."""
    found = TRIED[-1]
    for step in reversed(TRIED):
        if not holds(step):
            break
        found = step
    return found


def _probe(kind: str, width: int, dtype: torch.dtype, device: torch.device) -> OpCall:
    """Width in, width out; large enough to fill a GPU, small enough for a CPU."""
    large = device.type == "cuda"

    def sized(*shape: int) -> Sized:
        return Sized(tuple(Form(n) for n in shape), dtype, tuple(range(len(shape))))

    if kind == "convolution":
        side, batch = (28, 64) if large else (14, 1)
        args = (
            ("input", sized(batch, width, side, side)),
            ("weight", sized(width, width, 3, 3)),
            ("bias", None),
            ("stride", [1, 1]),
            ("padding", [1, 1]),
            ("dilation", [1, 1]),
            ("transposed", False),
            ("output_padding", [0, 0]),
            ("groups", 1),
        )
        return OpCall("aten::convolution", torch.ops.aten.convolution.default, args, ())
    rows = 16384 if large else 196
    args_ = (("self", sized(rows, width)), ("mat2", sized(width, width)))
    return OpCall("aten::mm", torch.ops.aten.mm.default, args_, ())
