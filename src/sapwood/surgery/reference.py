"""The masked reference: the dense model in which removed channels contribute nothing.

It runs the dense weights and, wherever channels are read, leaves the removed ones out: sums see zeros
there; contractions, means, norms and softmaxes run over the survivors only. Contractions make only what
survives; ones stand in the places of the rest, and would show if anything were to read them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from sapwood.capture.facts import Ids, Reading
from sapwood.capture.isolation import copied, undisturbed
from sapwood.capture.modes import WatchFunctions, WatchOperators, plain_paths
from sapwood.capture.registry import SUMS, apply_rule, bind, short_name, tensors
from sapwood.capture.run import Inputs, Seen, watch
from sapwood.capture.skeleton import named_tensors, require_plain
from sapwood.capture.tagging import tag_attributes
from sapwood.capture.tracker import Tracker
from sapwood.surgery.cut import require_fit
from sapwood.types import Plan

Survivors = Callable[[torch.Tensor, int], torch.Tensor | None]
"""(tensor, dim) -> the positions along dim that stay; None when all do."""


def masked_reference(model: nn.Module, plan: Plan) -> nn.Module:
    """A callable model: call it with inputs as you would the dense one."""
    model = require_plain(model)
    require_fit(model, plan)
    return _Reference(model, plan)


class _Reference(nn.Module):
    """Finds out anew, for each call, who reads what; then runs a copy of the dense model."""

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        super().__init__()
        self._dense = (model,)  # in a tuple: not a submodule, never moved or saved with us
        self.plan = plan

    @undisturbed()
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        dense = self._dense[0]
        with undisturbed():  # the same random numbers as without the look ahead
            seen = watch(dense, copied((args, kwargs)))
        return run_reference(dense, self.plan, (args, kwargs), seen)


def run_reference(dense: nn.Module, plan: Plan, inputs: Inputs, seen: Seen) -> Any:
    """One forward of a copy of the dense model, without what the plan removes; ``seen`` tells who reads what."""
    removed = removed_ids(seen, plan)
    state = torch.get_rng_state()
    try:
        return _run(dense, inputs, _Retrace(seen.tracker.readings, removed), seen)
    except _OtherWayError:  # data have led the model another way: follow it once more
        torch.set_rng_state(state)
    tracker = Tracker({})
    own = seen.working_copy(dense).eval()
    for name, tensor in named_tensors(own).items():
        tracker.register(name, tensor)
    if seen.tracker.with_tags:
        tag_attributes(own, tracker)
    args, kwargs = copied(inputs)
    with torch.no_grad(), plain_paths(), _LeaveOut(tracker, removed), WatchFunctions(tracker):
        return own(*args, **kwargs)


def _run(dense: nn.Module, inputs: Inputs, mode: TorchDispatchMode, seen: Seen) -> Any:
    own = seen.working_copy(dense).eval()
    args, kwargs = copied(inputs)
    with torch.no_grad(), plain_paths(), mode:
        return own(*args, **kwargs)


def removed_ids(seen: Seen, plan: Plan) -> np.ndarray:
    """For every id of a trace, whether the plan removes it."""
    classes = seen.classes
    gone = np.zeros(classes.count, dtype=bool)
    masks: dict[tuple[int, int], np.ndarray] = {}
    for name, dims in plan.keep.items():
        for dim, kept in dims.items():
            ids = seen.tracker.coordinates[name, dim]
            key = id(kept), len(ids)
            if key not in masks:
                masks[key] = np.ones(len(ids), dtype=bool)
                masks[key][list(kept)] = False
            gone[classes.label[ids[masks[key]]]] = True
    return gone[classes.label]  # type: ignore[no-any-return]


def surviving(ids: Ids, removed: np.ndarray, device: torch.device) -> torch.Tensor | None:
    """Positions of an axis that stay; None when all do."""
    if ids is None or (len(ids) and int(ids.max()) >= len(removed)):
        return None
    gone = removed[ids]
    return torch.tensor(np.flatnonzero(~gone), device=device) if gone.any() else None


def _is_reader(op: Any) -> bool:
    return short_name(op) in _READERS or short_name(op) in SUMS


def _left_out(op: Any, args: Any, kwargs: Any, survivors: Survivors) -> Any:
    """Call an operator that reads channels, without the removed ones."""
    bound, name = bind(op, args, kwargs), short_name(op)
    if name not in SUMS:
        return _READERS[name](op, bound, survivors)
    for argument, dim in SUMS[name]:
        bound[argument] = _zeroed(bound[argument], dim, survivors(bound[argument], dim))
    return _call(op, bound)


class _OtherWayError(Exception):
    """The model did not call the operators that it called while it was traced."""


class _Retrace(TorchDispatchMode):
    """Runs the dense model's operators on the survivors, where the trace has seen channels being read."""

    supports_higher_order_operators = True

    def __init__(self, readings: Sequence[Reading], removed: np.ndarray) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ahead = iter([r for r in readings if _is_reader(r[0])])
        self.removed = removed
        self.found: dict[int, torch.Tensor | None] = {}  # by id vector: many operators read the same channels

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload) or not _is_reader(func):
            return func(*args, **kwargs)
        op, read = next(self.ahead, (None, ()))
        given = list(tensors(bind(func, args, kwargs).values()))
        if op is not func or [tuple(t.shape) for t in given] != [shape for shape, _ in read]:
            raise _OtherWayError
        known = {id(t): ids for t, (_, ids) in zip(given, read, strict=True)}

        def survivors(tensor: torch.Tensor, dim: int) -> torch.Tensor | None:
            ids = known[id(tensor)][dim]
            if ids is None:
                return None
            if id(ids) not in self.found:
                self.found[id(ids)] = surviving(ids, self.removed, tensor.device)
            return self.found[id(ids)]

        return _left_out(func, args, kwargs, survivors)


class _LeaveOut(WatchOperators):
    """Runs the dense model's operators on the survivors wherever an axis is read, following the axes anew."""

    def __init__(self, tracker: Tracker, removed: np.ndarray) -> None:
        super().__init__(tracker)
        self.removed = removed

    def survivors(self, tensor: torch.Tensor, dim: int) -> torch.Tensor | None:
        return surviving(self.tracker.ids(tensor)[dim], self.removed, tensor.device)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        reads = isinstance(func, torch._ops.OpOverload) and _is_reader(func)
        out = _left_out(func, args, kwargs, self.survivors) if reads else func(*args, **kwargs)
        apply_rule(self.tracker, func, args, kwargs, out)
        return out


_READERS: dict[str, Callable[[Any, dict[str, Any], Survivors], Any]] = {}


def _reads(*names: str) -> Callable[[Any], Any]:
    def register(function: Any) -> Any:
        _READERS.update(dict.fromkeys(names, function))
        return function

    return register


def _call(op: Any, bound: dict[str, Any]) -> Any:
    positional = [a.name for a in op._schema.arguments if not a.kwarg_only]
    named = {a.name: bound[a.name] for a in op._schema.arguments if a.kwarg_only}
    return op(*[bound[n] for n in positional], **named)


def _zeroed(tensor: torch.Tensor, dim: int, kept: torch.Tensor | None) -> torch.Tensor:
    if kept is None:
        return tensor
    mask = torch.zeros(tensor.shape[dim], dtype=torch.bool, device=tensor.device)
    mask[kept] = True
    shape = [-1 if d == dim % tensor.dim() else 1 for d in range(tensor.dim())]
    return torch.where(mask.view(shape), tensor, torch.zeros((), dtype=tensor.dtype, device=tensor.device))


@_reads("aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm", "aten::mv", "aten::dot", "aten::vdot", "aten::linear")
@_reads("aten::_grouped_mm")
def _contraction(op: Any, bound: dict[str, Any], survivors: Survivors) -> Any:
    left = next(n for n in ("mat1", "batch1", "input", "self") if n in bound)
    name, read, made = {"aten::linear": ("weight", 1, 0)}.get(short_name(op), ("mat2", 0, 1))
    kept = survivors(bound[left], -1)
    if name not in bound or bound[name].dim() != 2:
        bound[left] = _zeroed(bound[left], -1, kept)
        return _call(op, bound)
    rows, size = survivors(bound[name], made), bound[name].shape[made]
    bound[name] = _part(bound[name], {made: rows, read: kept})
    if kept is not None:
        bound[left] = bound[left].index_select(-1, kept)
    if rows is None:
        return _call(op, bound)
    bias = {"aten::linear": "bias", "aten::addmm": "self"}.get(short_name(op))
    if bias and bound[bias] is not None and bound[bias].dim() and bound[bias].shape[-1] == size:
        bound[bias] = bound[bias].index_select(-1, rows)
    return _among_others(_call(op, bound), -1, rows, size)


def _part(weight: torch.Tensor, kept: dict[int, torch.Tensor | None]) -> torch.Tensor:
    """Survivors along several dims, those that lie farthest apart in memory first; a transposed weight stays one."""
    if weight.dim() == 2 and weight.stride(0) < weight.stride(1):
        return _part(weight.t(), {1 - dim: positions for dim, positions in kept.items()}).t()
    for dim in sorted(kept, key=weight.stride, reverse=True):
        positions = kept[dim]
        weight = weight if positions is None else weight.index_select(dim, positions)
    return weight


@_reads("aten::convolution", "aten::_convolution")
def _convolution(op: Any, bound: dict[str, Any], survivors: Survivors) -> Any:
    x, weight = bound["input"], bound["weight"]
    read, made = (0, 1) if bound["transposed"] else (1, 0)
    kept = survivors(x, 1)
    if bound["groups"] > 1:
        if kept is not None and bound["groups"] == x.shape[1] == weight.shape[0]:
            bound["weight"] = _zeroed(weight, 0, kept)  # each channel by itself: what reads it is one filter
        else:
            bound["input"] = _zeroed(x, 1, kept)
        return _call(op, bound)
    rows = survivors(weight, made)
    bound["weight"] = _part(weight, {made: rows, read: kept})
    if kept is not None:
        bound["input"] = x.index_select(1, kept)
    if rows is None:
        return _call(op, bound)
    if bound["bias"] is not None:
        bound["bias"] = bound["bias"].index_select(0, rows)
    return _among_others(_call(op, bound), 1, rows, weight.shape[made])


def _among_others(made: torch.Tensor, dim: int, rows: torch.Tensor, size: int) -> torch.Tensor:
    """Survivors in their places. What lies between them must not matter to anybody: it is all ones."""
    shape = list(made.shape)
    shape[dim] = size
    return made.new_ones(shape).index_copy_(dim, rows, made)


def _dims(bound: dict[str, Any], x: torch.Tensor) -> list[int]:
    wanted = bound.get("dim")
    if wanted is None or wanted == []:
        return list(range(x.dim()))
    return [d % x.dim() for d in ([wanted] if isinstance(wanted, int) else wanted)] if x.dim() else []


@_reads("aten::sum", "aten::nansum", "aten::linalg_vector_norm", "aten::norm", "aten::any", "aten::count_nonzero")
def _sum(op: Any, bound: dict[str, Any], survivors: Survivors) -> Any:
    x = bound["self"]
    for dim in _dims(bound, x):
        bound["self"] = _zeroed(bound["self"], dim, survivors(x, dim))
    return _call(op, bound)


@_reads("aten::mean", "aten::var", "aten::var_mean", "aten::std", "aten::std_mean", "aten::amax", "aten::amin")
@_reads("aten::logsumexp", "aten::all", "aten::prod", "aten::max", "aten::min")
def _statistic(op: Any, bound: dict[str, Any], survivors: Survivors) -> Any:
    x = bound["self"]
    for dim in _dims(bound, x):
        kept = survivors(x, dim)
        bound["self"] = bound["self"] if kept is None else bound["self"].index_select(dim, kept)
    return _call(op, bound)


@_reads("aten::_softmax", "aten::_log_softmax", "aten::_safe_softmax")
def _softmax(op: Any, bound: dict[str, Any], survivors: Survivors) -> Any:
    x, dim = bound["self"], bound["dim"]
    kept = survivors(x, dim)
    if kept is None:
        return _call(op, bound)
    bound["self"] = x.index_select(dim, kept)
    return torch.zeros_like(x).index_copy(dim, kept, _call(op, bound))


@_reads("aten::native_layer_norm", "aten::_fused_rms_norm", "aten::layer_norm", "aten::rms_norm")
def _layer_norm(op: Any, bound: dict[str, Any], survivors: Survivors) -> Any:
    x, rank = bound["input"], len(bound["normalized_shape"])
    kept = {d: survivors(x, d) for d in range(x.dim() - rank, x.dim())}
    if all(k is None for k in kept.values()):
        return _call(op, bound)
    for dim, positions in kept.items():
        if positions is not None:
            bound["input"] = bound["input"].index_select(dim, positions)
            for name in ("weight", "bias"):
                if bound.get(name) is not None:
                    bound[name] = bound[name].index_select(dim - x.dim() + rank, positions)
    bound["normalized_shape"] = list(bound["input"].shape[x.dim() - rank :])
    outputs = _call(op, bound)
    whole = outputs[0] if isinstance(outputs, tuple) else outputs
    for dim, positions in kept.items():
        if positions is not None:
            shape = list(whole.shape)
            shape[dim] = x.shape[dim]
            whole = whole.new_zeros(shape).index_copy(dim, positions, whole)
    return (whole, *outputs[1:]) if isinstance(outputs, tuple) else whole


@_reads("aten::native_batch_norm", "aten::_native_batch_norm_legit", "aten::_native_batch_norm_legit_functional")
@_reads("aten::_batch_norm_no_update", "aten::_batch_norm_with_update", "aten::cudnn_batch_norm")
def _batch_norm(op: Any, bound: dict[str, Any], survivors: Survivors) -> Any:
    """Statistics of the batch at hand: also taken over weights, to standardise them."""
    x = bound["input"]
    kept = {d: positions for d in range(2, x.dim()) if (positions := survivors(x, d)) is not None}
    if not kept or not bound.get("training", True):
        return _call(op, bound)
    for dim, positions in kept.items():
        bound["input"] = bound["input"].index_select(dim, positions)
    whole, *rest = _call(op, bound)
    for dim, positions in kept.items():
        shape = list(whole.shape)
        shape[dim] = x.shape[dim]
        whole = whole.new_zeros(shape).index_copy(dim, positions, whole)
    return whole, *rest


@_reads("aten::native_group_norm")
def _group_norm(op: Any, bound: dict[str, Any], survivors: Survivors) -> Any:
    x, groups = bound["input"], bound["group"]
    kept = survivors(x, 1)
    if kept is None:
        return _call(op, bound)
    width = x.shape[1] // groups
    rows, per_row = torch.unique(kept // width, return_counts=True)
    if (per_row != per_row[0]).any():
        raise AssertionError("a plan must keep equally many channels in each normalised group")
    bound["input"] = x.index_select(1, kept)
    for name in ("weight", "bias"):
        if bound[name] is not None:
            bound[name] = bound[name].index_select(0, kept)
    bound["C"], bound["group"] = len(kept), len(rows)
    out, mean, rstd = _call(op, bound)
    whole = torch.zeros_like(x).index_copy(1, kept, out)
    spread = [t.new_zeros(t.shape[0], groups).index_copy(1, rows, t) for t in (mean, rstd)]
    return whole, *spread


@_reads("aten::_weight_norm_interface")
def _weight_norm(op: Any, bound: dict[str, Any], survivors: Survivors) -> Any:
    v = bound["v"]
    for dim in range(v.dim()):
        if dim != bound["dim"]:
            bound["v"] = _zeroed(bound["v"], dim, survivors(v, dim))
    return _call(op, bound)
