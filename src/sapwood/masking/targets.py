"""Which weights may become zero: matrices and kernels; not norms, biases or embeddings unless asked for."""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch
from torch import nn

from sapwood.capture.skeleton import unwrap
from sapwood.errors import explain

MARK = "_sapwood_masked"
"""Attribute of a masked model: name of weight -> pattern. The zeros themselves are the mask."""

_NORMS = (
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.modules.batchnorm._BatchNorm,
    nn.modules.instancenorm._InstanceNorm,
)
_NEVER = (nn.Embedding, nn.EmbeddingBag, *_NORMS)
_WEIGHT = re.compile(r"weight|kernel|proj")


def maskable(model: nn.Module, include: Iterable[str] = (), ignore: Iterable[str] = ()) -> dict[str, nn.Parameter]:
    """Weights that may be masked, each once under its first name. ``include`` and ``ignore`` take names of
    parameters or modules, or ``re:`` expressions."""
    include, ignore = _names(include, "include"), _names(ignore, "ignore")
    model = unwrap(model)
    never = {id(p) for m in model.modules() if isinstance(m, _NEVER) for p in m.parameters(recurse=False)}
    everything = dict(model.named_parameters())
    for text in (*include, *ignore):
        if not any(_meant(name, text) for name in everything):
            raise explain("the name of a parameter or module", repr(text), "See named_parameters().", "include, ignore")
    found = {}
    for name, parameter in everything.items():
        usual = parameter.dim() >= 2 and id(parameter) not in never and _WEIGHT.search(name.rpartition(".")[2])
        asked = any(_meant(name, text) for text in include)
        if (usual or asked) and parameter.is_floating_point() and not any(_meant(name, text) for text in ignore):
            found[name] = parameter
    return found


def input_dim(model: nn.Module, name: str, weight: torch.Tensor) -> int:
    """The dimension of a weight that reads the inputs: the second, but for transposed kinds."""
    owner = unwrap(model).get_submodule(name.rpartition(".")[0])
    flipped = isinstance(owner, nn.modules.conv._ConvTransposeNd)
    flipped = flipped or (hasattr(owner, "nf") and weight.dim() == 2)  # GPT-2's Conv1D keeps (inputs, outputs)
    return 0 if flipped else 1


def _meant(name: str, text: str) -> bool:
    if text.startswith("re:"):
        return re.fullmatch(text[3:], name) is not None
    return name == text or name.startswith(text + ".")


def _names(names: Iterable[str], where: str) -> tuple[str, ...]:
    if isinstance(names, str):
        raise explain("a list of names", repr(names), f"Write {where}=({names!r},).", where)
    return tuple(names)
