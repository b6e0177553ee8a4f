"""Normalisations: affine parameters follow their channels; statistics over an axis are inexact."""

from __future__ import annotations

import torch

from sapwood.capture.facts import SOFTMAX, Ids
from sapwood.capture.registry import Call, rule
from sapwood.capture.tracker import Tracker

OVER = "a norm takes statistics over these channels"


def _affine(tracker: Tracker, channels: Ids, parameters: list[torch.Tensor | None], what: str) -> None:
    for number, parameter in enumerate(parameters):
        if parameter is None:
            continue
        tracker.link(channels, tracker.ids(parameter)[0], what)
        site = tracker.site(parameter, 0)
        if number == 0 and site is not None:
            tracker.scales.add(site)


@rule(
    "aten::native_batch_norm",
    "aten::_native_batch_norm_legit",
    "aten::_native_batch_norm_legit_no_training",
    "aten::_native_batch_norm_legit_functional",
    "aten::_batch_norm_no_update",
    "aten::_batch_norm_with_update",
    "aten::cudnn_batch_norm",
    "aten::miopen_batch_norm",
    "aten::batch_norm",
)
def batch_norm(call: Call) -> None:
    tracker = call.tracker
    ids = tracker.ids(call["input"])
    names = ("weight", "bias", "running_mean", "running_var")
    _affine(tracker, ids[1], [call.args.get(n) for n in names], call.name)
    if call.args.get("training", True) and "no_training" not in call.name:
        for axis in ids[2:]:  # standardised weights: their inputs lie along these
            tracker.mark_inexact(axis, OVER)
    tracker.assign(call.out, ids)


@rule("aten::native_layer_norm", "aten::_fused_rms_norm", "aten::rms_norm", "aten::layer_norm")
def layer_norm(call: Call) -> None:
    tracker, x = call.tracker, call["input"]
    ids, rank = tracker.ids(x), len(call["normalized_shape"])
    tail = ids[x.dim() - rank :]
    for number, name in enumerate(("weight", "bias")):
        parameter = call.args.get(name)
        if parameter is None:
            continue
        for dim, (mine, own) in enumerate(zip(tail, tracker.ids(parameter), strict=True)):
            tracker.link(mine, own, call.name)
            site = tracker.site(parameter, dim)
            if number == 0 and rank == 1 and site is not None:
                tracker.scales.add(site)
    for axis in tail:
        tracker.mark_inexact(axis, OVER)
    tracker.assign(call.out, ids)


@rule("aten::native_group_norm", "aten::group_norm")
def group_norm(call: Call) -> None:
    tracker, x = call.tracker, call["input"]
    groups = call.args.get("group", call.args.get("num_groups"))
    assert isinstance(groups, int)
    ids = tracker.ids(x)
    rows, columns = tracker.split(ids[1], (groups, x.shape[1] // groups))
    tracker.equate(tracker.hints.get("groups", groups), rows, "the number of groups")
    tracker.mark_inexact(columns, OVER)
    _affine(tracker, ids[1], [call["weight"], call["bias"]], call.name)
    tracker.assign(call.out, ids)


@rule("aten::_weight_norm_interface", "aten::_weight_norm")
def weight_norm(call: Call) -> None:
    tracker, direction, length, dim = call.tracker, call["v"], call["g"], call["dim"]
    ids = tracker.ids(direction)
    tracker.link(ids[dim], tracker.ids(length)[dim], call.name)
    for other, axis in enumerate(ids):
        if other != dim:
            tracker.mark_inexact(axis, "the weight is normalised over these channels")
    tracker.assign(call.out, ids)


@rule("aten::_softmax", "aten::_log_softmax", "aten::softmax", "aten::log_softmax", "aten::_safe_softmax")
def softmax(call: Call) -> None:
    tracker, x = call.tracker, call["self"]
    ids = tracker.ids(x)
    tracker.mark_inexact(ids[call["dim"]], SOFTMAX)
    tracker.assign(call.out, ids)
