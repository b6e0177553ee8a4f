"""A checkpoint for ``prune_and_recover``: killed at any moment, the same call goes on from the last one."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from sapwood.errors import explain
from sapwood.pipeline.checkpoints import Checkpoint, fill, fill_optimizer, read_checkpoint, write_checkpoint
from sapwood.recovery.session import Session
from sapwood.surgery.cut import cut
from sapwood.types import Plan

APART = 20.0
"""Seconds from one checkpoint to the next, at least."""


class Keeper:
    """Writes where a session stands after an epoch, not too often; ``what`` tells one call from another."""

    def __init__(self, path: str | Path, what: Any) -> None:
        self.path, self.digest = Path(path), hashlib.sha256(repr(what).encode()).hexdigest()[:16]
        self._last = time.monotonic()

    def found(self) -> Checkpoint | None:
        there = read_checkpoint(self.path)
        if there is not None and there.recipe != self.digest:
            got, remedy = "one of a call with other arguments", "Name another file, or remove this one."
            raise explain("a checkpoint of this call", got, remedy, str(self.path))
        return there

    def keep(self, session: Session, plan: Plan) -> None:
        if session.done or time.monotonic() - self._last < APART:
            return
        loop = session.loop
        write_checkpoint(
            self.path, self.digest, "recover", loop.plain, plan, {}, loop.optimizer.optimizer, session.position(),
            loop.hidden,
        )  # fmt: skip
        self._last = time.monotonic()

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


def told(value: Any) -> Any:
    """What a value says in any process: functions by name, of tensors and other objects the kind only."""
    if isinstance(value, (str, int, float, type(None))):
        return value
    if isinstance(value, Mapping):
        return sorted((str(key), told(one)) for key, one in value.items())
    if isinstance(value, (tuple, list)):
        return [told(one) for one in value]
    name = value if callable(value) and hasattr(value, "__qualname__") else type(value)
    return f"{name.__module__}.{name.__qualname__}"


def restored(model: nn.Module, found: Checkpoint | None) -> nn.Module:
    """A copy of the model, cut and filled as the checkpoint says."""
    copy = cut(model, Plan({}, {}, {}) if found is None else found.plan)
    if found is not None:
        fill(copy, found)
    return copy


def go_on(session: Session, found: Checkpoint | None) -> None:
    if found is not None and found.position is not None:
        fill_optimizer(session.loop.plain, session.loop.optimizer.optimizer, found.optimizer)
        session.go_to(found.position)
        if found.hidden:
            session.loop.regrow(found.hidden)
