"""Run a model once under the watching modes, on a copy, and give back what was seen."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from sapwood.capture.fakes import fake_inputs, fake_model, in_fake_mode
from sapwood.capture.isolation import copied
from sapwood.capture.modes import WatchFunctions, WatchOperators, plain_paths
from sapwood.capture.skeleton import named_tensors, rebuild
from sapwood.capture.tagging import tag_attributes
from sapwood.capture.tracker import Tracker
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


def watch(model: nn.Module, inputs: Inputs) -> tuple[Tracker, str]:
    """Trace on tensors without data where the model allows it, on real ones otherwise."""

    def without_data(tags: bool) -> Tracker:
        return in_fake_mode(lambda mode: _attempt(fake_model(mode, model), fake_inputs(mode, inputs), tags))

    first: Tracker | None = None
    with contextlib.suppress(SapwoodError):
        first = without_data(tags=True)
        if first.complete or is_meta(model):
            return first, "fake"
    if is_meta(model):
        return without_data(tags=False), "fake"
    try:
        found = _attempt(rebuild(model, lambda _, t: t.detach().clone()), copied(inputs), tags=True)
        return (found, "real") if first is None or found.complete else (first, "fake")
    except SapwoodError:
        if first is not None:
            return first, "fake"
        with contextlib.suppress(SapwoodError):  # code that insists on plain ints: more is frozen, it works
            return without_data(tags=False), "fake"
        raise


def _attempt(model: nn.Module, inputs: Inputs, tags: bool) -> Tracker:
    """One forward in evaluation mode, one in training mode (auxiliary heads, masks of a literal size)."""
    tracker = Tracker({id(m): path for path, m in model.named_modules() if path})
    for name, tensor in named_tensors(model).items():
        tracker.register(name, tensor)
    tracker.with_tags = tags
    if tags:
        tag_attributes(model, tracker)
    result = forward(model.eval(), copied(inputs), tracker)
    tracker.outputs = [tuple(t.shape) for t in results_in(model, result)]
    if not tracker.outputs:
        got = type(result).__name__
        raise explain("outputs that contain tensors", got, "Return the tensors to compare.", "the model's output")
    work, calls = list(tracker.work), list(tracker.calls)
    try:
        forward(model.train(), inputs, tracker)
        tracker.trains = True
    except SapwoodError:  # what it saw until then still counts
        parameters = {n for n, p in model.named_parameters()}
        tracker.complete = not (parameters - tracker.touched)
    tracker.work, tracker.calls = work, calls
    return tracker


def forward(model: nn.Module, inputs: Inputs, tracker: Tracker) -> Any:
    """One forward under the watch; the axes of the result are pinned."""
    args, kwargs = inputs
    try:
        with torch.no_grad(), plain_paths(), WatchOperators(tracker), WatchFunctions(tracker):
            result = model(*args, **kwargs)
    except Exception as error:
        shapes = [tuple(t.shape) for t in tensors_in([args, kwargs])]
        raise SapwoodError(
            f"example_inputs: expected inputs that {type(model).__name__} accepts; its forward raised "
            f"{type(error).__name__}: {error} for inputs of shapes {shapes}. "
            "Check that model(*example_inputs) runs by itself."
        ) from error
    for tensor in results_in(model, result):
        tracker.use(tensor)
        for ids in tracker.ids(tensor):
            tracker.pin(ids, "it is part of the model's output", "output")
    return result
