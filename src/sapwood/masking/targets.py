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
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_WEIGHT = re.compile(r"weight|kernel|proj")


def maskable(model: nn.Module, include: Iterable[str] = (), ignore: Iterable[str] = ()) -> dict[str, nn.Parameter]:
    """Weights that may be masked, each once under its first name. ``include`` and ``ignore`` take names of
    parameters or modules, or ``re:`` expressions."""
    if not isinstance(model, nn.Module):
        raise explain("a torch.nn.Module", type(model).__name__, "Pass the model itself.", "model")
    include, ignore = _names(include, "include"), _names(ignore, "ignore")
    model = unwrap(model)
    never = {id(p) for m in model.modules() if isinstance(m, _NEVER) for p in m.parameters(recurse=False)}
    everything = dict(model.named_parameters())
    known: dict[int, list[str]] = {}  # a tied weight goes by any of its names
    for name, parameter in model.named_parameters(remove_duplicate=False):
        known.setdefault(id(parameter), []).append(name)
    for text in (*include, *ignore):
        if not any(_meant(name, text) for names in known.values() for name in names):
            raise explain("the name of a parameter or module", repr(text), "See named_parameters().", "include, ignore")
    found = {}
    for name, parameter in everything.items():
        short = name.rpartition(".")[2]
        usual = parameter.dim() >= 2 and id(parameter) not in never and _WEIGHT.search(short) and short != "weight_g"
        names = known[id(parameter)]
        asked = any(_meant(n, text) for text in include for n in names)
        barred = any(_meant(n, text) for text in ignore for n in names)
        if (usual or asked) and not barred and parameter.dtype in _DTYPES and parameter.numel():
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
    found = (names,) if isinstance(names, str) else tuple(names)
    for name in found:
        if not isinstance(name, str):
            raise explain("names", type(name).__name__, "See named_parameters().", where)
        if name.startswith("re:"):
            try:
                re.compile(name[3:])
            except re.error as error:
                raise explain("a regular expression", f"{name!r} ({error})", "Mend it.", where) from None
    return found
