"""Run a model once under the watching modes, on a copy, and give back what was seen."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from sapwood.capture.classes import Classes, find_classes
from sapwood.capture.facts import WritesToWeightsError
from sapwood.capture.fakes import fake_inputs, fake_model, in_fake_mode
from sapwood.capture.isolation import copied, full_precision, reseed, uncollected
from sapwood.capture.modes import Hollow, WatchFunctions, WatchOperators, plain_paths
from sapwood.capture.skeleton import cloned, named_parts, named_tensors, sharing
from sapwood.capture.tagging import tag_attributes
from sapwood.capture.tracker import Tracker
from sapwood.capture.training import questions
from sapwood.errors import SapwoodError, explain

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def as_call(example_inputs: Any) -> Inputs:
    """A tensor, a tuple (arguments) or a dict (keywords) as the call to make."""
    if _is_call(example_inputs):
        return example_inputs  # type: ignore[no-any-return]
    if example_inputs is None or (isinstance(example_inputs, (tuple, dict)) and not example_inputs):
        raise explain(
            "example inputs: a tensor, a tuple of arguments or a dict of keywords",
            repr(example_inputs),
            "Pass one small batch that the model accepts, for example torch.randn(1, 3, 224, 224).",
            "example_inputs",
        )
    if isinstance(example_inputs, tuple):
        return example_inputs, {}
    if isinstance(example_inputs, dict):
        return (), example_inputs
    return (example_inputs,), {}


def _is_call(value: Any) -> bool:
    return type(value) is tuple and len(value) == 2 and type(value[0]) is tuple and type(value[1]) is dict


def tensors_in(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """Every tensor in a nest of containers, dataclasses and plain objects, in a stable order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth < 12:
        for item in _inside(value):
            yield from tensors_in(item, depth + 1)


def results_in(model: nn.Module, value: Any) -> Iterator[torch.Tensor]:
    """The tensors of an output.

    Objects that the model also takes as an argument of the same name are state that it hands back to itself (caches of
    keys and values): their sizes are its own affair.
    """
    if isinstance(value, dict):
        taken = inspect.signature(type(model).forward).parameters
        value = [v for k, v in value.items() if k not in taken or isinstance(v, (torch.Tensor, tuple, list, dict))]
    yield from tensors_in(value)


def _inside(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, (tuple, list)):
        return list(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, entry.name) for entry in dataclasses.fields(value)]
    if inspect.isgenerator(value):
        raise explain("outputs that can be looked at twice", "a generator", "Return a list.", "the model's output")
    if isinstance(value, (type, nn.Module, str, bytes, int, float)) or value is None:
        return []
    slots = [s for kind in type(value).__mro__ for s in _slots(kind)]
    return [*vars(value).values(), *_slotted(value, slots)] if hasattr(value, "__dict__") else _slotted(value, slots)


def _slots(kind: type) -> tuple[str, ...]:
    found = kind.__dict__.get("__slots__", ())
    return (found,) if isinstance(found, str) else tuple(found)


def _slotted(value: Any, slots: list[str]) -> list[Any]:
    return [getattr(value, s) for s in slots if not s.startswith("__") and hasattr(value, s)]


def is_meta(model: nn.Module) -> bool:
    return any(t.is_meta for t in named_tensors(model).values())


@dataclasses.dataclass
class Seen:
    """What was seen of a model: the facts, and whether on real tensors or on fake ones."""

    tracker: Tracker
    mode: str

    @functools.cached_property
    def classes(self) -> Classes:
        return find_classes(self.tracker)

    def working_copy(self, model: nn.Module) -> nn.Module:
        """A copy of the model (or of a cut one) that shares with it the parameters no forward writes to."""
        return sharing(model, self.tracker.written)


@uncollected()
def watch(model: nn.Module, inputs: Inputs, data: bool = False) -> Seen:
    """Trace on tensors without data where the model allows it, on real ones otherwise.

    With ``data``, the other way round: where they will be needed anyway, which is quicker. Where the values decide what
    happens, they are computed, too.
    """
    if data and not is_meta(model):
        for hollow in (True, False):
            with contextlib.suppress(SapwoodError):
                found = _with_data(model, inputs, hollow)
                if found.tracker.complete and not found.tracker.swayed:
                    return found
    first: Tracker | None = None
    with contextlib.suppress(SapwoodError):
        first = _without_data(model, inputs, tags=True)
        if first.complete or is_meta(model):
            return Seen(first, "fake")
    if is_meta(model):
        return Seen(_without_data(model, inputs, tags=False), "fake")
    try:
        found = _with_data(model, inputs)
        return found if first is None or found.tracker.complete else Seen(first, "fake")
    except SapwoodError:
        if first is not None:
            return Seen(first, "fake")
        with contextlib.suppress(SapwoodError):  # code that insists on plain ints: more is frozen, it works
            return Seen(_without_data(model, inputs, tags=False), "fake")
        raise


def _without_data(model: nn.Module, inputs: Inputs, tags: bool) -> Tracker:
    def look(mode: FakeTensorMode) -> Tracker:
        own, given, tracker = fake_model(mode, model), fake_inputs(mode, inputs), Tracker({}, with_tags=tags)
        _evaluate(own, given, tracker)
        _train(own, given, tracker)
        return tracker

    return in_fake_mode(look)


def _with_data(model: nn.Module, inputs: Inputs, hollow: bool = False) -> Seen:
    """On a copy that shares the parameters, if no forward wants to write to them."""
    try:
        return _look(sharing(model), inputs, Tracker({}, guarded=True), hollow)
    except WritesToWeightsError:
        return _look(cloned(model), inputs, Tracker({}), hollow)


def _look(own: nn.Module, inputs: Inputs, tracker: Tracker, hollow: bool) -> Seen:
    """Forwards without a result to look at may as well multiply nothing."""
    reseed()
    mode = Hollow()
    with full_precision():
        _evaluate(own, inputs, tracker, *([mode] if hollow else []))
    tracker.swayed = tracker.swayed and mode.used  # by values that are not the model's own
    _train(own, inputs, tracker, Hollow())
    if not tracker.trains:
        _train(own, inputs, tracker)
    return Seen(tracker, "real")


def _known(model: nn.Module, tracker: Tracker) -> nn.Module:
    """Introduce a copy of the model to the tracker: its modules, tensors and ints."""
    tracker.module_names.update({id(m): path for path, m in named_parts(model) if path})
    for name, tensor in named_tensors(model).items():
        tracker.register(name, tensor)
    if tracker.with_tags:
        tag_attributes(model, tracker)
    return model


def _evaluate(model: nn.Module, inputs: Inputs, tracker: Tracker, *modes: Any) -> None:
    """One forward in evaluation mode."""
    with questions(model) as heard:
        result = forward(_known(model, tracker).eval(), copied(inputs), tracker, *modes)
    tracker.alike = not heard.asked
    found = list(results_in(model, result))
    tracker.outputs = [tuple(t.shape) for t in found]
    if not found:
        got = type(result).__name__
        raise explain("outputs that contain tensors", got, "Return the tensors to compare.", "the model's output")
    tracker.noting = False


def _train(model: nn.Module, inputs: Inputs, tracker: Tracker, *modes: Any) -> None:
    """One forward in training mode (auxiliary heads, masks of a literal size), if it could be another one."""
    if tracker.alike:
        tracker.trains = True
        return
    try:
        forward(model.train(), copied(inputs), tracker, *modes)
        tracker.trains = tracker.complete = True
    except SapwoodError:  # what it saw until then still counts
        parameters = {n for n, p in model.named_parameters()}
        tracker.complete = not (parameters - tracker.touched)


def forward(model: nn.Module, inputs: Inputs, tracker: Tracker, *modes: Any) -> Any:
    """One forward under the watch, and under other modes; the axes of the result are pinned."""
    args, kwargs = inputs
    try:
        with torch.no_grad(), plain_paths(), contextlib.ExitStack() as stack:
            for mode in (*modes, WatchOperators(tracker), WatchFunctions(tracker)):
                stack.enter_context(mode)
            result = model(*args, **kwargs)
    except Exception as error:
        if tracker.refused:
            raise WritesToWeightsError from error
        shapes = [tuple(t.shape) for t in tensors_in([args, kwargs])]
        raise SapwoodError(
            f"example_inputs: expected inputs that {type(model).__name__} accepts; its forward raised "
            f"{type(error).__name__}: {error} for inputs of shapes {shapes}. "
            "Check that model(*example_inputs) runs by itself."
        ) from error
    if tracker.refused:  # and its own code has passed over that
        raise WritesToWeightsError
    for tensor in results_in(model, result):
        tracker.use(tensor)
        for ids in tracker.ids(tensor):
            tracker.pin(ids, "it is part of the model's output", "output")
    return result
