"""Copies of a model that hold other tensors.

A trace runs a copy whose tensors are fake; a cut is a copy whose tensors are sliced. In both the
structure is deep-copied and every tensor is replaced, so nothing is ever written to the original.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from sapwood.errors import SapwoodError, explain

Replace = Callable[[str, torch.Tensor], torch.Tensor]


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside ``torch.compile`` and data-parallel wrappers."""
    parallel = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, parallel):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers, each once, under their first state_dict name."""
    found: dict[str, torch.Tensor] = dict(model.named_parameters())
    found.update(model.named_buffers())
    return found


def _loose_tensors(model: nn.Module, known: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors kept as plain attributes (hook-made weights, caches)."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            for tensor in _tensors_within(value):
                if id(tensor) not in known:
                    known.add(id(tensor))
                    yield f"{path}.{name}".lstrip("."), tensor


def _tensors_within(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif type(value) in (list, tuple, dict) and depth < 4:
        for item in value.values() if type(value) is dict else value:
            yield from _tensors_within(item, depth + 1)


def rebuild(model: nn.Module, replace: Replace) -> nn.Module:
    """A deep copy of the structure with ``replace(name, tensor)`` in place of each tensor."""
    memo: dict[int, Any] = {}
    tensors = named_tensors(model)
    for name, tensor in tensors.items():
        new = replace(name, tensor)
        if isinstance(tensor, nn.Parameter) and not isinstance(new, nn.Parameter):
            new = new.clone() if new.is_inference() else new
            new = nn.Parameter(new, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = new
    for name, tensor in _loose_tensors(model, set(memo)):
        memo[id(tensor)] = replace(name, tensor.detach())
    try:
        made = copy.deepcopy(model, memo)
        join_recurrent(made)
        return made
    except Exception as error:
        raise SapwoodError(
            f"expected a model that can be copied; copying {type(model).__name__} raised "
            f"{type(error).__name__}: {error}. Remove what cannot be copied (open files, locks, "
            "generators) from the modules' attributes before pruning."
        ) from error


def join_recurrent(model: nn.Module) -> None:
    """cuDNN wants the weights of a recurrent layer side by side."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase) and all(type(p) is nn.Parameter for p in module.parameters()):
            module.flatten_parameters()


def require_plain(model: Any) -> nn.Module:
    """Refuse what cannot be traced, in plain words."""
    if not isinstance(model, nn.Module):
        raise explain("a torch.nn.Module", type(model).__name__, "Pass the model itself.", "model")
    model = unwrap(model)
    assert isinstance(model, nn.Module)
    if isinstance(model, torch.jit.ScriptModule):
        raise explain(
            "an eager nn.Module",
            f"a scripted {type(model).__name__}",
            "Prune the Python model and script the result.",
            "model",
        )
    for path, module in model.named_modules():
        kind = type(module).__module__
        if kind.startswith(("torch.ao.nn.quantized", "torch.nn.quantized", "torch.ao.nn.intrinsic.quantized")):
            raise explain(
                "float weights",
                f"a quantised {type(module).__name__} at {path!r}",
                "Prune first, then quantise.",
                "model",
            )
    tensors = named_tensors(model)
    for name, tensor in tensors.items():
        if tensor.is_quantized:
            raise explain("float weights", f"quantised {name!r}", "Prune first, then quantise.", "model")
        if nn.parameter.is_lazy(tensor):
            raise explain(
                "initialised parameters",
                f"lazy {name!r}",
                "Run the model once so that lazy layers know their sizes.",
                "model",
            )
    if not any(isinstance(t, nn.Parameter) for t in tensors.values()):
        raise explain(
            "a model with parameters",
            f"{type(model).__name__} without any",
            "There is nothing to prune in it.",
            "model",
        )
    return model
