"""Reductions: a reduced channel axis ends here, exactly (sum, norm) or not (mean, max, variance)."""

from __future__ import annotations

from sapwood.capture.registry import Call, rule, tensors


def _reduce(call: Call, exact: bool) -> None:
    tracker, x = call.tracker, call["self"]
    wanted = call.args.get("dim")
    if wanted is None or wanted == []:
        wanted = list(range(x.dim()))
    dims = {d % x.dim() for d in ([wanted] if isinstance(wanted, int) else wanted)} if x.dim() else set()
    ids = tracker.ids(x)
    if not exact:
        for dim in dims:
            tracker.mark_inexact(ids[dim], f"{call.name} is taken over these channels")
    keep = call.args.get("keepdim", False)
    result = [None if d in dims else held for d, held in enumerate(ids) if keep or d not in dims]
    for out in tensors([call.outputs]):
        tracker.assign(out, result)


@rule("aten::sum", "aten::nansum", "aten::linalg_vector_norm", "aten::norm", "aten::any", "aten::count_nonzero")
def exact(call: Call) -> None:
    _reduce(call, exact=True)


@rule("aten::mean", "aten::var", "aten::var_mean", "aten::std", "aten::std_mean", "aten::amax", "aten::amin")
@rule("aten::logsumexp", "aten::all", "aten::prod")
def inexact(call: Call) -> None:
    _reduce(call, exact=False)


@rule("aten::max", "aten::min")
def extreme(call: Call) -> None:
    """Values as amax gives them; their positions freeze the axis only when something uses them."""
    tracker, x = call.tracker, call["self"]
    _reduce(call, exact=False)
    if isinstance(call.outputs, (tuple, list)):
        tracker.positions[call.outputs[1]] = tracker.ids(x)[call["dim"]]


@rule("aten::argmax", "aten::argmin", "aten::topk", "aten::sort", "aten::kthvalue", "aten::median")
def picks(call: Call) -> None:
    _pick(call)


def _pick(call: Call) -> None:
    """Positions along the axis are part of the result: it may not be cut."""
    tracker, x = call.tracker, call["self"]
    wanted = call.args.get("dim")
    ids = tracker.ids(x)
    dims = range(x.dim()) if wanted is None else [wanted % max(x.dim(), 1)]
    for dim in dims:
        if dim < x.dim():
            tracker.pin(ids[dim], f"{call.name} picks positions along it")
            ids[dim] = None
    for out in tensors([call.outputs]):
        if out.dim() == x.dim():
            tracker.assign(out, ids)
        elif out.dim() == x.dim() - 1 and wanted is not None:
            dim = wanted % x.dim()
            tracker.assign(out, ids[:dim] + ids[dim + 1 :])


@rule("aten::cumsum", "aten::cumprod", "aten::cummax", "aten::logcumsumexp")
def cumulative(call: Call) -> None:
    tracker, x = call.tracker, call["self"]
    ids = tracker.ids(x)
    tracker.pin(ids[call["dim"]], f"{call.name} runs along it")
    for out in tensors([call.outputs]):
        tracker.assign(out, ids)
