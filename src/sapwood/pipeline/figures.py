"""What a run tells in the end: means and spreads over seeds, measured latency, and where it ran."""

from __future__ import annotations

import datetime
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import nn

from sapwood.measurement import Timing, take_turns
from sapwood.pipeline.data import Data
from sapwood.scoring.data import inputs_of
from sapwood.version import __version__


def over(values: Sequence[float]) -> dict[str, float]:
    """Mean and spread (standard deviation)."""
    return {"mean": statistics.fmean(values), "spread": statistics.stdev(values) if len(values) > 1 else 0.0}


def summary(seeds: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean and spread (standard deviation) over the seeds, and what became of the accuracy."""
    steps = []
    for index in range(len(seeds[0]["steps"])):
        same = [s["steps"][index] for s in seeds]
        steps.append(
            {
                "after_pruning": over([s["after_pruning"]["test"] for s in same]),
                "recovered": over([s["recovered"]["test"] for s in same]),
                "curve": {
                    f"{point['share']:.0%}": over([s["curve"][k]["test"] for s in same])
                    for k, point in enumerate(same[0]["curve"])
                },
            }
        )
    return {"seeds": len(seeds), "dense": over([s["dense"]["test"] for s in seeds]), "steps": steps}


def batch_for(data: Data, device: torch.device) -> Any:
    """The inputs that latency is measured with: the first batch of the test data."""
    return send_to_device(inputs_of(next(iter(data.test))), device)


def measured(
    dense: nn.Module, pruned: Mapping[int, nn.Module], data: Data, folder: Path, device: torch.device
) -> dict[str, Any]:
    """Latency of every seed's pruned model and of the last seed's dense one, all taking turns; the last one's files."""
    models = {"dense": dense.to(device).eval(), **{str(seed): m.to(device).eval() for seed, m in pruned.items()}}
    example = batch_for(data, device)
    size = len(next(iter(example.values())) if isinstance(example, dict) else example)

    def call(model: nn.Module) -> Callable[[], object]:
        return lambda: model(**example) if isinstance(example, dict) else model(example)

    with torch.inference_mode():
        times = take_turns({n: call(m) for n, m in models.items()}, seconds=min(4.0, float(len(pruned))))
    *_, last = times.values()
    return {
        "latency_ms": {"dense": latency(times["dense"]), "pruned": latency(last)},
        "speedup": last.speed,
        "speed_interval": [last.speed_low, last.speed_high],
        "seeds": {n: {**latency(t), "speedup": t.speed} for n, t in times.items() if n != "dense"},
        "on": f"{device.type}, eager, a batch of {size}",
        "file_bytes": {
            "dense": (folder / "dense.safetensors").stat().st_size,
            "pruned": (folder / "pruned" / "model.safetensors").stat().st_size,
        },
    }


def latency(timing: Timing) -> dict[str, float]:
    return {"median": timing.median_ms, "spread": timing.spread_ms, "rounds": timing.rounds}


def environment(device: torch.device) -> dict[str, Any]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {
        "date": datetime.date.today().isoformat(),
        "sapwood": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": f"{device.type} ({name})",
        "threads": torch.get_num_threads(),
    }
