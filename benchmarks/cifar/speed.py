"""Milliseconds of a training step by switch: ResNet-56, batch 256, whatever device there is.

A step of a plain graph-captured bf16 loop took 7.8 ms on an H200; 5.2 ms are asked for.
"""

from __future__ import annotations

import itertools
import statistics
import time
from typing import Any

import torch

import sapwood as sw
from benchmarks.cifar.kinds import Recipe
from benchmarks.cifar.work import Place, Run, environment

SWITCHES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "bf16": {"mixed_precision": "bf16"},
    "bf16, channels last, fused": {"mixed_precision": "bf16", "channels_last": True, "fused": True},
    "bf16, graph": {"mixed_precision": "bf16", "graph": True},
    "bf16, channels last, graph": {"mixed_precision": "bf16", "channels_last": True, "graph": True},
    "bf16, channels last, graph, compiled": {
        "mixed_precision": "bf16", "channels_last": True, "graph": True, "compile": True,
    },
}  # fmt: skip


def one(run: Run, switches: dict[str, Any], taught: bool, sparse: bool, steps: int) -> dict[str, float]:
    model = run.dense()
    if sparse:
        model = sw.mask(model, sw.Budget(sparsity=0.9))
    loader, times = run.loader(), []
    first = max(1, steps // 4)

    def on_step(step: int, total: int) -> None:
        if step % first == 0:
            if run.device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter())

    began = time.perf_counter()
    teacher = run.dense() if taught else None
    sw.recover(model, loader, lr=0.01, epochs=steps / len(loader), teacher=teacher, on_step=on_step, **switches)
    per_step = [1000 * (b - a) / first for a, b in itertools.pairwise(times)]
    return {"ms_per_step": round(statistics.median(per_step), 3), "set_up_s": round(times[0] - began, 1)}


def profile(place: Place, name: str, taught: bool, steps: int = 20) -> None:
    """Where the time of a step goes, by kernel, alone on the device."""
    run, took = Run("speed", Recipe(), 0, place), {}
    recorder = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])

    def on_step(step: int, total: int) -> None:
        if step == total - steps - 1:
            torch.cuda.synchronize()
            recorder.start()
        if step == total - 1:
            torch.cuda.synchronize()
            recorder.stop()

    loader, teacher = run.loader(), run.dense() if taught else None
    sw.recover(
        run.dense(), loader, lr=0.01, epochs=100 / len(loader), teacher=teacher, on_step=on_step, **SWITCHES[name]
    )
    for event in recorder.key_averages():
        took[event.key] = (event.self_device_time_total / steps, event.count / steps)
    print(f"{name}{', teacher' if taught else ''}: {sum(t for t, _ in took.values()) / 1000:.2f} ms a step in kernels")
    for key, (us, count) in sorted(took.items(), key=lambda pair: -pair[1][0])[:45]:
        print(f"{us:8.1f} us {count:6.1f} x {us / max(count, 1e-9):7.1f}  {key[:110]}", flush=True)


def measure(place: Place, steps: int, which: list[str], seed: int = 0, beside: str = "alone") -> None:
    """``which`` switches, all unless some are named; ``beside`` says what else runs on the device."""
    run, taught = Run("speed", Recipe(), seed, place), (False, True) if beside == "alone" else (True,)
    run.tell("start", steps=steps, **environment(run.device))
    for name in which or list(SWITCHES):
        for with_teacher in taught:
            for sparse in (False, True) if not with_teacher and "graph" in name else (False,):
                try:
                    found: dict[str, Any] = one(run, SWITCHES[name], with_teacher, sparse, steps)
                except RuntimeError as error:
                    found = {"failed": str(error)[:300]}
                told = {"switches": name, "teacher": with_teacher, "zeros": sparse, "beside": beside, **found}
                print(run.tell("speed", **told), flush=True)
