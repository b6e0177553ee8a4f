"""A model's latency as a function of its widths: timed operators, and the rest by the bytes it moves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from sapwood.capture.operators import OpCall
from sapwood.capture.trace import Trace
from sapwood.measurement.roofline import moved_bytes
from sapwood.measurement.tables import TIMED, OperatorTimes
from sapwood.planning.counts import settle, units_of
from sapwood.planning.draft import weights_of
from sapwood.planning.knapsack import Knapsack, choose, quickest
from sapwood.types import Tell

LEVELS, FINE = 10, 30  # choices of width per unit
FLOOR, DEEP = 0.125, 0.03125  # no group is cut below this share, and where that is not enough
ABOVE = 1.5  # how far above a base its finer choices go
LEAST = 0.15  # of the time that is not the timed operators': launches and such, which no cut makes shorter
ANCHORS = 4  # of one side of a pair's table; the rest lies between


@dataclass(frozen=True)
class Near:
    """Choices about a plan that was measured: the units ``held`` keep its widths, the others any, or only more."""

    counts: Sequence[int]
    held: Sequence[int] = ()
    upwards: bool = False


class Prediction:
    """Choices of widths for each unit, and a knapsack of scores and times."""

    def __init__(
        self,
        trace: Trace,
        scores: Sequence[np.ndarray],
        times: OperatorTimes,
        steps: np.ndarray,
        fixed: np.ndarray,
        levels: int = LEVELS,
        near: Near | None = None,
        floor: float = FLOOR,
    ) -> None:
        self.trace, self.scores, self.times = trace, scores, times
        self.units = units_of(trace.dense, [form for form, _ in trace.constraints])
        self.unit_of = {g: n for n, unit in enumerate(self.units) for g in unit.groups}
        widths = np.array(trace.dense, dtype=float)
        self.levels, self.near, self.floor = levels, near, floor
        self._fastest: list[int] | None = None
        self._best: dict[float, list[int]] = {}
        self.choices = [self._choices(number, widths, steps, fixed) for number in range(len(self.units))]

    def _choices(self, number: int, widths: np.ndarray, steps: np.ndarray, fixed: np.ndarray) -> list[np.ndarray]:
        """Counts of a unit's groups from narrow to whole, all of them ways that fit together."""
        unit, near = self.units[number], self.near
        index = list(unit.groups)
        whole = widths[index].astype(int)
        own = whole if near is None else np.array(near.counts)[index]
        found = {tuple(own.tolist()): own}
        if near is not None and number in near.held:
            return [own]
        least, most = self.floor, self.floor / FLOOR
        if near is not None and near.upwards:
            least = max(self.floor, float((own / whole).min()))
            most = min(1.0, ABOVE * least)
        else:
            found[tuple(whole.tolist())] = whole
        for level in np.linspace(least, most, self.levels):
            counts = settle(unit, widths[index] * level, widths[index], steps[index], fixed[index]).astype(int)
            if near is None or not near.upwards or (counts >= own).all():
                found[tuple(counts.tolist())] = counts
        return sorted(found.values(), key=lambda c: int(c.sum()))

    def counts(self, choice: Sequence[int]) -> list[int]:
        """How many channels each group keeps."""
        result = list(self.trace.dense)
        for unit, options, k in zip(self.units, self.choices, choice, strict=True):
            for group, count in zip(unit.groups, options[k], strict=True):
                result[group] = int(count)
        return result

    def choice_of(self, counts: Sequence[int]) -> list[int] | None:
        """The choices that keep so many channels, where there are such."""
        wanted = [tuple(counts[g] for g in unit.groups) for unit in self.units]
        known = [{tuple(c.tolist()): k for k, c in enumerate(options)} for options in self.choices]
        found = [places.get(own) for own, places in zip(wanted, known, strict=True)]
        return None if any(k is None for k in found) else [k for k in found if k is not None]

    def bulky(self, counts: Sequence[int], ms: float) -> list[int]:
        """Units whose next choice up takes more than so long: a step of theirs is no small correction."""
        choice = self.choice_of(counts)
        if choice is None:
            return []
        now, found = self.problem.time_of(choice), []
        for unit, k in enumerate(choice):
            more = [*choice[:unit], min(k + 1, len(self.choices[unit]) - 1), *choice[unit + 1 :]]
            if self.problem.time_of(more) - now > ms:
                found.append(unit)
        return found

    def best(self, limit: float) -> list[int]:
        """The counts that keep the most score within a limit; where none fit, the fastest."""
        if limit not in self._best:
            choice = choose(self.problem, limit)
            self._best[limit] = self.counts(self.fastest() if choice is None else choice)
        return self._best[limit]

    def fastest(self) -> list[int]:
        """Not always the narrowest: some widths have slow kernels."""
        if self._fastest is None:
            self._fastest = quickest(self.problem)
        return self._fastest

    def fill(self, dense_ms: float, tell: Tell) -> None:
        """Measure what is not known, and share out what the timed operators leave of the dense model's time."""
        timed = [c for c in self.trace.calls if c.name in TIMED]
        other = [c for c in self.trace.calls if c.name not in TIMED]
        tables = _Tables(self)
        for number, call in enumerate(timed):
            tell("timing operators", number, len(timed))
            tables.add(call, lambda kept, c=call: self.times.time_of(c, kept), sparse=True)  # type: ignore[misc]
        tell("timing operators", len(timed), len(timed))
        known = sum(self.times.time_of(call, self.trace.dense) for call in timed)
        rest, scale = dense_ms - known, 1.0
        if rest < 0.02 * dense_ms:  # kernels overlap, or are faster within the whole
            rest, scale = 0.02 * dense_ms, 0.98 * dense_ms / known if known else 1.0
        moved = _Tables(self)
        for call in other:
            moved.add(call, lambda kept, c=call: moved_bytes(c, kept) / 1e6)  # type: ignore[misc]
        total = sum(moved_bytes(call, self.trace.dense) / 1e6 for call in other) or 1.0
        self.problem = (
            tables.scaled(scale).plus(moved.scaled((1 - LEAST) * rest / total)).problem(self._values(), LEAST * rest)
        )

    def _values(self) -> list[np.ndarray]:
        """The score that each choice keeps."""
        pairs = zip(weights_of(self.trace), self.scores, strict=True)
        best = [n * np.concatenate([[0.0], np.cumsum(-np.sort(-s))]) for n, s in pairs]
        return [
            np.array([sum(best[g][n] for g, n in zip(unit.groups, counts, strict=True)) for counts in options])
            for unit, options in zip(self.units, self.choices, strict=True)
        ]


class _Tables:
    """Sums over operators: a constant, a vector for each unit, a matrix for each pair of units."""

    def __init__(self, of: Prediction) -> None:
        self.of = of
        self.constant = 0.0
        self.alone = [np.zeros(len(options)) for options in of.choices]
        self.pairs: dict[tuple[int, int], np.ndarray] = {}

    def add(self, call: OpCall, cost: Callable[[list[int]], float], sparse: bool = False) -> None:
        units = sorted({self.of.unit_of[g] for g in call.groups()})
        if not units:
            self.constant += cost(self.of.trace.dense)
        elif len(units) == 1:
            (u,) = units
            self.alone[u] += [cost(self._at({u: k})) for k in range(len(self.alone[u]))]
        else:
            u, v = units if len(units) == 2 else sorted(self._largest(call, units))
            table = self._pair(u, v, cost, sparse, [w for w in units if w not in (u, v)])
            self.pairs[u, v] = self.pairs.get((u, v), np.zeros_like(table)) + table

    def _largest(self, call: OpCall, units: list[int]) -> list[int]:
        """Of many, the one made and the widest of those read; the others are taken to be cut alike."""
        made = {self.of.unit_of[g] for r in call.results for g in r.groups()}
        widths = {u: sum(int(n) for n in self.of.choices[u][-1]) for u in units}
        ranked = sorted(units, key=lambda u: (u not in made or len(made) > 1, -widths[u]))
        return ranked[:2]

    def _pair(self, u: int, v: int, cost: Callable[[list[int]], float], sparse: bool, others: list[int]) -> np.ndarray:
        height, width = len(self.alone[u]), len(self.alone[v])
        rows = _anchors(height) if sparse else list(range(height))
        table = np.zeros((height, width))
        for k in rows:
            for j in range(width):
                rest = {w: round((k + 1) / height * len(self.alone[w])) - 1 for w in others}
                table[k, j] = cost(self._at({u: k, v: j, **{w: max(0, c) for w, c in rest.items()}}))
        if len(rows) < height:
            size = [int(c.sum()) for c in self.of.choices[u]]
            for j in range(width):
                table[:, j] = np.interp(size, [size[k] for k in rows], table[rows, j])
        return table

    def _at(self, choice: dict[int, int]) -> list[int]:
        return self.of.counts([choice.get(u, len(options) - 1) for u, options in enumerate(self.of.choices)])

    def scaled(self, factor: float) -> _Tables:
        made = _Tables(self.of)
        made.constant = self.constant * factor
        made.alone = [t * factor for t in self.alone]
        made.pairs = {pair: t * factor for pair, t in self.pairs.items()}
        return made

    def plus(self, other: _Tables) -> _Tables:
        made = self.scaled(1.0)
        made.constant += other.constant
        made.alone = [a + b for a, b in zip(self.alone, other.alone, strict=True)]
        for pair, table in other.pairs.items():
            made.pairs[pair] = made.pairs.get(pair, np.zeros_like(table)) + table
        return made

    def problem(self, values: list[np.ndarray], constant: float = 0.0) -> Knapsack:
        return Knapsack(
            values or [np.zeros_like(t) for t in self.alone], self.alone, self.pairs, self.constant + constant
        )


def _anchors(count: int) -> list[int]:
    if count <= ANCHORS:
        return list(range(count))
    return sorted({round(p) for p in np.linspace(0, count - 1, ANCHORS)})
