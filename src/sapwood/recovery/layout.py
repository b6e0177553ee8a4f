"""Strides that agree: fused optimizers refuse a weight whose gradient or momentum lies otherwise in memory.

It happens with channels_last (a 1x1 kernel lies the same way under two descriptions), after a cut and after a resume.
"""

from __future__ import annotations

from typing import Any

import torch


def aligned(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The tensor with the strides of another one of its shape: the same memory where that will do, else a copy."""
    if tensor.stride() == like.stride() or tensor.shape != like.shape or tensor.layout != torch.strided:
        return tensor
    differ = [n for n, a, b in zip(tensor.shape, tensor.stride(), like.stride(), strict=True) if a != b]
    if all(n == 1 for n in differ):
        return tensor.as_strided(like.shape, like.stride(), tensor.storage_offset())
    return torch.empty_like(like, dtype=tensor.dtype, requires_grad=False).copy_(tensor)


@torch.no_grad()
def align_gradients(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        if group.get("fused"):
            for weight in group["params"]:
                if weight.grad is not None and weight.grad.stride() != weight.stride():
                    weight.grad = aligned(weight.grad, weight)


@torch.no_grad()
def align_state(optimizer: Any) -> None:
    for weight, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.device == weight.device:
                state[key] = aligned(value, weight)
