"""Tensors with shapes but no data, to run models on at no cost."""

from __future__ import annotations

import contextlib
import logging
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from sapwood.capture.isolation import forget_locals, scrub
from sapwood.capture.skeleton import rebuild

Result = TypeVar("Result")


class _Remembering(FakeTensorMode):
    """Knows which of its tensors are still alive."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.made: list[weakref.ref[torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, FakeTensor):
                self.made.append(weakref.ref(tensor))
        return out

    def alive(self) -> list[torch.Tensor]:
        return [tensor for tensor in (made() for made in self.made) if tensor is not None]


def in_fake_mode(function: Callable[[FakeTensorMode], Result]) -> Result:
    """Call a function under a mode of tensors without data; its result must not hold any."""
    mode = _Remembering()
    try:
        with _silenced(), mode, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return function(mode)
    except BaseException as error:
        forget_locals(error)
        raise
    finally:
        scrub(mode.alive)


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """Torch's own log of what failed on such tensors is not for our users."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


def fake(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without data; one from the meta device plays that it is on the CPU."""
    if tensor.is_meta:
        with mode:
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    else:
        made = mode.from_tensor(tensor)
    return made


def fake_inputs(mode: FakeTensorMode, inputs: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda t: fake(mode, t), inputs)


def fake_model(mode: FakeTensorMode, model: nn.Module) -> nn.Module:
    return rebuild(model, lambda _, tensor: fake(mode, tensor))
