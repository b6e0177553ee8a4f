"""Where zeros may lie: anywhere, N of every M kept along the inputs, or whole blocks."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from sapwood.errors import explain

_WEIGHTS = 2**22
EXAMPLES = "unstructured, 2:4 (any N:M) or block:16x16"


@dataclass(frozen=True)
class Pattern:
    """``kept`` of every ``of`` along the inputs; or blocks of ``rows`` by ``columns``; or neither."""

    text: str
    kept: int = 0
    of: int = 0
    rows: int = 0
    columns: int = 0

    @property
    def is_nm(self) -> bool:
        return self.of > 0

    @property
    def is_block(self) -> bool:
        return self.rows > 0


def parse(text: str) -> Pattern:
    """``unstructured``, ``2:4`` or ``block:16x16``."""
    if text == "unstructured":
        return Pattern(text)
    if found := re.fullmatch(r"(\d{1,4}):(\d{1,4})", str(text)):
        kept, of = int(found[1]), int(found[2])
        if 0 < kept < of:
            return Pattern(text, kept=kept, of=of)
    if found := re.fullmatch(r"block:(\d{1,5})x(\d{1,5})", str(text)):
        rows, columns = int(found[1]), int(found[2])
        if rows and columns:
            return Pattern(text, rows=rows, columns=columns)
    raise explain(f"a pattern: {EXAMPLES}", repr(text), "2:4 keeps 2 of every 4.", "pattern")


def zero_nm(weight: torch.Tensor, source: torch.Tensor, kept: int | torch.Tensor, of: int, dim: int) -> None:
    """Keep the best ``kept`` of every ``of`` neighbours along ``dim``, or so many in each group; of equal ones the
    first."""
    require_numbers(source)
    target, ranked = weight.movedim(dim, -1), source.movedim(dim, -1).reshape(-1, of)
    gone = torch.empty(ranked.shape, dtype=torch.bool, device=weight.device)
    step = max(1, _WEIGHTS // of)
    for start in range(0, len(ranked), step):
        part = ranked[start : start + step]
        least = kept[start : start + step] if isinstance(kept, torch.Tensor) else kept
        gone[start : start + step] = (_ranks if of <= 8 else _sorted_ranks)(part) >= least
    target.masked_fill_(gone.view(target.shape), 0)


def _ranks(scores: torch.Tensor) -> torch.Tensor:
    """How many neighbours come before each: those that score more, and equal ones to the left."""
    columns = scores.unbind(1)
    ranks = torch.zeros(scores.shape, dtype=torch.int8, device=scores.device)
    for i, own in enumerate(columns):
        for j, other in enumerate(columns):
            if i != j:
                ranks[:, i] += (other >= own) if j < i else (other > own)
    return ranks


def _sorted_ranks(scores: torch.Tensor) -> torch.Tensor:
    order = scores.argsort(dim=1, descending=True, stable=True)
    places = torch.arange(scores.shape[1], device=scores.device).expand(order.shape)
    return torch.empty_like(order).scatter_(1, order, places)


def require_numbers(values: torch.Tensor) -> None:
    if bool(values.isnan().any()):
        raise explain("weights and scores that are numbers", "nan", "Check the weights before masking.", "mask")


def block_scores(source: torch.Tensor, pattern: Pattern) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean score of each block of a matrix (outputs by everything else), and how many weights it has."""
    matrix = source.reshape(len(source), -1).float()
    finite = matrix.masked_fill(matrix == -torch.inf, 0)
    rows, columns = -(-matrix.shape[0] // pattern.rows), -(-matrix.shape[1] // pattern.columns)
    margin = (0, columns * pattern.columns - matrix.shape[1], 0, rows * pattern.rows - matrix.shape[0])

    def per_block(values: torch.Tensor) -> torch.Tensor:
        return pad(values, margin).view(rows, pattern.rows, columns, pattern.columns).sum((1, 3))

    sizes = per_block(torch.ones_like(matrix))
    empty = per_block((matrix == -torch.inf).float()) == sizes  # zero already: these come first
    return (per_block(finite) / sizes).masked_fill(empty, -torch.inf), sizes.long()


def zero_blocks(
    weights: Mapping[str, torch.Tensor], ranked: Callable[[str], torch.Tensor], count: int, pattern: Pattern
) -> None:
    """Zero the blocks with the smallest mean score, as many as fit into ``count`` weights."""
    scores, sizes = {}, {}
    for name in weights:
        scores[name], sizes[name] = block_scores(ranked(name), pattern)
    everything = torch.cat([s.view(-1).cpu() for s in scores.values()])
    require_numbers(everything)
    order = everything.argsort(stable=True)
    each = torch.cat([s.view(-1).cpu() for s in sizes.values()])
    filled = each[order].cumsum(0)
    gone = torch.zeros(len(everything), dtype=torch.bool)
    gone[order[filled <= count]] = True
    room = count - (int(filled[filled <= count][-1]) if bool((filled <= count).any()) else 0)
    for place in order[filled > count].tolist() if room >= int(each.min()) else ():  # smaller ones at the edges
        if int(each[place]) <= room:
            gone[place] = True
            room -= int(each[place])
    if count and not bool(gone.any()):
        got = f"the smallest has {int(each.min())}"
        raise explain(f"blocks of at most {count} weights", got, "Choose smaller blocks or more zeros.", "pattern")
    start = 0
    for name, weight in weights.items():
        shape = scores[name].shape
        part = gone[start : start + shape.numel()].view(shape).to(weight.device)
        start += shape.numel()
        matrix = weight.view(len(weight), -1)
        spread = part.repeat_interleave(pattern.rows, 0).repeat_interleave(pattern.columns, 1)
        matrix.masked_fill_(spread[: matrix.shape[0], : matrix.shape[1]], 0)
