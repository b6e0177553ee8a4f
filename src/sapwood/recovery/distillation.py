"""Learning from the dense model: its outputs are a second target, whatever the loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from sapwood.capture.run import tensors_in
from sapwood.errors import explain


class Distillation:
    """Watches the student's forward and runs the teacher on the same inputs."""

    def __init__(self, student: nn.Module, teacher: nn.Module, temperature: float, share: float) -> None:
        if not 0 < share <= 1 or temperature <= 0:
            got = f"share={share!r}, temperature={temperature!r}"
            raise explain("a share above 0 and at most 1, a temperature above 0", got, "Try 0.9 and 4.", "distill")
        self.modes = {m: m.training for m in teacher.modules()}
        self.teacher, self.temperature, self.share = teacher.eval(), temperature, share
        self.seen: tuple[Any, Any, Any] | None = None
        self._hook = student.register_forward_hook(self._remember, with_kwargs=True)

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
        return (1 - self.share) * task + self.share * distance(logits_of(output), wanted, self.temperature)

    def release(self) -> None:
        self._hook.remove()
        for module, mode in self.modes.items():
            module.training = mode


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
