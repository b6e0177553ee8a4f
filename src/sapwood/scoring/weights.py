"""Scores that need nothing but the weights.

How sites are combined: at every weight of two or more dimensions that a group touches, each channel
gets the norm of the slice it owns (by lamp its square, over the sum of those no smaller); these
numbers are divided by their mean over the site, so that weights with many inputs do not drown the
others; a channel's score is the mean over the group's sites. Scores therefore average to one in
every group, which makes them comparable across groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import nn

from sapwood.errors import explain
from sapwood.scoring.elements import over_larger
from sapwood.types import Group, Site

SiteScore = Callable[[torch.Tensor, int], torch.Tensor]
"""(weight, dim) -> one number per index of dim, higher = keep."""

Score = str | SiteScore


def l1(weight: torch.Tensor, dim: int) -> torch.Tensor:
    return _power_sums(weight, dim, torch.abs)


def l2(weight: torch.Tensor, dim: int) -> torch.Tensor:
    """Squared, so that a channel's slices add up; the root is taken at the end."""
    return _power_sums(weight, dim, torch.square)


def _power_sums(weight: torch.Tensor, dim: int, power: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Sums of powers over all dimensions but one."""
    if dim < 2 <= weight.dim():
        return _both_sides(weight, power)[dim]
    powers = power(weight.detach().to(_wide(weight.dtype))).movedim(dim, 0)
    return powers.flatten(1).sum(dim=1) if powers.dim() > 1 else powers


_AT_ONCE = 1 << 22
"""Elements of a weight that are looked at together."""


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _both_sides(weight: torch.Tensor, power: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    """Sums of powers by rows and by columns, part by part: no copy of a large weight is made."""
    values, wide = weight.detach(), _wide(weight.dtype)
    step = max(1, _AT_ONCE // max(values[0].numel(), 1)) if len(values) else 1
    rows, columns = [], []
    for part in values.split(step):
        powers = power(part.to(wide))
        powers = powers.flatten(2).sum(dim=2) if powers.dim() > 2 else powers
        rows.append(powers.sum(dim=1))
        columns.append(powers.sum(dim=0))
    return [torch.cat(rows), columns[0] if len(columns) == 1 else torch.stack(columns).sum(dim=0)]


Standing = Mapping[str, Mapping[Site, np.ndarray]]
"""What the channels of each group, by name, are worth at each of its sites, where their mean is one."""


def worth_of(group: Group, before: Standing) -> dict[Site, float]:
    """What is left of a group is worth as much as the best so many were before others were cut, in the mean and by
    site, however its scores are distributed by now."""
    sites = before.get(group.name, {})
    best = np.argsort(-sum(sites.values(), np.zeros(1)), kind="stable")[: group.width]
    return {site: float(values[best].mean()) for site, values in sites.items()}


Finish = Callable[[np.ndarray], np.ndarray]
"""What becomes of the sums of a group's channels at a site."""


def lamp(squares: np.ndarray) -> np.ndarray:
    """Lee et al., 2021, here by channel: in one ranking, the fewer of a group are left, the more each is worth."""
    return over_larger(torch.from_numpy(squares)).numpy()


_NAMED: dict[str, SiteScore] = {"l1": l1, "l2": l2, "lamp": l2}
_FINISH: dict[str, Finish] = {"l2": np.sqrt, "lamp": lamp}
_POWERS: dict[SiteScore, Callable[[torch.Tensor], torch.Tensor]] = {l1: torch.abs, l2: torch.square}
NAMES = (*_NAMED, "bn_scale", "random")


def score_groups(
    tensors: Mapping[str, torch.Tensor],
    groups: Sequence[Group],
    score: Score = "l1",
    scales: frozenset[Site] = frozenset(),
    seed: int = 0,
    before: Standing | None = None,
) -> list[np.ndarray]:
    """Scores of every group's channels. Weights without values (meta) score by position. ``before`` is what
    ``site_scores`` said before a first round cut any."""
    found = site_scores(tensors, groups, score, scales, seed)
    result = []
    for group in groups:
        values, worth = found[group.name], worth_of(group, before or {})
        result.append(sum((worth.get(s, 1.0) * v for s, v in values.items()), np.zeros(group.width)) / len(values))
    return result


def site_scores(
    tensors: Mapping[str, torch.Tensor],
    groups: Sequence[Group],
    score: Score = "l1",
    scales: frozenset[Site] = frozenset(),
    seed: int = 0,
) -> Standing:
    """The parts that a group's scores are the mean of."""
    if isinstance(score, str) and score not in NAMES:
        raise explain(
            f"one of {', '.join(NAMES)}, or a function of (weight, dim)",
            repr(score),
            "For example score='l1'.",
            "score",
        )
    rng = np.random.default_rng(seed)
    known: dict[tuple[SiteScore, Site], np.ndarray] = {}  # groups that share a weight ask for the same numbers
    return {g.name: _score_group(tensors, g, score, scales, rng, known) for g in groups}


def _score_group(
    tensors: Mapping[str, torch.Tensor],
    group: Group,
    score: Score,
    scales: frozenset[Site],
    rng: np.random.Generator,
    known: dict[tuple[SiteScore, Site], np.ndarray],
) -> dict[Site, np.ndarray]:
    if score == "random":
        return {group.sites[0]: rng.random(group.width) + 0.5}
    if any(tensors[name].is_meta for name, _ in group.sites):
        return {group.sites[0]: np.linspace(1.5, 0.5, group.width)}
    if score == "bn_scale":
        sites = [s for s in group.sites if s in scales]
        if sites:
            return _at_sites(tensors, group, sites, l1, known)
        score = "l1"  # no norm follows these channels
    function = _NAMED[score] if isinstance(score, str) else score
    weights = [s for s in group.sites if isinstance(tensors[s[0]], nn.Parameter) and tensors[s[0]].dim() > 1]
    finish = _FINISH.get(score) if isinstance(score, str) else None
    return _at_sites(tensors, group, weights or list(group.sites), function, known, finish)


def _at_sites(
    tensors: Mapping[str, torch.Tensor],
    group: Group,
    sites: Sequence[Site],
    function: SiteScore,
    known: dict[tuple[SiteScore, Site], np.ndarray],
    finish: Finish | None = None,
) -> dict[Site, np.ndarray]:
    result = {}
    for site in sites:
        if (function, site) not in known:
            known |= _numbers(tensors[site[0]], site, function)
        owned = known[function, site][group.members[site]].sum(axis=1)
        owned = owned if finish is None else finish(owned)
        mean = np.abs(owned).mean()
        result[site] = owned / mean if mean > 0 else np.ones_like(owned)
    return result


def _numbers(tensor: torch.Tensor, site: Site, function: SiteScore) -> dict[tuple[SiteScore, Site], np.ndarray]:
    """What a score says of every index of a site; for sums of powers, of both sides of a weight at once."""
    name, dim = site
    power = _POWERS.get(function)
    if power is not None and dim < 2 <= tensor.dim():
        both = enumerate(_both_sides(tensor, power))
        return {(function, (name, side)): _required(values, tensor, (name, side)) for side, values in both}
    return {(function, site): _required(function(tensor, dim), tensor, site)}


def _required(values: object, tensor: torch.Tensor, site: Site) -> np.ndarray:
    """One finite number for every index."""
    (name, dim), size = site, tensor.shape[site[1]]
    if not isinstance(values, torch.Tensor) or values.shape != (size,):
        got = tuple(values.shape) if isinstance(values, torch.Tensor) else type(values).__name__
        raise explain(
            f"a score function to return a tensor of {size} numbers for {name!r}, dim {dim}",
            str(got),
            "Return one number per index of that dimension, higher = keep.",
            "score",
        )
    numbers: np.ndarray = values.detach().double().cpu().numpy()
    if not np.isfinite(numbers).all():
        raise explain("finite scores", f"nan or inf for {name!r}", "Check the weights.", "score")
    return numbers
