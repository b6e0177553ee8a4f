"""The main job on a small scale: train, prune in three ways, recover each, measure; several seeds."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import nn

from sapwood.measurement import Timing, count, take_turns
from sapwood.pipeline.data import Data, load_data
from sapwood.pipeline.figures import over
from sapwood.pipeline.models import SmallCNN
from sapwood.pipeline.shrink import Shrunk, prune_and_recover
from sapwood.recovery.recover import recover
from sapwood.storage.bundle import save
from sapwood.types import Budget, Tell

EPOCHS, FRACTION, LR = 20, 0.2, 0.1
VARIANTS: dict[str, dict[str, Any]] = {
    "90% zeros": {"budget": Budget(sparsity=0.9)},
    "2:4 zeros": {"pattern": "2:4"},
    "half the channels": {"budget": Budget(channels=0.5), "options": {"score": "l1"}},
}


@dataclass(frozen=True)
class Row:
    """One variant: test accuracies over the seeds, and what was counted and clocked with the last one."""

    name: str
    after_pruning: dict[str, float]
    recovered: dict[str, float]
    curve: dict[str, dict[str, float]]
    counts: dict[str, int]
    file_bytes: int
    timing: Timing


def run_demo(seeds: Sequence[int], tell: Tell, seconds: float = 4.0, epochs: int = EPOCHS) -> list[Row]:
    """The dense model first, then each variant."""
    data = load_data("digits", batch=64)
    dense: list[float] = []
    found: dict[str, list[Shrunk]] = {name: [] for name in VARIANTS}
    curves: dict[str, list[list[float]]] = {name: [] for name in VARIANTS}
    for seed in seeds:
        torch.manual_seed(seed)
        model = SmallCNN()
        recover(model, data.train, lr=LR, epochs=epochs, seed=seed, on_step=_named(tell, f"seed {seed}: training"))
        dense.append(data.score(model, "test"))
        for name, how in VARIANTS.items():
            done = prune_and_recover(
                model,
                data.example,
                data.train,
                lr=LR,
                original_epochs=epochs,
                fraction=FRACTION,
                seed=seed,
                validate=lambda m: data.score(m, "validation"),
                test=lambda m: data.score(m, "test"),
                on_step=_named(tell, f"seed {seed}: {name}, recovering"),
                **how,
            )
            found[name].append(done)
            curves[name].append([p.test or 0.0 for p in done.curve])
    models = {"dense": model, **{name: done[-1].model for name, done in found.items()}}
    timings = _clock(models, data, seconds, tell)
    shares = {name: [f"{p.share:.0%}" for p in done[-1].curve] for name, done in found.items()}
    example = send_to_device(data.example, next(model.parameters()).device)
    rows = [Row("dense", {}, over(dense), {}, count(model, example), _size(model, None), timings["dense"])]
    for name, runs in found.items():
        by_point = list(zip(*curves[name], strict=True))
        curve = {share: over(values) for share, values in zip(shares[name], by_point, strict=True)}
        pruned = runs[-1]
        counts, size = count(pruned.model, example), _size(pruned.model, pruned)
        rows.append(Row(name, curve["0%"], list(curve.values())[-1], curve, counts, size, timings[name]))
    return rows


def _named(tell: Tell, what: str) -> Callable[[int, int], None]:
    return lambda step, total: tell(what, step, total)


def _clock(models: dict[str, nn.Module], data: Data, seconds: float, tell: Tell) -> dict[str, Timing]:
    tell("measuring latency, variants taking turns", 0, 1)
    device = next(models["dense"].parameters()).device
    batch = torch.cat([x for x, _ in data.test])[:256].to(device)
    for model in models.values():
        model.eval()
    with torch.inference_mode():
        timings = take_turns({n: _call(m, batch) for n, m in models.items()}, seconds)
    tell("measuring latency, variants taking turns", 1, 1)
    return timings


def _call(model: nn.Module, batch: torch.Tensor) -> Callable[[], object]:
    return lambda: model(batch)


def _size(model: nn.Module, pruned: Shrunk | None) -> int:
    with tempfile.TemporaryDirectory() as folder:
        path = save(Path(folder) / "model.safetensors", model, None if pruned is None else pruned.plan)
        return path.stat().st_size
