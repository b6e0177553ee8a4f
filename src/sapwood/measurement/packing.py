"""Linear layers whose zeros are left out, layer by layer, where the clock says that it pays.

2:4 weights go to sparse tensor cores; weights with other zeros to the kernels of ``sapwood.sparse``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.sparse import to_sparse_semi_structured

from sapwood.capture.isolation import copied
from sapwood.capture.run import Inputs
from sapwood.measurement.backends import capture
from sapwood.measurement.clock import take_turns
from sapwood.measurement.forms import by_product, to_csr
from sapwood.measurement.model_forms import FormLinear
from sapwood.sparse import SparseLinear
from sapwood.sparse.linear import packable, with_layers
from sapwood.sparse.operator import most_of, unready
from sapwood.surgery.check import relative_error

PAYS = 1.05  # a packed layer must be faster than the dense one by this much
TOO_FAR = 0.05  # relative; what follows checks the whole model
CACHE = 128 * 2**20  # bytes of weights that are read in turns, so that none comes from a cache
COPIES = 8

Convert = Callable[[nn.Linear], nn.Module]
Packing = tuple[nn.Module, tuple[str, ...]]


def is_two_of_four(weight: torch.Tensor) -> bool:
    """At most two of each four neighbours in a row are not zero."""
    if weight.dim() != 2 or weight.shape[1] % 4:
        return False
    return bool((weight.detach().reshape(-1, 4).count_nonzero(1) <= 2).all())


def pack_two_of_four(model: nn.Module, inputs: Inputs) -> Packing | None:
    """A copy with 2:4 linear layers packed where that is faster, and what was done; None where nothing is."""
    names = [
        name
        for name, module in model.named_modules()
        if type(module) is nn.Linear
        and module.weight.is_cuda
        and module.weight.dtype in (torch.float16, torch.bfloat16)
        and is_two_of_four(module.weight)
    ]
    return _pack(model, inputs, names, {"2:4": _two_of_four}, "2:4 zeros")


def pack_zeros(model: nn.Module, inputs: Inputs) -> Packing | None:
    """The same for zeros anywhere, by kernels that read the other weights only; on a CPU also by MKL's CSR."""
    layers = {n: m for n, m in packable(model) if m.weight.device.type in ("cpu", "cuda")}
    kinds = {(m.weight.device, m.weight.dtype) for m in layers.values()}
    ways: dict[str, Convert] = {}
    if not any(unready(*kind) for kind in kinds):
        ways["packed"] = lambda layer: SparseLinear.of(layer, most_of(layer.weight.device))
    if all(device.type == "cpu" and dtype is torch.float32 for device, dtype in kinds):
        ways["CSR"] = _csr
    return _pack(model, inputs, list(layers), ways, "zeros")


def _csr(layer: nn.Linear) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says at the first sparse tensor that they are new
        weight = to_csr(layer.weight.detach())
    return FormLinear(weight, None if layer.bias is None else layer.bias.detach().clone(), by_product)


def _two_of_four(layer: nn.Linear) -> nn.Module:
    with torch.device("meta"):
        made = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
    made.weight = nn.Parameter(to_sparse_semi_structured(layer.weight.detach()), requires_grad=False)
    if layer.bias is not None:
        made.bias = nn.Parameter(layer.bias.detach().clone())
    return made


def _pack(
    model: nn.Module, inputs: Inputs, names: Sequence[str], ways: Mapping[str, Convert], what: str
) -> Packing | None:
    if not names or not ways:
        return None
    given = _inputs_of(model, names, inputs)
    known: dict[Any, str] = {}
    made: dict[str, nn.Module] = {}
    used: dict[str, int] = {}
    for name in names:
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        if name not in given:
            continue
        zeros = round(8 * int((layer.weight == 0).sum()) / max(1, layer.weight.numel()))
        key = (tuple(layer.weight.shape), tuple(given[name].shape), layer.bias is None, zeros)
        if key not in known:
            known[key] = _fastest(layer, ways, given[name])
        if way := known[key]:
            made[name], used[way] = ways[way](layer), used.get(way, 0) + 1
    if not made:
        return None
    told = ", ".join(f"{count} as {way}" for way, count in used.items())
    return with_layers(model, made).eval(), (f"{len(made)} of {len(names)} layers with {what}: {told}",)


def _inputs_of(model: nn.Module, names: Sequence[str], inputs: Inputs) -> dict[str, torch.Tensor]:
    """What each layer is given in one forward."""
    found: dict[str, torch.Tensor] = {}
    hooks = []
    for name in names:

        def note(_: nn.Module, args: Any, name: str = name) -> None:
            found[name] = args[0].detach()

        hooks.append(model.get_submodule(name).register_forward_pre_hook(note))
    args, kwargs = copied(inputs)
    try:
        with torch.no_grad():
            model(*args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _fastest(layer: nn.Linear, ways: Mapping[str, Convert], x: torch.Tensor) -> str:
    """The way that is faster than dense, or none; weights lie in several places, as those of a whole model do."""
    weight = layer.weight.detach()
    copies = max(1, min(COPIES, CACHE // max(1, weight.nbytes)))
    plain = [weight.clone() for _ in range(copies)]
    calls = {"": _ready(lambda a: [F.linear(a, w, layer.bias) for w in plain][-1], x)}
    wanted = calls[""]()
    for way, convert in ways.items():
        try:
            packed = [convert(layer) for _ in range(copies)]
            call = _ready(_in_turn(packed), x)
            if relative_error(wanted, call()) <= TOO_FAR:
                calls[way] = call
        except Exception:  # a shape or device that the kernels refuse
            continue
    with torch.no_grad():
        times = take_turns(calls, seconds=0.1, least=7, device=x.device)
    best = max(times, key=lambda way: times[way].speed)
    return best if times[best].speed_low > PAYS else ""


def _in_turn(layers: Sequence[nn.Module]) -> Callable[[torch.Tensor], torch.Tensor]:
    def all_of_them(x: torch.Tensor) -> torch.Tensor:
        made: list[torch.Tensor] = [layer(x) for layer in layers]
        return made[-1]

    return all_of_them


def _ready(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Callable[[], torch.Tensor]:
    if x.is_cuda:
        return capture(function, ((x,), {}), x.device).call

    def call() -> torch.Tensor:
        with torch.no_grad():
            return function(x)

    return call
