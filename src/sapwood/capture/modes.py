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
from sapwood.capture.registry import apply_rule
from sapwood.capture.sizes import strip
from sapwood.capture.tracker import Tracker

_SHAPE = torch.Tensor.shape
FUSED = {"scaled_dot_product_attention": ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")}
"""Functions that run as one kernel, and their arguments by position."""
_SIZE_METHODS = {"size", "numel", "nelement", "__len__"}


class WatchOperators(TorchDispatchMode):
    """Runs each operator and tells the tracker."""

    supports_higher_order_operators = True

    def __init__(self, tracker: Tracker) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tracker = tracker

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        apply_rule(self.tracker, func, args, kwargs or {}, out)
        return out


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


@contextlib.contextmanager
def plain_paths() -> Iterator[None]:
    """Switch off fused paths that hide operators, and let functional code run openly."""
    names = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    # a batch of one, in training mode, is no reason to stop a trace
    replaced = {**dict.fromkeys(names, lambda *_: False), "_verify_batch_size": lambda size: None}
    saved = {name: getattr(F, name) for name in replaced}
    fast = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        for name, function in replaced.items():
            setattr(F, name, function)
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        for name, function in saved.items():
            setattr(F, name, function)
        torch.backends.mha.set_fastpath_enabled(fast)
