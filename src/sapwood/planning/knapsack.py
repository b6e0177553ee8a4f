"""The widths that keep the most score within a latency: a knapsack with one choice per unit.

A unit is a set of groups whose counts depend on one another; its choices are counts that fit together. Times are
given for single units and for pairs of them (a convolution reads one and makes another). The pairs are part of the
program: for each pair of choices a variable, tied to the choices it stands for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

GAP = 0.005  # of the score: nearer to the best is worth no wait


@dataclass(frozen=True)
class Knapsack:
    """``values[u][k]``: score kept by choice k of unit u. Times in ms: ``alone[u][k]``, ``pairs[u, v][k, l]``."""

    values: Sequence[np.ndarray]
    alone: Sequence[np.ndarray]
    pairs: Mapping[tuple[int, int], np.ndarray]
    constant: float = 0.0

    def time_of(self, choice: Sequence[int]) -> float:
        single = sum(float(t[k]) for t, k in zip(self.alone, choice, strict=True))
        return self.constant + single + sum(float(t[choice[u], choice[v]]) for (u, v), t in self.pairs.items())

    def score_of(self, choice: Sequence[int]) -> float:
        return sum(float(v[k]) for v, k in zip(self.values, choice, strict=True))


def choose(problem: Knapsack, limit: float, seconds: float = 10.0) -> list[int] | None:
    """The choice of each unit that keeps the most score within ``limit``; None where none fits."""
    if not problem.values:
        return [] if problem.constant <= limit else None
    return _solve(problem, limit, seconds)


def quickest(problem: Knapsack, seconds: float = 10.0) -> list[int]:
    """The choices that take the least time."""
    return (_solve(problem, None, seconds) if problem.values else []) or [0] * len(problem.values)


def _solve(problem: Knapsack, limit: float | None, seconds: float) -> list[int] | None:
    """The most score within a limit, or, without one, the least time."""
    sizes = [len(v) for v in problem.values]
    first = np.concatenate([[0], np.cumsum(sizes)]).astype(int)
    places = dict(zip(problem.pairs, _offsets(problem, int(first[-1])).tolist(), strict=False))
    total = int(first[-1]) + sum(t.size for t in problem.pairs.values())
    cost = np.zeros(total)
    times = np.zeros(total)
    for unit, (values, alone) in enumerate(zip(problem.values, problem.alone, strict=True)):
        cost[first[unit] : first[unit + 1]] = -values
        times[first[unit] : first[unit + 1]] = alone
    for pair, table in problem.pairs.items():
        times[places[pair] : places[pair] + table.size] = table.ravel()
    rows, columns, entries, right = _ties(problem, first, places)
    ties = coo_array((entries, (rows, columns)), shape=(len(right), total)).tocsr()
    integrality = np.zeros(total)
    integrality[: first[-1]] = 1
    constraints = [LinearConstraint(ties, right, right)]
    if limit is not None:
        constraints.append(LinearConstraint(times[None, :], -np.inf, limit - problem.constant))
    found = milp(
        times if limit is None else cost,
        integrality=integrality,
        bounds=Bounds(0, 1),
        constraints=constraints,
        options={"time_limit": seconds, "mip_rel_gap": GAP},
    )
    if found.x is None:
        return None
    return [int(np.argmax(found.x[first[u] : first[u + 1]])) for u in range(len(sizes))]


def _offsets(problem: Knapsack, start: int) -> np.ndarray:
    return np.cumsum([start, *(t.size for t in problem.pairs.values())])


def _ties(
    problem: Knapsack, first: np.ndarray, places: Mapping[tuple[int, int], int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """One choice per unit; the variables of a pair add up to the choices of both its units."""
    rows: list[int] = []
    columns: list[int] = []
    entries: list[float] = []
    right: list[float] = []

    def equation(terms: Sequence[tuple[int, float]], value: float) -> None:
        for column, entry in terms:
            rows.append(len(right))
            columns.append(column)
            entries.append(entry)
        right.append(value)

    for unit, values in enumerate(problem.values):
        equation([(int(first[unit]) + k, 1.0) for k in range(len(values))], 1.0)
    for (u, v), table in problem.pairs.items():
        place, (height, width) = places[u, v], table.shape
        for k in range(height):
            equation([(place + k * width + j, 1.0) for j in range(width)] + [(int(first[u]) + k, -1.0)], 0.0)
        for j in range(width):
            equation([(place + k * width + j, 1.0) for k in range(height)] + [(int(first[v]) + j, -1.0)], 0.0)
    return np.array(rows), np.array(columns), np.array(entries), np.array(right)
