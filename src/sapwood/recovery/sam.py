"""Flat minima: the weights step by the gradient at the worst point near by (Foret et al., 2021), not by their own.

Near is relative to each weight's size (Kwon et al., 2021): it does not matter how a network's layers are scaled, and a
weight that is zero stays zero.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

SMALLEST = 1e-12
"""Of a norm that is divided by."""


class Uphill:
    """A model's way to the worst point within a radius, and back; what its buffers see there is forgotten."""

    def __init__(self, model: nn.Module, radius: float) -> None:
        self.radius = radius
        self._weights = [p for p in model.parameters() if p.requires_grad]
        floats = [b for b in model.buffers() if b.is_floating_point()]
        others = [b for b in model.buffers() if not b.is_floating_point()]
        all_of_them: list[list[torch.Tensor]] = [[*self._weights], floats, others]
        self._kept = [(own, [torch.empty_like(t) for t in own]) for own in all_of_them if own]

    @contextlib.contextmanager
    def there(self) -> Iterator[None]:
        """While this lasts the weights are at the worst point, by the gradients they have; these are gone then."""
        with torch.no_grad():
            for own, kept in self._kept:
                torch._foreach_copy_(kept, own)
            self._climb()
        try:
            yield
        finally:
            with torch.no_grad():
                for own, kept in self._kept:
                    torch._foreach_copy_(own, kept)

    def _climb(self) -> None:
        """Each weight w with the gradient g goes up by radius * w^2 g / |w g|."""
        pairs = [(w, w.grad) for w in self._weights if w.grad is not None]
        if not pairs:
            return
        weights: list[torch.Tensor] = [w for w, _ in pairs]
        grads = [g.to(w.dtype) for w, g in pairs]
        sizes = list(torch._foreach_abs(weights))
        steps = list(torch._foreach_mul(sizes, grads))
        norm = torch.linalg.vector_norm(torch.stack(list(torch._foreach_norm(steps))))
        torch._foreach_mul_(steps, sizes)
        torch._foreach_mul_(steps, self.radius / norm.clamp_min(SMALLEST))
        torch._foreach_add_(weights, steps)
        for weight in self._weights:
            weight.grad = None
