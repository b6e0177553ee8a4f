"""How a cut is shared out over the groups."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sapwood.capture.trace import Trace
from sapwood.errors import explain
from sapwood.planning.names import named_groups
from sapwood.types import Group

ALLOCATIONS = ("uniform", "global")
Allocate = str | Mapping[str, float] | Callable[[Group], float]
"""The same share of every group, one ranking of all channels, or shares by name or by a function of a group, in
relation to one another."""


@dataclass(frozen=True)
class UniformOf:
    """The same share of what every group had before, for a model that has been cut since: shares of what is left, each
    rounded down in every round, would end up far apart. Fractions of channels are of what there was before, too."""

    before: Mapping[str, Sequence[int]]
    now: Mapping[str, Sequence[int]]

    def __call__(self, group: Group) -> float:
        """How many times as wide it was; told by a site that is all its own, where it has one."""
        own = [(n, d) for n, d in group.sites if group.members[n, d].size == self.now[n][d]]
        name, dim = (own or group.sites)[0]
        return self.before[name][dim] / self.now[name][dim]


def require_allocation(allocate: Any, kind: str = "", where: str = "allocate") -> None:
    """``kind`` is that of the budget."""
    if isinstance(allocate, str) and allocate in ALLOCATIONS:
        return
    if not isinstance(allocate, Mapping) and not callable(allocate):
        wanted = f"{', '.join(ALLOCATIONS)} or shares by name, or a function of a group"
        raise explain(wanted, repr(allocate)[:80], "Choose how the cut is shared out.", where)
    if kind == "latency":
        remedy = "Its widths follow from measured times; leave allocate out, or ask for flops."
        raise explain("no shares by name or function with a latency", repr(allocate)[:80], remedy, where)
    if not isinstance(allocate, Mapping):
        return
    remedy = "For example allocate={'layer1': 0.8} keeps four fifths of the share that others keep."
    if not allocate:
        raise explain("names with numbers", "none", remedy, where)
    for name, share in allocate.items():
        if not isinstance(name, str) or not _is_share(share):
            raise explain("names with numbers from 0.001 to 1000", f"{name!r}: {share!r}"[:80], remedy, where)


def shares_of(trace: Trace, allocate: Allocate, ignore: Iterable[str]) -> np.ndarray:
    """What each group keeps in relation to the one that keeps the least."""
    if isinstance(allocate, str):
        return np.ones(len(trace.groups))
    if isinstance(allocate, UniformOf):
        return np.array([allocate(group) for group in trace.groups])  # none below one
    if not isinstance(allocate, Mapping):
        told = {group.name: allocate(group) for group in trace.groups}
        for name, share in told.items():
            if not _is_share(share):
                remedy = "For example allocate=lambda group: 0.8 if group.width < 64 else 1.0."
                wanted = "a number from 0.001 to 1000 for every group"
                raise explain(wanted, f"{share!r} for {name}", remedy, "allocate")
        return _to_least([float(share) for share in told.values()])
    ignored, given = named_groups(trace, ignore), dict[str, tuple[str, float]]()
    for pattern, share in allocate.items():
        named = named_groups(trace, (pattern,), "allocate") - ignored
        if not named:
            got = f"{pattern!r}, which makes none that may be cut"
            remedy = "Leave it out; see trace.frozen, and ignore."
            raise explain("names of layers that make channels", got, remedy, "allocate")
        for name in sorted(named):
            other, before = given.setdefault(name, (pattern, float(share)))
            if before != float(share):
                got = f"{before:g} by {other!r} and {float(share):g} by {pattern!r}"
                raise explain(f"one share for group {name}", got, "Name it once.", "allocate")
    return _to_least([given[g.name][1] if g.name in given else 1.0 for g in trace.groups])


def _is_share(share: Any) -> bool:
    return isinstance(share, numbers.Real) and not isinstance(share, bool) and 0.001 <= float(share) <= 1000


def _to_least(shares: list[float]) -> np.ndarray:
    return np.asarray(np.array(shares) / min(shares, default=1.0))
