"""Convolutions of few channels in training: by our kernels where these are faster than cuDNN's, found by trying.

cuDNN's kernels are made for wide layers; with 16 channels, or an odd number of them as after a cut, they take several
times what the memory traffic needs. It is the same function either way. Only in captured steps, where calls cost
nothing.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Tensor = torch.Tensor
Ours = tuple[bool, bool, bool]
"""Which are ours: the output, the gradient of the input, the gradient of the weight."""
NONE: Ours = (False, False, False)

WIDEST, TAPS, MOST_KINDS = 64, 9, 16
"""Channels and taps of what is tried; with more kinds of convolutions than this, trying takes too long."""
DEVICES: tuple[str, ...] = ()
"""Where they are tried: nowhere yet, until a GPU has run the tests of them (tests/test_gpu_training.py)."""
GAIN, ERROR = 0.9, 0.02
"""Ours are taken when they take at most this share of the time, and differ by no more than this."""
_KNOWN: dict[tuple[Any, ...], Ours] = {}


class Narrow(torch.autograd.Function):
    """A convolution of stride 1 that keeps sizes, without a bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ours: Ours) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.ours = ours
        if ours[0]:
            return torch.ops.sapwood.narrow_product(x, weight, False)  # type: ignore[no-any-return]
        return F.conv2d(x, weight, padding=_padding(weight))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        wanted = [need and not own for need, own in zip(ctx.needs_input_grad[:2], ctx.ours[1:], strict=True)]
        left, right = None, None
        if any(wanted):
            left, right, _ = torch.ops.aten.convolution_backward(
                grad, x, weight, None, [1, 1], _padding(weight), [1, 1], False, [0, 0], 1, [*wanted, False]
            )
        if ctx.needs_input_grad[0] and ctx.ours[1]:
            left = torch.ops.sapwood.narrow_product(grad, weight, True)
        if ctx.needs_input_grad[1] and ctx.ours[2]:
            right = torch.ops.sapwood.narrow_weights(x, grad, weight)
        return left, right, None


def _padding(weight: Tensor) -> list[int]:
    return [weight.shape[2] // 2, weight.shape[3] // 2]


@functools.lru_cache
def _computed(ours: Ours) -> Callable[..., Tensor]:
    """In place of ``Conv2d._conv_forward``: one function for all that are alike, so that they are compiled once."""

    def narrow(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight = x.to(dtype), weight.to(dtype)
        out: Tensor = Narrow.apply(x, weight, ours)  # type: ignore[no-untyped-call]
        return out if bias is None else out + bias.to(out.dtype).view(1, -1, 1, 1)

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
        found = dict.fromkeys(m for model in models for m in model.modules() if is_narrow(m))
        self.seen: dict[nn.Module, tuple[Any, ...] | None] = dict.fromkeys(found)
        self.chosen: dict[nn.Module, Ours] = {}
        self.looked = False

    def look(self, call: Callable[[], Any]) -> None:
        """See what the convolutions get while ``call`` runs, and try each kind. What it raises is of no matter here."""
        self.looked = True
        if not self.seen or not DEVICES:
            return
        hooks = [m.register_forward_pre_hook(self._note) for m in self.seen]
        try:
            call()
        except Exception:  # models that compute something else when they do not train
            self.seen = dict.fromkeys(self.seen)
        finally:
            for hook in hooks:
                hook.remove()
        kinds = {kind for kind in self.seen.values() if kind is not None}
        if len(kinds - _KNOWN.keys()) <= MOST_KINDS and _kernels_load():
            for kind in kinds - _KNOWN.keys():
                _KNOWN[kind] = tried(*kind)
        self.chosen = {m: o for m, kind in self.seen.items() if (o := _KNOWN.get(kind or (), NONE)) != NONE}

    def _note(self, module: Any, args: tuple[Any, ...]) -> None:
        x = args[0]
        dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
        fits = x.dim() == 4 and max(x.numel(), x.numel() // x.shape[1] * module.out_channels) < 2**31
        good = fits and x.device.type in DEVICES and dtype in (torch.bfloat16, torch.float16)
        self.seen[module] = (x.device, dtype, tuple(x.shape), tuple(module.weight.shape)) if good else None

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Computed so while this lasts."""
        for module, ours in self.chosen.items():
            vars(module)["_conv_forward"] = _computed(ours)
        try:
            yield
        finally:
            for module in self.chosen:
                vars(module).pop("_conv_forward", None)


@functools.lru_cache
def _kernels_load() -> bool:
    try:
        importlib.import_module("sapwood.recovery.narrow_kernels")
    except Exception:  # no Triton, or one that does not fit
        return False
    return True


def tried(device: torch.device, dtype: torch.dtype, size: tuple[int, ...], window: tuple[int, ...]) -> Ours:
    """Which of the three are faster by our kernels, on inputs and weights of these sizes."""
    from triton.testing import do_bench_cudagraph

    def some(*shape: int) -> Tensor:
        made: Tensor = torch.randn(shape, device=device) / window[1] ** 0.5
        return made.to(dtype).contiguous(memory_format=torch.channels_last)

    x, weight, kernels = some(*size), some(*window), torch.ops.sapwood
    grad = some(size[0], window[0], *size[2:])
    padding = _padding(weight)

    def back(wanted: list[bool]) -> Any:
        places: Any = ([1, 1], padding, [1, 1], False, [0, 0], 1)
        return torch.ops.aten.convolution_backward(grad, x, weight, None, *places, [*wanted, False])

    pairs: list[tuple[Callable[[], Tensor], Callable[[], Tensor]]] = [
        (lambda: F.conv2d(x, weight, padding=padding), lambda: kernels.narrow_product(x, weight, False)),
        (lambda: back([True, False])[0], lambda: kernels.narrow_product(grad, weight, True)),
        (lambda: back([False, True])[1], lambda: kernels.narrow_weights(x, grad, weight)),
    ]
    found = []
    for theirs, ours in pairs:
        try:
            wanted, got = theirs().float(), ours().float()
            right = bool((wanted - got).norm() <= ERROR * wanted.norm())
            found.append(right and do_bench_cudagraph(ours, rep=10) <= GAIN * do_bench_cudagraph(theirs, rep=10))
        except Exception:  # what cannot be compiled or run here is not taken
            found.append(False)
    return found[0], found[1], found[2]
