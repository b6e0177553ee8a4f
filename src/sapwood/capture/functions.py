"""What the arguments of functions tell: sizes written as numbers, attributes or shapes.

Operators below autograd see plain ints. One level up, where Python calls ``view`` or ``split``, ints
are still tagged with their provenance; each handler here turns them into equations on id vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from sapwood.capture.facts import Ids, Rescale
from sapwood.capture.registry import tensors
from sapwood.capture.sizes import Expr, Op, TaggedInt, expr_of, strip
from sapwood.capture.tracker import Tracker

Handler = Callable[[Tracker, tuple[Any, ...], dict[str, Any], Any], None]
HANDLERS: dict[str, Handler] = {}


def handles(*names: str) -> Callable[[Handler], Handler]:
    """Register a handler to run after functions of these names."""

    def register(function: Handler) -> Handler:
        for name in names:
            assert name not in HANDLERS, f"two handlers for {name}"
            HANDLERS[name] = function
        return function

    return register


def _sizes(args: tuple[Any, ...], kwargs: dict[str, Any], skip: int, *names: str) -> list[Any]:
    """Sizes given as one sequence or as separate ints, by position or by name."""
    for name in names:
        if name in kwargs:
            return list(kwargs[name])
    rest = args[skip:]
    if rest and isinstance(rest[0], (tuple, list)):
        return list(rest[0])
    return [v for v in rest if isinstance(v, int)]


def _equate(tracker: Tracker, size: Any, ids: Ids, what: str) -> None:
    if isinstance(size, int) and strip(size) != -1:
        tracker.equate(expr_of(size), ids, what)


@handles("view", "reshape", "_unsafe_view", "unflatten")
def view(tracker: Tracker, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    if not isinstance(out, torch.Tensor):
        return
    sizes, first = _sizes(args, kwargs, 1, "shape", "size", "sizes"), 0
    if len(sizes) != out.dim():  # unflatten(dim, sizes), or view(dtype)
        dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
        sizes = _sizes(args, kwargs, 2, "sizes")
        first = int(dim) % args[0].dim() if isinstance(dim, int) else 0
    ids = tracker.ids(out)
    for place, size in enumerate(sizes):
        _equate(tracker, size, ids[first + place], "a size in a reshape")


@handles("expand", "broadcast_to")
def expand(tracker: Tracker, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    sizes, source = _sizes(args, kwargs, 1, "size", "sizes"), args[0]
    ids = tracker.ids(out)
    for dim, size in enumerate(sizes):
        before = dim - out.dim() + source.dim()
        if type(size) is int and (before < 0 or source.shape[before] == 1):
            ids[dim] = None  # stretched to a fixed size, such as the batch
    tracker.assign(out, ids)
    _fill(tracker, out, sizes)


@handles("repeat")
def repeat(tracker: Tracker, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    """A single entry repeated follows the number of times; repeating several keeps their order."""
    counts, source = _sizes(args, kwargs, 1, "repeats"), args[0]
    lead, ids = out.dim() - source.dim(), tracker.ids(out)
    for dim, times in enumerate(counts):
        if dim >= lead and source.shape[dim - lead] == 1 and ids[dim] is not None:
            if type(times) is int:
                ids[dim] = None  # repeated a fixed number of times
            else:
                _equate(tracker, times, ids[dim], "a number of repeats")
    tracker.assign(out, ids)


@handles("zeros", "ones", "empty", "rand", "randn", "full")
def create(tracker: Tracker, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    _fill(tracker, out, _sizes(args, kwargs, 0, "size"))


@handles("new_zeros", "new_ones", "new_empty", "new_full")
def create_like(tracker: Tracker, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    _fill(tracker, out, _sizes(args, kwargs, 1, "size"))


@handles("arange")
def arange(tracker: Tracker, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    ends = [v for v in (*args, kwargs.get("end")) if isinstance(v, int)]
    _fill(tracker, out, ends[:1] if len(ends) == 1 else [])


def _fill(tracker: Tracker, out: Any, sizes: Sequence[Any]) -> None:
    """A new tensor's axes follow whatever they meet, if code gives their sizes by name."""
    if not isinstance(out, torch.Tensor) or len(sizes) != out.dim():
        return
    ids = tracker.ids(out)
    for dim, size in enumerate(sizes):
        if strip(size) == -1:
            continue
        if ids[dim] is not None:
            _equate(tracker, size, ids[dim], "a size")
        elif isinstance(size, TaggedInt) and out.shape[dim] == int(strip(size)) > 1:
            ids[dim] = tracker.fresh(out.shape[dim])
            tracker.equate(size.expr, ids[dim], "the size of a new tensor")
    tracker.assign(out, ids)


@handles("split", "split_with_sizes", "unsafe_split")
def split(tracker: Tracker, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    names = ("split_size_or_sections", "split_size", "split_sizes")
    size = next((kwargs[n] for n in names if n in kwargs), args[1] if len(args) > 1 else None)
    dim = int(kwargs.get("dim", args[2] if len(args) > 2 else 0))
    sizes = list(size) if isinstance(size, (list, tuple)) else [size] * len(out)
    last_is_rest = not isinstance(size, (list, tuple)) and args[0].shape[dim] % int(size or 1) != 0
    for number, (piece, wanted) in enumerate(zip(out, sizes, strict=True)):
        if last_is_rest and number == len(out) - 1:
            break
        tracker.equate(expr_of(wanted), tracker.ids(piece)[dim], "the size of a split")


@handles("chunk", "tensor_split")
def chunk(tracker: Tracker, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    x = args[0]
    dim = int(kwargs.get("dim", args[2] if len(args) > 2 else 0)) % x.dim()
    whole = tracker.ids(x)[dim]
    if whole is None:
        return
    if x.shape[dim] % len(out):
        tracker.pin(whole, "it is cut into unequal chunks")
        return
    each: Expr = Op("//", expr_of(tracker.tagged(x.shape[dim], whole)), len(out))
    for piece in out:
        tracker.equate(each, tracker.ids(piece)[dim], "an equal chunk")


@handles("narrow")
def narrow(tracker: Tracker, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    x, dim, start, length = (*args, *kwargs.values())[:4]
    held = tracker.ids(x)[int(dim)]
    if held is not None and isinstance(start, int):
        _bound(tracker, held, start)
        _equate(tracker, length, tracker.ids(out)[int(dim)], "the length of a slice")


@handles("__getitem__", "__setitem__")
def getitem(tracker: Tracker, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    x, items = args[0], args[1] if isinstance(args[1], tuple) else (args[1],)
    ids = tracker.ids(x)
    used = sum(_span(i) for i in items)
    dim = 0
    for item in items:
        if item is Ellipsis:
            dim += x.dim() - used
            continue
        if isinstance(item, slice) and dim < len(ids):
            held = ids[dim]
            if held is not None:
                for edge in (item.start, item.stop):
                    if isinstance(edge, int) and edge != 0 and abs(int(edge)) < len(held):
                        _bound(tracker, held, edge)
        dim += _span(item)


def _span(item: Any) -> int:
    if item is None or item is Ellipsis or isinstance(item, bool):
        return 0
    if isinstance(item, torch.Tensor) and item.dtype in (torch.bool, torch.uint8):
        return item.dim()
    return 1


def _bound(tracker: Tracker, held: np.ndarray, edge: int) -> None:
    """A slice's edge must move with the survivors before it (or after it, if negative)."""
    place, expr = int(strip(edge)), expr_of(edge)
    if place > 0:
        tracker.equate(expr, held[:place], "the edge of a slice")
    elif place < 0:
        tracker.equate(Op("-", 0, expr) if not isinstance(expr, int) else -expr, held[place:], "a slice's edge")


@handles("layer_norm", "rms_norm")
def layer_norm(tracker: Tracker, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    shape = kwargs.get("normalized_shape", args[1] if len(args) > 1 else ())
    ids = tracker.ids(out)
    for place, size in enumerate(reversed(list(shape))):
        tracker.equate(expr_of(size), ids[-1 - place], "the shape of a norm")


@handles("scaled_dot_product_attention")
def attention(tracker: Tracker, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    """Without a scale of its own, attention divides by the root of the head width."""
    query = args[0] if args else kwargs["query"]
    held = tracker.ids(query)[-1]
    if held is None or kwargs.get("scale") is not None:
        return
    maker = tracker.makers.get(query)
    if maker is None:
        tracker.pin(held, "attention divides by the root of this width")
    else:
        tracker.rescales.append(Rescale(tracker.vector(held), maker, tracker.where()))


_GROUPS_AT = {"conv1d": 6, "conv2d": 6, "conv3d": 6, "group_norm": 1, "channel_shuffle": 1}
_GROUPS_AT |= {f"conv_transpose{n}d": 6 for n in (1, 2, 3)}
"""Where functions take the number of groups."""


def hints_from(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Provenance that operator rules themselves need: the number of groups."""
    if name not in _GROUPS_AT:
        return {}
    found = kwargs.get("groups", kwargs.get("num_groups"))
    if found is None and len(args) > _GROUPS_AT[name]:
        found = args[_GROUPS_AT[name]]
    return {} if found is None else {"groups": expr_of(found)}


def sizes_of(tracker: Tracker, tensor: torch.Tensor, shape: Sequence[int]) -> torch.Size:
    """A tensor's shape, tagged."""
    return torch.Size([tracker.tagged(n, held) for n, held in zip(shape, tracker.ids(tensor), strict=True)])


__all__ = ["HANDLERS", "hints_from", "sizes_of", "tensors"]
