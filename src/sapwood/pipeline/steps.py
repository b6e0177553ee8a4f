"""``Step``: one thing to prune, and on which schedule, as data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from sapwood.errors import explain
from sapwood.masking.patterns import parse
from sapwood.masking.targets import maskable
from sapwood.pipeline.prune import make_plan
from sapwood.recovery.schedules import Schedule
from sapwood.types import Budget


@dataclass(frozen=True)
class Step:
    """One thing to prune: zeros (a sparsity, or an N:M pattern) or channels; and on which schedule."""

    budget: Budget | None = None
    pattern: str = "unstructured"
    schedule: Schedule = field(default_factory=Schedule)
    options: Mapping[str, Any] = field(default_factory=dict)
    """What ``mask`` or ``prune`` takes besides: score, scope, allocate, ignore, round_to, ..."""

    def __post_init__(self) -> None:
        kind = parse(self.pattern)
        if self.schedule.regrow and (kind.is_nm or not self.is_mask):
            got = self.pattern if kind.is_nm else f"a cut, {self.budget}"
            raise explain("single zeros or blocks, which can come back", got, "Leave regrow out.", "regrow")
        if not self.is_mask and self.pattern != "unstructured":
            raise explain(
                "a pattern of zeros with a sparsity", f"{self.pattern} with {self.budget}", "Drop one.", "prune"
            )
        if self.budget is None and not kind.is_nm:
            raise explain("a budget", "none", "For example sparsity: 0.9 or channels: 0.5.", "prune")
        if isinstance(self.options.get("calibration"), Iterator) and self.schedule.times > 1:
            got, remedy = "an iterator, which is used up after the first", "Pass a list or a data loader."
            raise explain("batches for every round", got, remedy, "calibration")
        if self.budget is not None and self.budget.kind == "latency" and self.schedule.kind != "one-shot":
            remedy = "Widths are measured once: schedule='one-shot'. Rounds can have flops or channels."
            raise explain("a one-shot schedule", f"{self.schedule.kind} with a latency", remedy, "schedule")
        if kind.is_nm and self.schedule.kind != "one-shot":
            got, remedy = f"{self.schedule.kind} with {self.pattern}", "N:M zeros come at once: schedule='one-shot'."
            raise explain("a one-shot schedule", got, remedy, "schedule")

    @property
    def is_mask(self) -> bool:
        return self.budget is None or self.budget.kind == "sparsity"

    def masked(self, model: nn.Module) -> Mapping[str, torch.Tensor]:
        """The weights that this masks."""
        return maskable(model, self.options.get("include", ()), self.options.get("ignore", ()))

    def zeros_in(self, model: nn.Module) -> float:
        """The share of zeros among these."""
        weights = [w.detach() for w in self.masked(model).values()]
        return 1 - sum(int(w.count_nonzero()) for w in weights) / sum(w.numel() for w in weights)

    def targets(self, model: nn.Module, example_inputs: Any) -> Sequence[Budget | None]:
        """The budget of each round, in terms of the dense model."""
        if self.budget is None or self.schedule.rounds == 1:
            return [self.budget]
        kind, value = self.budget.kind, float(getattr(self.budget, self.budget.kind))
        if kind == "sparsity":
            there = self.zeros_in(model) if self.schedule.regrow else 0.0  # else they are the first to be zero anyway
            rounds = [*(1 - left for left in self.schedule.kept(1 - value)[:-1]), value]
            return [Budget(sparsity=max(there, share)) for share in rounds]
        dense = make_plan(model, example_inputs, Budget(channels=1.0)).achieved[f"dense_{kind}"]
        left = self.schedule.kept(self.budget.limit(dense) / dense)
        if kind == "channels" and self.options.get("allocate") == "uniform":
            return [Budget(channels=part) for part in left]
        return [Budget(**{kind: max(2, int(part * dense))}) for part in left]


def require_fading(step: Step, fade: float, again: bool = True) -> None:
    """``again``: the run may be stopped and gone on with, which makes the plan anew."""
    cut_once = not step.is_mask and step.schedule.kind == "one-shot"
    if not cut_once or not 0 < fade < 1:
        got = f"fade={fade!r}, schedule={step.schedule.kind!r}, {step.budget}"
        raise explain("a share below 1, with channels that are cut once", got, "For example fade=0.3.", "fade")
    if again and step.budget is not None and step.budget.kind == "latency":
        remedy = "Leave fade out, or ask for the FLOPs of a plan for this latency."
        raise explain("a budget that gives the same plan every time", "a latency", remedy, "fade")
