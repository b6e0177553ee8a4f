"""The main job on a small scale: train, prune in three ways, recover each, measure; several seeds."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import nn

from sapwood.capture.isolation import undisturbed
from sapwood.measurement import Timing, count, take_turns
from sapwood.pipeline.data import Data, accuracy, load_data
from sapwood.pipeline.details import LOOKS, details_of
from sapwood.pipeline.figures import over
from sapwood.pipeline.models import SmallCNN
from sapwood.pipeline.sensitivity import SHARES, sensitivity
from sapwood.pipeline.shrink import Shrunk, prune_and_recover
from sapwood.recovery.recover import recover
from sapwood.storage.bundle import save
from sapwood.types import Budget, Tell

EPOCHS, FRACTION, LR, BATCH = 20, 0.2, 0.1, 256
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
    seeds: list[dict[str, Any]]
    """For each seed its test accuracies, and the latency of its model; ``training`` for the dense one."""
    details: dict[str, Any] = field(default_factory=dict)


def run_demo(seeds: Sequence[int], tell: Tell, seconds: float = 4.0, epochs: int = EPOCHS) -> list[Row]:
    """The dense model first, then each variant."""
    data = load_data("digits", batch=64)
    dense: list[float] = []
    training: list[list[dict[str, Any]]] = []
    found: dict[str, list[Shrunk]] = {name: [] for name in VARIANTS}
    for seed in seeds:
        torch.manual_seed(seed)
        model = SmallCNN()
        trained = recover(
            model,
            data.train,
            lr=LR,
            epochs=epochs,
            fraction=1.0,
            seed=seed,
            validate=lambda m: _look(m, data),
            marks=LOOKS,
            on_step=_named(tell, f"seed {seed}: training"),
        )
        dense.append(data.score(model, "test"))
        training.append([{"epochs": p.epochs, "test": p.metric} for p in trained.curve])
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
    models: dict[str, nn.Module] = {"dense": model}
    models |= {_key(name, seed): one.model for name, runs in found.items() for seed, one in zip(seeds, runs)}
    timings = _clock(models, data, seconds, tell)
    example = send_to_device(data.example, next(model.parameters()).device)
    told = [{"seed": s, "recovered": d, "training": t} for s, d, t in zip(seeds, dense, training)]
    size, known = _size(model, None), {"sensitivity": _sensitivity(model, data, example)}
    rows = [Row("dense", {}, over(dense), {}, count(model, example), size, timings["dense"], told, known)]
    for name, runs in found.items():
        tell(f"{name}: layer by layer", len(rows) - 1, len(found))
        by_seed = [_seed(s, done, timings[_key(name, s)]) for s, done in zip(seeds, runs)]
        rows.append(_row(name, runs, by_seed, timings[_key(name, seeds[-1])], model, data))
        tell(f"{name}: layer by layer", len(found), len(found))
    return rows


def _sensitivity(model: nn.Module, data: Data, example: torch.Tensor) -> dict[str, Any]:
    """Of the last seed's dense model, on all of the validation data."""
    batches = list(data.validation)
    cells = sensitivity(model, example, lambda m: accuracy(m, batches))
    settings = {"batches": len(batches), "examples": sum(len(y) for _, y in batches), "shares": list(SHARES)}
    return {"settings": settings, "dense": accuracy(model, batches), "done": True, "cells": cells}


def _key(name: str, seed: int) -> str:
    return f"{name}, seed {seed}"


def _look(model: nn.Module, data: Data) -> float:
    """Test accuracy in the middle of training, which goes on as if nobody had looked."""
    with undisturbed():
        return data.score(model, "test")


def _seed(seed: int, done: Shrunk, timing: Timing) -> dict[str, Any]:
    return {
        "seed": seed,
        "after_pruning": done.curve[0].test,
        "recovered": done.curve[-1].test,
        "curve": [{"epochs": p.epochs, "share": p.share, "test": p.test} for p in done.curve],
        "latency_ms": timing.median_ms,
        "speed": timing.speed,
    }


def _row(
    name: str, runs: list[Shrunk], seeds: list[dict[str, Any]], timing: Timing, dense: nn.Module, data: Data
) -> Row:
    pruned, example = runs[-1], send_to_device(data.example, next(dense.parameters()).device)
    by_point = zip(*([p.test or 0.0 for p in done.curve] for done in runs), strict=True)
    curve = {f"{p.share:.0%}": over(values) for p, values in zip(pruned.curve, by_point, strict=True)}
    counts, size = count(pruned.model, example), _size(pruned.model, pruned)
    score = "l1" if pruned.plan.keep else "magnitude"
    details = details_of(dense, pruned.model, pruned.plan, score, example, _batch(data, example.device))
    return Row(name, curve["0%"], list(curve.values())[-1], curve, counts, size, timing, seeds, details)


def _named(tell: Tell, what: str) -> Callable[[int, int], None]:
    return lambda step, total: tell(what, step, total)


def _clock(models: dict[str, nn.Module], data: Data, seconds: float, tell: Tell) -> dict[str, Timing]:
    tell("measuring latency, variants taking turns", 0, 1)
    device = next(models["dense"].parameters()).device
    batch = _batch(data, device)
    for model in models.values():
        model.eval()
    with torch.inference_mode():
        timings = take_turns({n: _call(m, batch) for n, m in models.items()}, seconds)
    tell("measuring latency, variants taking turns", 1, 1)
    return timings


def _batch(data: Data, device: torch.device) -> torch.Tensor:
    return torch.cat([x for x, _ in data.test])[:BATCH].to(device)


def _call(model: nn.Module, batch: torch.Tensor) -> Callable[[], object]:
    return lambda: model(batch)


def _size(model: nn.Module, pruned: Shrunk | None) -> int:
    with tempfile.TemporaryDirectory() as folder:
        path = save(Path(folder) / "model.safetensors", model, None if pruned is None else pruned.plan)
        return path.stat().st_size
