"""Compiling what repeats: the blocks of a network, each kind once, instead of the whole network."""

from __future__ import annotations

import contextlib
import functools
import itertools
import types
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

MOST = 0.5
"""Blocks hold at least this share of the weights, or the network is compiled as a whole."""
_numbers = itertools.count()


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The outermost modules of those classes of which at least two are alike; torch's own are too small to pay."""
    own = [m for m in model.modules() if m is not model and _is_called(m)]
    alike = Counter(map(_kind, own))
    classes = {kind for (kind, *shapes), times in alike.items() if times > 1 and shapes}
    found = list(dict.fromkeys(_outermost(model, classes)))
    held = {p for block in found for p in block.parameters()}
    return found if sum(p.numel() for p in held) >= MOST * sum(p.numel() for p in model.parameters()) else []


def _is_called(module: nn.Module) -> bool:
    """Not torch's own, and no list of others."""
    kind: Any = type(module)
    return not kind.__module__.startswith("torch.") and kind.forward is not nn.ModuleList.forward


def _kind(module: nn.Module) -> tuple[Any, ...]:
    return type(module), *(tuple(p.shape) for p in module.parameters())


def _outermost(module: nn.Module, classes: set[Any]) -> Iterator[nn.Module]:
    for child in module.children():
        if type(child) in classes:
            yield child
        else:
            yield from _outermost(child, classes)


def _call(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return block._call_impl(*args, **kwargs)


def _compiled_call() -> Callable[..., Any]:
    """A function of its own for each kind: torch counts what it compiles by function, and gives up after eight."""
    code = _call.__code__.replace(co_name=f"block_{next(_numbers)}")
    return torch.compile(types.FunctionType(code, globals()))


class Compiled:
    """A model in training whose blocks are compiled, or the whole of it where nothing repeats."""

    def __init__(self, model: nn.Module) -> None:
        blocks = blocks_of(model)
        self.model: nn.Module = model if blocks else torch.compile(model)  # type: ignore[assignment]
        kinds = {kind: _compiled_call() for kind in dict.fromkeys(map(_kind, blocks))}
        self._calls = [(block, functools.partial(kinds[_kind(block)], block)) for block in blocks]

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Compiled while this lasts, backward included; otherwise the model is as it was."""
        before = [block._compiled_call_impl for block, _ in self._calls]
        for block, call in self._calls:
            block._compiled_call_impl = call
        try:
            with torch._dynamo.config.patch(skip_nnmodule_hook_guards=False):  # hooks may differ from block to block
                yield
        finally:
            for (block, _), own in zip(self._calls, before, strict=True):
                block._compiled_call_impl = own
