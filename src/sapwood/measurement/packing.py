"""2:4 weights packed for sparse tensor cores, layer by layer, where the clock says that it pays."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.sparse import to_sparse_semi_structured

from sapwood.capture.isolation import copied
from sapwood.capture.run import Inputs
from sapwood.capture.skeleton import rebuild
from sapwood.measurement.backends import capture
from sapwood.measurement.clock import take_turns
from sapwood.surgery.check import relative_error

PAYS = 1.05  # a packed layer must be faster than the dense one by this much


def is_two_of_four(weight: torch.Tensor) -> bool:
    """At most two of each four neighbours in a row are not zero."""
    if weight.dim() != 2 or weight.shape[1] % 4:
        return False
    return bool((weight.detach().reshape(-1, 4).count_nonzero(1) <= 2).all())


def pack(model: nn.Module, inputs: Inputs) -> tuple[nn.Module, tuple[str, ...]] | None:
    """A copy with 2:4 linear layers packed where that is faster, and what was done; None where nothing is."""
    names = [
        name
        for name, module in model.named_modules()
        if type(module) is nn.Linear
        and module.weight.is_cuda
        and module.weight.dtype in (torch.float16, torch.bfloat16)
        and is_two_of_four(module.weight)
    ]
    if not names:
        return None
    copy = rebuild(model, lambda _, tensor: tensor.detach().clone()).eval()
    given = _inputs_of(copy, names, inputs)
    known: dict[Any, bool] = {}
    packed = 0
    for name in names:
        layer: Any = copy.get_submodule(name)
        if name not in given:
            continue
        key = (tuple(layer.weight.shape), tuple(given[name].shape), layer.bias is None)
        if key not in known:
            known[key] = _pays(layer, given[name])
        if known[key]:
            layer.weight = nn.Parameter(to_sparse_semi_structured(layer.weight.detach()), requires_grad=False)
            packed += 1
    return (copy, (f"{packed} of {len(names)} layers with 2:4 zeros packed",)) if packed else None


def _inputs_of(model: nn.Module, names: list[str], inputs: Inputs) -> dict[str, torch.Tensor]:
    """What each layer is given in one forward."""
    found: dict[str, torch.Tensor] = {}
    hooks = []
    for name in names:

        def note(_: nn.Module, args: Any, name: str = name) -> None:
            found[name] = args[0].detach()

        hooks.append(model.get_submodule(name).register_forward_pre_hook(note))
    args, kwargs = copied(inputs)
    with torch.no_grad():
        model(*args, **kwargs)
    for hook in hooks:
        hook.remove()
    return found


def _pays(layer: nn.Linear, x: torch.Tensor) -> bool:
    weight = layer.weight.detach()
    try:
        packed = to_sparse_semi_structured(weight)
        dense = capture(lambda a: F.linear(a, weight, layer.bias), ((x,), {}), x.device)
        sparse = capture(lambda a: F.linear(a, packed, layer.bias), ((x,), {}), x.device)
        if relative_error(dense.call(), sparse.call()) > 0.05:
            return False
    except Exception:  # a shape or device that the kernels refuse
        return False
    times = take_turns({"dense": dense.call, "packed": sparse.call}, seconds=0.1, least=7, device=x.device)
    return times["packed"].speed_low > PAYS
