"""Facts about tensors that are forgotten when the tensor dies: plain look-ups by identity, many per operator."""

from __future__ import annotations

import weakref
from typing import Any, Generic, TypeVar

import torch

Fact = TypeVar("Fact")


class ByTensor(Generic[Fact]):
    """A dict from tensors to facts that keeps no tensor alive."""

    def __init__(self) -> None:
        self._facts: dict[int, Fact] = {}
        self._alive: dict[int, Any] = {}

    def get(self, tensor: torch.Tensor) -> Fact | None:
        return self._facts.get(id(tensor))

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._facts

    def __setitem__(self, tensor: torch.Tensor, fact: Fact) -> None:
        key = id(tensor)
        if key not in self._alive:
            self._alive[key] = weakref.ref(tensor, _Forget(self, key))
        self._facts[key] = fact


class _Forget:
    """Called when a tensor has died: another may be given its place in memory."""

    __slots__ = ("facts", "key")

    def __init__(self, facts: ByTensor[Any], key: int) -> None:
        self.facts, self.key = facts, key

    def __call__(self, _: Any) -> None:
        self.facts._facts.pop(self.key, None)
        self.facts._alive.pop(self.key, None)
