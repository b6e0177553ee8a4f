"""A callback for Lightning's Trainer: zeros that stay, or masks that grow while it trains."""

from __future__ import annotations

import importlib
import math
import sys
from typing import Any, Unpack

from torch import nn

from sapwood.errors import explain
from sapwood.recovery.gradual import Choices, Upkeep
from sapwood.types import Budget

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
"""The same library under two names, with classes of their own."""


def _bases() -> tuple[Any, ...]:
    """``Callback`` of each that is imported already, else of the first that is installed."""
    if loaded := [module for n in PACKAGES if (module := sys.modules.get(n)) is not None]:
        return tuple(m.Callback for m in loaded)
    for name in PACKAGES:
        try:
            return (importlib.import_module(name).Callback,)
        except ImportError as error:
            cause = error
    remedy = "pip install 'sapwood[lightning]'"
    raise explain("lightning or pytorch_lightning to be installed", str(cause), remedy, "SapwoodCallback") from cause


class SapwoodCallback(*_bases()):  # type: ignore[misc]
    """``Trainer(callbacks=[SapwoodCallback()])`` holds the zeros of a masked model, or of masked parts of it.

    ``SapwoodCallback(Budget(sparsity=0.9))`` masks the model while it trains; ``schedule``, ``rounds``, ``begin``,
    ``end`` and the options of ``mask_`` are those of ``Gradual``. A resumed training goes on where it was.
    """

    def __init__(self, budget: Budget | None = None, **choices: Unpack[Choices]) -> None:
        super().__init__()
        self.upkeep = Upkeep(budget, choices)
        self._steps = 1

    def on_train_start(self, trainer: Any, pl_module: nn.Module) -> None:
        if self.upkeep.gradual is not None:
            self._steps = _all_steps(trainer)
        by_hand = not pl_module.automatic_optimization  # its clipping, too
        self.upkeep.start(pl_module, trainer.optimizers, trainer.global_step / self._steps, gradients=by_hand)

    def on_before_optimizer_step(self, trainer: Any, pl_module: nn.Module, optimizer: Any) -> None:
        self.upkeep.clear_gradients()  # for who clips after this: the trainer, or the module itself

    def on_train_batch_end(self, trainer: Any, pl_module: nn.Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.upkeep.step(pl_module, trainer.optimizers, trainer.global_step / self._steps)

    def on_train_end(self, trainer: Any, pl_module: nn.Module) -> None:
        self.upkeep.end()


def _all_steps(trainer: Any) -> int:
    """How many steps the optimizers will make; Lightning counts those of several together."""
    steps = trainer.estimated_stepping_batches * len(trainer.optimizers)
    if trainer.max_steps > 0:
        steps = min(steps, trainer.max_steps)
    if not math.isfinite(steps) or steps < 1:
        got = f"max_epochs={trainer.max_epochs}, max_steps={trainer.max_steps}"
        raise explain("a training whose length is known", got, "Give Trainer max_steps.", "SapwoodCallback")
    return int(steps)
