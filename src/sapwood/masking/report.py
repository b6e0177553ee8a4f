"""``sparsity``: how many of a model's weights are zero, per layer and in all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from sapwood.capture.skeleton import unwrap
from sapwood.masking.hold import noted_masks, plain_name
from sapwood.masking.targets import maskable


@dataclass(frozen=True)
class Sparsity:
    """``zeros`` of ``weights`` maskable weights are zero; ``layers`` says so for each."""

    zeros: int
    weights: int
    layers: Mapping[str, Sparsity]
    pattern: str = ""

    @property
    def total(self) -> float:
        return self.zeros / self.weights if self.weights else 0.0

    def __str__(self) -> str:
        lines = [f"{n}: {s.zeros:,} of {s.weights:,} zero ({s.total:.2%})" for n, s in self.layers.items()]
        return "\n".join([*lines, f"total: {self.zeros:,} of {self.weights:,} zero ({self.total:.2%})"])


def sparsity(model: nn.Module) -> Sparsity:
    """Count the zeros (-0.0 is one) among the maskable weights, and those masked though not maskable by default."""
    weights = dict(maskable(model))
    noted = noted_masks(model)
    for name, parameter in unwrap(model).named_parameters():
        if plain_name(name) in noted:
            weights.setdefault(name, parameter)
    layers = {
        n: Sparsity(int(w.numel() - w.detach().count_nonzero()), w.numel(), {}, noted.get(plain_name(n), ""))
        for n, w in weights.items()
    }
    for name, module in unwrap(model).named_modules():
        counted = getattr(module, "sapwood_zeros", None)
        if counted is not None:  # a packed layer counts its own
            zeros, whole = counted()
            weight = f"{name}.weight".lstrip(".")
            layers[weight] = Sparsity(zeros, whole, {}, noted.get(plain_name(weight), ""))
    return Sparsity(sum(s.zeros for s in layers.values()), sum(s.weights for s in layers.values()), layers)
