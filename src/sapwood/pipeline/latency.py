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
from sapwood.measurement.tables import OperatorTimes, usual_activation
from sapwood.pipeline.planner import Fails, Planner
from sapwood.pipeline.predict import DEEP, FINE, FLOOR, LEVELS, Near, Prediction
from sapwood.pipeline.quickly import QUICK, Quickly
from sapwood.planning.counts import Steps, steps_for
from sapwood.planning.draft import block_sizes, describe, fixed_groups, plan_of_counts
from sapwood.surgery.cut import cut
from sapwood.types import Budget, Plan

CLOSE = 0.03  # how near the budget a plan must come
OVER = 0.01  # and how far above it one is looked for no further
TRIES = 8  # cut models that are measured before the steps change
DRAFTS = 24
FAR = 1.4  # times the budget: from there, cutting more is no small correction
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
    near: Near | None = None
    fine: bool = False
    floor: float = FLOOR
    tried: list[_Try] = field(default_factory=list, repr=False)
    drafted: list[Plan] = field(default_factory=list, repr=False)
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
        quick = QUICK.get((self.device.type, self.way))
        self.quick = Quickly(self.model, self.inputs, quick) if quick else None
        arranged = any(word in self.dense.form for word in ("arranged", "padded", "channels_last"))
        after = usual_activation(self.trace.calls)
        self.times = OperatorTimes(self.device, self.way, channels_last=arranged, after=after)

    def _predict(self) -> Prediction:
        """Times of operators over widths, and choices of widths that fit together."""
        fixed = fixed_groups(self.trace, self.options["ignore"], self.barred)
        levels = FINE if self.fine else LEVELS
        steps = steps_for(self.options["round_to"], block_sizes(self.trace), self.trace.dense)
        made = Prediction(self.trace, self.scores, self.times, steps, fixed, levels, self.near, self.floor)
        made.fill(self.dense_ms, self.told)
        self.times.save()
        return made

    def draft(self) -> Plan:
        if self._seen != dict(self.barred):
            self.near = None  # it may cut what must now stay whole
            self.prediction, self._seen = self._predict(), dict(self.barred)
        return self._plan_of(self.prediction.best(self.limit))

    def _plan_of(self, counts: list[int]) -> Plan:
        about = describe(self.budget, "latency", self.options["round_to"], self.options["score_name"])
        return plan_of_counts(self.trace, self.scores, counts, about, self.barred)

    def plan_until(self, fails: Fails) -> Plan:
        """Move the limit of the prediction until the measured latency is within 3% of the budget.

        Where no limit does: narrower layers, if all plans were too slow; keep what moves the latency in large steps
        as it is, and move the rest; then with finer steps.
        """
        self.tried, self.drafted = [], []
        target = self.budget.limit_ms(self.dense_ms)
        self.limit = 0.99 * target if target < self.dense_ms else 2 * target  # the whole model is tried first
        if not self._search(fails, target) and isinstance(self.options["round_to"], Steps):
            for go_near in (self._deepen, self._hold, self._refine):
                if go_near(target) and self._search(fails, target):
                    break
        below = [plan for share, plan in self._by_share() if share <= 1]
        if below and not self._fits():
            self._timed(below[-1])  # so far only guessed at
        if not self._fits() and self._try_least(fails):
            self._search(fails, target)
        self.told("measuring cut models", 1, 1)
        return self._best(self.tried)

    def _fits(self) -> bool:
        return any(t.share(self.budget) <= 1 + CLOSE for t in self.tried)

    def _try_least(self, fails: Fails) -> bool:
        """The plan that should be fastest, and the narrowest, before it is said that none will do; whether one does."""
        for choice in (self.prediction.fastest(), [0] * len(self.prediction.choices)):
            plan = self._plan_of(self.prediction.counts(choice))
            if self._known(plan) is None and plan.groups and not fails(plan):
                self._timed(plan)
                self.drafted.append(plan)
        if not self._fits():
            return False
        nearest = [plan for share, plan in self._by_share() if share <= 1 + CLOSE][-1]
        self._go_near(nearest, Near(self._counts(nearest), upwards=True))
        return True

    def _search(self, fails: Fails, target: float) -> bool:
        """Bisect from the limit on, by what the clock says; whether a plan came close."""
        before, drafts = len(self.tried), list[tuple[float, Plan]]()
        most = 2 * max(self.dense_ms, self.limit)
        for _ in range(DRAFTS):
            self.told("measuring cut models", len(self.tried) - before, TRIES)
            plan = self.draft()
            new = self._share(plan) is None
            plan = super().plan_until(fails) if new else plan
            share = self._clocked(plan)
            drafts.append((self.limit, plan))
            self.drafted.append(plan)
            if self._known(plan) is not None and (1 - CLOSE <= share <= 1 + OVER or (share <= 1.0 and not plan.groups)):
                return True
            shares = [(limit, self._share(p) or 0.0) for limit, p in drafts]
            low = max((limit for limit, s in shares if s <= 1), default=0.0)
            high = min((limit for limit, s in shares if s > 1), default=most)
            ends = self._is_fastest(plan) if share > 1 else self._is_widest(plan)
            if ends or high - low < 0.005 * target or len(self.tried) - before >= TRIES:
                break
            aim = self.limit * 0.985 / share
            between = (low + high) / 2 if high < most else 1.5 * self.limit  # in steps, where nothing is above yet
            self.limit = aim if low < aim < min(high, 2 * self.limit) and new else between
        nearest = min((plan for _, plan in drafts), key=lambda plan: abs((self._share(plan) or 0.0) - 1 + CLOSE / 2))
        if self._known(nearest) is None:  # it was only guessed at
            return 1 - CLOSE <= self._timed(nearest).share(self.budget) <= 1 + OVER
        return False

    def _share(self, plan: Plan) -> float | None:
        """Of what the budget allows: measured, or guessed, or not known."""
        found = self._known(plan)
        if found is not None:
            return found.share(self.budget)
        raw = self.quick.raw(plan) if self.quick else None
        return raw * self.quick.factor * self._allowed() if self.quick and raw is not None else None

    def _clocked(self, plan: Plan) -> float:
        """Measured where a guess does not rule it out."""
        if self._known(plan) is None and self.quick and plan.groups:
            guess = self.quick.share(plan) * self._allowed()
            if abs(guess - 1 + CLOSE / 2) > self.quick.off:
                return guess
        found = self._known(plan) or self._timed(plan)
        return found.share(self.budget)

    def _allowed(self) -> float:
        """From a share of the dense time to a share of the budget."""
        return self.dense_ms / self.budget.limit_ms(self.dense_ms)

    def _known(self, plan: Plan) -> _Try | None:
        return next((t for t in self.tried if t.plan.groups == plan.groups), None)

    def _deepen(self, target: float) -> bool:
        """Narrower layers than anyone would like, where all plans were too slow."""
        if any(share <= 1 + CLOSE for share, _ in self._by_share()) or self.floor == DEEP:
            return False
        self.floor, self.limit = DEEP, 0.99 * target
        self._go_near(None, None)
        return True

    def _hold(self, target: float) -> bool:
        """Around the plan that is nearest above the budget, or below: what is bulky stays, the rest may change."""
        by_share = self._by_share()
        above = [plan for share, plan in by_share if 1 < share < FAR]
        from_here = above[0] if above else [by_share[0][1], *[plan for share, plan in by_share if share <= 1]][-1]
        counts = self._counts(from_here)
        held = self.prediction.bulky(counts, CLOSE * target)
        if not 0 < len(held) < len(self.prediction.units):
            return False
        self._go_near(from_here, Near(counts, held))
        return True

    def _refine(self, _: float) -> bool:
        """Smaller steps, upwards from the best plan below the budget, or anywhere."""
        coarse: Steps = self.options["round_to"]
        finer = {"wide": max(1, coarse.wide // 4), "least": max(1, coarse.least // 4), "parts": 4 * coarse.parts}
        steps = replace(coarse, **finer)
        self.fine, self.options = True, {**self.options, "round_to": steps}
        below = [plan for share, plan in self._by_share() if share <= 1]
        best = below[-1] if below else None
        self._go_near(best, Near(self._counts(best), upwards=True) if best else None)
        return True

    def _by_share(self) -> list[tuple[float, Plan]]:
        """All plans that were measured or guessed at, the fastest first."""
        return sorted(((self._share(plan) or 0.0, plan) for plan in self.drafted), key=lambda pair: pair[0])

    def _go_near(self, plan: Plan | None, near: Near | None) -> None:
        """Predict anew; the limit is where that plan's time would be the budget's."""
        self.near = near
        self.prediction, self._seen = self._predict(), dict(self.barred)
        if plan is not None and near is not None:
            place = self.prediction.choice_of(near.counts)
            if place is not None:
                self.limit = self.prediction.problem.time_of(place) * 0.985 / (self._share(plan) or 1.0)

    def _counts(self, plan: Plan) -> list[int]:
        return [len(plan.groups.get(g.name, range(g.width))) for g in self.trace.groups]

    def _is_fastest(self, plan: Plan) -> bool:
        return self._counts(plan) == self.prediction.counts(self.prediction.fastest())

    def _is_widest(self, plan: Plan) -> bool:
        return self._counts(plan) == self.prediction.counts([len(c) - 1 for c in self.prediction.choices])

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
        """Measured, and remembered."""
        if not plan.groups:
            times = self._clock({"dense": self.dense})
            found = _Try(plan, times["dense"], times["dense"])
        else:
            small = deploy(cut(self.model, plan), self.inputs, self.way, seconds=0.5)
            times = self._clock({"dense": self.dense, "cut": small})
            found = _Try(plan, times["cut"], times["dense"])
        self.tried.append(found)
        if self.quick:
            self.quick.learn(plan, found.share(self.budget) / self._allowed())
        return found

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
            f"got ±{unsure:.1%}, and {moved:.0%} more or less, on {name_of(self.device)} after 27 seconds. The machine "
            "is too noisy to decide: close what else runs on it, or use a larger batch."
        )
