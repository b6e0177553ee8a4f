"""What a cut model would take, by a form that is made in seconds where the best one must be compiled."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from sapwood.capture.run import Inputs
from sapwood.measurement.backends import device_of
from sapwood.measurement.clock import take_turns
from sapwood.measurement.deployment import Deployed, deploy
from sapwood.surgery.cut import cut
from sapwood.types import Plan

QUICK = {("cuda", "compile"): "graph"}
"""Ways of running on a device that take long to make ready, and quick ones that run most of the same kernels."""
UNKNOWN, KNOWN = 0.15, 0.03  # how far a guess may be off, before and after it was compared with a measurement


@dataclass
class Quickly:
    """Shares of the dense model's time, corrected by how far the last one was off."""

    model: nn.Module
    inputs: Inputs
    way: str
    factor: float = 1.0
    off: float = UNKNOWN
    _dense: Deployed | None = field(default=None, repr=False)
    _known: list[tuple[Plan, float]] = field(default_factory=list, repr=False)

    def share(self, plan: Plan) -> float:
        """Guessed; a form is made and timed for plans not seen before."""
        found = self.raw(plan)
        if found is None:
            found = self._timed(plan)
            self._known.append((plan, found))
        return found * self.factor

    def raw(self, plan: Plan) -> float | None:
        return next((share for known, share in self._known if known.groups == plan.groups), None)

    def learn(self, plan: Plan, measured: float) -> None:
        found = self.raw(plan)
        if found:
            self.factor, self.off = measured / found, KNOWN

    def _timed(self, plan: Plan) -> float:
        if self._dense is None:
            self._dense = deploy(self.model, self.inputs, self.way, seconds=0.3)
        small = deploy(cut(self.model, plan), self.inputs, self.way, seconds=0.3)
        calls = {name: f.runner_for(self.inputs).call for name, f in (("dense", self._dense), ("cut", small))}
        with torch.no_grad():
            return 1 / take_turns(calls, 0.5, device=device_of(self.model, self.inputs), lead=1)["cut"].speed
