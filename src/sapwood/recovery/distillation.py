"""Learning from the dense model: its outputs are a second target, whatever the loss; so are features inside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from sapwood.capture.run import tensors_in
from sapwood.capture.skeleton import unwrap
from sapwood.errors import explain


class Distillation:
    """Watches the student's forward and runs the teacher on the same inputs.

    At the modules that ``features`` names, what the student computes is drawn to what the teacher computes, too.
    """

    def __init__(
        self,
        student: nn.Module,
        teacher: nn.Module,
        temperature: float,
        share: float,
        features: Sequence[str] = (),
        weight: float = 1.0,
    ) -> None:
        if not 0 < share <= 1 or temperature <= 0:
            got = f"share={share!r}, temperature={temperature!r}"
            raise explain("a share above 0 and at most 1, a temperature above 0", got, "Try 0.5 and 4.", "distill")
        self.modes = {m: m.training for m in teacher.modules()}
        self.teacher, self.temperature, self.share = teacher.eval(), temperature, share
        self.seen: tuple[Any, Any, Any] | None = None
        self._hooks = [student.register_forward_hook(self._remember, with_kwargs=True)]
        self.features, self.weight = _names(features, weight), weight
        self.ours: dict[str, Any] = {}
        self.theirs: dict[str, Any] = {}
        for model, found in ((student, self.ours), (teacher, self.theirs)) if features else ():
            named = dict(unwrap(model).named_modules())
            for name in self.features:
                if name not in named:
                    remedy = "Name modules of model.named_modules()."
                    raise explain("modules that model and teacher both have", repr(name), remedy, "features")
                self._hooks.append(named[name].register_forward_hook(_Kept(found, name)))

    def _remember(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if module.training:
            self.seen = (args, {k: v for k, v in kwargs.items() if k != "labels"}, output)

    def blend(self, task: torch.Tensor) -> torch.Tensor:
        """The task's loss and the distance to the teacher, in the share asked for."""
        if self.seen is None:
            raise explain("a loss that calls the model", "one that does not", "Let loss(model, batch) call it.", "loss")
        args, kwargs, output = self.seen
        self.seen = None
        with torch.no_grad():
            wanted = logits_of(self.teacher(*args, **kwargs))
        blended = (1 - self.share) * task + self.share * distance(logits_of(output), wanted, self.temperature)
        if not self.features:
            return blended
        apart = [difference(name, self.ours[name], self.theirs[name]) for name in self.features]
        self.ours.clear()
        self.theirs.clear()
        return blended + self.weight * torch.stack(apart).mean()

    def release(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for module, mode in self.modes.items():
            module.training = mode


class _Kept:
    """A forward hook that notes what a module gave."""

    def __init__(self, found: dict[str, Any], name: str) -> None:
        self.found, self.name = found, name

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self.found[self.name] = output


def _names(features: Sequence[str], weight: float) -> tuple[str, ...]:
    if isinstance(features, str) or not all(isinstance(name, str) for name in features):
        raise explain("a list of names of modules", repr(features), "For example ['layer3', 'layer4'].", "features")
    if not 0 < weight < float("inf"):
        raise explain("a weight above 0", repr(weight), "Try 1.", "feature_weight")
    return tuple(dict.fromkeys(features))


def difference(name: str, student: Any, teacher: Any) -> torch.Tensor:
    """The squared distance of two features, of the square of the teacher's."""
    ours, theirs = (next(iter(tensors_in(output)), None) for output in (student, teacher))
    if ours is None or theirs is None or ours.shape != theirs.shape:
        got = " and ".join("no tensor" if t is None else str(tuple(t.shape)) for t in (ours, theirs))
        remedy = "Name modules whose outputs the cut leaves as wide as they were, such as whole residual blocks."
        raise explain(f"outputs of {name} that have one shape in model and teacher", got, remedy, "features")
    wanted = theirs.detach().float()
    return (ours.float() - wanted).square().mean() / wanted.square().mean().clamp_min(1e-12)


def distance(student: torch.Tensor, teacher: torch.Tensor, temperature: float) -> torch.Tensor:
    """Kullback-Leibler divergence of softened class probabilities (Hinton et al., 2015), per example."""
    if student.dim() < 2 or student.shape != teacher.shape or student.dim() > 3:
        got = f"{tuple(student.shape)} and {tuple(teacher.shape)}"
        remedy = "Distillation takes (examples, classes) or (examples, places, classes); leave the teacher out."
        raise explain("class scores of the same shape from model and teacher", got, remedy, "distill")
    ours = nn.functional.log_softmax(student.float().flatten(0, -2) / temperature, dim=-1)
    theirs = nn.functional.log_softmax(teacher.float().flatten(0, -2) / temperature, dim=-1)
    divergence = nn.functional.kl_div(ours, theirs, reduction="batchmean", log_target=True)
    return divergence * temperature**2


def logits_of(output: Any) -> torch.Tensor:
    """The class scores in what a model returns: its ``logits``, or its first tensor."""
    found = output.get("logits") if isinstance(output, dict) else getattr(output, "logits", None)
    if not isinstance(found, torch.Tensor):
        tensors = list(tensors_in(output))
        if not tensors:
            raise explain("a model that returns tensors", type(output).__name__, "Leave distillation out.", "distill")
        found = tensors[0]
    return found
