"""``recover``: the accuracy back, by a short training at a high learning rate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from accelerate import Accelerator
from torch import nn

from sapwood.errors import explain
from sapwood.recovery.loop import Loop, MakeOptimizer, Settings
from sapwood.recovery.rates import Rate
from sapwood.recovery.session import MARKS, Phase, Point, Session, Validate, steps_for
from sapwood.scoring.data import Loss


@dataclass(frozen=True)
class Recovered:
    """What ``recover`` gives: the model (the one given, trained) and the curve of its recovery."""

    model: nn.Module
    curve: tuple[Point, ...]

    @property
    def metric(self) -> float | None:
        """Of the last epoch: never the best one."""
        return self.curve[-1].metric


def recover(
    model: nn.Module,
    train_loader: Any,
    *,
    lr: float,
    original_epochs: float | None = None,
    fraction: float = 0.2,
    epochs: float | None = None,
    rate: str = "rewind",
    anneal: str = "linear",
    warmup: float = 0.1,
    optimizer: str | MakeOptimizer = "sgd",
    weight_decay: float = 5e-4,
    loss: Loss | None = None,
    teacher: nn.Module | None = None,
    temperature: float = 4.0,
    share: float = 0.9,
    validate: Validate | None = None,
    marks: Sequence[float] = MARKS,
    clip: float | None = None,
    mixed_precision: str = "no",
    accumulate: int = 1,
    channels_last: bool = False,
    compile: bool = False,
    fused: bool = False,
    graph: bool = False,
    seed: int = 0,
    accelerator: Accelerator | None = None,
    on_step: Callable[[int, int], None] | None = None,
) -> Recovered:
    """Train a pruned model, in place, until its accuracy is back. Zeros of a masked model stay zero.

    It takes ``fraction`` of the ``original_epochs`` (or ``epochs`` as they are). ``lr`` is the peak learning rate
    of the original training: ``rate="rewind"`` goes back to it, warmed up, and anneals to zero; ``"finetune"``
    stays at a hundredth of it. ``loss(model, batch)`` is the model's own or cross entropy where none is given. A
    ``teacher`` (the dense model) switches distillation on. ``validate(model)`` is called at the ``marks``, shares of
    the original epochs, and at the end. For speed: ``channels_last``, ``compile``, ``fused`` (the optimizer in one
    kernel) and ``graph`` (on one GPU the whole step is captured once and replayed, with batches of one shape).
    Under ``accelerate launch`` the same call trains on many devices.
    """
    total_epochs = epochs_of(original_epochs, fraction, epochs)
    settings = Settings(
        lr=lr,
        optimizer=optimizer,
        weight_decay=weight_decay,
        rate=Rate(rate, anneal, warmup),
        clip=clip,
        mixed_precision=mixed_precision,
        accumulate=accumulate,
        channels_last=channels_last,
        compile=compile,
        fused=fused,
        graph=graph,
        seed=seed,
    )
    require_batches(train_loader)
    loop = Loop(
        model,
        train_loader,
        settings,
        loss=loss,
        teacher=teacher,
        temperature=temperature,
        share=share,
        accelerator=accelerator,
    )
    original = original_epochs or total_epochs / fraction
    phases = [Phase(steps_for(total_epochs, loop))]
    session = Session(loop, phases, original, validate, marks, on_step)
    try:
        while session.advance():
            pass
    finally:
        trained = loop.finish()
    return Recovered(trained, tuple(session.curve))


def require_batches(loader: Any) -> None:
    try:
        count = len(loader)
    except TypeError:
        raise explain("a data loader with a length", type(loader).__name__, "Make it a list.", "loader") from None
    if count == 0:
        raise explain("at least one batch", "an empty data loader", "Check the data set.", "loader")


def epochs_of(original: float | None, fraction: float, epochs: float | None) -> float:
    if (original is None) == (epochs is None):
        got = "both" if epochs is not None else "neither"
        raise explain("original_epochs (or epochs)", got, "recover(..., original_epochs=100) takes 20.", "recover")
    if not isinstance(fraction, (int, float)) or not 0 < fraction <= 1:
        raise explain("a fraction above 0 and at most 1", repr(fraction), "The default is 0.2.", "fraction")
    given = epochs if epochs is not None else original
    total = given * fraction if epochs is None and isinstance(given, (int, float)) else given
    if not isinstance(total, (int, float)) or not 0 < total < 1e9:
        raise explain("a number of epochs above 0", repr(total), "Give the epochs of training.", "recover")
    return float(total)
