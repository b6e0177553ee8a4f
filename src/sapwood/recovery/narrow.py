"""Convolutions of few channels in training: by our kernels where these are faster than cuDNN's, found by trying.

cuDNN's kernels are made for wide layers; with 16 channels, or an odd number of them as after a cut, they take several
times what the memory traffic needs. It is the same function either way. Only in captured steps, where calls cost
nothing.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Tensor = torch.Tensor
Ours = tuple[int, int, int]
"""Which way of ours, counted from 1, or 0 for PyTorch's: the output, the gradient of the input, that of the weight."""
Kind = tuple[torch.device, torch.dtype, tuple[int, ...], tuple[int, ...]]
"""Device and dtype, sizes of the input and of the weight."""
Call = Callable[[], Tensor]
NONE: Ours = (0, 0, 0)

WIDEST, TAPS = 64, 9
"""Channels and taps of what is tried."""
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
MOST_KINDS = min(64, max(16, 4 * CORES))
"""With more kinds of convolutions than this, trying takes too long: each has five kernels to compile."""
DEVICES: tuple[str, ...] = ("cuda",)
"""Where they are tried."""
MOST_NUMBERS = 2**31 - 2**12
"""In an image or what is made of it: kernels count them, and a few more, in 32 bits."""
GAIN, ERROR, REPEATS, TURNS = 0.9, 0.02, 20, 7
"""Ours are taken when they take at most this share of the time, and differ by no more than this."""
_KNOWN: dict[Kind, Ours] = {}


class Narrow(torch.autograd.Function):
    """A convolution of stride 1 that keeps sizes, without a bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ours: Ours) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.ours = ours
        if ours[0]:
            return torch.ops.sapwood.narrow_product(x, weight, False, ours[0])  # type: ignore[no-any-return]
        return F.conv2d(x, weight, padding=_padding(weight))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        needed = ctx.needs_input_grad[:2]
        ours = (0, 0) if torch.is_grad_enabled() else ctx.ours[1:]  # gradients of gradients are PyTorch's
        wanted = [need and not own for need, own in zip(needed, ours, strict=True)]
        left, right = _theirs(grad, x, weight, wanted) if any(wanted) else (None, None)
        if needed[0] and ours[0]:
            left = torch.ops.sapwood.narrow_product(grad, weight, True, ours[0])
        if needed[1] and ours[1]:
            right = torch.ops.sapwood.narrow_weights(x, grad, weight, ours[1])
        return left, right, None


def _padding(weight: Tensor) -> list[int]:
    return [weight.shape[2] // 2, weight.shape[3] // 2]


def _theirs(grad: Tensor, x: Tensor, weight: Tensor, wanted: list[bool]) -> Any:
    """The gradients of input and weight, as far as wanted."""
    places: Any = (None, [1, 1], _padding(weight), [1, 1], False, [0, 0], 1)
    return torch.ops.aten.convolution_backward(grad, x, weight, *places, [*wanted, False])[:2]


@functools.lru_cache
def _computed(dtype: torch.dtype, size: tuple[int, ...], ours: Ours) -> Callable[..., Tensor]:
    """In place of ``Conv2d._conv_forward``: one function for all that are alike, so that they are compiled once.

    Inputs of other sizes than those that were tried go PyTorch's way.
    """

    def narrow(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x, weight = (t.to(torch.get_autocast_dtype(x.device.type)) for t in (x, weight))
        if x.shape == size and x.dtype == weight.dtype == dtype:
            out: Tensor = Narrow.apply(x, weight, ours)  # type: ignore[no-untyped-call]
            return out if bias is None else out + bias.to(dtype).view(1, -1, 1, 1)
        return F.conv2d(x, weight, bias, padding=_padding(weight))

    return narrow


def is_narrow(module: nn.Module) -> bool:
    if type(module) is not nn.Conv2d or "_conv_forward" in vars(module):
        return False
    window: Any = module.kernel_size
    same = all(k % 2 == 1 for k in window) and module.padding in (tuple(k // 2 for k in window), "same")
    plain = module.stride == module.dilation == (1, 1) and module.groups == 1 and module.padding_mode == "zeros"
    few = max(module.in_channels, module.out_channels) <= WIDEST and 1 < window[0] * window[1] <= TAPS
    return same and plain and few


class NarrowConvolutions:
    """Those of some models; which kernels are taken is decided once, from a look at their inputs."""

    def __init__(self, *models: nn.Module) -> None:
        found = [m for model in models for m in model.modules() if is_narrow(m)] if DEVICES else []
        self.seen: dict[nn.Module, set[Kind | None]] = {m: set() for m in found}
        self.chosen: dict[nn.Module, Callable[..., Tensor]] = {}
        self.looked = not found

    @contextlib.contextmanager
    def look(self) -> Iterator[None]:
        """See what the convolutions get while this lasts, a training step; after it each kind is tried."""
        hooks = [m.register_forward_pre_hook(self._note) for m in self.seen]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        self.looked = True
        alike = {m: next(iter(kinds)) for m, kinds in self.seen.items() if len(kinds) == 1}
        new = {kind for kind in alike.values() if kind is not None} - _KNOWN.keys()
        if len(new) <= MOST_KINDS and new and _kernels_load():
            compiled_ahead(new)
            _KNOWN.update({kind: tried(*kind) for kind in new})
        for module, kind in alike.items():
            if kind is not None and (ours := _KNOWN.get(kind, NONE)) != NONE:
                self.chosen[module] = _computed(kind[1], kind[2], ours)

    def _note(self, module: Any, args: tuple[Any, ...]) -> None:
        x = args[0] if args else None  # else it comes by keyword: left alone
        if not isinstance(x, Tensor) or x.dim() != 4 or x.dtype == torch.float64:
            self.seen[module].add(None)
            return
        dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
        good = x.device.type in DEVICES and dtype in (torch.bfloat16, torch.float16)
        good = good and 0 < x.numel() // x.shape[1] * max(x.shape[1], module.out_channels) < MOST_NUMBERS
        kind = (x.device, dtype, tuple(x.shape), tuple(module.weight.shape))
        self.seen[module].add(kind if good else None)

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Computed so while this lasts."""
        for module, computed in self.chosen.items():
            vars(module)["_conv_forward"] = computed
        try:
            yield
        finally:
            for module in self.chosen:
                vars(module).pop("_conv_forward", None)


@functools.lru_cache
def _kernels_load() -> bool:
    try:
        importlib.import_module("sapwood.recovery.narrow_kernels")
    except Exception:  # a torch that does not fit
        return False
    return not torch.version.hip


def compiled_ahead(kinds: Iterable[Kind]) -> None:
    """The kernels of all kinds at once, on all cores."""
    from sapwood.recovery import narrow_kernels as kernels

    with contextlib.suppress(Exception):  # what does not work is left out where it is tried
        kernels.compile_for([kind for kind in kinds if kind[0].type == "cuda"], CORES)


def tried(device: torch.device, dtype: torch.dtype, size: tuple[int, ...], window: tuple[int, ...]) -> Ours:
    """Which way is the fastest for each of the three; ours that cannot be compiled or run here are not."""
    dice = torch.Generator(device).manual_seed(0)  # the training's own random numbers stay as they are

    def some(*shape: int) -> Tensor:
        made = torch.randn(shape, device=device, dtype=dtype, generator=dice)
        return made.contiguous(memory_format=torch.channels_last)

    with contextlib.suppress(Exception):
        from sapwood.recovery import narrow_kernels as kernels

        x, weight, grad = some(*size), some(*window), some(size[0], window[0], *size[2:])
        products, sums = range(1, len(kernels.PRODUCTS) + 1), range(1, len(kernels.BLOCKS) + 1)
        made: list[list[Call]] = [
            [lambda: F.conv2d(x, weight, padding=_padding(weight))],
            [lambda: _theirs(grad, x, weight, [True, False])[0]],
            [lambda: _theirs(grad, x, weight, [False, True])[1]],
        ]
        made[0] += [functools.partial(kernels.product, x, weight, False, way) for way in products]
        made[1] += [functools.partial(kernels.product, grad, weight, True, way) for way in products]
        made[2] += [functools.partial(kernels.weights, x, grad, weight, way) for way in sums]
        first, second, third = (_fastest(calls, device) for calls in made)
        return first, second, third
    return NONE


def _fastest(calls: Sequence[Call], device: torch.device) -> int:
    """Its place; the first unless another one is right and clearly faster."""
    wanted = calls[0]().float()
    good = [0]
    for place, call in enumerate(calls[1:], 1):
        with contextlib.suppress(Exception):
            if (wanted - call().float()).norm() <= ERROR * wanted.norm():
                good.append(place)
    times = milliseconds([calls[place] for place in good], device)
    best = min(range(len(good)), key=times.__getitem__)
    return good[best] if times[best] <= GAIN * times[0] else 0


def milliseconds(calls: Sequence[Callable[[], Any]], device: torch.device) -> list[float]:
    """The time of each call in a graph, where launching costs nothing: they take turns, and the least counts."""
    stream, graphs = torch.cuda.Stream(device), [torch.cuda.CUDAGraph() for _ in calls]
    times: list[list[float]] = [[] for _ in calls]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for call, graph in zip(calls, graphs, strict=True):
            call()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):  # loaders' threads go on
                for _ in range(REPEATS):
                    call()
        for _ in range(TURNS):
            for graph, taken in zip(graphs, times, strict=True):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record(stream)
                graph.replay()
                end.record(stream)
                end.synchronize()
                taken.append(begin.elapsed_time(end) / REPEATS)
    torch.cuda.current_stream(device).wait_stream(stream)
    return [min(taken) for taken in times]
