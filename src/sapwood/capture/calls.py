"""What is noted of an operator call while a model runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class RawSized:
    """A tensor: a dimension is a plain size or the number of an id vector; dtype, order of dimensions in memory."""

    sizes: tuple[int, ...]
    vectors: tuple[int | None, ...]
    dtype: torch.dtype
    order: tuple[int, ...]


@dataclass(frozen=True)
class RawCall:
    name: str
    op: Any
    args: tuple[tuple[str, Any], ...]
    results: tuple[RawSized, ...]


def memory_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Dimensions from the slowest to the fastest in memory."""
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return tuple(range(tensor.dim()))
    strides = tensor.stride()
    return tuple(sorted(range(tensor.dim()), key=lambda d: (-strides[d], d)))
