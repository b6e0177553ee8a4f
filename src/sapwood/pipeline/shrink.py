"""``prune_and_recover``: zeros or cuts, at once, in rounds or gradually, and the accuracy back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast, send_to_device
from torch import nn

from sapwood.capture.skeleton import named_tensors
from sapwood.capture.trace import trace
from sapwood.errors import explain
from sapwood.masking.mask import mask_
from sapwood.pipeline.keeping import Keeper, go_on, restored, told
from sapwood.pipeline.prune import make_plan, prune
from sapwood.pipeline.steps import Step, require_fading
from sapwood.planning.sharing import AsBefore
from sapwood.recovery.loop import Loop, Settings, is_sharded
from sapwood.recovery.mending import refit_, refresh_norms_
from sapwood.recovery.rates import Rate
from sapwood.recovery.recover import epochs_of, require_batches
from sapwood.recovery.schedules import Schedule
from sapwood.recovery.session import MARKS, Phase, Point, Session, Validate, steps_for
from sapwood.recovery.settings import require_unscaled
from sapwood.scoring.data import Loss
from sapwood.scoring.weights import Standing, site_scores
from sapwood.surgery.check import check
from sapwood.surgery.compose import compose
from sapwood.surgery.cut import cut
from sapwood.types import Budget, Plan

EMPTY = Plan({}, {}, {})


class Pruner:
    """Prunes what a loop trains, and remembers the cuts as one plan on the dense model."""

    def __init__(self, example_inputs: Any, plan: Plan = EMPTY, mend: Sequence[Any] = ()) -> None:
        self.example, self.plan, self.mend = example_inputs, plan, mend
        self.before: dict[str, tuple[int, ...]] | None = None
        self.standing: Standing | None = None

    def begin(self, step: Step, before: nn.Module) -> None:
        """Note what rounds of channels go by: the model with which the first one begins."""
        if step.is_mask or step.schedule.rounds == 1:
            return
        self.before = shapes_of(before)
        if step.options.get("allocate", "global") == "global":
            seen = trace(before, send_to_device(self.example, next(before.parameters()).device))
            score = step.options.get("score", "l1")
            self.standing = site_scores(named_tensors(before), seen.groups, score, seen.scales)

    def zeros(self, loop: Loop, budget: Budget | None, step: Step, last: bool) -> None:
        if is_sharded(loop.model):
            remedy = "Mask the model before sharding it; its zeros are held."
            raise explain("a whole model to rank", "one that is sharded", remedy, "schedule")

        def mask_now() -> None:
            mask_(loop.plain, budget, pattern=step.pattern, **step.options)
            for tensor in loop.plain.state_dict().values():  # scores from data may differ by process
                broadcast(tensor)
            if self.mend:
                refresh_norms_(loop.plain, self.mend)

        if step.schedule.regrow:
            loop.remask(mask_now, step.masked(loop.plain), last)
        else:
            mask_now()
            loop.rehold()

    def channels(self, loop: Loop, budget: Budget | None, step: Step) -> None:
        if is_sharded(loop.model):
            raise explain(
                "a whole model to cut", "one that is sharded", "Cut the model before sharding it.", "schedule"
            )
        assert budget is not None
        loop.let_go()  # the cut copies the model as it is
        device, options = next(loop.plain.parameters()).device, dict(step.options)
        if self.before is not None:
            shares = options.get("allocate", "global")
            options["allocate"] = AsBefore(shares, self.before, shapes_of(loop.plain), self.standing)
        done = prune(loop.plain, send_to_device(self.example, device), budget, **options)
        self._go_on(loop, done.model, done.plan)

    def faded(self, loop: Loop, plan: Plan) -> None:
        """Cut what has faded out."""
        loop.let_go()
        small = cut(loop.plain, plan)
        device = next(loop.plain.parameters()).device
        result = check(loop.plain, small, plan, send_to_device(self.example, device))
        if not result.passed:
            raise explain("a cut that computes the same", result.notes[-1], "Leave fade out.", "fade")
        self._go_on(loop, small, plan)

    def _go_on(self, loop: Loop, small: nn.Module, plan: Plan) -> None:
        small.train(loop.plain.training)
        if self.mend:
            refresh_norms_(refit_(small, loop.plain, plan, self.mend), self.mend)
        loop.swap(small, plan)
        self.plan = compose(self.plan, plan) if self.plan.keep else plan


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in named_tensors(model).items()}


def phases_of(step: Step, targets: Sequence[Budget | None], pruner: Pruner, total: int) -> list[Phase]:
    """The phases of a recovery of ``total`` steps, with what is pruned when."""
    moments = step.schedule.moments(total)

    def at(index: int) -> Callable[[Loop], None]:
        def prune_now(loop: Loop) -> None:
            target, last = targets[min(index, len(targets) - 1)], index + 1 == step.schedule.times
            loop.changing = not step.is_mask and not last
            if step.is_mask:
                pruner.zeros(loop, target, step, last)
            else:
                pruner.channels(loop, target, step)

        return prune_now

    phases, index = [], 0
    for number, when in enumerate(moments):
        first, last = number * total // len(moments), (number + 1) * total // len(moments)
        due: dict[int, Callable[[Loop], None]] = {}
        for moment in when:
            due[moment] = at(index)  # of two rounds at the same moment the later one counts
            index += 1
        phases.append(Phase(last - first, due))
    return phases


def fading_phase(plan: Plan, pruner: Pruner, total: int, share: float) -> Phase:
    """One recovery of ``total`` steps; over the first share of it the plan's channels fade out, then they are cut."""
    if total < 2:
        raise explain("a recovery of at least 2 steps", str(total), "Train longer, or leave fade out.", "fade")
    steps = min(max(1, int(share * total)), total - 1)
    return Phase(total, {0: lambda loop: loop.fade(plan, steps), steps: lambda loop: pruner.faded(loop, plan)})


@dataclass(frozen=True)
class Shrunk:
    """What ``prune_and_recover`` gives; ``pruned`` is where it stood right after the last pruning."""

    model: nn.Module
    plan: Plan
    curve: tuple[Point, ...]
    pruned: Point | None = None

    @property
    def metric(self) -> float | None:
        """Of the last epoch: never the best one."""
        return self.curve[-1].metric


def prune_and_recover(
    model: nn.Module,
    example_inputs: Any,
    train_loader: Any,
    budget: Budget | None = None,
    *,
    lr: float,
    pattern: str = "unstructured",
    schedule: str = "one-shot",
    rounds: int = 1,
    until: float = 0.5,
    regrow: float = 0.0,
    fade: float = 0.0,
    mend: Sequence[Any] = (),
    original_epochs: float | None = None,
    fraction: float = 0.2,
    epochs: float | None = None,
    rate: str = "rewind",
    anneal: str = "linear",
    warmup: float = 0.1,
    loss: Loss | None = None,
    distill: bool = False,
    teacher: nn.Module | None = None,
    temperature: float = 4.0,
    share: float = 0.9,
    validate: Validate | None = None,
    test: Validate | None = None,
    marks: Iterable[float] = MARKS,
    options: Mapping[str, Any] | None = None,
    checkpoint: str | Path | None = None,
    accelerator: Accelerator | None = None,
    on_step: Callable[[int, int], None] | None = None,
    **settings: Any,
) -> Shrunk:
    """Prune a copy of the model on a schedule and recover it; the model given is not changed.

    A sparsity makes zeros that stay, other budgets cut channels; ``options`` are further arguments of ``mask`` or
    ``prune``. ``distill=True`` learns from the model given, ``teacher=`` from another one, such as the dense model
    where one that was pruned before is pruned further. ``test(model)`` is noted beside ``validate(model)``, for the
    report. ``until`` is the part of a cubic schedule in which pruning goes on. With ``regrow=0.8`` masked weights
    go on learning out of sight and may come back, in rounds up to 80% of the steps. With ``fade=0.3`` the channels
    to cut shrink to nothing over the first 30% of the steps and are cut then. ``mend`` takes a few batches: after
    each cut, what reads the removed channels is refitted on them and the statistics of batch norms are taken anew.
    With ``checkpoint`` a call that was killed goes on where it was. Everything else is as in ``recover``.
    """
    step = Step(budget, pattern, Schedule(schedule, rounds, until, regrow), dict(options or {}))
    if isinstance(mend, (torch.Tensor, str, Mapping)) or not isinstance(mend, Sequence):
        remedy = "For example mend=[batch for batch, _ in zip(loader, range(16))]."
        raise explain("a list of batches", type(mend).__name__, remedy, "mend")
    if fade:
        require_fading(step, fade, checkpoint is not None)
    total_epochs = epochs_of(original_epochs, fraction, epochs)
    require_batches(train_loader)
    chosen = Settings(lr=lr, rate=Rate(rate, anneal, warmup), **settings)
    if regrow:
        require_unscaled(chosen.mixed_precision)
    learning = (temperature, share, chosen.weight_decay, chosen.clip)
    same = (
        budget,
        pattern,
        step.schedule,
        total_epochs,
        lr,
        chosen.rate,
        chosen.seed,
        fade,
        "teacher" if teacher is not None else distill,
        len(mend),
        learning,
        told(chosen.optimizer),
        told(step.options),
    )
    keeper = None if checkpoint is None else Keeper(checkpoint, same)
    found = None if keeper is None else keeper.found()
    targets = step.targets(model, example_inputs)
    if distill or teacher is not None:
        teacher = cut(model if teacher is None else teacher, EMPTY)
    extra: dict[str, Any] = {"temperature": temperature, "share": share, "accelerator": accelerator}
    extra["changing"] = not step.is_mask and not fade and found is None
    loop = Loop(restored(model, found), train_loader, chosen, loss=loss, teacher=teacher, **extra)
    pruner = Pruner(example_inputs, EMPTY if found is None else found.plan, mend)
    pruner.begin(step, model)
    total = steps_for(total_epochs, loop, rounds)
    if fade:
        plan = make_plan(model, example_inputs, budget or Budget(channels=1.0), **step.options)
        phases = [fading_phase(plan, pruner, total, fade)]
    else:
        phases = phases_of(step, targets, pruner, total)
    original = original_epochs or total_epochs / fraction
    session = Session(loop, phases, original, validate, tuple(marks), on_step, test)
    go_on(session, found)
    if fade and 0 < session.step < max(phases[0].prune):
        loop.fade(plan, max(phases[0].prune), session.step)
    try:
        while session.advance():
            if keeper is not None:
                keeper.keep(session, pruner.plan)
    finally:
        trained = loop.finish()
    if keeper is not None:
        keeper.remove()
    return Shrunk(trained, pruner.plan, tuple(session.curve), session.pruned)
