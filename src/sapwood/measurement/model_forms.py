"""The forms of a whole model: its linear layers multiply by CSR, 2:4 or packed weights; all else runs as it is."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear
from torch.utils import _pytree as pytree

from sapwood.capture.run import Inputs
from sapwood.capture.trace import trace
from sapwood.errors import SapwoodError
from sapwood.masking.hold import noted_masks
from sapwood.masking.targets import maskable
from sapwood.measurement.counts import batch_of, count
from sapwood.measurement.forms import (
    Multiply,
    by_kernel,
    by_linear,
    by_product,
    to_csr,
    to_packed,
    to_semi_structured,
)
from sapwood.measurement.points import Cost, told
from sapwood.measurement.roofline import moved_bytes
from sapwood.measurement.tables import TIMED
from sapwood.surgery.cut import cut
from sapwood.types import Plan

FEWEST = 0.1  # of the maskable weights must be in linear layers for a sparse form to say anything
NO_FORM = "convolutions and other layers have no {form} form in torch"
TO: Mapping[str, Callable[[torch.Tensor], Any]] = {"CSR": to_csr, "packed": to_packed}
BY: Mapping[str, Mapping[str, Multiply]] = {
    "CSR": {"product": by_product, "linear": by_linear},
    "packed": {"kernel": by_kernel},
}


class FormLinear(nn.Module):
    """A linear layer whose weight is a sparse tensor, which not every kind can be as a parameter."""

    def __init__(self, weight: Any, bias: torch.Tensor | None, multiply: Multiply | None) -> None:
        super().__init__()
        self.weight, self.bias, self.multiply = weight, bias, multiply

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        if self.multiply is None:
            out = linear(rows, self.weight, self.bias)
        else:
            out = self.multiply(rows, self.weight)
            out = out if self.bias is None else out + self.bias
        return out.reshape(*x.shape[:-1], -1)


@dataclass(frozen=True)
class Converted:
    """A model in a sparse form, in one or more ways; and what its layers save."""

    ways: Mapping[str, nn.Module]
    nonzeros: Mapping[str, int]
    """Of each layer that was converted."""
    notes: tuple[str, ...]


def copy_of(model: nn.Module) -> nn.Module:
    """A copy with memory of its own."""
    return cut(model, Plan({}, {}, {}))


def placed(model: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """A copy on the device, in the dtype and in evaluation mode."""
    return copy_of(model).to(device, dtype).eval()


def with_batch(inputs: Inputs, batch: int, device: torch.device, dtype: torch.dtype) -> Inputs:
    """Inputs like these for so many examples: random where they are floating point, repeated where they are not."""
    old, dice = batch_of(inputs), torch.Generator().manual_seed(1)

    def change(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() and tensor.shape[0] == old:
            if tensor.is_floating_point():
                tensor = torch.randn(batch, *tensor.shape[1:], generator=dice)
            else:
                tensor = tensor[torch.arange(batch, device=tensor.device) % old]
        return tensor.to(device, dtype if tensor.is_floating_point() else None)

    return pytree.tree_map_only(torch.Tensor, change, inputs)  # type: ignore[no-any-return]


def linear_layers(model: nn.Module, form: str) -> dict[str, nn.Linear]:
    """The masked linear layers; an error where they hold too little of the model to bear the form."""
    masks, weights = noted_masks(model), maskable(model, (), ())
    found = {n: m for n, m in model.named_modules() if type(m) is nn.Linear and f"{n}.weight" in masks}
    inside = sum(m.weight.numel() for m in found.values())
    share = inside / max(1, sum(w.numel() for w in weights.values()))
    if share < FEWEST:
        raise SapwoodError(f"linear layers hold {share:.0%} of the weights; {NO_FORM.format(form=form)}")
    return found


def to_form(form: str, masked: nn.Module) -> Converted:
    """A masked model as CSR, 2:4 or packed. Layers whose shape does not fit 2:4 stay as they are."""
    layers = linear_layers(masked, form)
    ways: Mapping[str, Multiply | None] = BY.get(form, {"linear": None})
    packed: dict[str, Any] = {}
    refused: dict[str, str] = {}
    for name, layer in layers.items():
        weight = layer.weight.detach()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch says at the first sparse tensor that they are new
                packed[name] = TO[form](weight) if form in TO else to_semi_structured(form, weight)
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:
            refused[name] = told(error)
    if not packed:
        raise SapwoodError(next(iter(refused.values()), "no linear layer is masked"))
    weights = sum(w.numel() for w in maskable(masked, (), ()).values())
    share = sum(layers[n].weight.numel() for n in packed) / max(1, weights)
    notes = [f"{share:.0%} of the weights are in this form"] if share < 0.995 else []
    notes += (
        [f"{len(refused)} of {len(layers)} linear layers stay dense: {next(iter(refused.values()))}"] if refused else []
    )
    nonzeros = {n: int(layers[n].weight.count_nonzero()) for n in packed}
    return Converted({w: _replaced(masked, packed, m) for w, m in ways.items()}, nonzeros, tuple(notes))


def _replaced(masked: nn.Module, packed: Mapping[str, Any], multiply: Multiply | None) -> nn.Module:
    model = copy_of(masked).eval()
    for name, weight in packed.items():
        layer = model.get_submodule(name)
        bias = layer.bias.detach() if isinstance(layer.bias, torch.Tensor) else None
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, FormLinear(weight, bias, multiply))
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0  # its fused path takes dense weights only
    return model


def dense_cost(model: nn.Module, inputs: Inputs) -> Cost:
    """What a dense model must compute, and move: the operands and results of its products and convolutions."""
    counted, batch, seen = count(model, inputs), batch_of(inputs), trace(model, inputs)
    moved = sum(moved_bytes(c, seen.dense) for c in seen.calls if c.name in TIMED)
    weights = counted["weight_bytes"]
    return Cost(float(counted["flops"] * batch), float(weights), float(max(0, moved - weights)))


def sparse_cost(form: str, masked: nn.Module, inputs: Inputs, dense: Cost, nonzeros: Mapping[str, int]) -> Cost:
    """The dense cost, less what the converted layers leave out, plus what says where their values are."""
    flops, weights = dense.flops, dense.weight_bytes
    for name, rows in _rows(masked, inputs, tuple(nonzeros)).items():
        weight = masked.get_submodule(name).weight
        assert isinstance(weight, torch.Tensor)
        kept, size = nonzeros[name], weight.element_size()
        per_value = {"CSR": 4.0, "packed": 1.0}.get(form, 0.25)
        places = kept * per_value + (0 if per_value < 1 else (len(weight) + 1) * 4)
        flops -= 2.0 * rows * (weight.numel() - kept)
        weights -= (weight.numel() - kept) * size - places
    return Cost(flops, weights, dense.activation_bytes)


def _rows(model: nn.Module, inputs: Inputs, names: tuple[str, ...]) -> dict[str, int]:
    """How many rows each layer multiplies in one forward."""
    seen = dict.fromkeys(names, 0)

    def watch(name: str) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
        def hook(_: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            seen[name] += args[0].numel() // max(1, args[0].shape[-1]) if args else 0

        return hook

    hooks = [model.get_submodule(n).register_forward_pre_hook(watch(n)) for n in names]
    try:
        with torch.no_grad():
            model(*inputs[0], **inputs[1])
    finally:
        for handle in hooks:
            handle.remove()
    return seen
