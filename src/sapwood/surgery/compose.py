"""Two cuts in a row as one plan on the dense model, so that a bundle needs only that one."""

from __future__ import annotations

import math

from sapwood.types import Plan, Scale


def compose(first: Plan, second: Plan) -> Plan:
    """The plan that does at once what ``first`` and then ``second``, made for the cut model, do."""
    keep: dict[str, dict[int, tuple[int, ...]]] = {n: dict(d) for n, d in first.keep.items()}
    shapes = dict(first.shapes)
    for name, dims in second.keep.items():
        shapes.setdefault(name, second.shapes[name])
        mine = keep.setdefault(name, {})
        for dim, kept in dims.items():
            before = mine.get(dim)
            mine[dim] = tuple(kept) if before is None else tuple(before[i] for i in kept)
    scales = {n: tuple(s) for n, s in first.scales.items()}
    for name, parts in second.scales.items():
        scales[name] = (*scales.get(name, ()), *(_moved(name, part, first) for part in parts))
    groups = dict(first.groups)
    for name, kept in second.groups.items():
        before = groups.pop(name, None)
        if before is None:
            groups[name] = tuple(kept)
        elif max(kept) < len(before):  # else the first cut has regrouped these channels
            groups[name] = tuple(before[i] for i in kept)
    dense = {k: v for k, v in first.achieved.items() if k.startswith("dense_") and k != "dense_latency_ms"}
    return Plan(
        keep=keep,
        attributes={**first.attributes, **second.attributes},
        shapes=shapes,
        scales=scales,
        groups=groups,
        exact=first.exact and second.exact,
        budget=second.budget,
        achieved={**second.achieved, **dense, **_kept(first, second)},
        notes=tuple(dict.fromkeys((*first.notes, *second.notes))),
    )


def _kept(first: Plan, second: Plan) -> dict[str, float]:
    """Of the score: a share of what the first plan left."""
    shares = [plan.achieved.get("score_kept") for plan in (first, second)]
    return {} if None in shares else {"score_kept": math.prod(float(s) for s in shares if s is not None)}


def _moved(name: str, scale: Scale, first: Plan) -> Scale:
    """Positions in the cut tensor, as positions in the dense one."""
    kept = first.keep.get(name, {}).get(scale.dim)
    positions = scale.positions if kept is None else tuple(kept[i] for i in scale.positions)
    return Scale(scale.dim, positions, scale.factor)
