"""Matrix products and convolutions: what is contracted links, what is produced is new."""

from __future__ import annotations

import math

import numpy as np
import torch

from sapwood.capture.facts import Ids, Maker
from sapwood.capture.registry import Call, rule
from sapwood.capture.rules.elementwise import broadcast
from sapwood.capture.tracker import Tracker
from sapwood.types import Site

KERNEL = "it is the extent of a kernel"


def produced(tracker: Tracker, out: torch.Tensor, axis: int, sources: list[tuple[torch.Tensor, int]]) -> None:
    """Note which parameter dimensions ``out`` is a linear image of, to rescale it later."""
    sites: list[Site] = []
    for tensor, dim in sources:
        site = tracker.site(tensor, dim)
        if site is not None:
            sites.append(site)
    if sites and len(sites) == len(sources):
        tracker.makers[out] = Maker(tuple(sites), (axis % out.dim(),), np.arange(out.shape[axis]))


def _product(call: Call, left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None) -> None:
    """(batch, m, k) x (batch, k, n), with any or no batch axis."""
    tracker, out = call.tracker, call.out
    a, b = tracker.ids(left), tracker.ids(right)
    inner = tracker.link(a[-1], b[-2], call.name)
    batch = [tracker.link(x, y, call.name) for x, y in zip(a[:-2], b[:-2], strict=True)]
    dims = [*batch, a[-2], b[-1]]
    tracker.assign(out, dims)
    if bias is not None:
        broadcast(tracker, (out, bias), out.dim(), call.name)
    sizes = [(d, n) for d, n in zip(dims, out.shape, strict=True)]
    tracker.count_work(2, (inner, left.shape[-1]), *sizes)
    produced(tracker, out, -1, [(right, right.dim() - 1)] + ([(bias, -1)] if bias is not None else []))
    if right in tracker.constant:
        tracker.mark_contraction(b[-1], b[-2])
    elif left in tracker.constant:
        tracker.mark_contraction(a[-2], a[-1])


@rule("aten::mm", "aten::bmm")
def matmul(call: Call) -> None:
    _product(call, call["self"], call["mat2"], None)


@rule("aten::addmm")
def addmm(call: Call) -> None:
    _product(call, call["mat1"], call["mat2"], call["self"])


@rule("aten::baddbmm")
def baddbmm(call: Call) -> None:
    _product(call, call["batch1"], call["batch2"], call["self"])


@rule("aten::linear")
def linear(call: Call) -> None:
    tracker, x, weight, bias, out = call.tracker, call["input"], call["weight"], call["bias"], call.out
    ids, held = tracker.ids(x), tracker.ids(weight)
    inner = tracker.link(ids[-1], held[1], call.name)
    dims = [*ids[:-1], held[0]]
    tracker.assign(out, dims)
    if bias is not None:
        tracker.link(held[0], tracker.ids(bias)[0], call.name)
    sizes = [(d, n) for d, n in zip(dims, out.shape, strict=True)]
    tracker.count_work(2, (inner, x.shape[-1]), *sizes)
    tracker.mark_contraction(held[0], held[1])
    produced(tracker, out, -1, [(weight, 0)] + ([(bias, 0)] if bias is not None else []))


@rule("aten::_grouped_mm")
def grouped_product(call: Call) -> None:
    """Rows, sorted by the expert that each goes to, times that expert's matrix."""
    tracker, x, weight, out = call.tracker, call["self"], call["mat2"], call.out
    ids, held = tracker.ids(x), tracker.ids(weight)
    if x.dim() != 2 or weight.dim() != 3 or call["bias"] is not None:
        for axis in (*ids, *held):
            tracker.pin(axis, "this form of a grouped product has no rule")
        return
    tracker.pin(held[0], "rows are sent to these by number")
    inner = tracker.link(ids[1], held[1], call.name)
    tracker.assign(out, [ids[0], held[2]])
    tracker.count_work(2, (ids[0], x.shape[0]), (inner, x.shape[1]), (held[2], weight.shape[2]))
    tracker.mark_contraction(held[2], held[1])
    produced(tracker, out, -1, [(weight, 2)])


@rule("aten::mv")
def matrix_vector(call: Call) -> None:
    tracker = call.tracker
    a, b = tracker.ids(call["self"]), tracker.ids(call["vec"])
    inner = tracker.link(a[1], b[0], call.name)
    tracker.assign(call.out, [a[0]])
    tracker.count_work(2, (inner, call["vec"].shape[0]), (a[0], call["self"].shape[0]))


@rule("aten::dot", "aten::vdot")
def dot(call: Call) -> None:
    tracker = call.tracker
    other = call.args.get("tensor", call.args.get("other"))
    assert isinstance(other, torch.Tensor)
    inner = tracker.link(tracker.ids(call["self"])[0], tracker.ids(other)[0], call.name)
    tracker.count_work(2, (inner, other.shape[0]))


@rule("aten::convolution", "aten::_convolution")
def convolution(call: Call) -> None:
    tracker, x, weight, bias, out = call.tracker, call["input"], call["weight"], call["bias"], call.out
    groups, transposed = call["groups"], call["transposed"]
    ids, held = tracker.ids(x), tracker.ids(weight)
    for axis in ids[2:]:
        tracker.pin(axis, "a window slides along it")
    for axis in held[2:]:
        tracker.pin(axis, KERNEL)
    channels = _grouped(call, ids[1], held, groups) if groups > 1 else None
    if channels is None:
        tracker.link(ids[1], held[0 if transposed else 1], call.name)
        channels = held[1 if transposed else 0]
    tracker.assign(out, [ids[0], channels, *[None] * (out.dim() - 2)])
    sources = [(weight, 1 if transposed else 0)]
    if bias is not None:
        tracker.link(channels, tracker.ids(bias)[0], call.name)
        sources.append((bias, 0))
    tracker.mark_contraction(channels, held[0 if transposed else 1])
    if not (transposed and groups > 1):
        produced(tracker, out, 1, sources)
    positions = math.prod(x.shape[2:] if transposed else out.shape[2:])
    window = math.prod(weight.shape[2:])
    per_group = (held[1], weight.shape[1])
    outer = (ids[1], x.shape[1]) if transposed else (channels, out.shape[1])
    tracker.count_work(2 * positions * window, (ids[0], x.shape[0]), outer, per_group)


def _grouped(call: Call, channels: Ids, held: list[Ids], groups: int) -> Ids:
    """Rows of the grid are the groups, columns the channels within one; the side with more of them is cut."""
    tracker, x, weight, out = call.tracker, call["input"], call["weight"], call.out
    rows, columns = tracker.split(channels, (groups, x.shape[1] // groups))
    tracker.equate(tracker.hints.get("groups", groups), rows, "the number of groups")
    for made in (columns, held[1]):
        if made is not None and len(made) > groups:
            tracker.preferred.append(made)
    if call["transposed"]:
        tracker.link(channels, held[0], call.name)
        return tracker.merge([rows, held[1]], [groups, weight.shape[1]])
    tracker.link(columns, held[1], call.name)
    out_rows, _ = tracker.split(held[0], (groups, out.shape[1] // groups))
    tracker.link(rows, out_rows, call.name)
    return held[0]


@rule("aten::embedding")
def embedding(call: Call) -> None:
    tracker, weight = call.tracker, call["weight"]
    rows, columns = tracker.ids(weight)
    tracker.pin(rows, "rows are looked up by number")
    tracker.assign(call.out, [*tracker.ids(call["indices"]), columns])
    tracker.mark_contraction(columns, None)
    produced(tracker, call.out, -1, [(weight, 1)])


@rule("aten::_embedding_bag", "aten::_embedding_bag_forward_only")
def embedding_bag(call: Call) -> None:
    tracker, weight = call.tracker, call["weight"]
    rows, columns = tracker.ids(weight)
    tracker.pin(rows, "rows are looked up by number")
    tracker.assign(call.out, [None, columns])
    tracker.mark_contraction(columns, None)
    produced(tracker, call.out, -1, [(weight, 1)])
