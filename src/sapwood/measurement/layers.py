"""Where the time of a forward goes: a clock around every module, models taking turns.

Each module's own time is counted, without that of the modules it calls. The clocks cost a little themselves, and on
a GPU they wait for the device at every module, so a sum is more than an undisturbed forward takes: good for shares,
not for latencies.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from sapwood.capture.isolation import undisturbed
from sapwood.capture.run import Inputs
from sapwood.measurement.clock import settle

METHOD = "a clock around every module, eager, medians over forwards that take turns; own time without inner modules"
FEW, MANY = 5, 50


class _Clock:
    """Own time of every module in one forward, by name."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.device = device
        self.names = {module: name for name, module in model.named_modules()}
        self.taken: dict[str, float] = {}
        self.open: list[list[float]] = []
        """Of every module that is running: when it began, and what inner modules took."""

    def enter(self, module: nn.Module, *_: Any) -> None:
        settle(self.device)
        self.open.append([time.perf_counter(), 0.0])

    def leave(self, module: nn.Module, *_: Any) -> None:
        settle(self.device)
        began, inner = self.open.pop()
        whole = time.perf_counter() - began
        name = self.names[module]
        self.taken[name] = self.taken.get(name, 0.0) + 1000 * (whole - inner)
        if self.open:
            self.open[-1][1] += whole

    @contextlib.contextmanager
    def hooked(self) -> Iterator[None]:
        hooks = []
        try:
            for module in self.names:
                hooks.append(module.register_forward_pre_hook(self.enter))
                hooks.append(module.register_forward_hook(self.leave))
            yield
        finally:
            for hook in hooks:
                hook.remove()


@undisturbed()
def layer_times(models: Mapping[str, nn.Module], inputs: Inputs, seconds: float = 1.0) -> dict[str, Any]:
    """For every module that takes time in any of the models: its kind, and milliseconds in each model."""
    found: dict[str, dict[str, list[float]]] = {name: {} for name in models}
    device = next((p.device for m in models.values() for p in m.parameters()), torch.device("cpu"))
    start, rounds = time.perf_counter(), -1  # the first is for warming up
    with torch.inference_mode():
        while rounds < FEW or (rounds < MANY and time.perf_counter() - start < seconds):
            rounds += 1
            for name, model in models.items():
                taken = _forward(model, inputs, device)
                for layer, ms in taken.items() if rounds else ():
                    found[name].setdefault(layer, []).append(ms)
    kinds = {layer: type(m).__name__ for model in models.values() for layer, m in model.named_modules()}
    order = [layer for layer in kinds if any(layer in taken for taken in found.values())]
    layers = [{"layer": n, "kind": kinds[n], "ms": {m: _middle(found[m].get(n)) for m in models}} for n in order]
    return {"method": METHOD, "rounds": rounds, "layers": layers}


def _forward(model: nn.Module, inputs: Inputs, device: torch.device) -> dict[str, float]:
    clock = _Clock(model, device)
    with clock.hooked():
        model(*inputs[0], **inputs[1])
    return clock.taken


def _middle(times: list[float] | None) -> float | None:
    return statistics.median(times) if times else None
