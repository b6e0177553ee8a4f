"""Masking while training goes on: a few weights at first, more in every round, the asked share in the end."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypedDict, cast

from torch import nn

from sapwood.capture.skeleton import unwrap
from sapwood.errors import explain
from sapwood.masking.hold import Hold, hold, noted_masks
from sapwood.masking.mask import SCOPES, mask_
from sapwood.masking.patterns import parse
from sapwood.recovery.schedules import Schedule
from sapwood.scoring.data import Loss
from sapwood.scoring.elements import NAMES, ElementScore
from sapwood.types import Budget

OPTIONS = ("calibration", "loss", "include", "ignore", "seed")
"""What ``mask_`` takes besides the budget, the pattern, the scope and the score."""


@dataclass
class Gradual:
    """Masks a model step by step, up to the budget.

    Progress runs from 0 to 1 over the whole training. ``"one-shot"`` masks once, at ``begin``. The others mask
    ``rounds`` times, evenly spaced from ``begin`` to ``end``, for the last time at ``end``: ``"cubic"`` follows
    S * (1 - (1 - t)^3), much at first and little in the end (Zhu & Gupta, 2017); ``"iterative"`` removes the same
    share of the remaining weights each time. ``options`` are further ones of ``mask_``.
    """

    budget: Budget | None = None
    schedule: str = "cubic"
    rounds: int = 10
    begin: float = 0.0
    end: float = 0.5
    pattern: str = "unstructured"
    scope: str | None = None
    score: str | ElementScore = "magnitude"
    options: Mapping[str, Any] = field(default_factory=dict)
    gradients: bool = False
    """Those of zeros are cleared as they are computed, for a loop that clips; as in ``hold``."""
    _holds: list[Hold] = field(default_factory=list, init=False, repr=False, compare=False)
    _done: int | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._check_times()
        self._check_choices()

    @property
    def target(self) -> float:
        """The share of zeros in the end."""
        kind = parse(self.pattern)
        return 1 - kind.kept / kind.of if kind.is_nm else float(self.budget.sparsity or 0) if self.budget else 0.0

    def sparsity_at(self, progress: float) -> float:
        """The share of zeros that is due at this progress of the training."""
        due = self._due(progress)
        if due == self._last:
            return self.target
        return 1 - Schedule(self.schedule, self.rounds).kept(1 - self.target)[due - 1] if due else 0.0

    def advance(self, model: nn.Module, optimizer: Any, progress: float) -> bool:
        """Mask further where a round is due, and hold all zeros through the steps of the optimizer (or of several).

        True when weights became zero. Progress alone decides what is due: on a model that was trained up to here
        before, the first call changes nothing and holds its zeros.
        """
        due = self._due(progress)
        if self._done is not None and due <= self._done:
            return False
        plain, before = unwrap(model), zeros_in(model)
        self._drop_holds()
        if due:
            sparsity = None if parse(self.pattern).is_nm else Budget(sparsity=self.sparsity_at(progress))
            choices = {"pattern": self.pattern, "scope": self.scope, "score": self.score}
            mask_(plain, sparsity, **choices, **self.options)  # type: ignore[arg-type]
        if due or noted_masks(plain):
            self._holds = hold_zeros(model, optimizer, self.gradients)
        self._done = due
        return zeros_in(model) > before

    def finish(self) -> None:
        """Put the zeros back once more and let go of the optimizer; warns when rounds are missing."""
        if self._done is not None and self._done < self._last:
            warnings.warn(
                f"training ended after {self._done} of {self._last} rounds of masking: the model has fewer zeros "
                f"than {self.target:.2%}. Train on, or mask earlier (end={self.end}).",
                stacklevel=2,
            )
        for held in self._holds:
            held.apply()
        self.release()

    def clear_gradients(self) -> None:
        """Before gradients are clipped; as in ``Hold``."""
        for held in self._holds:
            held.clear_gradients()

    def release(self) -> None:
        """Let go of the optimizer and forget which rounds are done; the next ``advance`` starts anew."""
        self._drop_holds()
        self._done = None

    def _drop_holds(self) -> None:
        for held in self._holds:
            held.release()
        self._holds = []

    @property
    def _last(self) -> int:
        return 1 if self.schedule == "one-shot" else self.rounds

    def _due(self, progress: float) -> int:
        """How many rounds are due."""
        if not _is_number(progress) or not progress >= 0:
            raise explain("a number from 0 to 1", repr(progress), "Steps done / all steps.", "progress")
        if self.schedule == "one-shot":
            return int(progress >= self.begin)
        t = (progress - self.begin) / (self.end - self.begin)
        return max(0, math.floor(min(t, 1.0) * self.rounds + 1e-9))

    def _check_times(self) -> None:
        Schedule(self.schedule, self._last)  # refuses what it does not know
        for name in ("begin", "end"):
            value = getattr(self, name)
            if not _is_number(value) or not 0 <= value <= 1:
                raise explain("a fraction of the training, from 0 to 1", repr(value), f"For example {name}=0.5.", name)
        if self.schedule != "one-shot" and self.begin >= self.end:
            got, remedy = f"begin={self.begin}, end={self.end}", "schedule='one-shot' masks once, at begin."
            raise explain("begin before end", got, remedy, "begin, end")

    def _check_choices(self) -> None:
        kind = parse(self.pattern)
        if kind.is_nm and self.schedule != "one-shot":
            got, remedy = f"schedule={self.schedule!r} with pattern={self.pattern!r}", "Choose schedule='one-shot'."
            raise explain("one masking, as N:M has no sparsities in between", got, remedy, "schedule")
        if self.budget is None and not kind.is_nm:
            raise explain("a budget", "none", "For example sw.Budget(sparsity=0.9).", "budget")
        if self.budget is not None and (not isinstance(self.budget, Budget) or self.budget.kind != "sparsity"):
            raise explain("Budget(sparsity=0.9)", repr(self.budget), "Masks make zeros; nothing else.", "budget")
        if self.budget is not None and abs(float(self.budget.sparsity or 0) - self.target) > 1e-6:
            got, remedy = f"sparsity={self.budget.sparsity}", "Leave the budget out: the pattern decides."
            raise explain(f"sparsity={self.target:g} for {self.pattern}", got, remedy, "budget")
        if self.scope is not None and self.scope not in SCOPES:
            raise explain(f"one of {', '.join(SCOPES)}", repr(self.scope), "For example scope='global'.", "scope")
        if not callable(self.score) and self.score not in NAMES:
            names = f"one of {', '.join(NAMES)}, or a function of a weight"
            raise explain(names, repr(self.score), "For example 'magnitude'.", "score")
        if unknown := [n for n in self.options if n not in OPTIONS]:
            known = ", ".join((*_choice_names(), *OPTIONS))
            raise explain(f"options among {known}", ", ".join(map(repr, unknown)), "Mend the name.", "options")
        calibration = self.options.get("calibration")
        if self.score in ("wanda", "taylor") and calibration is None:
            raise explain("calibration batches", "none", "Pass calibration=, a list of batches.", f"score={self.score}")
        if isinstance(calibration, Iterator) and self.schedule != "one-shot":
            got = "an iterator, which is used up after the first"
            raise explain("batches for every round", got, "Pass a list or a data loader.", "calibration")


class Choices(TypedDict, total=False):
    """What a callback takes besides the budget: the fields of ``Gradual`` and the options of ``mask_``."""

    schedule: str
    rounds: int
    begin: float
    end: float
    pattern: str
    scope: str | None
    score: str | ElementScore
    calibration: Iterable[Any]
    loss: Loss
    include: Iterable[str]
    ignore: Iterable[str]
    seed: int


class Upkeep:
    """What a callback does in anyone's training loop: hold a masked model's zeros or, with a budget, mask it."""

    def __init__(self, budget: Budget | None, choices: Choices) -> None:
        self.gradual: Gradual | None = None
        self._holds: list[Hold] = []
        if budget is not None or choices:
            given = cast(dict[str, Any], choices)
            own = {n: v for n, v in given.items() if n in _choice_names()}
            self.gradual = Gradual(budget, **own, options={n: v for n, v in given.items() if n not in own})

    def start(self, model: nn.Module, optimizer: Any, progress: float, gradients: bool = False) -> None:
        self._release()
        if self.gradual is None:
            self._holds = hold_zeros(model, optimizer, gradients)
        else:
            self.gradual.gradients = gradients
            self.gradual.release()
            self.gradual.advance(model, optimizer, progress)

    def step(self, model: nn.Module, optimizer: Any, progress: float) -> bool:
        return self.gradual is not None and self.gradual.advance(model, optimizer, progress)

    def clear_gradients(self) -> None:
        if self.gradual is not None:
            self.gradual.clear_gradients()
        for held in self._holds:
            held.clear_gradients()

    def end(self) -> None:
        for held in self._holds:
            held.apply()
        self._release()
        if self.gradual is not None:
            self.gradual.finish()

    def _release(self) -> None:
        for held in self._holds:
            held.release()
        self._holds = []


def hold_zeros(model: nn.Module, optimizer: Any, gradients: bool = False) -> list[Hold]:
    """``hold`` for one optimizer or several."""
    optimizers = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
    return [hold(model, one, gradients=gradients and one is optimizers[0]) for one in optimizers]


def zeros_in(model: nn.Module) -> int:
    """How many numbers in a model's parameters are zero."""
    return sum(int(p.numel() - p.detach().count_nonzero()) for p in model.parameters())


def _choice_names() -> tuple[str, ...]:
    return tuple(n for n in Choices.__annotations__ if n not in OPTIONS)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
