"""Attributes that repeat a weight's size without the forward reading them (``out_features``).

Nothing breaks when they go stale, but people and tools read them, so a cut keeps them right.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from sapwood.capture.skeleton import named_parts, named_tensors

_WEIGHTS = (
    "weight",
    "weight_orig",
    "weight_v",
    "parametrizations.weight.original1",
    "parametrizations.weight.original",
)
_PLACES: dict[str, tuple[tuple[str, ...], int]] = {
    "out_features": (_WEIGHTS, 0),
    "in_features": (_WEIGHTS, 1),
    "num_features": (("weight", "running_mean"), 0),
    "num_channels": (("weight",), 0),
    "embedding_dim": (("weight",), 1),
    "nf": (("weight",), 1),
    "nx": (("weight",), 0),
    "out_channels": (_WEIGHTS, 0),
    "in_channels": (_WEIGHTS, 1),
}


@dataclass(frozen=True)
class Mirror:
    """``attribute`` equals the size of a parameter's dimension, times the value of ``times``."""

    attribute: str
    parameter: str
    dim: int
    value: int
    times: str | None = None
    times_value: int = 1


def find_mirrors(model: nn.Module) -> list[Mirror]:
    found = []
    first_name = {id(t): n for n, t in named_tensors(model).items()}  # tied weights have one name
    for path, module in named_parts(model):
        if not any(attribute in vars(module) for attribute in _PLACES):
            continue
        direct = {n: t for n, t in (*module._parameters.items(), *module._buffers.items()) if t is not None}
        own = named_tensors(module) if module._modules else direct
        for attribute, (names, dim) in _PLACES.items():
            value = vars(module).get(attribute)
            times = None
            if attribute.endswith("_channels"):
                dim = 1 - dim if getattr(module, "transposed", False) else dim
                times = "groups" if dim == 1 and hasattr(module, "groups") else None
            name = next((n for n in names if n in own and own[n].dim() > dim), None)
            if type(value) is not int or name is None:
                continue
            size = own[name].shape[dim] * (getattr(module, times) if times else 1)
            if size == value:
                prefix = f"{path}." if path else ""
                known = first_name[id(own[name])]
                by = (prefix + times, getattr(module, times)) if times else (None, 1)
                found.append(Mirror(prefix + attribute, known, dim, value, *by))
    return found
