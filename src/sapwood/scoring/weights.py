"""Scores that need nothing but the weights.

How sites are combined: at every weight of two or more dimensions that a group touches, each channel
gets the norm of the slice it owns; these numbers are divided by their mean over the site, so that
weights with many inputs do not drown the others; a channel's score is the mean over the group's
sites. Scores therefore average to one in every group, which makes them comparable across groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import nn

from sapwood.errors import explain
from sapwood.types import Group, Site

SiteScore = Callable[[torch.Tensor, int], torch.Tensor]
"""(weight, dim) -> one number per index of dim, higher = keep."""

Score = str | SiteScore


def l1(weight: torch.Tensor, dim: int) -> torch.Tensor:
    return _norms(weight, dim, 1)


def l2(weight: torch.Tensor, dim: int) -> torch.Tensor:
    """Squared, so that a channel's slices add up; the root is taken at the end."""
    return _norms(weight, dim, 2).square()


def _norms(weight: torch.Tensor, dim: int, order: int) -> torch.Tensor:
    others = [d for d in range(weight.dim()) if d != dim]
    values = weight.detach()
    if not others:
        return values.abs().float()
    norms: torch.Tensor = torch.linalg.vector_norm(values, order, dim=others, dtype=_wide(values.dtype))
    return norms  # computed without a copy of the weight


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


_NAMED: dict[str, SiteScore] = {"l1": l1, "l2": l2}
NAMES = (*_NAMED, "bn_scale", "random")


def score_groups(
    tensors: Mapping[str, torch.Tensor],
    groups: Sequence[Group],
    score: Score = "l1",
    scales: frozenset[Site] = frozenset(),
    seed: int = 0,
) -> list[np.ndarray]:
    """Scores of every group's channels. Weights without values (meta) score by position."""
    if isinstance(score, str) and score not in NAMES:
        raise explain(
            f"one of {', '.join(NAMES)}, or a function of (weight, dim)",
            repr(score),
            "For example score='l1'.",
            "score",
        )
    rng = np.random.default_rng(seed)
    return [_score_group(tensors, g, score, scales, rng) for g in groups]


def _score_group(
    tensors: Mapping[str, torch.Tensor],
    group: Group,
    score: Score,
    scales: frozenset[Site],
    rng: np.random.Generator,
) -> np.ndarray:
    if score == "random":
        return rng.random(group.width) + 0.5
    if any(tensors[name].is_meta for name, _ in group.sites):
        return np.linspace(1.5, 0.5, group.width)
    if score == "bn_scale":
        sites = [s for s in group.sites if s in scales]
        if sites:
            return _combine(tensors, group, sites, l1)
        score = "l1"  # no norm follows these channels
    function = _NAMED[score] if isinstance(score, str) else score
    weights = [s for s in group.sites if isinstance(tensors[s[0]], nn.Parameter) and tensors[s[0]].dim() > 1]
    return _combine(tensors, group, weights or list(group.sites), function, root=score == "l2")


def _combine(
    tensors: Mapping[str, torch.Tensor],
    group: Group,
    sites: Sequence[Site],
    function: SiteScore,
    root: bool = False,
) -> np.ndarray:
    total = np.zeros(group.width)
    for site in sites:
        name, dim = site
        values = function(tensors[name], dim)
        size = tensors[name].shape[dim]
        if not isinstance(values, torch.Tensor) or values.shape != (size,):
            got = tuple(values.shape) if isinstance(values, torch.Tensor) else type(values).__name__
            raise explain(
                f"a score function to return a tensor of {size} numbers for {name!r}, dim {dim}",
                str(got),
                "Return one number per index of that dimension, higher = keep.",
                "score",
            )
        numbers = values.detach().double().cpu().numpy()
        if not np.isfinite(numbers).all():
            raise explain("finite scores", f"nan or inf for {name!r}", "Check the weights.", "score")
        owned = numbers[group.members[site]].sum(axis=1)
        owned = np.sqrt(owned) if root else owned
        mean = np.abs(owned).mean()
        total += owned / mean if mean > 0 else np.ones_like(owned)
    return total / max(len(sites), 1)
