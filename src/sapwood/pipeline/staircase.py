"""The staircase: latency against width, measured, with the cliffs marked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from sapwood.capture.isolation import undisturbed
from sapwood.capture.run import as_call
from sapwood.capture.skeleton import require_plain
from sapwood.errors import explain
from sapwood.measurement.backends import device_of
from sapwood.measurement.clock import Timing, take_turns
from sapwood.measurement.counts import batch_of
from sapwood.measurement.deployment import Deployed, deploy
from sapwood.measurement.machine import Others, describe
from sapwood.measurement.measure import require_seconds
from sapwood.pipeline.prune import make_plan
from sapwood.surgery.cut import cut
from sapwood.types import Budget, Tell

CLIFF = 1.03  # slower than a wider model by this much


@dataclass(frozen=True)
class Stair:
    """One width: the share of the channels that stay, and what the clock says."""

    channels: float
    flops: float
    """The share of the FLOPs that stay."""
    timing: Timing
    cliff: str = ""
    """Which wider model is faster than this one, if any is."""


@dataclass(frozen=True)
class Staircase:
    """From whole to narrow. ``form`` is how all of them ran."""

    stairs: tuple[Stair, ...]
    form: str
    batch: int
    machine: dict[str, Any]
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@undisturbed()
def staircase(
    model: nn.Module,
    inputs: Any,
    backend: str = "auto",
    shares: Sequence[float] = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1),
    round_to: int | str | None = None,
    seconds: float = 2.0,
    tell: Tell | None = None,
) -> Staircase:
    """Cut the same share of every group, from little to much, and measure each in turns with the dense model."""
    if not shares or not all(0 < s < 1 for s in shares):
        raise explain("shares of the channels above 0 and below 1", repr(shares), "For example 0.5.", "staircase")
    require_seconds(seconds)
    model, call, others = require_plain(model), as_call(inputs), Others()
    device = device_of(model, call)
    say = tell or (lambda what, done, of: None)
    say("the dense model", 0, len(shares) + 1)
    dense = deploy(model, call, backend)
    stairs: list[Stair] = []
    notes: list[str] = []
    for number, share in enumerate(sorted(set(shares), reverse=True)):
        say(f"{share:.0%} of the channels", number + 1, len(shares) + 1)
        plan = make_plan(model, call, Budget(channels=share), allocate="uniform", round_to=round_to)
        small = deploy(cut(model, plan), call, dense.backend, seconds=0.5) if plan.groups else dense
        times = _turns({"dense": dense, "cut": small}, call, seconds, device)
        left = plan.achieved
        if not left["dense_channels"]:
            got, remedy = f"{type(model).__name__}, of which nothing can be cut", "sapwood inspect says why."
            raise explain("a model with channels to cut", got, remedy, "staircase")
        if not stairs:
            stairs.append(Stair(1.0, 1.0, times["dense"]))
        kept = left["channels"] / left["dense_channels"]
        stairs.append(Stair(kept, left["flops"] / left["dense_flops"], times["cut"], cliff_of(stairs, times["cut"])))
        notes += [n for n in small.notes if "failed" in n and n not in notes]
    say("done", len(shares) + 1, len(shares) + 1)
    notes += others.note(device)
    return Staircase(tuple(stairs), dense.form, batch_of(call), describe(device), tuple(notes))


def _turns(forms: dict[str, Deployed], call: Any, seconds: float, device: torch.device) -> dict[str, Timing]:
    with torch.no_grad():
        return take_turns({n: f.runner_for(call).call for n, f in forms.items()}, seconds, device=device, lead=1)


def cliff_of(wider: Sequence[Stair], timing: Timing) -> str:
    """The fastest wider model, where it is faster for sure."""
    best = max(wider, key=lambda s: s.timing.speed)
    if timing.speed_high * CLIFF > best.timing.speed:
        return ""
    name = "the dense model" if best.channels == 1.0 else f"{best.channels:.0%} of the channels"
    return f"slower than {name}"
