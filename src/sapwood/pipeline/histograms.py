"""Scores as histograms, split into what was kept and what was removed, with the line between the two."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from sapwood.masking.report import sparsity
from sapwood.scoring.elements import score_elements

BINS = 40
SAMPLE = 200_000  # weights looked at; more than that are sampled evenly
ALL = "all"


def channel_scores(
    names: Sequence[str], scores: Sequence[np.ndarray], kept: Sequence[Sequence[int]], score: str
) -> dict[str, Any]:
    """A histogram for each group and one of all channels."""
    flags = [np.isin(np.arange(len(s)), k) for s, k in zip(scores, kept, strict=True)]
    edges = _edges(np.concatenate(scores)) if scores else np.zeros(0)
    parts = [(n, s, f) for n, s, f in zip(names, scores, flags, strict=True)]
    whole = [(ALL, np.concatenate(scores), np.concatenate(flags))] if scores else []
    what = f"{score} score of a channel of the trained model; the mean of each group is 1"
    return {"what": what, "unit": "channels", "edges": edges.tolist(), "of": [_split(*p, edges) for p in whole + parts]}


def weight_scores(before: nn.Module, after: nn.Module, score: str) -> dict[str, Any]:
    """The same for single weights of the layers that were masked, as they were before; large models are sampled."""
    names = [n for n, layer in sparsity(after).layers.items() if layer.pattern]
    old, new = dict(before.named_parameters()), dict(after.named_parameters())
    plain = score in ("magnitude", "lamp")
    values = score_elements({n: old[n] for n in names}, score) if plain else None
    every = max(1, sum(new[n].numel() for n in names) // SAMPLE)
    parts = []
    for name in names:
        found = old[name].detach().abs() if values is None else values[name]
        numbers = found.reshape(-1)[::every].float().cpu().numpy().astype(float)
        parts.append((name, numbers, _nonzero(new[name], every)))
    numbers, flags = (np.concatenate([p[i] for p in parts]) for i in (1, 2))
    edges = _edges(numbers)
    what = f"{score} score of a weight" if plain else f"size of a weight (they were ranked by {score}, which differs)"
    what += " of the trained model" + (f", one in {every} of them" if every > 1 else "")
    of = [_split(n, s, f, edges) for n, s, f in [(ALL, numbers, flags), *parts]]
    return {"what": what, "unit": "weights", "edges": edges.tolist(), "of": of}


def _nonzero(weight: torch.Tensor, every: int) -> np.ndarray:
    found: np.ndarray = (weight.detach().reshape(-1)[::every] != 0).cpu().numpy()
    return found


def _edges(values: np.ndarray) -> np.ndarray:
    """Evenly over nearly all; the few largest fall into the last bin."""
    finite = values[np.isfinite(values)]
    if not len(finite):
        return np.linspace(0, 1, BINS + 1)
    low, high = float(finite.min()), float(np.quantile(finite, 0.999))
    return np.linspace(low, high if high > low else low + 1, BINS + 1)


def _split(name: str, values: np.ndarray, flags: np.ndarray, edges: np.ndarray) -> dict[str, Any]:
    clipped = np.clip(np.nan_to_num(values), edges[0], edges[-1])
    kept, _ = np.histogram(clipped[flags], edges)
    removed, _ = np.histogram(clipped[~flags], edges)
    return {"name": name, "kept": kept.tolist(), "removed": removed.tolist(), "cut": _cut(values, flags)}


def _cut(values: np.ndarray, flags: np.ndarray) -> float | None:
    """Where one line separates best: so many lie below it as were removed. None where nothing was."""
    gone = int((~flags).sum())
    if gone == 0 or gone == len(values):
        return None
    ordered = np.sort(values)
    return float((ordered[gone - 1] + ordered[gone]) / 2)
