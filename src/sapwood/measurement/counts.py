"""What can be counted without a clock: parameters, non-zeros, FLOPs (2 x multiply-accumulates), bytes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from sapwood.capture.modes import plain_paths
from sapwood.capture.registry import tensors
from sapwood.capture.run import as_call, tensors_in
from sapwood.capture.skeleton import named_tensors


class _CountBytes(TorchDispatchMode):
    """Bytes that operators write to new memory; views write nothing."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.written = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        held = {t.untyped_storage()._cdata for t in tensors([*args, *(kwargs or {}).values()])}
        for tensor in tensors([out]):
            if tensor.untyped_storage()._cdata not in held:
                self.written += tensor.numel() * tensor.element_size()
        return out


class _Everywhere:
    """Stands in for the counter's look at modules, which fails where a parameter is handed to a module as an input."""

    parents: frozenset[str] = frozenset({"Global"})

    def __enter__(self) -> _Everywhere:
        return self

    def __exit__(self, *_: object) -> None:
        return None


def flop_counter() -> FlopCounterMode:
    """Torch's counter of FLOPs, for whole models."""
    counter: Any = FlopCounterMode(display=False)
    counter.mod_tracker = _Everywhere()
    return counter  # type: ignore[no-any-return]


def count(model: nn.Module, example_inputs: Any) -> dict[str, int]:
    """Of one example (its share of the batch given): FLOPs, MACs, bytes of activations; and what the weights take."""
    args, kwargs = as_call(example_inputs)
    parameters = list(model.parameters())
    modes = {m: m.training for m in model.modules()}
    counter, bytes_ = flop_counter(), _CountBytes()
    try:
        model.eval()
        with torch.no_grad(), plain_paths(), counter, bytes_:
            model(*args, **kwargs)
    finally:
        for module, mode in modes.items():
            module.training = mode
    batch = batch_of((args, kwargs))
    flops = counter.get_total_flops() // batch
    return {
        "params": sum(p.numel() for p in parameters),
        "nonzeros": sum(int(p.detach().count_nonzero()) for p in parameters),
        "flops": flops,
        "macs": flops // 2,
        "weight_bytes": sum(t.numel() * t.element_size() for t in named_tensors(model).values()),
        "activation_bytes": bytes_.written // batch,
    }


def batch_of(inputs: Any) -> int:
    """The first size of the first tensor among the inputs."""
    found = [t for t in tensors_in(inputs) if t.dim()]
    return max(1, found[0].shape[0]) if found else 1
