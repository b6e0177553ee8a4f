"""From a trace, scores and a budget to a Plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from sapwood.capture.isolation import uncollected
from sapwood.capture.sizes import Attr
from sapwood.capture.trace import Trace
from sapwood.errors import SapwoodError
from sapwood.planning.counts import Allocator, RoundTo, Steps, steps_for, units_of
from sapwood.planning.names import named_groups
from sapwood.planning.sharing import Allocate, AsBefore, as_data, require_allocation, shares_of
from sapwood.types import Budget, Plan, Scale


@uncollected()
def draft_plan(
    trace: Trace,
    scores: Sequence[np.ndarray],
    budget: Budget,
    allocate: Allocate = "global",
    ignore: Iterable[str] = (),
    round_to: RoundTo = None,
    score_name: str = "",
    frozen_groups: Mapping[str, str] | None = None,
) -> Plan:
    """Decide what every group keeps. ``frozen_groups`` (name -> why) are left whole."""
    require_allocation(allocate)
    barred, ignore = frozen_groups or {}, (ignore,) if isinstance(ignore, str) else tuple(ignore)
    fixed, shares = fixed_groups(trace, ignore, barred), shares_of(trace, allocate, ignore)

    later = isinstance(allocate, AsBefore)
    even = as_data(allocate) == "uniform" if later else bool((shares == 1).all())

    def count(steps: RoundTo) -> list[int]:
        shared = None if as_data(allocate) == "global" else shares
        return _count(trace, scores, budget, shared, even, steps, fixed, barred)

    counts, too_many = _in_steps(trace, budget, round_to, count)
    if later and even:
        too_many = ""  # it speaks of what is left now
    plan = plan_of_counts(trace, scores, counts, describe(budget, allocate, round_to, score_name), barred)
    if too_many and (round_to is not None or (fixed.any() and not barred)):
        why = "what is to be ignored stays whole"
        why = why if round_to is None else f"no layer is cut below round_to, {plan.budget['round_to']}"
        plan = replace(plan, notes=(*plan.notes, f"{too_many}: {why}"))
    if isinstance(round_to, int):
        narrow = sum(
            b * w < round_to and k < w for b, w, k in zip(block_sizes(trace), trace.dense, counts, strict=True)
        )
        if narrow:
            told = (
                f"{narrow} group{'s are' if narrow > 1 else ' is'} narrower than round_to, {round_to}, and cut freely"
            )
            plan = replace(plan, notes=(*plan.notes, told))
    return plan


def _in_steps(
    trace: Trace, budget: Budget, round_to: RoundTo, count: Callable[[RoundTo], list[int]]
) -> tuple[list[int], str]:
    """Counts in the steps that a device likes, or in finer ones where those leave more than was asked for; and what is
    to be said where all of them do."""
    ways = [round_to]
    if isinstance(round_to, Steps):
        ways += [replace(round_to, parts=round_to.parts << i) for i in range(1, 5)]
    dense = trace.costs.evaluate("channels", trace.dense)
    told = ""
    for way in ways:
        try:
            counts = count(way)
        except SapwoodError:
            if way is ways[-1]:
                raise
            continue
        left, asked = trace.costs.evaluate("channels", counts), budget.limit(dense)
        if budget.kind != "channels" or left <= 1.05 * asked:
            return counts, ""
        if way is None:
            return counts, f"{left / dense:.0%} of the channels stay, not {asked / dense:.0%}" if dense else ""
        asked = max(trace.costs.evaluate("channels", count(None)), asked)
        told = "" if left <= 1.05 * asked else f"{left / dense:.0%} of the channels stay, not {asked / dense:.0%}"
        if not told:
            break
    return counts, told


def fixed_groups(trace: Trace, ignore: Iterable[str], barred: Mapping[str, str]) -> np.ndarray:
    """Which groups stay whole."""
    ignored = named_groups(trace, ignore)
    return np.array([g.name in ignored or g.name in barred for g in trace.groups], dtype=bool)


def plan_of_counts(
    trace: Trace,
    scores: Sequence[np.ndarray],
    counts: Sequence[int],
    budget: Mapping[str, Any],
    barred: Mapping[str, str],
) -> Plan:
    """Keep the best channels of each group, so many of them."""
    kept = {
        g.name: tuple(sorted(np.argsort(-s, kind="stable")[:n].tolist()))
        for g, s, n in zip(trace.groups, scores, counts, strict=True)
        if n < g.width
    }
    notes = trace.notes + tuple(f"group {name} was left whole: {why}" for name, why in barred.items())
    plan = build_plan(trace, kept, budget=budget, notes=notes)
    return replace(plan, achieved={**plan.achieved, "score_kept": score_kept(trace, scores, kept)})


def score_kept(trace: Trace, scores: Sequence[np.ndarray], kept: Mapping[str, Sequence[int]]) -> float:
    """The score of all channels that stay, of all there are; each counts once for each weight it has a part in."""
    worth = [(g, n * s) for g, n, s in zip(trace.groups, weights_of(trace), scores, strict=True)]
    left = sum(float(s[list(kept[g.name])].sum() if g.name in kept else s.sum()) for g, s in worth)
    total = sum(float(s.sum()) for _, s in worth)
    return left / total if total else 1.0


def weights_of(trace: Trace) -> list[int]:
    """In how many weights the channels of each group have a part: in a residual stream that is most of them."""
    return [max(1, sum(len(trace.shapes[name]) > 1 for name, _ in g.sites)) for g in trace.groups]


def describe(budget: Budget, allocate: Allocate, round_to: RoundTo, score_name: str) -> dict[str, Any]:
    return {
        budget.kind: getattr(budget, budget.kind),
        "allocate": as_data(allocate),
        "round_to": f"auto ({round_to.wide})" if isinstance(round_to, Steps) else round_to,
        "score": score_name,
    }


def _count(
    trace: Trace,
    scores: Sequence[np.ndarray],
    budget: Budget,
    shares: np.ndarray | None,
    even: bool,
    round_to: RoundTo,
    fixed: np.ndarray,
    barred: Mapping[str, str],
) -> list[int]:
    widths = np.array(trace.dense, dtype=float)
    dense = trace.costs.evaluate(budget.kind, trace.dense)
    limit = budget.limit(dense)
    if limit >= dense:
        return trace.dense
    ranks = _ranks(scores)

    def targets(level: float) -> np.ndarray:
        if shares is not None:
            return widths * np.minimum(level * shares, 1.0)
        best = level * sum(trace.dense)
        return np.array([np.searchsorted(r, best, side="left") for r in ranks], dtype=float)

    steps = steps_for(round_to, block_sizes(trace), trace.dense)
    allocator = Allocator(
        units_of(trace.dense, [form for form, _ in trace.constraints]),
        widths,
        steps,
        fixed,
        targets,
        lambda counts: trace.costs.evaluate(budget.kind, [int(c) for c in counts]),
        None if shares is None else np.maximum(steps, widths / 10),
    )
    if budget.kind == "channels" and shares is not None and even:  # the same fraction of each group
        return [int(c) for c in allocator.counts(limit / dense)]
    least = allocator.cost(allocator.counts(0.0))
    if budget.kind == "channels" and budget.is_fraction:
        limit = max(limit, least)  # a fraction of the channels, but one of each group at least
    if least > limit:
        raise _unreachable(trace, budget, int(least), dense, limit, barred, round_to)
    return [int(c) for c in allocator.fit(limit, slack=0.002 * dense)]


def block_sizes(trace: Trace) -> list[int]:
    """How many indices of the weights that make it one channel of each group owns: a head has many, a channel one."""
    result = []
    for group in trace.groups:
        made = [m.shape[1] for site, m in group.members.items() if site in trace.made]
        result.append(min(made) if made else max(m.shape[1] for m in group.members.values()))
    return result


def _ranks(scores: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The places of each group's channels in one ranking of all, best first; ties keep their order."""
    if not len(scores):
        return []
    order = np.argsort(-np.concatenate(scores), kind="stable")
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    ends = np.cumsum([len(s) for s in scores])[:-1]
    return [np.sort(part) for part in np.split(place, ends)]


def _unreachable(
    trace: Trace,
    budget: Budget,
    least: int,
    dense: int,
    limit: float,
    barred: Mapping[str, str],
    round_to: RoundTo,
) -> SapwoodError:
    worst = [f"{f.sites[0][0]} ({f.reason})" for f in sorted(trace.frozen, key=lambda f: -f.channels)[:3]]
    worst += [f"group {name} ({why})" for name, why in list(barred.items())[:3]]
    why = "; ".join(worst) or "one channel must stay in each group"
    return SapwoodError(
        f"Budget({budget.kind}={getattr(budget, budget.kind)}): expected a budget of at least {least:,} of "
        f"{dense:,} {budget.kind} ({least / dense:.1%}); got {limit:,.0f}. Frozen, among others: {why}. "
        f"Ask for a larger budget, ignore less{'' if round_to is None else ', use a smaller round_to'}, "
        f"or see trace.frozen."
    )


def build_plan(
    trace: Trace,
    kept: Mapping[str, tuple[int, ...]],
    budget: Mapping[str, Any] | None = None,
    notes: tuple[str, ...] = (),
) -> Plan:
    """Spell out, by name, what keeping these channels of each group means."""
    stays: dict[str, dict[int, np.ndarray]] = {}
    exact = True
    for group in trace.groups:
        if group.name not in kept:
            continue
        gone = np.ones(group.width, dtype=bool)
        gone[list(kept[group.name])] = False
        exact = exact and (group.exact or not gone.any())
        for (name, dim), members in group.members.items():
            dims = stays.setdefault(name, {})
            if dim not in dims:
                dims[dim] = np.ones(trace.shapes[name][dim], dtype=bool)
            dims[dim][members[gone]] = False
    positions: dict[bytes, tuple[int, ...]] = {}  # one tuple for all sites that keep the same

    def places(mask: np.ndarray) -> tuple[int, ...]:
        key = mask.tobytes()
        if key not in positions:
            positions[key] = tuple(np.flatnonzero(mask).tolist())
        return positions[key]

    keep = {name: {dim: places(mask) for dim, mask in sorted(dims.items())} for name, dims in stays.items()}
    counts = [len(kept.get(g.name, range(g.width))) for g in trace.groups]
    achieved: dict[str, Any] = {}
    for kind in ("channels", "params", "flops"):
        achieved[kind] = trace.costs.evaluate(kind, counts)
        achieved[f"dense_{kind}"] = trace.costs.evaluate(kind, trace.dense)
    return Plan(
        keep=keep,
        attributes=_attributes(trace, counts, keep),
        shapes={name: trace.shapes[name] for name in keep},
        scales=_scales(trace, counts),
        groups=dict(kept),
        exact=exact,
        budget=dict(budget or {}),
        achieved=achieved,
        notes=notes,
    )


def _attributes(trace: Trace, counts: list[int], keep: Mapping[str, Mapping[int, tuple[int, ...]]]) -> dict[str, Any]:
    """New values of the attributes that change: those the code reads, and those that only tell."""
    changed: dict[str, Any] = {}
    for attribute, form in trace.attributes.items():
        assert isinstance(attribute, Attr)
        new = form.value(counts)
        if new != trace.attribute_values[attribute]:
            held = changed.get(attribute.path, trace.attribute_roots[attribute.path])
            changed[attribute.path] = _replaced(held, attribute.index, new)
    for mirror in trace.mirrors:
        dims = keep.get(mirror.parameter, {})
        size = len(dims[mirror.dim]) if mirror.dim in dims else trace.shapes[mirror.parameter][mirror.dim]
        if mirror.times is not None:
            size *= changed.get(mirror.times, mirror.times_value)
        if size != mirror.value:
            changed.setdefault(mirror.attribute, size)
    return changed


def _replaced(value: Any, index: tuple[int, ...], new: int) -> Any:
    """A copy of a nested tuple or list with one entry replaced."""
    if not index:
        return new
    parts = list(value)
    parts[index[0]] = _replaced(parts[index[0]], index[1:], new)
    return type(value)(parts)


def _scales(trace: Trace, counts: list[int]) -> dict[str, tuple[Scale, ...]]:
    """Make up for the root of the head width that attention divides by."""
    found: dict[tuple[str, int, tuple[int, ...]], float] = {}
    for form, maker in trace.rescales:
        factor = math.sqrt(form.value(counts) / form.value(trace.dense))
        if factor != 1.0:
            for name, dim in maker.sites:
                found[name, dim, tuple(maker.positions.ravel().tolist())] = factor
    result: dict[str, tuple[Scale, ...]] = {}
    for (name, dim, positions), factor in found.items():
        result[name] = (*result.get(name, ()), Scale(dim, positions, factor))
    return result
