"""What the verbs share: building the model a user names, reading shapes, printing results and errors."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from sapwood.errors import SapwoodError, explain
from sapwood.storage import factories


def named_model(name: str) -> nn.Module:
    """``torchvision:resnet50``, ``timm:...``, or ``package.module:factory`` of the user's own."""
    package, _, factory = name.partition(":")
    if package in (*factories.LIBRARIES, "hf") and factory:
        return factories.build({"factory": name})
    if not factory:
        raise explain("torchvision:NAME, timm:NAME or package.module:factory", repr(name), "Name a model.", "--model")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        made = getattr(importlib.import_module(package), factory)()
    except (ImportError, AttributeError) as error:
        raise SapwoodError(f"--model: expected {name!r} to name a factory; {error}. Check the spelling.") from None
    if not isinstance(made, nn.Module):
        raise explain("a factory that returns an nn.Module", type(made).__name__, "Check the factory.", "--model")
    return made


def parse_shape(text: str) -> torch.Tensor:
    """``1x3x224x224``, or ``1x16:int64`` for token numbers."""
    found = re.fullmatch(r"(\d+(?:x\d+)*)(?::(\w+))?", text)
    dtype = getattr(torch, found[2] or "float32", None) if found else None
    if found is None or not isinstance(dtype, torch.dtype):
        raise explain("a shape such as 1x3x224x224 or 1x16:int64", repr(text), "Mend it.", "--input")
    shape = [int(n) for n in found[1].split("x")]
    return torch.randn(shape, dtype=dtype) if dtype.is_floating_point else torch.ones(shape, dtype=dtype)


def show(result: dict[str, Any], as_json: bool, text: str) -> None:
    """One result, for a machine or for a person."""
    if as_json:
        print(json.dumps(result, default=str))
    else:
        Console().print(text, highlight=False)


def size_of(path: Path) -> int:
    return sum(f.stat().st_size for f in path.rglob("*") if f.is_file()) if path.is_dir() else path.stat().st_size
