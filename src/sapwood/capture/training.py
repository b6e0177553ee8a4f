"""Does a model's own code ask whether it is in training mode?

If nobody but torch's layers does (dropout, batch norm), a forward in training mode calls the same operators on the same
channels as one in evaluation mode, and there is nothing to be learned from it.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from sapwood.capture.skeleton import named_parts

_LAYERS = "torch.nn.modules."
_lock = threading.Lock()
_listening: list[Questions] = []


class Questions:
    """Whether code outside torch's layers asked."""

    def __init__(self) -> None:
        self.asked = False


@contextlib.contextmanager
def questions(model: nn.Module) -> Iterator[Questions]:
    """Listen to who reads the attribute ``training`` of any module."""
    heard = Questions()
    heard.asked = any(_reads_unheard(kind) for kind in {type(m) for _, m in named_parts(model)})
    with _lock:
        _listening.append(heard)
        if len(_listening) == 1:
            type.__setattr__(nn.Module, "training", property(_read, _write))
    try:
        yield heard
    finally:
        with _lock:
            _listening.remove(heard)
            if not _listening:
                type.__delattr__(nn.Module, "training")


def _reads_unheard(kind: type) -> bool:
    own = (k for k in kind.__mro__ if k is not nn.Module)
    return issubclass(kind, torch.jit.ScriptModule) or any("training" in vars(k) for k in own)


def _read(module: nn.Module) -> Any:
    asker = sys._getframe(1).f_globals.get("__name__", "")
    if not asker.startswith(_LAYERS):
        for heard in tuple(_listening):
            heard.asked = True
    own = vars(module)
    return own["training"] if "training" in own else module.__getattr__("training")


def _write(module: nn.Module, value: Any) -> None:
    vars(module)["training"] = value
