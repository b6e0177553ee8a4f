"""Does a forward in training mode do what one in evaluation mode did?

If it calls the same functions on the same weights and on the results of the same calls, slices them in the same places
and looks at no other sizes, there is nothing to be learned from it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from sapwood.capture.sizes import strip

Step = list[Any]
_COUNT = "add_"
"""How batch norms count their batches in training mode."""


class Flow:
    """The calls of a forward, each with where its tensors come from."""

    def __init__(self, known: Mapping[int, str]) -> None:
        self.known, self.steps, self.shapes = known, list[Step](), list[list[torch.Size]]()
        self._made: dict[int, tuple[int, int]] = {}

    def note(self, func: Any, args: Any, kwargs: Mapping[str, Any], out: Any) -> None:
        self.made(self.asked(func, args, kwargs), out)

    def asked(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Step:
        """A call. Flags and rates do not count: they say how, not what."""
        step: Step = [func]
        for arg in args:
            self._add(step, arg)
        for key in kwargs:
            self._add(step, kwargs[key])
        return step

    def made(self, step: Step, out: Any) -> list[torch.Size]:
        """The same call with its results, of which it has the shapes."""
        number = len(self.steps)
        results = out if isinstance(out, (tuple, list)) else (out,)
        shapes = []
        for place, result in enumerate(results):
            if isinstance(result, torch.Tensor):
                self._made[id(result)] = (number, place)
                shapes.append(result.shape)
        self.steps.append(step)
        self.shapes.append(shapes)
        return shapes

    def _add(self, step: Step, arg: Any) -> None:
        if isinstance(arg, torch.Tensor):
            own = id(arg)
            step.append(self.known.get(own) or self._made.get(own) or arg.shape)
        elif type(arg) in (list, tuple):
            step.append(len(arg))
            for item in arg:
                self._add(step, item)
        elif type(arg) not in (bool, float):
            step.append(arg)

    def counts(self, func: Any, args: Any) -> bool:
        """Whether this only counts batches."""
        return (
            getattr(func, "__name__", "") == _COUNT
            and isinstance(args[0], torch.Tensor)
            and not isinstance(args[0], torch.nn.Parameter)
            and not args[0].shape
            and id(args[0]) in self.known
        )


class OtherFlowError(Exception):
    """A forward does something else than the one before."""


class Repeats(TorchFunctionMode):
    """Goes on as long as all is as it was. What is not is not even called: it might write to a weight."""

    def __init__(self, flow: Flow) -> None:
        super().__init__()
        self.before, self.now = flow, Flow(flow.known)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = [strip(a) for a in args], {k: strip(v) for k, v in (kwargs or {}).items()}
        if self.now.counts(func, args) or (getattr(func, "__name__", "") == "size" and asked_by_torch(1)):
            return func(*args, **kwargs)
        number, step = len(self.now.steps), self.now.asked(func, args, kwargs)
        self._require(number < len(self.before.steps) and _same(step, self.before.steps[number]))
        out = func(*args, **kwargs)
        self._require(self.now.made(step, out) == self.before.shapes[number])
        return out

    def _require(self, same: bool) -> None:
        if not same:
            self.before = Flow({})  # for good, even where the model's code catches the error
            raise OtherFlowError

    @property
    def complete(self) -> bool:
        return len(self.now.steps) == len(self.before.steps)


def asked_by_torch(depth: int) -> bool:
    """Whether torch's own functions look at a size: batch norms do, in training mode."""
    return sys._getframe(depth + 1).f_globals.get("__name__") == "torch.nn.functional"


def _same(step: Step, other: Step) -> bool:
    with contextlib.suppress(Exception):  # an array's answer is no yes or no
        return bool(step == other)
    return False
