"""How a cut is shared out over the groups."""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sapwood.capture.trace import Trace
from sapwood.errors import explain
from sapwood.planning.names import named_groups
from sapwood.scoring.weights import Standing
from sapwood.types import Group


@dataclass(frozen=True)
class AsBefore:
    """As the first round did, for a model that has been cut since. Shares are of what every group had before: of what
    is left, each rounded down in every round, they would end up far apart. One ranking goes by what channels were worth
    before: scores that average to one in what is left of each group would take from the same groups again and again.
    Made between rounds; fractions are of what there was, too."""

    shares: str | Mapping[str, float]
    before: Mapping[str, Sequence[int]]
    now: Mapping[str, Sequence[int]]
    standing: Standing | None = None
    """What channels were worth before the first round; for one ranking."""

    def times(self, group: Group) -> float:
        """How many times as wide a group was, one at least; told by a site that is all its own, where it has one."""
        own = [(n, d) for n, d in group.sites if group.members[n, d].size == self.now[n][d]]
        name, dim = (own or group.sites)[0]
        return self.before[name][dim] / self.now[name][dim]


ALLOCATIONS = ("uniform", "global")
Allocate = str | Mapping[str, float] | AsBefore
"""The same share of every group, one ranking of all channels, or shares by name, in relation to one another."""


def require_allocation(allocate: Any, kind: str = "", where: str = "allocate") -> None:
    """``kind`` is that of the budget."""
    if isinstance(allocate, AsBefore):
        allocate = allocate.shares
    if not isinstance(allocate, Mapping):
        if not isinstance(allocate, str) or allocate not in ALLOCATIONS:
            wanted = f"{', '.join(ALLOCATIONS)} or shares by name"
            raise explain(wanted, repr(allocate)[:80], "Choose how the cut is shared out.", where)
        return
    if kind == "latency":
        remedy = "Its widths follow from measured times; leave allocate out, or ask for flops."
        raise explain("no shares by name with a latency", repr(dict(allocate))[:80], remedy, where)
    remedy = "For example allocate={'layer1': 0.8} keeps four fifths of the share that others keep."
    if not allocate:
        raise explain("names with numbers", "none", remedy, where)
    for name, share in allocate.items():
        number = isinstance(share, numbers.Real) and not isinstance(share, bool)
        if not isinstance(name, str) or not number or not 0.001 <= share <= 1000:
            raise explain("names with numbers from 0.001 to 1000", f"{name!r}: {share!r}"[:80], remedy, where)


def shares_of(trace: Trace, allocate: Allocate, ignore: Iterable[str]) -> np.ndarray:
    """What each group keeps in relation to the one that keeps the least."""
    if isinstance(allocate, AsBefore):
        named = _named_shares(trace, allocate.shares, ignore, later=True)
        return np.array([more * allocate.times(g) for more, g in zip(named, trace.groups, strict=True)])
    return _named_shares(trace, allocate, ignore)


def _named_shares(
    trace: Trace, allocate: str | Mapping[str, float], ignore: Iterable[str], later: bool = False
) -> np.ndarray:
    """``later``: what is named may be down to its last channel, which no group has any more."""
    if isinstance(allocate, str):
        return np.ones(len(trace.groups))
    ignored, given = named_groups(trace, ignore), dict[str, tuple[str, float]]()
    for pattern, share in allocate.items():
        named = named_groups(trace, (pattern,), "allocate") - ignored
        if not named and not later:
            got = f"{pattern!r}, which makes none that may be cut"
            remedy = "Leave it out; see trace.frozen, and ignore."
            raise explain("names of layers that make channels", got, remedy, "allocate")
        for name in sorted(named):
            other, before = given.setdefault(name, (pattern, float(share)))
            if before != float(share):
                got = f"{before:g} by {other!r} and {float(share):g} by {pattern!r}"
                raise explain(f"one share for group {name}", got, "Name it once.", "allocate")
    shares = np.array([given[g.name][1] if g.name in given else 1.0 for g in trace.groups])
    return np.asarray(shares / shares.min(initial=np.inf))


def as_data(allocate: Allocate) -> str | dict[str, float]:
    """As a plan has it."""
    if isinstance(allocate, AsBefore):
        return as_data(allocate.shares)
    return allocate if isinstance(allocate, str) else {name: float(share) for name, share in allocate.items()}
