"""How many channels each group keeps, so that a budget is met and all sizes still fit together."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse.csgraph import connected_components

from sapwood.capture.forms import Form

Targets = Callable[[float], np.ndarray]
"""A level between 0 and 1 -> how many channels of each group would stay, as a float."""


@dataclass(frozen=True)
class Unit:
    """Groups whose counts depend on one another, with the equations that tie them."""

    groups: tuple[int, ...]
    rows: np.ndarray  # coefficients, one row per equation
    constants: np.ndarray


def units_of(widths: Sequence[int], constraints: Sequence[Form]) -> list[Unit]:
    """Partition the groups into units that can be decided apart."""
    size = len(widths)
    touches = np.zeros((size, size), dtype=bool)
    for form in constraints:
        numbers = [g for g, _ in form.terms]
        touches[numbers[0], numbers] = True
    label = connected_components(touches, directed=False)[1] if size else np.zeros(0, int)
    units = []
    for value in range(int(label.max(initial=-1)) + 1):
        members = np.flatnonzero(label == value)
        place = {int(g): i for i, g in enumerate(members)}
        own = [f for f in constraints if f.terms[0][0] in place]
        rows = np.zeros((len(own), len(members)))
        for number, form in enumerate(own):
            for group, coefficient in form.terms:
                rows[number, place[group]] = coefficient
        units.append(Unit(tuple(place), rows, np.array([f.constant for f in own], dtype=float)))
    return units


def settle(unit: Unit, targets: np.ndarray, widths: np.ndarray, steps: np.ndarray, fixed: np.ndarray) -> np.ndarray:
    """Whole counts at most the targets where possible, never zero, that satisfy the equations."""
    floor = np.floor(targets / steps + 1e-9) * steps
    counts = np.clip(floor, np.minimum(steps, widths), widths)
    counts = np.where(fixed | (targets >= widths), widths, counts)
    if not len(unit.rows):
        return counts
    for step in (steps, np.ones_like(steps)) if (steps > 1).any() else (steps,):
        for upper in (counts, widths.astype(float)):
            found = _solve(unit, counts, upper, widths, fixed, step)
            if found is not None:
                return found
    return widths.astype(float)


def _solve(
    unit: Unit, wanted: np.ndarray, upper: np.ndarray, widths: np.ndarray, fixed: np.ndarray, steps: np.ndarray
) -> np.ndarray | None:
    """Counts nearest to the wanted ones (each deviation relative to its width), in whole steps."""
    size = len(widths)
    steps = np.where(fixed | (widths % steps != 0), 1, steps)
    lower = np.where(fixed, widths, steps) / steps
    # variables: counts in steps, then the deviations of the counts from the wanted ones
    cost = np.concatenate([np.zeros(size), 1.0 / widths])
    grow, eye = np.diag(steps), np.eye(size)
    rows = unit.rows * steps
    equations = LinearConstraint(np.hstack([rows, np.zeros_like(rows)]), -unit.constants, -unit.constants)
    above = LinearConstraint(np.hstack([-grow, eye]), -wanted, np.inf)
    below = LinearConstraint(np.hstack([grow, eye]), wanted, np.inf)
    found = milp(
        cost,
        integrality=np.concatenate([np.ones(size), np.zeros(size)]),
        bounds=Bounds(
            np.concatenate([lower, np.zeros(size)]),
            np.concatenate([np.maximum(np.floor(upper / steps), lower), np.full(size, np.inf)]),
        ),
        constraints=[equations, above, below],
        options={"time_limit": 5.0},
    )
    return None if found.x is None else np.round(found.x[:size]) * steps


def steps_for(round_to: RoundTo, blocks: Sequence[int], widths: Sequence[int]) -> np.ndarray:
    """The step of each group's count so that its size in weights is a multiple of ``round_to``."""
    if round_to is None:
        return np.ones(len(widths))
    steps = []
    for block, width in zip(blocks, widths, strict=True):
        wanted = round_to.step(block * width) if isinstance(round_to, Steps) else round_to
        steps.append(wanted // math.gcd(wanted, block))
    return np.array([s if s <= w else 1 for s, w in zip(steps, widths, strict=True)], dtype=float)


@dataclass(frozen=True)
class Steps:
    """The step a device likes for wide layers, and for narrow ones, which is the least.

    Narrow layers take smaller steps, a quarter of their width (one of ``parts``), so that they can be cut at all. Those
    that ``least`` would leave whole may have a ``narrow`` step where each width is timed before it is chosen.
    """

    wide: int
    least: int
    narrow: int | None = None
    parts: int = 4

    def step(self, size: int) -> int:
        fits = 1 << int(math.log2(max(size // self.parts, 1)))
        least = self.narrow if self.narrow and size < 2 * self.least else self.least
        return max(min(least, self.least), min(self.wide, fits))


RoundTo = int | Steps | None


@dataclass
class Allocator:
    """Finds the highest level whose cost fits the budget, then uses up what is left over."""

    units: list[Unit]
    widths: np.ndarray
    steps: np.ndarray
    fixed: np.ndarray
    targets: Targets
    cost: Callable[[np.ndarray], float]
    rise: np.ndarray | None = None
    """By how many channels each group may end above the level that fits, to use up what is left over; None: by any."""

    def counts(
        self, level: float, held: dict[int, np.ndarray] | None = None, most: np.ndarray | None = None
    ) -> np.ndarray:
        wanted = self.targets(level) if most is None else np.minimum(self.targets(level), most)
        result = np.zeros(len(self.widths))
        for number, unit in enumerate(self.units):
            index = list(unit.groups)
            if held is not None and number in held:
                result[index] = held[number]
            else:
                result[index] = settle(unit, wanted[index], self.widths[index], self.steps[index], self.fixed[index])
        return result

    def fit(self, limit: float, slack: float) -> np.ndarray:
        """Counts whose cost is at most ``limit`` and, where the model allows, above limit - slack."""
        best, coarse = self._fill(limit, slack, {})
        for number, counts in coarse:  # a unit of coarse steps: try its next step up, and less elsewhere
            if limit - self.cost(best) <= slack:
                break
            held = {number: counts}
            if self.cost(self.counts(0.0, held)) <= limit:
                other, _ = self._fill(limit, slack, held)
                best = max(best, other, key=self.cost)
        return best

    def _fill(
        self, limit: float, slack: float, held: dict[int, np.ndarray]
    ) -> tuple[np.ndarray, list[tuple[int, np.ndarray]]]:
        """Raise the level; hold what would overshoot, go on with the rest. Also: the steps not taken."""
        held, level = dict(held), 0.0
        best, most = self.counts(level, held), None
        coarse: list[tuple[int, np.ndarray]] = []
        for _ in range(len(self.units)):
            low, high = self._bisect(limit, level, held, most)
            best, level = self.counts(low, held, most), low
            if most is None and self.rise is not None:
                most = best + self.rise
            if limit - self.cost(best) <= slack or low >= 1.0:
                break
            above = self.counts(high, held, most)
            jumped = [
                n
                for n, u in enumerate(self.units)
                if n not in held and (above[list(u.groups)] != best[list(u.groups)]).any()
            ]
            if not jumped:
                break
            largest = max(jumped, key=lambda n: self._jump(best, above, n))
            index = list(self.units[largest].groups)
            held[largest] = best[index]
            coarse.append((largest, above[index]))
        return best, coarse[:4]

    def _jump(self, below: np.ndarray, above: np.ndarray, number: int) -> float:
        mixed, index = below.copy(), list(self.units[number].groups)
        mixed[index] = above[index]
        return self.cost(mixed)

    def _bisect(
        self, limit: float, low: float, held: dict[int, np.ndarray], most: np.ndarray | None
    ) -> tuple[float, float]:
        high = 1.0
        if self.cost(self.counts(high, held, most)) <= limit:
            return high, high
        for _ in range(24):
            middle = (low + high) / 2
            if self.cost(self.counts(middle, held, most)) <= limit:
                low = middle
            else:
                high = middle
        return low, high
