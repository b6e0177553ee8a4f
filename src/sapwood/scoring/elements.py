"""Scores of single weights, higher = keep: what ``mask`` ranks by.

``magnitude`` is read off the weights where they lie; every other score is one float per weight, held until the
ranking is done. A weight that is zero already always ranks last.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping

import torch

from sapwood.errors import explain

ElementScore = Callable[[torch.Tensor], torch.Tensor]
"""weight -> a tensor of the same shape, higher = keep."""

NAMES = ("magnitude", "lamp", "random", "wanda", "taylor")


def lamp(weight: torch.Tensor) -> torch.Tensor:
    """The square of a weight over the sum of the squares of all that are at least as large in its tensor."""
    return over_larger(weight.detach().double().square().reshape(-1)).float().view(weight.shape)


def over_larger(values: torch.Tensor) -> torch.Tensor:
    """Each over the sum of itself and all that rank above it."""
    ordered, places = values.sort(stable=True)
    rest = ordered.flip(0).cumsum(0).flip(0)
    result = torch.empty_like(values)
    result[places] = torch.where(rest > 0, ordered / rest, torch.zeros_like(rest))
    return result


def random(weight: torch.Tensor, name: str, seed: int) -> torch.Tensor:
    """Uniform numbers that depend on the seed and the name only, not on the order of the layers or the device."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) ^ seed)
    return torch.rand(weight.shape, generator=generator).to(weight.device)


def wanda(weight: torch.Tensor, norms: torch.Tensor) -> torch.Tensor:
    """The size of a weight times the norm of the input it reads (Sun et al., 2023)."""
    return weight.detach().abs().float() * norms.to(weight.device)


def taylor(weight: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """How much the loss would change, to first order, if the weight were zero."""
    return (weight.detach() * gradient.to(weight.device)).abs().float()


def score_elements(
    weights: Mapping[str, torch.Tensor],
    score: str | ElementScore,
    seed: int = 0,
    norms: Mapping[str, torch.Tensor] | None = None,
    gradients: Mapping[str, torch.Tensor] | None = None,
) -> dict[str, torch.Tensor] | None:
    """Scores by name; None when they are the weights' own magnitudes."""
    if score == "magnitude":
        return None
    if not callable(score) and score not in NAMES:
        names = ", ".join(NAMES)
        raise explain(f"one of {names}, or a function of a weight", repr(score), "For example 'magnitude'.", "score")
    found = {}
    for name, weight in weights.items():
        if score == "lamp":
            values = lamp(weight)
        elif score == "random":
            values = random(weight, name, seed)
        elif score == "wanda":
            values = wanda(weight, (norms or {})[name])
        elif score == "taylor":
            values = taylor(weight, (gradients or {})[name])
        else:
            assert not isinstance(score, str)
            values = score(weight.detach())
            _require_alike(values, weight, name)
        found[name] = values.detach().float().masked_fill(weight.detach() == 0, -torch.inf)
    return found


def _require_alike(values: object, weight: torch.Tensor, name: str) -> None:
    if not isinstance(values, torch.Tensor) or values.shape != weight.shape:
        got = tuple(values.shape) if isinstance(values, torch.Tensor) else type(values).__name__
        raise explain(
            f"a score function to return a tensor of shape {tuple(weight.shape)} for {name!r}",
            str(got),
            "Return one number per weight, higher = keep.",
            "score",
        )
