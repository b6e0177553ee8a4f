"""The two modes a model runs under while it is watched.

``WatchOperators`` sees every ATen operator and applies its rule. ``WatchFunctions`` sees the Python
calls above it, hands out tagged shapes and reads tagged sizes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from sapwood.capture import rules  # noqa: F401  (fills the registry)
from sapwood.capture.functions import HANDLERS, hints_from, sizes_of
from sapwood.capture.registry import apply_rule, note_writes
from sapwood.capture.sizes import strip
from sapwood.capture.tracker import Tracker

_SHAPE = torch.Tensor.shape
FUSED = {"scaled_dot_product_attention": ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")}
"""Functions that run as one kernel, and their arguments by position."""
_aten = torch.ops.aten
HEAVY = {_aten.convolution, _aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm, _aten.linear}
HEAVY |= {_aten.gelu, _aten.silu, _aten.max_pool2d_with_indices}
IN_PLACE = {_aten.relu_, _aten.silu_, _aten.gelu_, _aten.hardtanh_, _aten.hardswish_, _aten.add_, _aten.mul_}
MUCH = 100_000
"""Elements from which on it is quicker to find the shape of a result than the result."""
RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
_VALUES = {"tolist", "numpy", "__array__"}
"""Functions that hand out values without calling an operator."""
_SIZE_METHODS = {"size", "numel", "nelement", "__len__"}


class WatchOperators(TorchDispatchMode):
    """Runs each operator and tells the tracker."""

    supports_higher_order_operators = True

    def __init__(self, tracker: Tracker) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tracker = tracker

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        note_writes(self.tracker, func, args, kwargs)
        out = func(*args, **kwargs)
        apply_rule(self.tracker, func, args, kwargs, out)
        return out


class Hollow(TorchDispatchMode):
    """Gives zeros of the right shape where there would be much to compute, if nobody looks at the result."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.used = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = getattr(func, "_overloadpacket", None)
        if kind not in HEAVY and kind not in IN_PLACE and kind is not _aten.native_batch_norm:
            return func(*args, **(kwargs or {}))
        given = [a for a in args if isinstance(a, torch.Tensor)]
        if sum(t.numel() for t in given) < MUCH:
            return func(*args, **(kwargs or {}))
        self.used = True
        if kind in IN_PLACE:
            return args[0]
        device = given[0].device
        if kind is _aten.native_batch_norm:  # its shapes are quicker told than found
            x, training = args[0], args[5]
            return (_zeros(x, device), *(x.new_zeros(x.shape[1] if training else 0) for _ in range(2)))
        out = func(*[_without_values(a) if isinstance(a, torch.Tensor) else a for a in args], **(kwargs or {}))
        return tuple(_zeros(t, device) for t in out) if isinstance(out, tuple) else _zeros(out, device)


def _zeros(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device).zero_()


def _without_values(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


class WatchFunctions(TorchFunctionMode):
    """Hands out tagged shapes; reads tagged sizes from the arguments of functions."""

    def __init__(self, tracker: Tracker) -> None:
        super().__init__()
        self.tracker = tracker

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__self__", None) is _SHAPE:
            return sizes_of(self.tracker, args[0], func(*args, **kwargs))
        name = getattr(func, "__name__", "")
        if name in _VALUES:
            self.tracker.swayed = self.tracker.swayed or self.tracker.noting
        if name in _SIZE_METHODS and args and isinstance(args[0], torch.Tensor):
            return self._size(name, args, kwargs)
        self.tracker.hints, before = hints_from(name, args, kwargs), len(self.tracker.calls)
        plain, named = [strip(a) for a in args], {k: strip(v) for k, v in kwargs.items()}
        out = func(*plain, **named)
        self.tracker.hints = {}
        if name in FUSED:  # one kernel, whatever it was taken apart into to be watched
            del self.tracker.calls[before:]
            given = dict(zip(FUSED[name], plain, strict=False)) | named
            self.tracker.note_call(name, func, given, out)
        if name in HANDLERS:
            HANDLERS[name](self.tracker, args, kwargs, out)
        return out

    def _size(self, name: str, args: Any, kwargs: Any) -> Any:
        shape = sizes_of(self.tracker, args[0], list(args[0].shape))
        if name == "size":
            dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
            return shape if dim is None else shape[int(strip(dim))]
        if name == "__len__":
            return len(args[0])
        total: Any = 1
        for size in shape:
            total = total * size
        return total


def _step_by_step(function: Any) -> Any:
    """A recurrent layer that calls the operators of each step, rather than one for them all."""

    def run(*args: Any) -> Any:
        (enabled, *_) = torch.backends.mkldnn.set_flags(_enabled=False)
        try:
            return function(*args)
        finally:
            torch.backends.mkldnn.set_flags(_enabled=enabled)

    return run


@contextlib.contextmanager
def plain_paths() -> Iterator[None]:
    """Switch off fused paths that hide operators, and let functional code run openly."""
    names = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    # a batch of one, in training mode, is no reason to stop a trace
    replaced = {**dict.fromkeys(names, lambda *_: False), "_verify_batch_size": lambda size: None}
    saved = {name: getattr(F, name) for name in replaced}
    recurrent = {name: getattr(torch._VF, name) for name in RECURRENT}
    fast = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        for name, function in replaced.items():
            setattr(F, name, function)
        for name, function in recurrent.items():
            setattr(torch._VF, name, _step_by_step(function))
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        for name, function in saved.items():
            setattr(F, name, function)
        for name, function in recurrent.items():
            setattr(torch._VF, name, function)
        torch.backends.mha.set_fastpath_enabled(fast)
