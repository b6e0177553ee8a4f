"""The machine: what it is, and the two ceilings it was measured to have."""

from __future__ import annotations

import contextlib
import os
import platform
import time
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from sapwood.measurement.clock import take_turns


def name_of(device: torch.device) -> str:
    """The device by the name its maker gave it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return _processor()


@cache
def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            found = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        return found[0] if found else platform.processor() or platform.machine()
    except OSError:
        return platform.processor() or platform.machine()


def describe(device: torch.device) -> dict[str, Any]:
    """What a figure needs beside it: the device, its driver, versions, threads."""
    about: dict[str, Any] = {"device": name_of(device), "kind": device.type, "torch": torch.__version__}
    if device.type == "cuda":
        about["cuda"] = torch.version.cuda
        about["cudnn"] = torch.backends.cudnn.version()
        about["driver"] = _driver()
    else:
        about["threads"] = torch.get_num_threads()
        about["cores"] = os.cpu_count()
    return about


@cache
def _driver() -> str:
    try:
        with open("/proc/driver/nvidia/version") as file:
            words = file.readline().split()
        return next((w for w in words if w[:1].isdigit() and "." in w), "unknown")
    except OSError:
        return "unknown"


QUIET = 0.1
"""The share of the processors that others may take."""


class Others:
    """What other programs take of the processors that this one may use, from when it is made."""

    def __init__(self) -> None:
        self.busy, self.began = _busy(), (_own(), time.perf_counter())

    def note(self, device: torch.device) -> tuple[str, ...]:
        """Said where figures of a CPU may be off for it; nothing where it cannot be known."""
        now = _busy()
        if device.type != "cpu" or now is None or self.busy is None:
            return ()
        own, wall = _own() - self.began[0], time.perf_counter() - self.began[1]
        share = (now - self.busy - own) / max(wall * len(os.sched_getaffinity(0)), 1e-9)
        if wall < 0.5 or share <= QUIET:
            return ()
        told = f"other programs took {min(share, 1.0):.0%} of the processors meanwhile, and figures may be far off"
        return (f"{told}: measure again when the machine is quiet",)


def _busy() -> float | None:
    """Seconds that the processors were at work, all together."""
    with contextlib.suppress(OSError, ValueError, AttributeError), open("/proc/stat") as lines:
        mine = {f"cpu{n}" for n in os.sched_getaffinity(0)}
        rows = [line.split() for line in lines if line.split(" ", 1)[0] in mine]
        ticks = sum(int(n) for row in rows for place, n in enumerate(row[1:9]) if place not in (3, 4))  # idle, waiting
        return ticks / os.sysconf("SC_CLK_TCK")
    return None


def _own() -> float:
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


@dataclass(frozen=True)
class Ceilings:
    """What the device reaches at best: bytes moved per second (read + written) and FLOPs per second."""

    bytes_per_s: float
    flops_per_s: float

    def floor_ms(self, flops: float, moved_bytes: float) -> float:
        """No version can run much faster than this: the larger of the two times."""
        return 1000 * max(flops / self.flops_per_s, moved_bytes / self.bytes_per_s)


@cache
def ceilings(device: torch.device, dtype: torch.dtype = torch.float32) -> Ceilings:
    """Measured, not looked up: a large copy, and a large matrix product in this dtype."""
    large = device.type == "cuda"
    size, side = (2**30, 8192) if large else (2**26, 1024)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    left = torch.randn(side, side, device=device).to(dtype)
    right = torch.randn(side, side, device=device).to(dtype)
    with torch.no_grad():
        times = take_turns(
            {"copy": lambda: target.copy_(source), "product": lambda: left @ right}, seconds=2.0, device=device
        )
    best = {name: t.low_ms / 1000 for name, t in times.items()}
    return Ceilings(2 * size / best["copy"], 2 * side**3 / best["product"])
