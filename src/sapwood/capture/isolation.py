"""Leave the user's surroundings as they were: random states, inference mode, inputs, global caches."""

from __future__ import annotations

import contextlib
import functools
import gc
import random
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Random number generators go on as if nothing had happened; inference mode is left for a while."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        with torch.inference_mode(False):
            yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Put off the search for garbage: with large libraries loaded it takes longer than what it would interrupt."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def reseed() -> None:
    """The same random numbers for each of two forwards that are to be compared."""
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """No TF32 on GPUs while values are compared: it would hide small errors and look like some."""
    places: list[Any] = [torch.backends.cuda.matmul, getattr(torch.backends.cudnn, "conv", None)]
    places = [p for p in places if hasattr(p, "fp32_precision")]
    saved = [p.fp32_precision for p in places]
    try:
        for place in places:
            place.fp32_precision = "ieee"
        yield
    finally:
        for place, value in zip(places, saved, strict=True):
            place.fp32_precision = value


def copied(inputs: Any) -> Any:
    """Inputs that a forward may change in place."""
    return pytree.tree_map_only(torch.Tensor, lambda t: t.detach().clone(), inputs)


def scrub(alive: Callable[[], list[torch.Tensor]]) -> None:
    """Take tensors without data out of caches that a model filled while it was watched.

    Functions under ``lru_cache`` and lists or dicts outside the model outlive the trace; the user's own
    forward must not find our tensors in them.
    """
    if not alive():
        return
    gc.collect()
    tensors = tuple(alive())  # a tuple: lists that hold one are emptied of it
    theirs = {id(t) for t in tensors}

    def holds(value: Any) -> bool:
        return id(value) in theirs or (type(value) is tuple and any(id(v) in theirs for v in value))

    for holder in _holders(tensors):
        if isinstance(holder, functools._lru_cache_wrapper):
            holder.cache_clear()
        elif isinstance(holder, dict):
            for key in [k for k, v in holder.items() if holds(v)]:
                del holder[key]
        elif isinstance(holder, list):
            holder[:] = [v for v in holder if not holds(v)]


def _holders(tensors: tuple[torch.Tensor, ...]) -> list[Any]:
    """What keeps tensors alive, looking through tuples."""
    found = [h for h in gc.get_referrers(*tensors) if h is not tensors] if tensors else []
    through = [h for h in found if type(h) is tuple]
    return [h for h in found if type(h) is not tuple] + (gc.get_referrers(*through) if through else [])


def forget_locals(error: BaseException | None) -> None:
    """Let go of what the frames of an error hold, through all of its causes."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
