"""``sapwood::sparse_linear``: one operator for every device, known to torch.compile and autograd."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from sapwood.errors import explain
from sapwood.sparse import cpu, cuda
from sapwood.sparse.format import Packed, tiles_of, unpack_weight

_NAME = "sapwood::sparse_linear"


def unready(device: torch.device, dtype: torch.dtype) -> str:
    """Why there is no kernel; empty where there is one."""
    if device.type == "cuda":
        return cuda.unready(torch.cuda.current_device() if device.index is None else device.index)
    if device.type == "cpu":
        return cpu.unready() if dtype in cpu.KINDS else f"no kernel for {dtype} on a CPU"
    return f"no kernel for {device.type}"


def most_of(device: torch.device) -> int:
    """Rows of inputs that a kernel takes at once."""
    return cuda.MOST if device.type == "cuda" else cpu.MOST


@torch.library.custom_op(_NAME, mutates_args=())
def sparse_linear(
    x: torch.Tensor,
    values: torch.Tensor,
    places: torch.Tensor,
    starts: torch.Tensor,
    bias: torch.Tensor | None,
    columns: int,
    most: int,
) -> torch.Tensor:
    """x times a packed weight, plus the bias. Above ``most`` rows of x the weight is unpacked for the call."""
    packed = Packed(values, places, starts, ((len(starts) - 1) // tiles_of(columns), columns))
    _require(x, packed, bias)
    flat = x.reshape(-1, columns).contiguous()
    shape = (*x.shape[:-1], packed.shape[0])
    if len(flat) <= most and not unready(x.device, x.dtype):
        if x.device.type == "cuda":
            return cuda.linear(_aligned(flat), packed, bias).view(shape)
        if bool(torch.isfinite(flat).all()):  # else zeros count, as in a dense product
            return cpu.linear(flat, packed, bias).view(shape)
    return F.linear(flat, dense(packed), bias).view(shape)


def dense(packed: Packed) -> torch.Tensor:
    device = packed.values.device
    if device.type == "cuda" and not unready(device, packed.values.dtype):
        return cuda.unpack(packed)
    return unpack_weight(packed)


def _aligned(x: torch.Tensor) -> torch.Tensor:
    return x if x.data_ptr() % 16 == 0 else x.clone()


def _require(x: torch.Tensor, packed: Packed, bias: torch.Tensor | None) -> None:
    columns = packed.shape[1]
    if x.dim() == 0 or x.shape[-1] != columns:
        raise explain(f"inputs of {columns} features", f"shape {tuple(x.shape)}", "Check the input.", "SparseLinear")
    if x.dtype is not packed.values.dtype or x.device != packed.values.device:
        raise explain(
            f"inputs of {packed.values.dtype} on {packed.values.device}",
            f"{x.dtype} on {x.device}",
            "Move the input, or the model.",
            "SparseLinear",
        )
    if bias is not None and (bias.shape, bias.dtype, bias.device) != (packed.shape[:1], x.dtype, x.device):
        raise explain(
            f"a bias of {packed.shape[0]} numbers, {x.dtype} on {x.device}",
            f"{tuple(bias.shape)} of {bias.dtype} on {bias.device}",
            "Give it the dtype of the inputs.",
            "SparseLinear",
        )


@sparse_linear.register_fake
def _fake(x: Any, values: Any, places: Any, starts: Any, bias: Any, columns: int, most: int) -> torch.Tensor:
    made: torch.Tensor = x.new_empty((*x.shape[:-1], (starts.shape[0] - 1) // tiles_of(columns)))
    return made


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    _, values, places, starts, bias, columns, _ = inputs
    ctx.save_for_backward(values, places, starts)
    ctx.columns, ctx.needs_bias = columns, bias is not None


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    values, places, starts = ctx.saved_tensors
    if ctx.needs_input_grad[1]:
        raise explain(
            "packed weights that stay as they are",
            "a gradient asked for them",
            "sw.unpack the model, train it with sw.hold, and pack it again.",
            "SparseLinear",
        )
    rows = (len(starts) - 1) // tiles_of(ctx.columns)
    weight = dense(Packed(values, places, starts, (rows, ctx.columns)))
    into_x = grad @ weight if ctx.needs_input_grad[0] else None
    into_bias = grad.reshape(-1, rows).sum(0) if ctx.needs_bias and ctx.needs_input_grad[4] else None
    return into_x, None, None, None, into_bias, None, None


sparse_linear.register_autograd(_backward, setup_context=_keep)
