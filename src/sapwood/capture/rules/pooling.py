"""Pooling, resizing and padding of space: channels pass, windows freeze what they slide along."""

from __future__ import annotations

import re

import torch

from sapwood.capture.registry import Call, rule, tensors

_SPATIAL = [
    f"aten::{name}{n}d{suffix}"
    for n in (1, 2, 3)
    for name, suffix in (
        ("max_pool", ""),
        ("max_pool", "_with_indices"),
        ("avg_pool", ""),
        ("adaptive_avg_pool", ""),
        ("adaptive_max_pool", ""),
        ("reflection_pad", ""),
        ("replication_pad", ""),
        ("upsample_nearest", ""),
        ("_upsample_nearest_exact", ""),
    )
] + [
    "aten::_adaptive_avg_pool2d",
    "aten::_adaptive_avg_pool3d",
    "aten::max_unpool2d",
    "aten::max_unpool3d",
    "aten::fractional_max_pool2d",
    "aten::fractional_max_pool3d",
    "aten::upsample_linear1d",
    "aten::upsample_bilinear2d",
    "aten::_upsample_bilinear2d_aa",
    "aten::upsample_bicubic2d",
    "aten::_upsample_bicubic2d_aa",
    "aten::upsample_trilinear3d",
]


@rule(*_SPATIAL)
def spatial(call: Call) -> None:
    tracker = call.tracker
    x = next(call.inputs())
    found = re.search(r"([123])d", call.name)
    assert found is not None
    ids, space = tracker.ids(x), int(found[1])
    for axis in ids[x.dim() - space :]:
        tracker.pin(axis, "a window slides along it")
    kept = ids[: x.dim() - space]
    where = call.args.get("indices")
    if isinstance(where, torch.Tensor):  # unpooling: positions come with their channels
        kept = [tracker.link(a, b, call.name) for a, b in zip(kept, tracker.ids(where), strict=False)]
    for out in tensors([call.outputs]):
        tracker.assign(out, kept + [None] * space)


@rule("aten::grid_sampler_2d", "aten::grid_sampler_3d")
def grid_sampler(call: Call) -> None:
    tracker, x, grid = call.tracker, call["input"], call["grid"]
    ids = tracker.ids(x)
    for axis in [*ids[2:], *tracker.ids(grid)]:
        tracker.pin(axis, "positions are sampled along it")
    tracker.assign(call.out, ids[:2] + [None] * (call.out.dim() - 2))
