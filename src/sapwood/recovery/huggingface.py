"""A callback for transformers' Trainer: zeros that stay, or masks that grow while it trains.

With ``load_best_model_at_end`` the best checkpoint gets the zeros of the last one: a gradually masked model has all
zeros asked for, but a checkpoint from before ``end`` has not been trained with them. Evaluate from ``end`` on only
(``eval_delay``), so that the best is one of those.
"""

from __future__ import annotations

import importlib
from typing import Any, Unpack

from torch import nn

from sapwood.errors import explain
from sapwood.recovery.gradual import Choices, Upkeep
from sapwood.types import Budget


def _base() -> Any:
    try:
        return importlib.import_module("transformers").TrainerCallback
    except ImportError as error:
        remedy = "pip install 'sapwood[transformers]'"
        raise explain("transformers to be installed", str(error), remedy, "SapwoodCallback") from error


class SapwoodCallback(_base()):  # type: ignore[misc]
    """``Trainer(..., callbacks=[SapwoodCallback()])`` holds the zeros of a masked model through the training.

    ``SapwoodCallback(Budget(sparsity=0.9))`` masks the model while it trains; ``schedule``, ``rounds``, ``begin``,
    ``end`` and the options of ``mask_`` are those of ``Gradual``. A resumed training goes on where it was.
    """

    def __init__(self, budget: Budget | None = None, **choices: Unpack[Choices]) -> None:
        super().__init__()
        self.upkeep = Upkeep(budget, choices)

    def on_train_begin(
        self, args: Any, state: Any, control: Any, *, model: nn.Module, optimizer: Any, **others: Any
    ) -> None:
        self.upkeep.start(model, optimizer, _progress(state), gradients=bool(args.max_grad_norm))

    def on_step_end(
        self, args: Any, state: Any, control: Any, *, model: nn.Module, optimizer: Any, **others: Any
    ) -> None:
        self.upkeep.step(model, optimizer, _progress(state))

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.upkeep.end()


def _progress(state: Any) -> float:
    return float(state.global_step / max(1, state.max_steps))
