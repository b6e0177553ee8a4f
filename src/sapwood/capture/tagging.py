"""Hand a copied model ints that know their names, in place of its int attributes."""

from __future__ import annotations

import types
from collections import OrderedDict
from typing import Any

import torch
from torch import nn

from sapwood.capture.sizes import Attr, TaggedInt
from sapwood.capture.skeleton import named_parts
from sapwood.capture.tracker import Tracker

_NO_SIZES = frozenset((type(None), bool, float, str, set, OrderedDict, torch.dtype, types.FunctionType))


def tag_attributes(model: nn.Module, tracker: Tracker) -> None:
    """Ints of modules, also in tuples, lists and dicts, and in configuration objects they hold."""
    seen: set[int] = set()
    for path, module in named_parts(model):
        if not isinstance(module, torch.jit.ScriptModule):
            _tag_object(module, path, tracker, seen, depth=0)


def _tag_object(owner: Any, path: str, tracker: Tracker, seen: set[int], depth: int) -> None:
    """Tag one object's attributes; an object that many modules share is tagged once."""
    if id(owner) in seen or depth > 3:
        return
    seen.add(id(owner))
    for name, value in list(vars(owner).items()):
        if not isinstance(name, str) or type(value) in _NO_SIZES or (type(value) is dict and name.startswith("_")):
            continue
        where = f"{path}.{name}".lstrip(".")
        tagged = _tag(value, Attr(where), tracker)
        if tagged is not value:
            if type(value) is not dict:
                tracker.attribute_roots[where] = value
            vars(owner)[name] = tagged
        elif _is_configuration(value):
            _tag_object(value, where, tracker, seen, depth + 1)


def _is_configuration(value: Any) -> bool:
    """A plain object with attributes: a dataclass, a namespace, a configuration."""
    kind = type(value)
    library = kind.__module__.split(".")[0]
    return (
        hasattr(value, "__dict__")
        and not isinstance(value, (type, nn.Module, torch.Tensor, dict, list, tuple))
        and not callable(value)
        and library not in ("torch", "builtins", "functools", "collections", "threading", "numpy")
    )


def _tag(value: Any, attr: Attr, tracker: Tracker) -> Any:
    if type(value) is int:
        tracker.attribute_values[attr] = value
        return TaggedInt(value, attr, tracker)
    if type(value) in (tuple, list) and value and all(type(v) in (int, tuple, list) for v in value):
        parts = [_tag(v, Attr(attr.path, (*attr.index, i)), tracker) for i, v in enumerate(value)]
        return type(value)(parts)
    if type(value) is dict and not attr.path.rsplit(".", 1)[-1].startswith("_"):
        return _tag_table(value, attr.path, tracker)
    return value


def _tag_table(table: dict[Any, Any], path: str, tracker: Tracker) -> dict[Any, Any]:
    """A dict of settings: each int goes by the name path.key."""
    named = {k: v for k, v in table.items() if type(v) is int and isinstance(k, str) and k.isidentifier()}
    if not named:
        return table
    for key, value in named.items():
        tracker.attribute_roots[f"{path}.{key}"] = value
    return {k: _tag(v, Attr(f"{path}.{k}"), tracker) if k in named else v for k, v in table.items()}
