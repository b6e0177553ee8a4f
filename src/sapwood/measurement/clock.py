"""Time, fairly: variants take turns in one run, after warm-up; medians and how sure they are."""

from __future__ import annotations

import contextlib
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from sapwood.cache import cache_folder

Call = Callable[[], object]
SAMPLE_MS = 0.3  # calls shorter than this are timed several at a time


@dataclass(frozen=True)
class Timing:
    """Of ``rounds`` samples: the median, its 95% interval, and half the distance between the quartiles.

    ``speed`` is against the first of those that took turns, round by round, so that what slows a whole round down
    does not count: the median of the ratios and its 95% interval. ``settled`` says that the interval of the median
    is narrower than 2%.
    """

    median_ms: float
    low_ms: float
    high_ms: float
    spread_ms: float
    rounds: int
    speed: float
    speed_low: float
    speed_high: float
    settled: bool


def take_turns(
    calls: Mapping[str, Call],
    seconds: float = 2.0,
    least: int = 15,
    warm_up: int = 3,
    device: torch.device | None = None,
    lead: int = 0,
) -> dict[str, Timing]:
    """Call each in turn and time every call, until all medians have settled or the time is up.

    The order changes from round to round: what ran before leaves its traces in caches and memory. At least ``least``
    rounds are made. On a CUDA ``device`` its own events keep the time. ``lead`` calls go before the timed ones of
    every turn: a model in use follows itself, with its weights in the caches and the next batch in the queue.
    Other processes of the user that measure on the same CUDA device are waited for.
    """
    with alone(device):
        return _take_turns(calls, seconds, least, warm_up, device, lead)


def _take_turns(
    calls: Mapping[str, Call], seconds: float, least: int, warm_up: int, device: torch.device | None, lead: int
) -> dict[str, Timing]:
    repeats = {name: _warm_up(call, warm_up, device) for name, call in calls.items()}
    taken: dict[str, list[float]] = {name: [] for name in calls}
    names, dice, start = list(calls), random.Random(0), time.perf_counter()
    while True:
        dice.shuffle(names)
        for name in names:
            taken[name].append(_sample(calls[name], repeats[name], device, lead))
        rounds, late = len(taken[names[0]]), time.perf_counter() - start >= seconds
        if rounds >= least and (late or (rounds % 5 == 0 and all(_settled(t) for t in taken.values()))):
            break
    first = next(iter(taken.values()))
    return {name: _timing(times, first) for name, times in taken.items()}


_held: set[str] = set()


@contextlib.contextmanager
def alone(device: torch.device | None) -> Iterator[None]:
    """No two processes measure on a CUDA device at once; where files cannot be locked, they may."""
    if device is None or device.type != "cuda":
        yield
        return
    name = str(torch.cuda.get_device_properties(device).uuid)  # "cuda" and "cuda:0" are one device
    if name in _held:
        yield
        return
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            at = cache_folder() / f"measuring-{name}.lock"
            at.parent.mkdir(parents=True, exist_ok=True)
            fcntl.flock(stack.enter_context(at.open("w")), fcntl.LOCK_EX)
        _held.add(name)
        stack.callback(_held.discard, name)
        yield


def _warm_up(call: Call, times: int, device: torch.device | None) -> int:
    """Run a few times; how many calls a sample takes."""
    call()
    settle(device)
    took = min(_sample(call, 1, device) for _ in range(max(times, 1)))
    return max(1, min(1000, math.ceil(SAMPLE_MS / max(took, 1e-4))))


def _sample(call: Call, repeats: int, device: torch.device | None, lead: int = 0) -> float:
    """Milliseconds of one call."""
    settle(device)
    for _ in range(lead):
        call()
    if device is not None and device.type == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.device(device):
            start.record()
            for _ in range(repeats):
                call()
            end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / repeats
    before = time.perf_counter()
    for _ in range(repeats):
        call()
    settle(device)
    return 1000 * (time.perf_counter() - before) / repeats


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The median, and the 95% interval of it from the order of the values."""
    ordered, count = sorted(values), len(values)
    away = 0.98 * math.sqrt(count)
    low, high = max(0, math.floor(count / 2 - away)), min(count - 1, math.ceil(count / 2 + away) - 1)
    return statistics.median(ordered), ordered[low], ordered[max(low, high)]


def _settled(times: Sequence[float]) -> bool:
    middle, low, high = interval(times)
    return high - low < 0.02 * middle


def _timing(times: list[float], first: list[float]) -> Timing:
    quarters = statistics.quantiles(times, n=4)
    middle, low, high = interval(times)
    ratio, ratio_low, ratio_high = interval([a / b for a, b in zip(first, times, strict=True)])
    spread = (quarters[2] - quarters[0]) / 2
    return Timing(middle, low, high, spread, len(times), ratio, ratio_low, ratio_high, _settled(times))


def settle(device: torch.device | None = None) -> None:
    """Wait until the device has done all it was told."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize(device if device is not None and device.type == "cuda" else None)
