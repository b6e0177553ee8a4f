"""Learning rates of recovery, as a multiple of the peak, over the progress of training (0 to 1)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sapwood.errors import explain

KINDS, ANNEALS = ("rewind", "finetune"), ("linear", "cosine", "none")


@dataclass(frozen=True)
class Rate:
    """``rewind`` goes back to the high rate of training, warmed up and annealed to zero; ``finetune`` stays small.
    ``anneal="none"`` stays at the peak, for a stage that another one follows."""

    kind: str = "rewind"
    anneal: str = "linear"
    warmup: float = 0.1
    small: float = 0.01

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise explain(f"one of {', '.join(KINDS)}", repr(self.kind), "rewind recovers more.", "rate")
        if self.anneal not in ANNEALS:
            raise explain(f"one of {', '.join(ANNEALS)}", repr(self.anneal), "For example 'linear'.", "anneal")
        if not 0 <= self.warmup < 1:
            raise explain("a warm-up from 0 to below 1", repr(self.warmup), "It is a share of the steps.", "warmup")

    def at(self, progress: float) -> float:
        if self.kind == "finetune":
            return self.small
        if progress < self.warmup:
            return progress / self.warmup
        if self.anneal == "none":
            return 1.0
        done = min(1.0, (progress - self.warmup) / (1 - self.warmup))
        return 1 - done if self.anneal == "linear" else 0.5 * (1 + math.cos(math.pi * done))
