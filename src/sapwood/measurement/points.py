"""One point of a table of forms: every form is made ready, checked, and then all take turns with dense."""

from __future__ import annotations

import contextlib
import gc
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from sapwood.capture.isolation import undisturbed
from sapwood.capture.run import Inputs, tensors_in
from sapwood.errors import SapwoodError, explain
from sapwood.measurement.backends import Runner
from sapwood.measurement.clock import Timing, settle, take_turns
from sapwood.measurement.machine import Ceilings, ceilings, describe
from sapwood.measurement.measure import out_of_memory, ready

TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 3e-2}
LEAST_COPIES, MOST_COPIES, PRODUCTS = 8, 64, 32
LONG_MS = 20.0  # dense over all copies should take no longer than this
SHORT_MS = 4.0  # and over many products: longer ones hide what a graph costs
ROUNDS, FEW_ROUNDS = 15, 5


@dataclass(frozen=True)
class Cost:
    """What a form cannot avoid: FLOPs (2 x multiply-accumulates), weights read, and inputs read + outputs written."""

    flops: float
    weight_bytes: float
    activation_bytes: float

    @property
    def moved_bytes(self) -> float:
        return self.weight_bytes + self.activation_bytes


@dataclass(frozen=True)
class Candidate:
    """A form that wants to be measured. Of the ``ways`` to compute it, the fastest that is right represents it.

    ``expected`` gives what it must compute: the output of a dense model with the same zeros.
    """

    form: str
    ways: Mapping[str, nn.Module]
    expected: Callable[[], list[torch.Tensor]]
    cost: Cost
    copies: int = 1
    """How many times one call computes it, each time from other memory."""
    passes: int = 1
    """How many times it runs over all of them."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Row:
    """A form that was measured: its time against dense, beside the least time the machine would need."""

    form: str
    way: str
    timing: Timing
    cost: Cost
    floor_ms: float | None
    error: float
    """Relative to the output of a dense model with the same zeros."""
    backend: str
    copies: int
    cold: bool | None
    """Whether the weights come from memory, not from the cache of the last run; None on a CPU, where it is not told."""
    notes: tuple[str, ...] = ()

    @property
    def reached(self) -> float | None:
        """The fraction of the estimate that was reached; above 1 where caches help."""
        return None if self.floor_ms is None else self.floor_ms / self.timing.median_ms


@dataclass(frozen=True)
class Point:
    """All forms at one batch size and one sparsity, measured in turns; and those left out, with the reason."""

    batch: int
    sparsity: float
    rows: tuple[Row, ...] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Bench:
    """The answer to: which form of zeros pays on this machine?"""

    what: Mapping[str, Any]
    device: str
    dtype: str
    backend: str
    seconds: float
    points: tuple[Point, ...]
    machine: Mapping[str, Any]
    ceilings: Ceilings | None
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        found = asdict(self)
        for point, told in zip(self.points, found["points"], strict=True):
            for row, entry in zip(point.rows, told["rows"], strict=True):
                entry["reached"] = row.reached
                entry["cost"]["moved_bytes"] = row.cost.moved_bytes
        return found


@undisturbed()
def measure_point(
    candidates: Sequence[Candidate],
    inputs: Inputs,
    device: torch.device,
    dtype: torch.dtype,
    backend: str,
    seconds: float,
    limits: Ceilings | None = None,
) -> tuple[tuple[Row, ...], dict[str, str]]:
    """The rows, and why others have none. The first candidate is dense: without it there is nothing to compare."""
    runners: dict[str, tuple[str, Runner]] = {}
    errors: dict[str, float] = {}
    skipped: dict[str, str] = {}
    round_ms = 0.0
    for candidate in candidates:
        try:
            way, runner, errors[candidate.form], took = _chosen(candidate, inputs, backend, dtype)
        except Exception as error:
            if candidate is candidates[0]:
                raise
            skipped[candidate.form] = told(error)
            continue
        runners[candidate.form] = way, runner
        round_ms += took
    slow = ROUNDS * round_ms > 2000 * seconds  # the intervals say how sure few rounds are
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        times = take_turns(
            {form: runner.call for form, (_, runner) in runners.items()},
            seconds,
            least=FEW_ROUNDS if slow else ROUNDS,
            warm_up=1 if slow else 3,
            device=device,
        )
    cache = cache_bytes(device)
    rows = []
    for c in candidates:
        if c.form in runners:
            way, runner = runners[c.form]
            floor = None if limits is None else limits.floor_ms(c.cost.flops, c.cost.moved_bytes)
            cold = None if cache is None else c.copies * c.cost.weight_bytes >= 2 * cache
            timing, notes = each(times[c.form], c.copies * c.passes), (*c.notes, *runner.notes)
            rows.append(Row(c.form, way, timing, c.cost, floor, errors[c.form], runner.backend, c.copies, cold, notes))
    return tuple(rows), skipped


def _chosen(candidate: Candidate, inputs: Inputs, backend: str, dtype: torch.dtype) -> tuple[str, Runner, float, float]:
    """The fastest way that computes the right thing: its name, runner, error and milliseconds of a call."""
    wanted = candidate.expected()
    best: tuple[str, Runner, float, float] | None = None
    why: list[str] = []
    for way, model in candidate.ways.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                runner, _ = ready(model.eval(), inputs, backend)  # a model of our own, not the user's
                settle(runner.device)
                start = time.perf_counter()
                out = runner.call()
                settle(runner.device)
                took = 1000 * (time.perf_counter() - start)
                error = relative_error(outputs(out), wanted)
            if not error <= TOLERANCE.get(dtype, 1e-3):
                raise SapwoodError(f"it computes something else: relative error {error:.1e}")
        except Exception as error_:
            if len(candidate.ways) == 1 or isinstance(error_, torch.cuda.OutOfMemoryError):
                raise
            why.append(f"by {way}: {told(error_)}")
            continue
        if best is None or took < best[3]:
            best = way, runner, error, took
    if best is None:
        raise SapwoodError("; ".join(why))
    return best


def outputs(value: Any) -> list[torch.Tensor]:
    """The tensors of an output, whichever library made it."""
    if isinstance(value, (list, tuple)) and value and all(isinstance(v, np.ndarray) for v in value):
        return [torch.from_numpy(v) for v in value]
    found = list(tensors_in(value))
    if not found and hasattr(value, "to_tuple"):  # openvino
        return [torch.from_numpy(np.array(v)) for v in value.to_tuple()]
    return found


def relative_error(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
    """The largest over the tensors of |found - wanted| / |wanted|, in Euclidean norms; inf where they cannot match."""
    floats = [[t for t in tensors if t.is_floating_point()] for tensors in (found, wanted)]
    if len(floats[0]) != len(floats[1]) or not floats[1]:
        return math.inf
    worst = 0.0
    for one, other in zip(*floats, strict=True):
        if one.shape != other.shape:
            return math.inf
        other = other.detach().float()
        away = float((one.detach().to(other.device).float() - other).norm())
        worst = max(worst, away / max(float(other.norm()), 1e-30) if away else 0.0)
        if math.isnan(away):
            return math.inf
    return worst


def each(timing: Timing, products: int) -> Timing:
    """The time of one of the products that a call runs over; ratios stay."""
    return replace(
        timing,
        median_ms=timing.median_ms / products,
        low_ms=timing.low_ms / products,
        high_ms=timing.high_ms / products,
        spread_ms=timing.spread_ms / products,
    )


def copies_needed(weight_bytes: Sequence[float], cache: int | None, room: float, dense_ms: float = 0.0) -> int:
    """How many copies of the weights one call runs over, so that none is still in the cache when it comes again.

    All forms use the same number: as many as the smallest needs to fill the cache twice, and several in any case, as in
    a model, where one product starts while the last comes to its end; as far as there is memory (``room`` in bytes, for
    one set of all forms times the copies) and as dense stays short.
    """
    if cache is None or not weight_bytes or min(weight_bytes) <= 0:
        return 1
    need = max(LEAST_COPIES, math.ceil(2 * cache / min(weight_bytes)))
    fits = int(room // sum(weight_bytes))
    short = int(LONG_MS / dense_ms) if dense_ms > 0 else MOST_COPIES
    return max(1, min(need, fits, short, MOST_COPIES))


def passes_needed(copies: int, dense_ms: float = 0.0) -> int:
    """How often one call runs over the copies: a graph starts and ends once, as in a model, not once for a few."""
    passes = -(-PRODUCTS // copies)
    known = copies > 1  # otherwise nothing is known of caches, or there is no room
    return passes if known and passes * copies * dense_ms <= SHORT_MS else 1


def cache_bytes(device: torch.device) -> int | None:
    """The last cache of a GPU; None where it is not told, as on a CPU."""
    if device.type != "cuda":
        return None
    size = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)
    return int(size) or None


def free_bytes(device: torch.device) -> float:
    """Memory that is free there; no limit where it cannot be read."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    with contextlib.suppress(OSError, StopIteration), open("/proc/meminfo") as lines:
        return 1024.0 * int(next(line for line in lines if line.startswith("MemAvailable")).split()[1])
    return math.inf


def limits_of(device: torch.device, dtype: torch.dtype) -> Ceilings | None:
    """The measured ceilings, or None where the device has no room to measure them."""
    try:
        return ceilings(device, dtype)
    except Exception:
        release()
        return None


def told(error: BaseException) -> str:
    """Why a form has no result, on one line."""
    if out_of_memory(error):
        return "out of memory"
    if isinstance(error, SapwoodError):
        return " ".join(str(error).split())
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    why = " ".join((lines or [""])[0].split())[:160]
    return f"torch raised {type(error).__name__}: {why}"


def release() -> None:
    """Give memory back before the next point."""
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        with contextlib.suppress(Exception):  # after a capture that failed the allocator may refuse
            torch.cuda.empty_cache()


def chosen_device(name: str | None) -> torch.device:
    """The device named; without a name a GPU where there is one."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.partition(":")[0] not in ("cpu", "cuda"):
        raise explain("cpu or cuda", repr(name), "Choose one of them.", "--device")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise explain("cpu, cuda or cuda:0", repr(name), "Choose one of them.", "--device") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        got = f"{name}, and torch {torch.__version__} sees {count or 'no'} GPU{'s' if count > 1 else ''}"
        raise explain("a GPU that is there", got, "Use --device cpu, or run where there is one.", "--device")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def chosen_dtype(name: str | None, device: torch.device) -> torch.dtype:
    """The dtype named; without a name bfloat16 on a GPU, float32 on a CPU."""
    names = {str(d).removeprefix("torch."): d for d in TOLERANCE}
    if name is None:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if name not in names:
        raise explain(f"one of {', '.join(names)}", repr(name), "Choose one of them.", "--dtype")
    return names[name]


def about(device: torch.device) -> dict[str, Any]:
    """The machine, with the size of the cache that repeated runs must not measure."""
    return {**describe(device), "cache_bytes": cache_bytes(device)}
