"""``mask`` and ``mask_``: the weights that matter least become zero; shapes and names stay."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from sapwood.capture.skeleton import require_plain
from sapwood.errors import explain
from sapwood.masking.hold import note_masks, noted_masks, plain_name
from sapwood.masking.patterns import Pattern, parse, require_numbers, zero_blocks, zero_nm
from sapwood.masking.select import smallest, zero_below
from sapwood.masking.targets import input_dim, maskable
from sapwood.scoring.data import Loss, default_loss, gradients, input_norms, require_iterable
from sapwood.scoring.elements import ElementScore, score_elements
from sapwood.surgery.cut import cut
from sapwood.types import Budget, Plan

SCOPES = ("global", "local", "row")


def mask(model: nn.Module, budget: Budget | None = None, **options: Any) -> nn.Module:
    """A copy of the model in which the weights that matter least are zero; options are those of ``mask_``."""
    return mask_(cut(model, Plan({}, {}, {})), budget, **options)


@torch.no_grad()
def mask_(
    model: nn.Module,
    budget: Budget | None = None,
    *,
    pattern: str = "unstructured",
    scope: str | None = None,
    score: str | ElementScore = "magnitude",
    calibration: Iterable[Any] | None = None,
    loss: Loss | None = None,
    include: Iterable[str] = (),
    ignore: Iterable[str] = (),
    seed: int = 0,
) -> nn.Module:
    """Zero the weights that matter least, in place, and note on the model which weights are masked.

    ``Budget(sparsity=0.9)`` is the fraction of zeros among the maskable weights: matrices and kernels, not norms,
    biases or embeddings unless ``include`` names them. ``scope`` ranks over all of them (``"global"``), per tensor
    (``"local"``) or per output (``"row"``, the default for ``wanda``, whose scores compare the inputs of one output).
    ``pattern="2:4"`` keeps 2 of every 4 neighbouring inputs, ``"block:16x16"`` zeroes whole blocks. ``wanda`` and
    ``taylor`` look at ``calibration`` batches.
    """
    plain = require_plain(model)
    kind = parse(pattern)
    share = _share(budget, kind)
    scope = scope if scope is not None else "row" if score == "wanda" else "global"
    if scope not in SCOPES:
        raise explain(f"one of {', '.join(SCOPES)}", repr(scope), "For example scope='global'.", "scope")
    weights = _targets(plain, kind, scope, include, ignore)
    scores = _scores(plain, weights, score, calibration, loss, seed)
    flat = {n: _laid_out(w) for n, w in weights.items()}
    parts = [list(flat)] if scope == "global" else [[n] for n in flat]

    def ranked(name: str) -> torch.Tensor:
        return flat[name].abs() if scores is None else scores[name]

    if len(parts) > 1 or kind.is_nm or kind.is_block:
        for name in flat:
            require_numbers(ranked(name))  # of all, before anything changes
    if kind.is_nm:
        for name, tensor in flat.items():
            zero_nm(tensor, ranked(name), kind.kept, kind.of, input_dim(plain, name, tensor))
    elif kind.is_block:
        for names in parts:
            count = _count(share, [flat[n] for n in names])
            zero_blocks({n: flat[n] for n in names}, ranked, count, kind)
    elif scope == "row":
        before = 0
        for name, tensor in flat.items():
            rows, width = tensor.view(len(tensor), -1), tensor.numel() // len(tensor)
            gone = [round(share * (before + width * r)) for r in range(len(rows) + 1)]  # so that the total comes out
            before += rows.numel()
            kept = width - torch.tensor(gone, device=rows.device).diff()[:, None]
            zero_nm(rows, ranked(name).reshape(rows.shape), kept, width, 1)
    else:
        before, done = 0, 0
        for names in parts:  # rounded so that the total comes out, too
            before += sum(flat[n].numel() for n in names)
            count = round(share * before) - done
            done += count
            _zero_smallest([flat[n] for n in names], None if scores is None else [scores[n] for n in names], count)
    for name, weight in weights.items():
        if flat[name] is not weight.data:
            weight.data.copy_(flat[name])
    for name, weight in weights.items():
        if share < 1 and not bool(weight.any()):
            warnings.warn(
                f"{name} is all zero now: nothing passes through it. Keep it with ignore=, or choose scope='local'.",
                stacklevel=3,
            )
    note_masks(plain, {**noted_masks(plain), **{plain_name(n): pattern for n in weights}})
    return model


def _zero_smallest(weights: list[torch.Tensor], scores: list[torch.Tensor] | None, count: int) -> None:
    flat = [w.view(-1) for w in weights]
    sources = flat if scores is None else [s.reshape(-1) for s in scores]
    if count:
        cutoff = smallest(sources, count, absolute=scores is None)
        for index, weight in enumerate(flat):
            zero_below(weight, sources[index], cutoff, index, absolute=scores is None)


def _count(share: float, weights: list[torch.Tensor]) -> int:
    """How many zeros are asked for: the nearest whole number."""
    return round(share * sum(w.numel() for w in weights))


def _laid_out(weight: nn.Parameter) -> torch.Tensor:
    data = weight.data
    return data if data.is_contiguous() else data.contiguous()


def _share(budget: Budget | None, kind: Pattern) -> float:
    if budget is not None and (not isinstance(budget, Budget) or budget.kind != "sparsity"):
        got = repr(budget) if not isinstance(budget, Budget) else f"Budget({budget.kind}=...)"
        raise explain("Budget(sparsity=0.9)", got, "Channels, params and FLOPs are for sw.prune.", "mask")
    if kind.is_nm:
        share = 1 - kind.kept / kind.of
        if budget is not None and abs(float(budget.sparsity or 0) - share) > 1e-6:
            got, remedy = f"sparsity={budget.sparsity}", "Leave the budget out: the pattern decides."
            raise explain(f"sparsity={share:g} for {kind.text}", got, remedy, "mask")
        return share
    if budget is None:
        raise explain("a budget", "none", "For example sw.Budget(sparsity=0.9).", "mask")
    return float(budget.sparsity or 0)


def _targets(
    model: nn.Module, kind: Pattern, scope: str, include: Iterable[str], ignore: Iterable[str]
) -> Mapping[str, nn.Parameter]:
    weights = maskable(model, include, ignore)
    if any(w.is_meta for w in weights.values()):
        raise explain("weights with values", "weights on the meta device", "Load the weights first.", "mask")
    flat = [n for n, w in weights.items() if w.dim() < 2]
    if flat and (kind.is_block or scope == "row"):
        got, remedy = f"{flat[0]!r}, which has {weights[flat[0]].dim()}", "Leave it out of include."
        raise explain("weights of two or more dimensions for rows and blocks", got, remedy, "mask")
    if kind.is_nm:
        fits = {n: w for n, w in weights.items() if w.dim() > 1 and w.shape[input_dim(model, n, w)] % kind.of == 0}
        weights = fits  # others have no whole groups of neighbours, and hardware could not skip their zeros
    if not weights:
        raise explain(
            "a model with weights to mask" + (f", with inputs in multiples of {kind.of}" if kind.is_nm else ""),
            f"{type(model).__name__} with none",
            "Name some with include=, or choose another pattern.",
            "mask",
        )
    return weights


def _scores(
    model: nn.Module,
    weights: Mapping[str, nn.Parameter],
    score: str | ElementScore,
    calibration: Iterable[Any] | None,
    loss: Loss | None,
    seed: int,
) -> dict[str, torch.Tensor] | None:
    norms = grads = None
    if score in ("wanda", "taylor"):
        if calibration is None:
            raise explain("calibration batches", "none", "Pass calibration=, an iterable of batches.", f"score={score}")
        require_iterable(calibration)
        if score == "wanda":
            norms = input_norms(model, weights, calibration)
        else:
            grads = gradients(model, weights, calibration, loss or default_loss)
    return score_elements(weights, score, seed, norms, grads)
