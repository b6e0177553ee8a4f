"""What a page shows besides the figures: channels and zeros by layer, scores and where the cut lies, time by layer.

Written once, at the end of a run, about its last seed. A part that fails is left out with the reason; it never takes
a finished run with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from sapwood.capture.run import Inputs, as_call
from sapwood.capture.skeleton import named_tensors
from sapwood.capture.trace import Trace, trace
from sapwood.errors import SapwoodError
from sapwood.masking.report import sparsity
from sapwood.measurement.clock import settle, take_turns
from sapwood.measurement.counts import batch_of
from sapwood.measurement.layers import layer_times
from sapwood.measurement.machine import describe
from sapwood.pipeline.histograms import channel_scores, weight_scores
from sapwood.pipeline.models import told
from sapwood.pipeline.planner import Planner
from sapwood.pipeline.staircase import Stair, Staircase, cliff_of
from sapwood.scoring import score_groups
from sapwood.surgery.cut import cut
from sapwood.types import Budget, Group, Plan

DETAILS = "details.json"
LOOKS = (0.05, *(tenth / 10 for tenth in range(1, 10)))
"""After which shares of the original training the accuracy is noted, besides its end."""
SHARES = (0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125)
QUICK_MS = 100.0  # a model that takes longer is not cut and clocked at every width unasked


def details_of(
    dense: nn.Module, pruned: nn.Module, plan: Plan, score: str, example: Any, batch: Any, seconds: float = 0.6
) -> dict[str, Any]:
    """All of it, for a model, what became of it, and by which plan; ``score`` is what ranked."""
    device = next(dense.parameters()).device
    dense, pruned = dense.eval(), pruned.to(device).eval()
    found: dict[str, Any] = {"score": score, "left_out": {}}
    zeros = _part(found, "zeros", lambda: zeros_of(pruned))
    if plan.keep:
        seen = _part(found, "channels", lambda: trace(dense, example))
        if seen is not None:
            _part(found, "channels", lambda: channels_of(seen, plan, dense))
            _part(found, "scores", lambda: _channel_histogram(seen, dense, plan, score))
    elif zeros:
        _part(found, "scores", lambda: weight_scores(cut(dense, plan), pruned, score))
    _part(found, "layers", lambda: layer_times({"dense": dense, "pruned": pruned}, as_call(batch), seconds))
    if plan.keep:
        _part(found, "staircase", lambda: quick_stairs(dense, example, as_call(batch), seconds / 2))
    return found


def _part(found: dict[str, Any], name: str, make: Callable[[], Any]) -> Any:
    """A part, or the reason why there is none."""
    try:
        found[name] = make()
    except Exception as error:  # whatever a model's code may raise
        found.pop(name, None)
        found["left_out"][name] = str(error).rstrip(".") if isinstance(error, SapwoodError) else told(error)
        return None
    return found[name]


def zeros_of(model: nn.Module) -> list[dict[str, Any]]:
    """Weights and zeros by layer, in the order of the model; empty where nothing was masked."""
    counted = sparsity(model)
    masked = {n: layer for n, layer in counted.layers.items() if layer.pattern}
    if not masked:
        return []
    return [
        {"weight": n, "weights": s.weights, "zeros": s.zeros, "pattern": s.pattern} for n, s in counted.layers.items()
    ]


def channels_of(seen: Trace, plan: Plan, model: nn.Module) -> list[dict[str, Any]]:
    """Groups and frozen channels in the order of the model: how wide, how many are kept, and why."""
    order = {name: place for place, name in enumerate(named_tensors(model))}
    rows: list[tuple[int, int, dict[str, Any]]] = []
    for group in seen.groups:
        kept, note = len(kept_of(group, plan)), group.note or ("" if group.exact else "approximate")
        row = {"name": group.name, "width": group.width, "kept": kept, "frozen": False, "reason": note}
        rows.append((*_place(group.sites, order), row))
    for frozen in seen.frozen:
        name, dim = frozen.sites[0]
        more = f" and {len(frozen.sites) - 1} more" if len(frozen.sites) > 1 else ""
        row = {"name": f"{name}, dim {dim}{more}", "width": frozen.channels, "kept": frozen.channels}
        rows.append((*_place(frozen.sites, order), {**row, "frozen": True, "reason": frozen.reason}))
    return [row for _, _, row in sorted(rows, key=lambda r: r[:2])]


def kept_of(group: Group, plan: Plan) -> list[int]:
    """The channels of a group that a plan leaves, whatever the plan calls its groups."""
    for site in group.sites:
        keep = plan.keep.get(site[0], {}).get(site[1])
        if keep is not None:
            left = set(keep)
            return [c for c, owned in enumerate(group.members[site]) if int(owned[0]) in left]
    return list(range(group.width))


def _place(sites: Any, order: Mapping[str, int]) -> tuple[int, int]:
    return min((order.get(name, len(order)), dim) for name, dim in sites)


def _channel_histogram(seen: Trace, dense: nn.Module, plan: Plan, score: str) -> dict[str, Any]:
    scores = score_groups(named_tensors(dense), seen.groups, score, seen.scales)
    kept = [kept_of(g, plan) for g in seen.groups]
    return channel_scores([g.name for g in seen.groups], scores, kept, score)


def quick_stairs(model: nn.Module, example: Any, call: Inputs, seconds: float) -> dict[str, Any]:
    """A staircase in about a second, eager as the run's latency is, where the model is quick enough for one."""
    with torch.inference_mode():
        model(*call[0], **call[1])
        settle()
        start = time.perf_counter()
        model(*call[0], **call[1])
        settle()
        took = 1000 * (time.perf_counter() - start)
    if took > QUICK_MS:
        raise SapwoodError(f"a forward takes {took:.0f} ms, too long to clock every width unasked")
    planner = Planner(model, as_call(example), Budget(channels=0.5), "l1", {"allocate": "uniform"})
    models, left = {"dense": model}, {"dense": (1.0, 1.0)}
    for share in SHARES:
        planner.budget = Budget(channels=share)
        plan = planner.draft()
        models[f"{share}"] = cut(model, plan).eval()
        had = plan.achieved
        left[f"{share}"] = had["channels"] / had["dense_channels"], had["flops"] / had["dense_flops"]
    device = next(model.parameters()).device
    with torch.inference_mode():
        times = take_turns({n: _call(m, call) for n, m in models.items()}, seconds, least=7, device=device, lead=1)
    stairs: list[Stair] = []
    for name, timing in times.items():
        stairs.append(Stair(*left[name], timing, cliff_of(stairs, timing) if stairs else ""))
    return Staircase(tuple(stairs), "eager", batch_of(call), describe(device)).to_dict()


def _call(model: nn.Module, inputs: Inputs) -> Callable[[], object]:
    return lambda: model(*inputs[0], **inputs[1])
