"""Time, fairly: variants take turns in one run, after warm-up; medians and their spread are told."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Timing:
    """Of ``rounds`` calls: the median, and half the distance from the first to the third quartile.

    ``speed`` is against the first of those that took turns, round by round, so that what slows a whole round down
    does not count: the median, and the first and third quartile.
    """

    median_ms: float
    spread_ms: float
    rounds: int
    speed: float
    speed_low: float
    speed_high: float


def take_turns(
    calls: Mapping[str, Callable[[], object]], seconds: float = 2.0, least: int = 15, warm_up: int = 3
) -> dict[str, Timing]:
    """Call each in turn until the time is up (at least ``least`` rounds), and time every call.

    The order changes from round to round: what ran before leaves its traces in caches and memory.
    """
    for _ in range(warm_up):
        for call in calls.values():
            call()
    taken: dict[str, list[float]] = {name: [] for name in calls}
    start, rounds = time.perf_counter(), 0
    names, dice = list(calls), random.Random(0)
    while rounds < least or time.perf_counter() - start < seconds:
        dice.shuffle(names)
        for name in names:
            _settle()
            before = time.perf_counter()
            calls[name]()
            _settle()
            taken[name].append(1000 * (time.perf_counter() - before))
        rounds += 1
    first = next(iter(taken.values()))
    return {name: _timing(times, first) for name, times in taken.items()}


def _timing(times: list[float], first: list[float]) -> Timing:
    low, middle, high = statistics.quantiles(times, n=4)
    ratios = statistics.quantiles([a / b for a, b in zip(first, times, strict=True)], n=4)
    return Timing(middle, (high - low) / 2, len(times), ratios[1], ratios[0], ratios[2])


def _settle() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
