"""Look-ups by number: the axis that is indexed is frozen, the others pass."""

from __future__ import annotations

import torch

from sapwood.capture.facts import Ids
from sapwood.capture.registry import Call, rule
from sapwood.capture.rules.elementwise import broadcast

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


@rule("aten::index_put", "aten::_unsafe_index_put")
def index_put(call: Call) -> None:
    """Writes by number freeze the axes they index; a mask over everything is elementwise."""
    tracker, x, indices, values = call.tracker, call["self"], list(call["indices"]), call["values"]
    first = indices[0] if len(indices) == 1 else None
    if first is not None and first.dtype == torch.bool and first.dim() == x.dim() and values.numel() == 1:
        tracker.assign(call.out, broadcast(tracker, (x, first), x.dim(), call.name))
        return
    ids, dim = tracker.ids(x), 0
    for item in indices:
        span = item.dim() if item is not None and item.dtype in (torch.bool, torch.uint8) else 1
        for d in range(dim, dim + span):
            if item is not None:
                tracker.pin(ids[d], LOOKED_UP)
        dim += span
    tail = x.dim() - dim
    given = tracker.ids(values)
    for place in range(1, min(tail, values.dim()) + 1):  # what follows the indexed axes is written across
        if values.shape[-place] > 1:
            tracker.link(ids[-place], given[-place], call.name)
    for held in given[: max(0, values.dim() - tail)]:
        tracker.pin(held, LOOKED_UP)
    tracker.assign(call.out, ids)


@rule("aten::index_add", "aten::index_copy", "aten::index_reduce")
def index_add(call: Call) -> None:
    tracker, x, source, dim = call.tracker, call["self"], call["source"], call["dim"] % max(call["self"].dim(), 1)
    ids, given = tracker.ids(x), tracker.ids(source)
    for d in range(x.dim()):
        if d == dim:
            tracker.pin(ids[d], LOOKED_UP)
            tracker.pin(given[d], LOOKED_UP)
        else:
            ids[d] = tracker.link(ids[d], given[d], call.name)
    tracker.assign(call.out, ids)


@rule("aten::scatter", "aten::scatter_add", "aten::scatter_reduce")
def scatter(call: Call) -> None:
    tracker, x, dim = call.tracker, call["self"], call["dim"] % max(call["self"].dim(), 1)
    ids = tracker.ids(x)
    for other in (call["index"], call.args.get("src")):
        if not isinstance(other, torch.Tensor):
            continue
        given = tracker.ids(other)
        for d in range(x.dim()):
            if d == dim or other.shape[d] != x.shape[d]:
                tracker.pin(ids[d], LOOKED_UP)
                tracker.pin(given[d], LOOKED_UP)
            else:
                tracker.link(ids[d], given[d], call.name)
    tracker.assign(call.out, ids)


@rule("aten::_fft_r2c", "aten::_fft_c2r", "aten::_fft_c2c")
def fourier(call: Call) -> None:
    tracker = call.tracker
    ids = tracker.ids(call["self"])
    for dim in call["dim"]:
        tracker.pin(ids[dim], "it is Fourier-transformed")
        ids[dim] = None
    tracker.assign(call.out, ids)
