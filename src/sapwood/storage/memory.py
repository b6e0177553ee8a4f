"""Fresh memory in large pages.

Filling new memory costs a page fault for every 4 KiB, which takes longer than unpacking the tensor itself.
Linux hands out 2 MiB at a time where it is asked to; the request is a hint, and nothing else changes.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap

import torch

_LARGE = 2 * 2**20


def roomy(tensor: torch.Tensor) -> torch.Tensor:
    """Ask for large pages under a tensor that has not been written to yet; the tensor is returned."""
    first = -(-tensor.data_ptr() // _LARGE) * _LARGE  # whole pages within the tensor only
    length = (tensor.data_ptr() + tensor.numel() * tensor.element_size() - first) // _LARGE * _LARGE
    if length > 0 and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), mmap.MADV_HUGEPAGE)
    return tensor
