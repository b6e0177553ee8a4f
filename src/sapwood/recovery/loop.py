"""The training loop of recovery, on Hugging Face Accelerate: one device or many, with switches for speed.

A loop goes epoch by epoch; every epoch starts from a seed of its own, so that a run that was stopped between two
epochs goes on exactly as if it had not been.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from sapwood.capture.run import is_meta
from sapwood.capture.skeleton import unwrap
from sapwood.errors import explain
from sapwood.masking.hold import Hold, held_weights, hold, noted_masks, partly_zero, plain_name
from sapwood.masking.regrow import Regrow
from sapwood.masking.targets import maskable
from sapwood.recovery.distillation import Distillation
from sapwood.recovery.fade import Fade
from sapwood.recovery.graphs import GraphedStep, graphed, set_rates
from sapwood.recovery.layout import align_gradients, align_state
from sapwood.recovery.loaders import own_order, prepared, seed_all
from sapwood.recovery.narrow import NarrowConvolutions
from sapwood.recovery.regions import Compiled
from sapwood.recovery.settings import MakeOptimizer, Settings, make_accelerator, make_optimizer, require_unscaled
from sapwood.scoring.data import Loss, default_loss
from sapwood.surgery.optimizer import cut_optimizer
from sapwood.types import Plan

__all__ = ["Loop", "MakeOptimizer", "Settings", "is_sharded"]


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
        share: float = 0.9,
        accelerator: Accelerator | None = None,
        changing: bool = False,
    ) -> None:
        """``changing``: widths will change soon, so that compiling waits until this is set to False."""
        self.settings, self.loss = settings, loss or default_loss
        self.accelerator = accelerator or make_accelerator(settings)
        _require_model(model)
        self._given, self._given_generator = loader, getattr(loader, "generator", None)
        self._order = own_order(loader)
        self.loader = prepared(loader, self.accelerator)
        if len(self.loader) == 0:
            got = f"fewer than the {self.accelerator.num_processes} processes"
            raise explain("a batch for every process", got, "Give more data or smaller batches.", "loader")
        if teacher is not None:
            _require_model(teacher)
        self.compiled: dict[str, Compiled] = {}
        self.teacher = None if teacher is None else self._ready(teacher)
        self._soften = (temperature, share)
        self.changing = changing
        self._adopt(model, make_optimizer(model, settings, self.accelerator.device))

    def _ready(self, teacher: nn.Module) -> nn.Module:
        """The teacher where, and laid out as, the student is."""
        teacher = teacher.to(self.accelerator.device)
        if self.settings.channels_last:
            teacher = teacher.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return self._compiled("teacher", teacher) if self.settings.compile else teacher

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
        self.compiled.pop("model", None)
        if self.settings.compile and not self.changing:
            self.model = self._compiled("model", self.model)
        self.held: Hold | None = None
        self.fading: Fade | None = None
        self.distillation = None
        if self.teacher is not None:
            self.distillation = Distillation(self.model, self.teacher, *self._soften)
        self.graphed: GraphedStep | None = None
        self.narrow: NarrowConvolutions | None = None
        if self.settings.graph:
            inner, processes = self.optimizer.optimizer, self.accelerator.num_processes
            self.graphed = graphed(self._whole_step, inner, self.accelerator.device, processes)
            self.narrow = self._narrow() if self.graphed is not None and not self.changing else None
        self.rehold()

    def _compiled(self, name: str, model: nn.Module) -> nn.Module:
        self.compiled[name] = Compiled(model)
        return self.compiled[name].model

    def rehold(self) -> None:
        """Hold the zeros the model has now."""
        noted = noted_masks(self.model)
        if self.held is not None and self.graphed is not None and len(noted) == len(self.held.held):
            self.held.renew()  # more zeros in the same weights
            return
        masked = noted or any(partly_zero(p.detach()) for p in maskable(self.plain).values())
        self._hold_by(hold(self.model, self.optimizer) if masked else None)

    def _hold_by(self, held: Hold | None) -> None:
        if self.held is not None:
            self.held.release()
        self.held = held
        if self.graphed is not None:
            self.graphed.reset()

    def remask(self, mask: Callable[[], object], weights: Mapping[str, torch.Tensor], last: bool = False) -> None:
        """Mask anew, these weights as they would be if none of them had been masked before; unless it is the last
        time, what is masked goes on learning."""
        if isinstance(self.held, Regrow):
            self.held.reveal()
        whole = {plain_name(name): weight.detach().clone() for name, weight in weights.items()}
        mask()
        if last:
            self._hold_by(hold(self.model, self.optimizer))
        else:
            self.regrow(whole)

    def regrow(self, values: Mapping[str, torch.Tensor]) -> None:
        """Hold the zeros the model has now, and let those of the weights named go on from these values."""
        require_unscaled(self.accelerator.mixed_precision)
        growing = self.held if isinstance(self.held, Regrow) else None
        if growing is None:
            growing = Regrow(held_weights(self.model), self.optimizer.optimizer, values)
            self._hold_by(growing)
        growing.hide(values)

    @property
    def hidden(self) -> dict[str, torch.Tensor]:
        """What zeros would be that may come back."""
        return dict(self.held.hidden) if isinstance(self.held, Regrow) else {}

    def fade(self, plan: Plan, steps: int, done: int = 0) -> None:
        """Let what reads the channels that the plan removes fade out over so many steps."""
        self.fading = Fade(self.plain, plan, steps, self.optimizer.optimizer)
        self.fading.done = done
        if self.graphed is not None:
            self.graphed.reset()

    def let_go(self) -> None:
        """Remove what was hooked to the model and its optimizer, and what was captured of them."""
        for part in (self.held, self.fading, self.distillation):
            if part is not None:
                part.release()
        self.graphed = None
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
        align_state(self.optimizer)
        step, losses, count, every = first_step, [], len(self.loader), self.settings.accumulate
        for index, batch in enumerate(self.loader):
            if step >= total or index >= count:
                return
            if index == 0 and self.accelerator.num_processes > 1:  # the order is shared, dropout is not
                torch.manual_seed(torch.initial_seed() + 7919 * (1 + self.accelerator.process_index))
            rate = self.settings.lr * self.settings.rate.at((step + 0.5) / total)
            set_rates(self.optimizer, rate, None if self.graphed is None else self.accelerator.device)
            last = (index + 1) % every == 0 or index + 1 == count
            if last and self.fading is not None:
                self.fading.advance()
            if self.graphed is not None:
                losses.append(self.graphed(batch))
            else:
                together = every if index < count - count % every else count % every
                with contextlib.nullcontext() if last else self.accelerator.no_sync(self.model):
                    losses.append(self._gradients(batch, together))
            if last:
                if self.graphed is None:
                    self._update()
                step += 1
                yield {"step": step, "lr": rate, "losses": losses}
                losses = []

    def _gradients(self, batch: Any, together: int) -> torch.Tensor:
        self.model.train()
        with contextlib.ExitStack() as stack:
            if self.narrow is not None and not self.narrow.looked:
                stack.enter_context(self.narrow.look())  # a step as it is
            else:
                for part in self._faster():
                    stack.enter_context(part)
            with self.accelerator.autocast():
                loss = _require_loss(self.loss(self.model, self._laid_out(batch)))
                if self.distillation is not None:
                    loss = self.distillation.blend(loss)
            self.accelerator.backward(loss / together)
        return loss.detach()

    def _narrow(self) -> NarrowConvolutions | None:
        """Where a repeatable run is asked for, nothing is chosen by timing; hooks do not reach a compiled whole."""
        fixed = self.settings.repeatable or torch.are_deterministic_algorithms_enabled()
        if fixed or not self.settings.channels_last or self.settings.mixed_precision != "bf16":
            return None
        models = [m for m in (self.model, self.teacher) if m is not None and not hasattr(m, "_orig_mod")]
        return NarrowConvolutions(*models)

    def _faster(self) -> Iterator[contextlib.AbstractContextManager[None]]:
        yield from (compiled.on() for compiled in self.compiled.values())
        if self.narrow is not None and self.graphed is not None and not self.graphed.refused:
            yield self.narrow.on()

    def _update(self) -> None:
        align_gradients(self.optimizer)
        if self.settings.clip is not None:
            if self.held is not None:
                self.held.clear_gradients()
            norm = self.accelerator.clip_grad_norm_(self.model.parameters(), self.settings.clip)
            if isinstance(self.held, Regrow):
                self.held.restore_gradients((self.settings.clip / (norm + 1e-6)).clamp(max=1.0))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _whole_step(self, batch: Any) -> torch.Tensor:
        loss = self._gradients(batch, 1)
        self._update()
        return loss

    def _seed(self, number: int) -> None:
        seed = self.settings.seed * 1_000_003 + number
        torch.manual_seed(seed)
        if self._order is not None:
            self._order.generator.manual_seed(seed)
        if self.settings.repeatable:
            seed_all(seed, self._given, self._given_generator)
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


def is_sharded(model: nn.Module) -> bool:
    """Whether a user has sharded the model already, with ``fully_shard``."""
    return any(hasattr(p, "to_local") for p in model.parameters())
