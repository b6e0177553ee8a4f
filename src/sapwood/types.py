"""The nouns every stage shares: sites, groups, what is frozen, budgets, plans, results."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from sapwood.errors import explain

Site = tuple[str, int]
"""A parameter or buffer name and one of its dimensions."""

Tell = Callable[[str, int, int], None]
"""Hears of progress: what is being done, how much of it is done, of how much."""


@dataclass(frozen=True)
class Group:
    """Channels that go together across parameters. ``width`` is how many there are."""

    name: str
    width: int
    sites: tuple[Site, ...]
    exact: bool
    params_per_channel: int
    flops_per_channel: int
    members: Mapping[Site, np.ndarray] = field(repr=False, compare=False)
    """For each site a row per channel: the indices that this channel owns there."""
    note: str = ""

    @property
    def approximate(self) -> bool:
        return not self.exact


@dataclass(frozen=True)
class Frozen:
    """Channels that may not be cut, and why."""

    sites: tuple[Site, ...]
    reason: str
    channels: int = 0


@dataclass(frozen=True)
class Budget:
    """What may remain: a fraction (0 < x <= 1) or an absolute number (an int above 1).

    ``latency`` is measured on the device of the model: a fraction of the dense model's, or a time such as "3.5ms".
    ``sparsity`` is the other way round, for masks: the fraction of zeros (0 <= x < 1).
    """

    channels: float | int | None = None
    params: float | int | None = None
    flops: float | int | None = None
    latency: float | str | None = None
    sparsity: float | None = None

    def __post_init__(self) -> None:
        given = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}
        if len(given) != 1:
            raise explain(
                "exactly one of channels, params, flops, latency, sparsity",
                ", ".join(given) or "none",
                "For example Budget(flops=0.5) keeps half of the floating-point operations.",
                "Budget",
            )
        ((name, value),) = given.items()
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if name == "sparsity":
            if not number or not 0 <= value < 1:
                remedy = "Budget(sparsity=0.9) makes 90% of the weights zero."
                raise explain("a fraction of zeros from 0 to below 1", f"sparsity={value!r}", remedy, "Budget")
            return
        if name == "latency":
            if not (number and 0 < value <= 1) and _milliseconds(value) is None:
                remedy = "Budget(latency=0.5) halves it; Budget(latency='3.5ms') asks for a time (s, ms or us)."
                raise explain("a fraction above 0 and at most 1, or a time", f"latency={value!r}", remedy, "Budget")
            return
        if not number or not (0 < value <= 1 or (value > 1 and float(value).is_integer())):
            raise explain(
                "a fraction above 0 and at most 1, or a whole number above 1",
                f"{name}={value!r}",
                f"Budget({name}=0.5) keeps half of what is there.",
                "Budget",
            )

    @property
    def kind(self) -> str:
        return next(f.name for f in fields(self) if getattr(self, f.name) is not None)

    @property
    def is_fraction(self) -> bool:
        value = getattr(self, self.kind)
        return not isinstance(value, str) and bool(value <= 1)

    def limit(self, dense: int) -> float:
        """The most that may remain, of ``dense``."""
        value = getattr(self, self.kind)
        return float(value * dense if self.is_fraction else value)

    def limit_ms(self, dense_ms: float) -> float:
        """The longest a forward may take, given what the dense model takes."""
        given = _milliseconds(self.latency)
        return given if given is not None else float(self.latency or 1.0) * dense_ms


def _milliseconds(text: Any) -> float | None:
    """``"3.5ms"``, ``"800us"`` or ``"0.2 s"``; None for anything else."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(s|ms|us|µs)\s*", text) if isinstance(text, str) else None
    if found is None or float(found[1]) <= 0:
        return None
    return float(found[1]) * {"s": 1000.0, "ms": 1.0, "us": 0.001, "µs": 0.001}[found[2]]


@dataclass(frozen=True)
class Scale:
    """Multiply these positions of a parameter's dimension by a factor (attention scale)."""

    dim: int
    positions: tuple[int, ...]
    factor: float


@dataclass(frozen=True)
class Plan:
    """What to keep, by name. Data only: it can be saved, read, diffed and replayed."""

    keep: Mapping[str, Mapping[int, tuple[int, ...]]]
    attributes: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    """Shapes before the cut, of every parameter and buffer that is cut."""
    scales: Mapping[str, tuple[Scale, ...]] = field(default_factory=dict)
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """For each group that is cut, the channels that stay."""
    exact: bool = True
    budget: Mapping[str, Any] = field(default_factory=dict)
    achieved: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class CheckResult:
    """How the cut model compares with the masked reference."""

    status: str  # "exact" or "approximate"; "failed" when it is neither
    max_error: float
    tolerance: float
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return self.status != "failed"
