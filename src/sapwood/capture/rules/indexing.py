"""Look-ups by number: the axis that is indexed is frozen, the others pass."""

from __future__ import annotations

import torch

from sapwood.capture.registry import Call, rule
from sapwood.capture.rules.elementwise import broadcast
from sapwood.capture.tracker import Ids

LOOKED_UP = "entries are looked up by number"


@rule("aten::index", "aten::_unsafe_index")
def index(call: Call) -> None:
    tracker, x, indices = call.tracker, call["self"], list(call["indices"])
    ids = tracker.ids(x)
    taken: list[int] = []
    dim = 0
    used: list[torch.Tensor] = []
    plain: list[tuple[int, Ids]] = []
    for item in indices:
        span = 1
        if item is None:
            plain.append((dim, ids[dim]))
        else:
            span = item.dim() if item.dtype in (torch.bool, torch.uint8) else 1
            taken.extend(range(dim, dim + span))
            used.append(item)
        dim += span
    plain += [(d, ids[d]) for d in range(dim, x.dim())]
    for d in taken:
        tracker.pin(ids[d], LOOKED_UP)
    rank = call.out.dim() - len(plain)
    looked: list[Ids] = [None] * rank
    if all(t.dtype not in (torch.bool, torch.uint8) for t in used):
        looked = broadcast(tracker, used, rank, call.name)
    together = taken == list(range(taken[0], taken[-1] + 1)) if taken else True
    front = [held for d, held in plain if together and taken and d < taken[0]]
    rest = [held for d, held in plain][len(front) :]
    tracker.assign(call.out, [*front, *looked, *rest])


@rule("aten::index_select")
def index_select(call: Call) -> None:
    tracker, dim = call.tracker, call["dim"]
    ids = tracker.ids(call["self"])
    tracker.pin(ids[dim], LOOKED_UP)
    ids[dim] = None
    tracker.assign(call.out, ids)


@rule("aten::gather")
def gather(call: Call) -> None:
    tracker, x, chosen = call.tracker, call["self"], call["index"]
    ids, own, dim = tracker.ids(x), tracker.ids(chosen), call["dim"] % max(call["self"].dim(), 1)
    result: list[Ids] = []
    for d in range(x.dim()):
        if d == dim:
            tracker.pin(ids[d], LOOKED_UP)
            result.append(own[d])
        elif x.shape[d] == chosen.shape[d]:
            result.append(tracker.link(ids[d], own[d], call.name))
        else:
            tracker.pin(ids[d], LOOKED_UP)
            result.append(own[d])
    tracker.assign(call.out, result)


@rule("aten::tril", "aten::triu")
def triangle(call: Call) -> None:
    tracker = call.tracker
    ids = tracker.ids(call["self"])
    for held in ids[-2:]:
        tracker.pin(held, "a triangle is cut out of it")
    tracker.assign(call.out, ids)
