"""The step in which a device likes widths: measured on a convolution or a product of usual size."""

from __future__ import annotations

import torch

from sapwood.capture.forms import Form
from sapwood.capture.operators import OpCall, Sized
from sapwood.measurement.tables import OperatorTimes

WIDTHS = (256, 192)
NARROW = 32
TRIED = (1, 2, 4, 8, 16, 32, 64)
BYTES = 16  # what a load or a vector unit takes at once; widths that are no multiple of it are never liked


def preferred_steps(times: OperatorTimes, kind: str, dtype: torch.dtype) -> tuple[int, int]:
    """(for wide layers, for narrow ones). ``kind`` is "convolution" or "product".

    A step is liked if giving up that many of 256 (and of 192) channels saves at least half of its share of the time,
    and if so do all larger ones; narrow layers have 32 channels.
    """
    least = max(1, BYTES // dtype.itemsize) if times.device.type == "cuda" else 8
    times.together([_probe(kind, width - step, dtype, times.device) for width, step in _tried()])
    wide = max(_liked(_took(times, kind, width, dtype), width) for width in WIDTHS)
    narrow = max(least, _liked(_took(times, kind, NARROW, dtype), NARROW))
    return max(wide, narrow), narrow


def _tried() -> list[tuple[int, int]]:
    """Widths, and how many channels less."""
    return [(width, step) for width in (*WIDTHS, NARROW) for step in (0, *TRIED) if step < width]


def _took(times: OperatorTimes, kind: str, width: int, dtype: torch.dtype) -> dict[int, float]:
    """By how many channels are given up."""
    steps = [step for tried, step in _tried() if tried == width]
    return {step: times.time_of(_probe(kind, width - step, dtype, times.device), []) for step in steps}


def _liked(took: dict[int, float], width: int) -> int:
    """The smallest step that saves enough, as all larger ones do; the largest where none does."""
    found = max(took)
    for step in sorted(took, reverse=True)[:-1]:
        if took[step] > took[0] * (1 - 0.5 * step / width):
            break
        found = step
    return found


def _probe(kind: str, width: int, dtype: torch.dtype, device: torch.device) -> OpCall:
    """Width in, width out; large enough to fill a GPU, small enough for a CPU. Narrow layers have larger images."""
    large, wider = device.type == "cuda", 1 if width > NARROW else 2

    def sized(*shape: int) -> Sized:
        return Sized(tuple(Form(n) for n in shape), dtype, tuple(range(len(shape))))

    if kind == "convolution":
        side, batch = (28 * wider, 64) if large else (14 * wider, 1)
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
