"""What can be counted without a clock: parameters, non-zeros, FLOPs (2 x multiply-accumulates)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from sapwood.capture.modes import plain_paths
from sapwood.capture.run import as_call


def count(model: nn.Module, example_inputs: Any) -> dict[str, int]:
    """Parameters, those that are not zero, and the FLOPs of one example (of a batch of those given, its share)."""
    args, kwargs = as_call(example_inputs)
    parameters = list(model.parameters())
    modes = {m: m.training for m in model.modules()}
    counter = FlopCounterMode(display=False)
    try:
        model.eval()
        with torch.no_grad(), plain_paths(), counter:
            model(*args, **kwargs)
    finally:
        for module, mode in modes.items():
            module.training = mode
    tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor) and a.dim()]
    batch = tensors[0].shape[0] if tensors else 1
    return {
        "params": sum(p.numel() for p in parameters),
        "nonzeros": sum(int(p.detach().count_nonzero()) for p in parameters),
        "flops": counter.get_total_flops() // max(1, batch),
    }
