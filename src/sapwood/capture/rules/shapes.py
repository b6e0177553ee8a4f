"""Operators that only move axes about: pure book-keeping on id vectors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from sapwood.capture.facts import Ids, Maker
from sapwood.capture.registry import Call, rule
from sapwood.capture.rules.elementwise import broadcast
from sapwood.capture.tracker import Tracker


def _carry_name(call: Call, source: torch.Tensor, out: torch.Tensor, axes: Sequence[int | None]) -> None:
    """Carry a parameter's name along; axes[i] = where output axis i came from."""
    named = call.tracker.names.get(source)
    if named is not None and None not in axes:
        call.tracker.names[out] = (named[0], tuple(named[1][a] for a in axes if a is not None))


def _rearrange(call: Call, axes: Sequence[int | None]) -> None:
    source, out = call["self"], call.out
    ids = call.ids(source)
    call.tracker.assign(out, [None if a is None else ids[a] for a in axes])
    _carry_name(call, source, out, axes)
    maker = call.tracker.makers.get(source)
    if maker is not None:
        call.tracker.makers[out] = maker.moved(axes)


@rule("aten::permute")
def permute(call: Call) -> None:
    _rearrange(call, [d % call.out.dim() for d in call["dims"]])


@rule("aten::transpose")
def transpose(call: Call) -> None:
    axes = list(range(call.out.dim()))
    if axes:
        a, b = call["dim0"] % len(axes), call["dim1"] % len(axes)
        axes[a], axes[b] = axes[b], axes[a]
    _rearrange(call, axes)


@rule("aten::t", "aten::numpy_T")
def transpose_all(call: Call) -> None:
    _rearrange(call, list(reversed(range(call.out.dim()))))


@rule("aten::unsqueeze")
def unsqueeze(call: Call) -> None:
    axes: list[int | None] = list(range(call["self"].dim()))
    axes.insert(call["dim"] % call.out.dim(), None)
    _rearrange(call, axes)


@rule("aten::squeeze")
def squeeze(call: Call) -> None:
    shape, wanted = call["self"].shape, call.args.get("dim")
    dims = range(len(shape)) if wanted is None else [wanted] if isinstance(wanted, int) else wanted
    gone = {d % len(shape) for d in dims if len(shape) and shape[d % len(shape)] == 1}
    _rearrange(call, [d for d in range(len(shape)) if d not in gone])


@rule("aten::expand")
def expand(call: Call) -> None:
    source, out = call["self"], call.out
    lead = out.dim() - source.dim()
    axes = [d - lead if d >= lead and source.shape[d - lead] == out.shape[d] else None for d in range(out.dim())]
    _rearrange(call, axes)
    ids = call.ids(out)
    for dim, axis in enumerate(axes):
        if axis is None and out.shape[dim] > 1:  # the same value all along: it follows what it meets
            ids[dim] = call.tracker.fresh(out.shape[dim])
    call.tracker.assign(out, ids)


@rule("aten::flip")
def flip(call: Call) -> None:
    ids = call.ids(call["self"])
    for dim in call["dims"]:
        held = ids[dim]
        ids[dim] = None if held is None else np.ascontiguousarray(held[::-1])
    call.tracker.assign(call.out, ids)


def regroup(before: Sequence[int], after: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """The smallest runs of axes with equal products: which input axes become which output axes."""
    runs: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(before) or j < len(after):
        left: list[int] = []
        right: list[int] = []
        a = b = 1
        while True:
            if a == b and left and right:
                break
            if (a <= b and i < len(before)) or j >= len(after):
                if i >= len(before):
                    break
                left.append(i)
                a *= before[i]
                i += 1
            else:
                right.append(j)
                b *= after[j]
                j += 1
        runs.append((left, right))
    return runs


@rule("aten::view", "aten::_unsafe_view", "aten::reshape", "aten::_reshape_alias", "aten::unflatten")
def view(call: Call) -> None:
    tracker, source, out = call.tracker, call["self"], call.out
    ids = tracker.ids(source)
    if source.numel() == 0:
        return
    dims: list[Ids] = [None] * out.dim()
    axes: list[int | None] = [None] * out.dim()
    before = [(d, n) for d, n in enumerate(source.shape) if n > 1]
    after = [(d, n) for d, n in enumerate(out.shape) if n > 1]
    runs: list[tuple[list[tuple[int, int]], list[tuple[int, int]]]] = []
    for left, right in regroup([n for _, n in before], [n for _, n in after]):
        olds, news = [before[i] for i in left], [after[j] for j in right]
        runs.append((olds, news))
        if len(olds) == len(news) == 1:
            dims[news[0][0]], axes[news[0][0]] = ids[olds[0][0]], olds[0][0]
            continue
        flat = tracker.merge([ids[d] for d, _ in olds], [n for _, n in olds])
        for (place, _), found in zip(news, tracker.split(flat, [n for _, n in news]), strict=True):
            dims[place] = found
    tracker.assign(out, dims)
    _carry_name(call, source, out, axes)
    maker = tracker.makers.get(source)
    if maker is not None:
        tracker.makers[out] = _viewed(maker, runs)


def _viewed(maker: Maker, runs: list[tuple[list[tuple[int, int]], list[tuple[int, int]]]]) -> Maker:
    """Split or join the dimensions that run along the maker's axis, where they do so by themselves."""
    stayed = {olds[0][0]: news[0][0] for olds, news in runs if len(olds) == len(news) == 1}
    if maker.axes and all(axis in stayed for axis in maker.axes):
        return Maker(maker.sites, tuple(stayed[axis] for axis in maker.axes), maker.positions)
    for olds, news in runs:
        if maker.axes and [d for d, _ in olds] == list(maker.axes):
            return Maker(maker.sites, tuple(d for d, _ in news), maker.positions.reshape([n for _, n in news]))
    return maker.blurred()


@rule("aten::view_as_complex", "aten::view_as_real", "aten::real", "aten::imag")
def complex_view(call: Call) -> None:
    source, out = call["self"], call.out
    ids = call.ids(source)
    shared = min(source.dim(), out.dim())
    for extra in ids[shared:]:
        call.tracker.pin(extra, "real and imaginary parts stay together")
    call.tracker.assign(out, ids[:shared] + [None] * (out.dim() - shared))


@rule("aten::cat", "aten::concat")
def cat(call: Call) -> None:
    tracker, out = call.tracker, call.out
    parts = [t for t in call["tensors"] if not (t.dim() == 1 and t.numel() == 0)]
    dim = call["dim"] % out.dim()
    dims: list[Ids] = [None] * out.dim()
    for other in range(out.dim()):
        if other != dim and out.shape[other] > 1:
            for number, tensor in enumerate(parts):
                held = tracker.ids(tensor)[other]
                dims[other] = held if number == 0 else tracker.link(dims[other], held, call.name)
    pieces = [tracker.ids(t)[dim] for t in parts]
    if any(p is not None for p in pieces):
        dims[dim] = np.concatenate(
            [p if p is not None else fixed(tracker, t.shape[dim]) for p, t in zip(pieces, parts, strict=True)]
        )
    tracker.assign(out, dims)
    makers = [tracker.makers.get(t) for t in parts]
    known = [m for m in makers if m is not None]
    if known and len(known) == len(parts) and all(m.sites == known[0].sites for m in known):
        tracker.makers[out] = known[0].blurred(*known[1:])


def fixed(tracker: Tracker, size: int) -> np.ndarray:
    """Fresh ids that may not be removed."""
    ids = tracker.fresh(size)
    tracker.pin(ids, "a part of this axis has a fixed size")
    return ids


@rule("aten::stack")
def stack(call: Call) -> None:
    tracker, out = call.tracker, call.out
    dims = broadcast(tracker, call["tensors"], out.dim() - 1, call.name)
    dims.insert(call["dim"] % out.dim(), None)
    tracker.assign(out, dims)


@rule("aten::slice")
def slice_(call: Call) -> None:
    tracker, source, out, dim = call.tracker, call["self"], call.out, call["dim"] % call.out.dim()
    ids, step = tracker.ids(source), call["step"]
    size = source.shape[dim]
    start, stop, _ = slice(call["start"], call["end"], step).indices(size)
    held = ids[dim]
    if held is not None and (start, stop) != (0, size):
        ids[dim] = held[start:stop:step]
    if held is not None and step != 1:
        tracker.pin(held, f"every {step}th entry is taken")
        ids[dim] = held[start:stop:step]
    tracker.assign(out, ids)
    named = tracker.names.get(source)
    if named is not None and out.shape == source.shape:
        tracker.names[out] = named
    _slice_maker(tracker, source, out, dim, slice(start, stop, step))


def _slice_maker(tracker: Tracker, source: torch.Tensor, out: torch.Tensor, dim: int, part: slice) -> None:
    maker = tracker.makers.get(source)
    if maker is not None:
        tracker.makers[out] = maker.at(dim, part)


@rule("aten::split", "aten::split_with_sizes", "aten::unsafe_split", "aten::chunk", "aten::tensor_split")
def split(call: Call) -> None:
    tracker, source, dim = call.tracker, call["self"], call["dim"] % call["self"].dim()
    ids, start = tracker.ids(source), 0
    for out in call.outputs:
        stop = start + out.shape[dim]
        dims, held = list(ids), ids[dim]
        dims[dim] = None if held is None else held[start:stop]
        tracker.assign(out, dims)
        _slice_maker(tracker, source, out, dim, slice(start, stop))
        start = stop


@rule("aten::glu")
def glu(call: Call) -> None:
    """The first half times the sigmoid of the second."""
    tracker, x, dim = call.tracker, call["self"], call["dim"] % call["self"].dim()
    ids = tracker.ids(x)
    held = ids[dim]
    if held is not None:
        half = x.shape[dim] // 2
        ids[dim] = tracker.link(held[:half], held[half:], call.name)
    tracker.assign(call.out, ids)


@rule("aten::select", "aten::unbind")
def select(call: Call) -> None:
    tracker, source = call.tracker, call["self"]
    dim = call["dim"] % source.dim()
    ids = tracker.ids(source)
    tracker.pin(ids[dim], "one entry is picked by its position")
    outs = call.outputs if isinstance(call.outputs, (list, tuple)) else [call.outputs]
    maker = tracker.makers.get(source)
    for number, out in enumerate(outs):
        tracker.assign(out, ids[:dim] + ids[dim + 1 :])
        if maker is not None:
            tracker.makers[out] = maker.at(dim, call.args.get("index", number))


@rule("aten::repeat")
def repeat(call: Call) -> None:
    tracker, source, out, counts = call.tracker, call["self"], call.out, call["repeats"]
    lead = out.dim() - source.dim()
    ids: list[Ids] = [None] * lead
    for d, held in enumerate(tracker.ids(source)):
        times = counts[lead + d]
        stretched = tracker.fresh(times) if times > 1 and source.shape[d] == 1 else None
        ids.append(stretched if held is None else np.tile(held, times))
    tracker.assign(out, ids)


@rule("aten::constant_pad_nd")
def pad(call: Call) -> None:
    tracker, source, amounts = call.tracker, call["self"], call["pad"]
    ids = tracker.ids(source)
    for pair in range(len(amounts) // 2):
        dim = source.dim() - 1 - pair
        before, after = amounts[2 * pair], amounts[2 * pair + 1]
        held = ids[dim]
        if held is None or (before == 0 and after == 0):
            continue
        held = held[max(0, -before) : len(held) - max(0, -after)]
        ids[dim] = np.concatenate([fixed(tracker, max(0, before)), held, fixed(tracker, max(0, after))])
        if before < 0 or after < 0:
            tracker.pin(ids[dim], "entries are cropped by position")
    tracker.assign(call.out, ids)


@rule("aten::roll")
def roll(call: Call) -> None:
    tracker, source = call.tracker, call["self"]
    ids = tracker.ids(source)
    for dim in call["dims"] or range(source.dim()):
        tracker.pin(ids[dim], "the axis is rolled")
    tracker.assign(call.out, ids)


@rule("aten::pixel_shuffle")
def pixel_shuffle(call: Call) -> None:
    tracker, out, factor = call.tracker, call.out, call["upscale_factor"]
    ids = tracker.ids(call["self"])
    rows, inner = tracker.split(ids[-3], (out.shape[-3], factor * factor))
    tracker.pin(inner, "these channels become pixels")
    tracker.assign(out, [*ids[:-3], rows, None, None])


@rule("aten::pixel_unshuffle")
def pixel_unshuffle(call: Call) -> None:
    tracker, factor = call.tracker, call["downscale_factor"]
    ids = tracker.ids(call["self"])
    held = tracker.merge([ids[-3], None], [call["self"].shape[-3], factor * factor])
    tracker.assign(call.out, [*ids[:-3], held, None, None])


@rule("aten::channel_shuffle", "aten::native_channel_shuffle")
def channel_shuffle(call: Call) -> None:
    tracker, x, groups = call.tracker, call["self"], call["groups"]
    ids = tracker.ids(x)
    width = x.shape[1] // groups
    rows, columns = tracker.split(ids[1], (groups, width))
    tracker.equate(tracker.hints.get("groups", groups), rows, "the number of groups")
    merged = tracker.merge([columns, rows], [width, groups])
    tracker.assign(call.out, [ids[0], merged, *ids[2:]])


@rule("aten::im2col")
def im2col(call: Call) -> None:
    tracker, x = call.tracker, call["self"]
    ids = tracker.ids(x)
    for held in ids[-2:]:
        tracker.pin(held, "a window slides along it")
    window = math.prod(call["kernel_size"])
    merged = tracker.merge([ids[-3], None], [x.shape[-3], window])
    tracker.assign(call.out, [*ids[:-3], merged, None])


@rule("aten::col2im")
def col2im(call: Call) -> None:
    tracker, x = call.tracker, call["self"]
    ids = tracker.ids(x)
    window = math.prod(call["kernel_size"])
    rows, inner = tracker.split(ids[-2], (x.shape[-2] // window, window))
    tracker.pin(inner, "these channels become pixels")
    tracker.pin(ids[-1], "windows are laid out again")
    tracker.assign(call.out, [*ids[:-2], rows, None, None])


@rule("aten::unfold")
def unfold(call: Call) -> None:
    tracker, x = call.tracker, call["self"]
    ids = tracker.ids(x)
    dim = call["dimension"] % x.dim()
    tracker.pin(ids[dim], "a window slides along it")
    ids[dim] = None
    tracker.assign(call.out, [*ids, None])


@rule("aten::as_strided")
def as_strided(call: Call) -> None:
    """Only the form that changes strides and keeps the sizes says nothing about axes."""
    tracker, source = call.tracker, call["self"]
    ids = tracker.ids(source)
    if tuple(call["size"]) == tuple(call.out.shape) == tuple(source.shape):
        tracker.assign(call.out, ids)
        return
    for held in ids:
        tracker.pin(held, "memory is read with new strides")
