"""Run a model once under the watching modes, on a copy, and give back what was seen."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from sapwood.capture.modes import WatchFunctions, WatchOperators, plain_paths
from sapwood.capture.sizes import Attr, TaggedInt
from sapwood.capture.skeleton import named_tensors, rebuild
from sapwood.capture.tracker import Tracker
from sapwood.errors import SapwoodError, explain

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def _is_call(value: Any) -> bool:
    return type(value) is tuple and len(value) == 2 and type(value[0]) is tuple and type(value[1]) is dict


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


def tensors_in(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """Every tensor in a nest of containers, dataclasses and plain objects, in a stable order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item, depth + 1)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item, depth + 1)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for entry in dataclasses.fields(value):
            yield from tensors_in(getattr(value, entry.name), depth + 1)
    elif hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module)) and depth < 8:
        for item in vars(value).values():
            yield from tensors_in(item, depth + 1)


def is_meta(model: nn.Module) -> bool:
    return any(t.is_meta for t in named_tensors(model).values())


@contextlib.contextmanager
def fake_tensors() -> Iterator[FakeTensorMode]:
    """Tensors without data; torch's own log of what failed on them is not for our users."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level, mode = log.level, FakeTensorMode(allow_non_fake_inputs=True)
    log.setLevel(logging.CRITICAL)
    try:
        with mode:
            yield mode
    finally:
        log.setLevel(level)


def fake(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without data; one from the meta device plays that it is on the CPU."""
    if tensor.is_meta:
        with mode:
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    else:
        made = mode.from_tensor(tensor)
    return made


def fake_inputs(mode: FakeTensorMode, inputs: Inputs) -> Inputs:
    return pytree.tree_map_only(torch.Tensor, lambda t: fake(mode, t), inputs)  # type: ignore[no-any-return]


def fake_model(mode: FakeTensorMode, model: nn.Module) -> nn.Module:
    return rebuild(model, lambda _, tensor: fake(mode, tensor))


def watch(model: nn.Module, inputs: Inputs) -> tuple[Tracker, str]:
    """Trace on tensors without data where the model allows it, on real ones otherwise."""
    try:
        with fake_tensors() as mode:
            return _attempt(fake_model(mode, model), fake_inputs(mode, inputs)), "fake"
    except SapwoodError:
        if is_meta(model):
            raise
        return _attempt(rebuild(model, _alias), inputs), "real"


def _alias(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Share a parameter's memory, but copy what a forward could write to."""
    return tensor.detach() if isinstance(tensor, nn.Parameter) else tensor.detach().clone()


def _attempt(copied: nn.Module, inputs: Inputs) -> Tracker:
    tracker = Tracker({id(m): path for path, m in copied.named_modules() if path})
    for name, tensor in named_tensors(copied).items():
        tracker.register(name, tensor)
    tag_attributes(copied, tracker)
    result = forward(copied.eval(), inputs, tracker)
    tracker.outputs = [tuple(t.shape) for t in tensors_in(result)]
    parameters = {n for n, _ in copied.named_parameters()}
    if parameters - tracker.touched:  # branches that only run in training: auxiliary heads
        with contextlib.suppress(SapwoodError):  # what it saw until then still counts
            forward(copied.train(), inputs, tracker)
    return tracker


def forward(copied: nn.Module, inputs: Inputs, tracker: Tracker) -> Any:
    """One forward under the watch; the axes of the result are pinned."""
    args, kwargs = inputs
    try:
        with torch.no_grad(), plain_paths(), WatchOperators(tracker), WatchFunctions(tracker):
            result = copied(*args, **kwargs)
    except Exception as error:
        shapes = [tuple(t.shape) for t in tensors_in([args, kwargs])]
        raise SapwoodError(
            f"example_inputs: expected inputs that {type(copied).__name__} accepts; its forward raised "
            f"{type(error).__name__}: {error} for inputs of shapes {shapes}. "
            "Check that model(*example_inputs) runs by itself."
        ) from error
    for tensor in tensors_in(result):
        for ids in tracker.ids(tensor):
            tracker.pin(ids, "it is part of the model's output", "output")
    return result


def tag_attributes(model: nn.Module, tracker: Tracker) -> None:
    """Replace the int attributes of every module of a copy by ints that know their name."""
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue
        for name, value in list(vars(module).items()):
            where = f"{path}.{name}".lstrip(".")
            tagged = _tag(value, Attr(where), tracker)
            if tagged is not value:
                tracker.attribute_roots[where] = value
                module.__dict__[name] = tagged


def _tag(value: Any, attr: Attr, tracker: Tracker) -> Any:
    if type(value) is int:
        tracker.attribute_values[attr] = value
        return TaggedInt(value, attr, tracker)
    if type(value) in (tuple, list) and value and all(type(v) in (int, tuple, list) for v in value):
        parts = [_tag(v, Attr(attr.path, (*attr.index, i)), tracker) for i, v in enumerate(value)]
        return type(value)(parts)
    return value
