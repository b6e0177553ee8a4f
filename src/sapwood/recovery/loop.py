"""The training loop of recovery, on Hugging Face Accelerate: one device or many, with switches for speed.

A loop goes epoch by epoch; every epoch starts from a seed of its own, so that a run that was stopped between two
epochs goes on exactly as if it had not been.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import parse_flag_from_env, send_to_device
from torch import nn

from sapwood.capture.run import is_meta
from sapwood.capture.skeleton import unwrap
from sapwood.errors import explain
from sapwood.masking.hold import Hold, hold, noted_masks, partly_zero
from sapwood.masking.targets import maskable
from sapwood.recovery.distillation import Distillation
from sapwood.recovery.rates import Rate
from sapwood.scoring.data import Loss, default_loss
from sapwood.surgery.optimizer import cut_optimizer
from sapwood.types import Plan

MakeOptimizer = Callable[[list[dict[str, Any]], float], torch.optim.Optimizer]
OPTIMIZERS: Mapping[str, MakeOptimizer] = {
    "sgd": lambda groups, lr: torch.optim.SGD(groups, lr=lr, momentum=0.9, nesterov=True),
    "adamw": lambda groups, lr: torch.optim.AdamW(groups, lr=lr),
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


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


class Loop:
    """A model, its data and its optimizer, prepared for the devices there are."""

    def __init__(
        self,
        model: nn.Module,
        loader: Any,
        settings: Settings,
        *,
        loss: Loss | None = None,
        teacher: nn.Module | None = None,
        temperature: float = 4.0,
        share: float = 0.5,
        accelerator: Accelerator | None = None,
    ) -> None:
        self.settings, self.loss = settings, loss or default_loss
        self.accelerator = accelerator or make_accelerator(settings)
        _require_model(model)
        self._given, self._given_generator = loader, getattr(loader, "generator", None)
        self._order = _own_order(loader)
        self.loader = _prepared(loader, self.accelerator)
        if len(self.loader) == 0:
            got = f"fewer than the {self.accelerator.num_processes} processes"
            raise explain("a batch for every process", got, "Give more data or smaller batches.", "loader")
        if teacher is not None:
            _require_model(teacher)
        self.teacher = None if teacher is None else teacher.to(self.accelerator.device)
        self._soften = (temperature, share)
        self._adopt(model, _make_optimizer(model, settings))

    def _adopt(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Prepare a model and its optimizer; called anew after a cut."""
        self.plain = model
        if self.settings.channels_last:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if is_sharded(model):
            self.model = model
            self.optimizer = self.accelerator.prepare_optimizer(optimizer)
        else:
            self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        if self.settings.compile:
            self.model = torch.compile(self.model)  # type: ignore[assignment]
        self.held: Hold | None = None
        self.rehold()
        self.distillation = None
        if self.teacher is not None:
            self.distillation = Distillation(self.model, self.teacher, *self._soften)

    def rehold(self) -> None:
        """Hold the zeros the model has now."""
        if self.held is not None:
            self.held.release()
        masked = noted_masks(self.model) or any(partly_zero(p.detach()) for p in maskable(self.plain).values())
        self.held = hold(self.model, self.optimizer) if masked else None

    def let_go(self) -> None:
        """Remove what was hooked to the model and its optimizer."""
        if self.held is not None:
            self.held.release()
        if self.distillation is not None:
            self.distillation.release()
        _unwrap_forward(self.plain)

    def swap(self, small: nn.Module, plan: Plan) -> None:
        """Go on with the cut model; the optimizer's state follows the cut."""
        inner = self.optimizer.optimizer
        after = cut_optimizer(inner, self.plain, small.to(self.accelerator.device), plan)
        self.let_go()
        self.accelerator._models.clear()
        self.accelerator._optimizers.clear()
        self._adopt(small, after)

    @property
    def steps_per_epoch(self) -> int:
        return max(1, math.ceil(len(self.loader) / self.settings.accumulate))

    def epoch(self, number: int, first_step: int, total: int) -> Iterator[dict[str, Any]]:
        """Train one epoch, from its own seed; yields what happened after each step of the optimizer."""
        self._seed(number)
        step, losses, count, every = first_step, [], len(self.loader), self.settings.accumulate
        for index, batch in enumerate(self.loader):
            if step >= total or index >= count:
                return
            if index == 0 and self.accelerator.num_processes > 1:  # the order is shared, dropout is not
                torch.manual_seed(torch.initial_seed() + 7919 * (1 + self.accelerator.process_index))
            self.model.train()
            rate = self.settings.lr * self.settings.rate.at((step + 0.5) / total)
            for group in self.optimizer.param_groups:
                group["lr"] = rate * group.get("lr_scale", 1.0)
            last = (index + 1) % every == 0 or index + 1 == count
            together = every if index < count - count % every else count % every
            with contextlib.nullcontext() if last else self.accelerator.no_sync(self.model):
                with self.accelerator.autocast():
                    loss = _require_loss(self.loss(self.model, self._laid_out(batch)))
                    if self.distillation is not None:
                        loss = self.distillation.blend(loss)
                self.accelerator.backward(loss / together)
            losses.append(loss.detach())
            if last:
                if self.settings.clip is not None:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), self.settings.clip)
                self.optimizer.step()
                self.optimizer.zero_grad()
                step += 1
                yield {"step": step, "lr": rate, "losses": losses}
                losses = []

    def _seed(self, number: int) -> None:
        seed = self.settings.seed * 1_000_003 + number
        torch.manual_seed(seed)
        if self._order is not None:
            self._order.generator.manual_seed(seed)
        if self.settings.repeatable:
            random.seed(seed)
            np.random.seed(seed % 2**32)
            for own in (getattr(getattr(self._given, "sampler", None), "generator", None), self._given_generator):
                if isinstance(own, torch.Generator):
                    own.manual_seed(seed)
        if hasattr(self.loader, "set_epoch"):
            self.loader.set_epoch(number)

    def _laid_out(self, batch: Any) -> Any:
        if not self.settings.channels_last:
            return batch
        if isinstance(batch, torch.Tensor):
            return batch.contiguous(memory_format=torch.channels_last) if batch.dim() == 4 else batch
        if isinstance(batch, (tuple, list)):
            return type(batch)(self._laid_out(b) for b in batch)
        return batch

    def view(self) -> nn.Module:
        """The model as it is now, for validation; training goes on with it."""
        return (
            self.model
            if is_sharded(self.model)
            else unwrap(self.accelerator.unwrap_model(self.model, keep_torch_compile=False))
        )

    def finish(self) -> nn.Module:
        """The plain model, trained, without wrappers or hooks."""
        self.let_go()
        if self._order is not None:
            self._order.generator = None
        self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False, keep_torch_compile=False)
        for module in self.plain.modules():
            vars(module).pop("_is_accelerate_prepared", None)
        return self.view()


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


def _unwrap_forward(model: nn.Module) -> None:
    """Take off what Accelerate puts around forward for mixed precision."""
    original = vars(model).pop("_original_forward", None)
    if original is not None:
        vars(model).pop("forward", None)


def _require_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise explain("a torch.nn.Module", type(model).__name__, "Pass the model itself.", "recover")
    if is_meta(model):
        raise explain("weights with values", "weights on the meta device", "Load the weights first.", "recover")


def _require_loss(loss: Any) -> torch.Tensor:
    if isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.requires_grad:
        return loss
    got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
    raise explain("loss(model, batch) to return one number with a gradient", got, "Return the mean loss.", "loss")


class _Batches:
    """Batches that do not come from a DataLoader: moved to the device, dealt out over the processes."""

    def __init__(self, batches: Any, accelerator: Accelerator) -> None:
        self.batches, self.accelerator = batches, accelerator

    def __len__(self) -> int:
        return int(len(self.batches) // self.accelerator.num_processes)

    def __iter__(self) -> Iterator[Any]:
        number, own = self.accelerator.num_processes, self.accelerator.process_index
        for index, batch in enumerate(self.batches):
            if index % number == own and index // number < len(self):
                yield send_to_device(batch, self.accelerator.device)


def _own_order(loader: Any) -> Any:
    """The sampler of a loader that shuffles, with a generator of ours until training ends; None where it has one."""
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, torch.utils.data.RandomSampler) or sampler.generator is not None:
        return None
    sampler.generator = torch.Generator()
    return sampler


def _prepared(loader: Any, accelerator: Accelerator) -> Any:
    if isinstance(loader, torch.utils.data.DataLoader):
        return accelerator.prepare_data_loader(loader)
    return _Batches(loader, accelerator)


def is_sharded(model: nn.Module) -> bool:
    """Whether a user has sharded the model already, with ``fully_shard``."""
    return any(hasattr(p, "to_local") for p in model.parameters())


def _make_optimizer(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """Weight decay on matrices and kernels, none on norms and biases."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise explain("parameters that require gradients", "none", "Set requires_grad on some.", "recover")
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]
    make = OPTIMIZERS[settings.optimizer] if isinstance(settings.optimizer, str) else settings.optimizer
    return make([g for g in groups if g["params"]], settings.lr)
