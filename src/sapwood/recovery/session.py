"""A recovery as it goes: phases, epochs, the curve; it can stop after any epoch and go on from there."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from sapwood.errors import explain
from sapwood.recovery.loop import Loop

Validate = Callable[[nn.Module], float]
"""A model -> how good it is on validation data."""

MARKS = (0.0, 0.05, 0.1, 0.2)


@dataclass(frozen=True)
class Point:
    """Where recovery stood after ``epochs`` epochs; ``share`` is that over the epochs of the original training."""

    epochs: float
    share: float
    loss: float | None
    lr: float
    metric: float | None = None
    test: float | None = None


@dataclass(frozen=True)
class Phase:
    """So many steps under one learning-rate schedule; ``prune`` says after which of them what is pruned."""

    steps: int
    prune: Mapping[int, Callable[[Loop], None]] = field(default_factory=dict)


class Session:
    """Trains through its phases, an epoch at a time."""

    def __init__(
        self,
        loop: Loop,
        phases: Sequence[Phase],
        original_epochs: float,
        validate: Validate | None = None,
        marks: Sequence[float] = MARKS,
        on_step: Callable[[int, int], None] | None = None,
        test: Validate | None = None,
    ) -> None:
        self.loop, self.phases, self.validate, self.on_step = loop, phases, validate, on_step
        self.test = test
        self.original = original_epochs
        self.total = sum(p.steps for p in phases)
        self.stops = {_ceil(m * original_epochs * loop.steps_per_epoch) for m in marks if m >= 0}
        self.phase = self.step = self.number = 0
        self.curve: list[Point] = []
        self.pruned: Point | None = None
        """Right after the last pruning."""
        self._last = max(((i, m) for i, p in enumerate(phases) for m in p.prune), default=(-1, -1))
        self._losses: list[torch.Tensor] = []

    @property
    def done(self) -> bool:
        return self.phase >= len(self.phases)

    @property
    def overall(self) -> int:
        """Steps taken since the start, over all phases."""
        return sum(p.steps for p in self.phases[: self.phase]) + self.step

    def advance(self) -> bool:
        """Train one epoch; False when all phases are through."""
        if self.done:
            return False
        phase = self.phases[self.phase]
        self._losses = []  # of this epoch only, so that a resumed run tells the same
        if self.step == 0:
            self._prune(phase)
            if self.overall == 0 and 0 in self.stops:
                self._look(0.0)
        for event in self.loop.epoch(self.number, self.step, phase.steps):
            self.step = event["step"]
            self._losses += event["losses"]
            if self.step < phase.steps:
                self._prune(phase)
            if self.on_step is not None:
                self.on_step(self.overall, self.total)
            if self.overall in self.stops or self.overall == self.total:
                self._look(event["lr"])
        self.number += 1
        if self.step >= phase.steps:
            self.phase, self.step = self.phase + 1, 0
        return True

    def _prune(self, phase: Phase) -> None:
        due = phase.prune.get(self.step)
        if due is not None:
            due(self.loop)
            if (self.phase, self.step) == self._last:
                self.pruned = self._point(0.0)

    def _look(self, rate: float) -> None:
        self.curve.append(self._point(rate))
        self._losses = []

    def _point(self, rate: float) -> Point:
        model = self.loop.view()
        metric, test = _number(self.validate, model, "validate"), _number(self.test, model, "test")
        mean = float(torch.stack(self._losses).mean()) if self._losses else None
        if mean is not None and not math.isfinite(mean):
            warnings.warn(
                f"the loss is {mean} at a learning rate of {rate:.3g}: the model does not train. Lower lr, or clip "
                "gradients (clip=1.0).",
                stacklevel=2,
            )
        epochs = self.overall / self.loop.steps_per_epoch
        return Point(epochs, epochs / self.original, mean, rate, metric, test)

    def position(self) -> dict[str, Any]:
        """All but weights and optimizer state, as plain data."""
        return {
            "phase": self.phase,
            "step": self.step,
            "number": self.number,
            "curve": [asdict(p) for p in self.curve],
            "pruned": None if self.pruned is None else asdict(self.pruned),
        }

    def go_to(self, position: Mapping[str, Any]) -> None:
        """Go on from a position; the loop's model and optimizer must be those of that moment."""
        self.phase, self.step, self.number = (int(position[k]) for k in ("phase", "step", "number"))
        self.curve = [Point(**p) for p in position["curve"]]
        self.pruned = None if position["pruned"] is None else Point(**position["pruned"])


def steps_for(epochs: float, loop: Loop, rounds: int = 1) -> int:
    """Steps of the optimizer in so many epochs; at least one a round, which is told."""
    asked = _ceil(epochs * loop.steps_per_epoch)
    if asked < rounds:
        warnings.warn(
            f"{rounds} rounds take at least a step each: {rounds} steps instead of {asked} ({epochs:g} epochs). To "
            "train no longer, choose fewer rounds or smaller batches.",
            stacklevel=3,
        )
    return max(rounds, asked)


def _ceil(steps: float) -> int:
    return math.ceil(steps - 1e-9)


def _number(look: Validate | None, model: nn.Module, name: str) -> float | None:
    if look is None:
        return None
    found: Any = look(model)
    try:
        return float(found)
    except (TypeError, ValueError):
        raise explain("a number from the model", repr(found)[:60], f"Let {name}(model) return one.", name) from None
