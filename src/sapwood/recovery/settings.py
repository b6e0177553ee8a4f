"""How to train: the switches of recovery, and the optimizer and the devices that follow from them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import parse_flag_from_env
from torch import nn

from sapwood.errors import explain
from sapwood.recovery.rates import Rate

MakeOptimizer = Callable[[list[dict[str, Any]], float], torch.optim.Optimizer]
OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda groups, lr, **more: torch.optim.SGD(groups, lr=lr, momentum=0.9, nesterov=True, **more),
    "adamw": lambda groups, lr, **more: torch.optim.AdamW(groups, lr=lr, **more),
}


@dataclass(frozen=True)
class Settings:
    """How to train; see ``recover`` for what each means."""

    lr: float
    optimizer: str | MakeOptimizer = "sgd"
    weight_decay: float = 5e-4
    rate: Rate = field(default_factory=Rate)
    clip: float | None = None
    mixed_precision: str = "no"
    accumulate: int = 1
    channels_last: bool = False
    compile: bool = False
    fused: bool = False
    graph: bool = False
    seed: int = 0
    cpu: bool = False
    repeatable: bool = False
    """Seed every generator there is at the start of each epoch: for runs that may be resumed."""

    def __post_init__(self) -> None:
        if isinstance(self.optimizer, str) and self.optimizer not in OPTIMIZERS:
            names = ", ".join(OPTIMIZERS)
            raise explain(f"{names}, or a function of (groups, lr)", repr(self.optimizer), "Try 'sgd'.", "optimizer")
        if not (_is_number(self.lr) and 0 < self.lr < math.inf):
            raise explain("a learning rate above 0", repr(self.lr), "Give the peak rate of training.", "lr")
        if not (isinstance(self.accumulate, int) and self.accumulate >= 1):
            raise explain("a whole number of batches", repr(self.accumulate), "1 steps after each.", "accumulate")
        if not (_is_number(self.weight_decay) and 0 <= self.weight_decay < math.inf):
            raise explain("a weight decay of at least 0", repr(self.weight_decay), "Try 5e-4.", "weight_decay")
        if self.clip is not None and not (_is_number(self.clip) and self.clip > 0):
            raise explain("a norm above 0", repr(self.clip), "For example clip=1.0.", "clip")
        if not isinstance(self.seed, int) or not 0 <= self.seed < 2**40:
            raise explain("a whole number of at least 0", repr(self.seed), "For example seed=0.", "seed")
        if self.mixed_precision not in ("no", "bf16", "fp16"):
            raise explain("no, bf16 or fp16", repr(self.mixed_precision), "bf16 is the safe one.", "mixed_precision")
        if self.graph and (self.accumulate > 1 or self.mixed_precision == "fp16"):
            got = f"accumulate={self.accumulate}, mixed_precision={self.mixed_precision!r}"
            raise explain("steps of one batch in bf16 or full precision", got, "Leave graph out.", "graph")


def require_unscaled(mixed_precision: str) -> None:
    """Zeros that may come back: gradients that are scaled cannot be laid aside while others are clipped."""
    if mixed_precision == "fp16":
        raise explain("bf16 or full precision", "fp16", "mixed_precision='bf16', or leave regrow out.", "regrow")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def make_accelerator(settings: Settings) -> Accelerator:
    """An Accelerator with these switches, also where an earlier one in this process had others."""
    state = AcceleratorState._shared_state
    if state and state.get("_mixed_precision") not in (None, settings.mixed_precision):
        AcceleratorState._reset_state(reset_partial_state=False)
    if PartialState._shared_state and PartialState().num_processes == 1:
        cpu = settings.cpu or parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.cuda.is_available()
        if cpu != (PartialState().device.type == "cpu"):
            AcceleratorState._reset_state(reset_partial_state=True)
    return Accelerator(mixed_precision=settings.mixed_precision, cpu=settings.cpu)


def _steps_alone(optimizer: Any) -> torch.optim.Optimizer:
    """Refuse what needs more than gradients: torch's LBFGS runs the model itself, several times a step."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise explain(
            "a torch optimizer", type(optimizer).__name__, "Return one from optimizer(groups, lr).", "optimizer"
        )
    needed = inspect.signature(optimizer.step).parameters.get("closure")
    if needed is not None and needed.default is inspect.Parameter.empty:
        got = f"{type(optimizer).__name__}, whose step() needs a closure"
        raise explain("an optimizer that steps by gradients alone", got, "Use sgd or adamw.", "optimizer")
    return optimizer


def make_optimizer(model: nn.Module, settings: Settings, device: torch.device) -> torch.optim.Optimizer:
    """Weight decay on matrices and kernels, none on norms and biases."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise explain("parameters that require gradients", "none", "Set requires_grad on some.", "recover")
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]
    groups = [g for g in groups if g["params"]]
    if not isinstance(settings.optimizer, str):
        return _steps_alone(settings.optimizer(groups, settings.lr))
    more: dict[str, bool] = {}
    if device.type == "cuda" and (settings.fused or settings.graph):
        if not any(hasattr(p, "to_local") for p in trained):
            model.to(device)  # where fused kernels look for it
        more = {"fused": True} | ({"capturable": True} if settings.graph and settings.optimizer != "sgd" else {})
    return OPTIMIZERS[settings.optimizer](groups, settings.lr, **more)
