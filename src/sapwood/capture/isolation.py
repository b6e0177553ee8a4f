"""Leave the user's surroundings as they were: random states, inference mode, inputs, global caches."""

from __future__ import annotations

import contextlib
import functools
import gc
import random
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


def reseed() -> None:
    """The same random numbers for each of two forwards that are to be compared."""
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)


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
    for tensor in tuple(alive()):  # a tuple: lists that hold one are emptied of it
        for holder in _holders(tensor):
            if isinstance(holder, functools._lru_cache_wrapper):
                holder.cache_clear()
            elif isinstance(holder, dict):
                for key in [k for k, v in holder.items() if _holds(v, tensor)]:
                    del holder[key]
            elif isinstance(holder, list):
                holder[:] = [v for v in holder if not _holds(v, tensor)]


def _holders(tensor: Any) -> list[Any]:
    """What keeps a tensor alive, looking through tuples."""
    found = []
    for holder in gc.get_referrers(tensor):
        found += gc.get_referrers(holder) if type(holder) is tuple else [holder]
    return found


def _holds(value: Any, tensor: torch.Tensor) -> bool:
    return value is tensor or (type(value) is tuple and any(v is tensor for v in value))
