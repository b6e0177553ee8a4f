"""Compiling what repeats: the blocks of a network, each kind once, instead of the whole network."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

KINDS = 64
"""Of blocks of one class (widths, batch sizes) that are compiled; torch would give up after eight."""


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The outermost modules of those classes of which at least two are alike; torch's own are too small to pay."""
    own = [m for m in model.modules() if m is not model and not type(m).__module__.startswith("torch.")]
    alike = Counter((type(m), *(tuple(p.shape) for p in m.parameters())) for m in own)
    classes = {kind for (kind, *shapes), times in alike.items() if times > 1 and shapes}
    return list(_outermost(model, classes))


def _outermost(module: nn.Module, classes: set[Any]) -> Iterator[nn.Module]:
    for child in module.children():
        if type(child) in classes:
            yield child
        else:
            yield from _outermost(child, classes)


class Compiled:
    """A model in training whose blocks are compiled, or the whole of it where nothing repeats."""

    def __init__(self, model: nn.Module) -> None:
        blocks = blocks_of(model)
        self.model: nn.Module = model if blocks else torch.compile(model)  # type: ignore[assignment]
        self._calls = [(block, torch.compile(block._call_impl, dynamic=False)) for block in blocks]

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Compiled while this lasts; otherwise the model is as it was."""
        for block, call in self._calls:
            block._compiled_call_impl = call
        try:
            with torch._dynamo.config.patch(recompile_limit=KINDS) if self._calls else contextlib.nullcontext():
                yield
        finally:
            for block, _ in self._calls:
                block._compiled_call_impl = None
