"""The smallest so many of all weights, exactly, without sorting or copying them.

A sample brackets the value that parts them; one pass counts what lies below and collects what lies within the
bracket; the value itself is found there. Of weights that are equal to it, as many as are needed go, spread evenly.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sapwood.masking.patterns import require_numbers

_CHUNK, _CHUNK_GPU = 2**20, 2**24  # weights looked at in one go: what fits a cache, or is worth the launches
_SAMPLE = 2**20


@dataclass(frozen=True)
class Cutoff:
    """All below ``value`` go; of those equal to it, ``needed[i]`` of ``equal[i]`` in the i-th tensor."""

    value: float
    needed: tuple[int, ...]
    equal: tuple[int, ...]
    dtype: torch.dtype


def smallest(sources: Sequence[torch.Tensor], count: int, absolute: bool) -> Cutoff:
    """Where to part the ``count`` smallest from the rest. Sources are flat; ``absolute`` ranks by size."""
    total = sum(s.numel() for s in sources)
    if not 0 < count <= total:
        raise ValueError(f"count must be in 1..{total}; got {count}")
    dtype = functools.reduce(torch.promote_types, [s.dtype for s in sources], torch.float32)
    low, high = -torch.inf, torch.inf
    if total > 4 * _SAMPLE:
        low, high = _bracket(sources, count / total, absolute, dtype)
    while True:
        below, within = _between(sources, low, high, absolute, dtype)
        inside = sum(w.numel() for w in within)
        if below < count <= below + inside:
            break
        low, high = (-torch.inf, high) if count <= below else (low, torch.inf)  # an unlucky sample
    device = sources[0].device
    value = torch.cat([w.to(device) for w in within]).kthvalue(count - below).values.item()
    less = below + sum(int((w < value).sum()) for w in within)
    equal = [int((w == value).sum()) for w in within]
    return Cutoff(value, tuple(_shares(equal, count - less)), tuple(equal), dtype)


def zero_below(weight: torch.Tensor, source: torch.Tensor, cutoff: Cutoff, index: int, absolute: bool) -> None:
    """Zero a flat weight where its score is below the cut-off, and its share of those equal to it."""
    needed, equal, dtype = cutoff.needed[index], cutoff.equal[index], cutoff.dtype
    seen = 0
    step = _step(source)
    for start in range(0, weight.numel(), step):
        values = _ranked(source[start : start + step], absolute, dtype)
        gone = values < cutoff.value
        if needed:
            ties = (values == cutoff.value).nonzero().view(-1)
            order = torch.arange(seen, seen + len(ties), device=ties.device)
            chosen = (order + 1) * needed // equal > order * needed // equal  # every so-manieth
            gone[ties[chosen]] = True
            seen += len(ties)
        weight[start : start + step].masked_fill_(gone, 0)


def _step(source: torch.Tensor) -> int:
    return _CHUNK_GPU if source.is_cuda else _CHUNK


def _ranked(part: torch.Tensor, absolute: bool, dtype: torch.dtype) -> torch.Tensor:
    """In one dtype for all, so that every comparison comes out the same."""
    return (part.abs() if absolute else part).to(dtype)


def _bracket(sources: Sequence[torch.Tensor], share: float, absolute: bool, dtype: torch.dtype) -> tuple[float, float]:
    """Two values that very likely enclose the cut-off."""
    total = sum(s.numel() for s in sources)
    device = sources[0].device
    generators: dict[torch.device, torch.Generator] = {}
    drawn = []
    for source in (s for s in sources if s.numel()):
        if source.device not in generators:
            generators[source.device] = torch.Generator(source.device).manual_seed(0)
        count, own = -(-_SAMPLE * source.numel() // total), generators[source.device]
        places = torch.randint(source.numel(), (count,), generator=own, device=source.device)
        drawn.append(_ranked(source[places], absolute, dtype).to(device))
    ordered = torch.cat(drawn).sort().values
    spread = 6 * (share * (1 - share) / len(ordered)) ** 0.5 + 10 / len(ordered)
    last = len(ordered) - 1
    low, high = int((share - spread) * last), int((share + spread) * last) + 1
    return (
        float(ordered[low]) if low > 0 else -torch.inf,
        float(ordered[high]) if high < last else torch.inf,
    )


def _between(
    sources: Sequence[torch.Tensor], low: float, high: float, absolute: bool, dtype: torch.dtype
) -> tuple[int, list[torch.Tensor]]:
    """How many lie below ``low``, and for each source those from ``low`` to ``high``."""
    below, within = 0, []
    for source in sources:
        found, step = [], _step(source)
        for start in range(0, source.numel(), step):
            values = _ranked(source[start : start + step], absolute, dtype)
            require_numbers(values)
            below += int((values < low).sum())
            found.append(values[(values >= low) & (values <= high)])
        within.append(torch.cat(found) if found else source[:0].to(dtype))
    return below, within


def _shares(counts: Sequence[int], needed: int) -> list[int]:
    """``needed`` dealt out in proportion to the counts, exactly."""
    total = sum(counts)
    before, result = 0, []
    for count in counts:
        result.append((before + count) * needed // total - before * needed // total)
        before += count
    return result
