"""Latency budgets: choose widths by what operators take, measure the cut model, correct until the budget holds."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from sapwood.errors import SapwoodError
from sapwood.measurement.backends import device_of
from sapwood.measurement.clock import Timing, take_turns
from sapwood.measurement.deployment import Deployed, deploy
from sapwood.measurement.machine import name_of
from sapwood.measurement.tables import OperatorTimes
from sapwood.pipeline.planner import Fails, Planner
from sapwood.pipeline.predict import LEVELS, Prediction
from sapwood.planning.counts import Steps, steps_for
from sapwood.planning.draft import block_sizes, describe, fixed_groups, plan_of_counts
from sapwood.planning.knapsack import choose
from sapwood.surgery.cut import cut
from sapwood.types import Budget, Plan

CLOSE = 0.03  # how near the budget a plan must come
TRIES = 10
NARROW = 8  # the step of layers that the device's own would leave whole
MOVED = 0.6  # where the dense model takes so much longer or shorter than at first, something disturbs


@dataclass(frozen=True)
class _Try:
    """A plan and what the clock said about it."""

    plan: Plan
    timing: Timing
    dense: Timing

    def share(self, budget: Budget) -> float:
        """Its latency, of what the budget allows; fractions are of the dense model's in the same run."""
        if budget.is_fraction:
            return 1 / self.timing.speed / budget.limit_ms(1.0)
        return self.timing.median_ms / budget.limit_ms(self.dense.median_ms)


@dataclass
class LatencyPlanner(Planner):
    """Drafts by a knapsack over predicted times; ``limit`` is moved until the measured latency fits."""

    backend: str = "auto"
    limit: float = 0.0
    dense_ms: float = 0.0
    known: Deployed | None = field(default=None, repr=False)
    """The dense model in its best form, where that is known already."""
    fine: bool = False
    base: list[int] | None = None
    _seen: dict[str, str] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(steps := self.options["round_to"], Steps):
            self.options = {**self.options, "round_to": replace(steps, narrow=NARROW)}
        self.told("measuring the dense model", 0, 1)
        self.device = device_of(self.model, self.inputs)
        self.dense = self.known or deploy(self.model, self.inputs, self.backend)
        self.way = self.dense.backend
        self.dense_ms = self._clock({"dense": self.dense})["dense"].median_ms
        self.told("measuring the dense model", 1, 1)
        arranged = "arranged" in self.dense.form or "channels_last" in self.dense.form
        self.times = OperatorTimes(self.device, self.way, channels_last=arranged)

    def _predict(self) -> Prediction:
        """Times of operators over widths, and choices of widths that fit together."""
        fixed = fixed_groups(self.trace, self.options["ignore"], self.barred)
        levels = 3 * LEVELS if self.fine else LEVELS
        steps = steps_for(self.options["round_to"], block_sizes(self.trace), self.trace.dense)
        made = Prediction(self.trace, self.scores, self.times, steps, fixed, levels, self.base)
        made.fill(self.dense_ms, self.told)
        self.times.save()
        return made

    def draft(self) -> Plan:
        if self._seen != dict(self.barred):
            self.base = None  # it may cut what must now stay whole
            self.prediction, self._seen = self._predict(), dict(self.barred)
        choice = choose(self.prediction.problem, self.limit, self.prediction.least())
        counts = self.prediction.counts(self.prediction.fastest() if choice is None else choice)
        about = describe(self.budget, "latency", self.options["round_to"], self.options["score_name"])
        return plan_of_counts(self.trace, self.scores, counts, about, self.barred)

    def plan_until(self, fails: Fails) -> Plan:
        """Move the limit of the prediction until the measured latency is within 3% of the budget."""
        target = self.budget.limit_ms(self.dense_ms)
        low, high, self.limit = 0.0, 2 * target, 0.99 * target
        tried: list[_Try] = []
        for number in range(TRIES):
            self.told("measuring cut models", number, TRIES)
            plan = super().plan_until(fails)
            again = next((t for t in tried if t.plan.groups == plan.groups), None)
            tried.append(again or self._timed(plan))
            share = tried[-1].share(self.budget)
            if 1 - CLOSE <= share <= 1.0 or (share <= 1.0 and not plan.groups):
                break
            if share > 1:
                high = min(high, self.limit)
            else:
                low = max(low, self.limit)
            stuck = again or high - low < 0.01 * target or (share > 1 and self._is_fastest(plan))
            if stuck:  # no widths between: take finer steps, once
                if self.fine or not isinstance(self.options["round_to"], Steps):
                    break
                self.limit = 0.99 * target
                low, high = self._refine(tried), 2 * target
                continue
            aim = self.limit * 0.985 / share
            self.limit = aim if low < aim < high else (low + high) / 2
        self.told("measuring cut models", TRIES, TRIES)
        return self._best(tried)

    def _refine(self, tried: list[_Try]) -> float:
        """Smaller steps, upwards from the best plan below the budget; what is predicted for that one."""
        coarse: Steps = self.options["round_to"]
        steps = replace(coarse, wide=max(1, coarse.wide // 4), least=max(1, coarse.least // 4))
        below = [t for t in tried if t.share(self.budget) <= 1]
        best = max(below, key=lambda t: t.share(self.budget), default=None)
        self.base = self._counts(best.plan) if best else None
        self.fine, self.options = True, {**self.options, "round_to": steps}
        self.prediction, self._seen = self._predict(), dict(self.barred)
        if best is None:
            return 0.0
        known = self.prediction.problem.time_of(self.prediction.least() or [])
        self.limit = known * 0.985 / best.share(self.budget)
        return known

    def _counts(self, plan: Plan) -> list[int]:
        return [len(plan.groups.get(g.name, range(g.width))) for g in self.trace.groups]

    def _is_fastest(self, plan: Plan) -> bool:
        return self._counts(plan) == self.prediction.counts(self.prediction.fastest())

    def _best(self, tried: list[_Try]) -> Plan:
        """The nearest to the budget that does not go over it by more than 3%, with its figures."""
        shares = [(t.share(self.budget), t) for t in tried]
        fits = [(s, t) for s, t in shares if s <= 1 + CLOSE]
        if not fits:
            share, least = min(shares, key=lambda pair: pair[0])
            raise self._unreachable(least)
        share, best = max(fits, key=lambda pair: pair[0] if pair[0] <= 1 else 2 - pair[0])
        notes = best.plan.notes
        if share < 1 - CLOSE and best.plan.groups:
            notes += (f"the latency is {1 - share:.0%} below the budget: no widths in the steps tried come nearer",)
        achieved = {
            **best.plan.achieved,
            "latency_ms": best.timing.median_ms,
            "dense_latency_ms": best.dense.median_ms,
            "speed": best.timing.speed,
            "speed_interval": [best.timing.speed_low, best.timing.speed_high],
        }
        measured = f"{self.dense.form} on {name_of(self.device)}"
        return replace(best.plan, achieved=achieved, notes=(*notes, f"latency measured as {measured}"))

    def _unreachable(self, least: _Try) -> SapwoodError:
        asked = self.budget.latency
        share = least.timing.median_ms / least.dense.median_ms
        return SapwoodError(
            f"Budget(latency={asked!r}): expected a latency that can be reached; the best found is "
            f"{least.timing.median_ms:.3g} ms, {share:.0%} of the dense model's {least.dense.median_ms:.3g} ms "
            f"({self.dense.form} on {name_of(self.device)}). Ask for more, or ignore less."
        )

    def _timed(self, plan: Plan) -> _Try:
        if not plan.groups:
            times = self._clock({"dense": self.dense})
            return _Try(plan, times["dense"], times["dense"])
        small = deploy(cut(self.model, plan), self.inputs, self.way, seconds=0.5)
        times = self._clock({"dense": self.dense, "cut": small})
        return _Try(plan, times["cut"], times["dense"])

    def _clock(self, forms: dict[str, Deployed]) -> dict[str, Timing]:
        """Both in turns; when the clock cannot decide within 3%, again with more time, then not at all."""
        calls: dict[str, Any] = {name: form.runner_for(self.inputs).call for name, form in forms.items()}
        for seconds in (2.0, 5.0, 20.0):
            with torch.no_grad():
                times = take_turns(calls, seconds, device=self.device, lead=1)
            last = list(times.values())[-1]
            unsure = max((last.high_ms - last.low_ms) / last.median_ms, last.speed_high / last.speed_low - 1) / 2
            moved = abs(times["dense"].median_ms / self.dense_ms - 1) if self.dense_ms else 0.0
            if unsure <= CLOSE and moved <= MOVED:
                return times
            time.sleep(1.0)  # what disturbs may pass
        raise SapwoodError(
            f"latency: expected medians that are certain within 3%, and a dense model that takes as long as before; "
            f"got ±{unsure:.0%}, and {moved:.0%} more or less, on {name_of(self.device)} after 27 seconds. The machine "
            "is too noisy to decide: close what else runs on it, or use a larger batch."
        )
