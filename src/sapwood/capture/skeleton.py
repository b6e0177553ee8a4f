"""Copies of a model that hold other tensors.

A trace runs a copy whose tensors are fake; a cut is a copy whose tensors are sliced. In both the
structure is deep-copied and every tensor is replaced, so nothing is ever written to the original.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
import types
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from sapwood.errors import SapwoodError, explain

Replace = Callable[[str, torch.Tensor], torch.Tensor]
_WITHOUT_PARTS = frozenset(
    (
        type(None),
        bool,
        int,
        float,
        complex,
        str,
        bytes,
        type,
        torch.dtype,
        types.FunctionType,
        types.BuiltinFunctionType,
    )
)
"""Types whose values a copy shares."""
_CONTAINERS = frozenset((list, tuple, dict, set, OrderedDict))
_EMPTY = frozenset((dict, OrderedDict, set, list))
_HOOKS = frozenset(vars(nn.Module()))
"""Attributes that every module has of its own."""
_REGISTERED = frozenset(("_parameters", "_buffers", "_modules"))


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside ``torch.compile`` and data-parallel wrappers."""
    parallel = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, parallel):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


@dataclass
class _Parts:
    """What a model consists of, as long as nobody changes it."""

    model: nn.Module
    users: int = 0
    parts: list[tuple[str, nn.Module]] | None = None
    tensors: dict[tuple[str, ...], dict[str, torch.Tensor]] = field(default_factory=dict)
    loose: list[tuple[str, torch.Tensor]] | None = None


_unchanging: dict[int, _Parts] = {}
_lock = threading.Lock()


@contextlib.contextmanager
def unchanging(model: Any) -> Iterator[None]:
    """While nobody adds, replaces or takes away a part of this model, its parts are looked up once."""
    with _lock:
        kept = _unchanging.setdefault(id(model), _Parts(model))
        kept.users += 1
    try:
        yield
    finally:
        with _lock:
            kept.users -= 1
            if not kept.users:
                del _unchanging[id(model)]


def named_parts(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """What ``named_modules`` gives, without a generator inside a generator for every level."""
    kept = _unchanging.get(id(model))
    if kept is None:
        return _find_parts(model)
    if kept.parts is None:
        kept.parts = _find_parts(model)
    return kept.parts


def _find_parts(model: nn.Module) -> list[tuple[str, nn.Module]]:
    found: list[tuple[str, nn.Module]] = []
    seen: set[int] = set()  # by identity: a class of modules may define when two are equal
    ahead = [("", model)]
    while ahead:
        path, module = ahead.pop()
        if id(module) not in seen:
            seen.add(id(module))
            found.append((path, module))
            start = path + "." if path else ""
            ahead.extend((start + n, m) for n, m in reversed(module._modules.items()) if m is not None)
    return found


def named_tensors(model: nn.Module, kinds: tuple[str, ...] = ("_parameters", "_buffers")) -> dict[str, torch.Tensor]:
    """Parameters and buffers, each once, under their first state_dict name."""
    kept = _unchanging.get(id(model))
    if kept is None:
        return _find_tensors(model, kinds)
    if kinds not in kept.tensors:
        kept.tensors[kinds] = _find_tensors(model, kinds)
    return dict(kept.tensors[kinds])


def _find_tensors(model: nn.Module, kinds: tuple[str, ...]) -> dict[str, torch.Tensor]:
    if isinstance(model, torch.jit.ScriptModule):
        return {**dict(model.named_parameters()), **dict(model.named_buffers())}
    found: dict[str, torch.Tensor] = {}
    parts = named_parts(model)
    for kind in kinds:
        seen: set[int] = set()
        for path, module in parts:
            for name, tensor in getattr(module, kind).items():
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    found[f"{path}.{name}" if path else name] = tensor
    return found


def _loose(model: nn.Module, known: set[int]) -> list[tuple[str, torch.Tensor]]:
    kept = _unchanging.get(id(model))
    if kept is None:
        return list(_loose_tensors(model, known))
    if kept.loose is None:
        kept.loose = list(_loose_tensors(model, known))
    return kept.loose


def _loose_tensors(model: nn.Module, known: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors kept as plain attributes (hook-made weights, caches)."""
    for path, module in named_parts(model):
        for name, value in vars(module).items():
            kind = type(value)
            if kind in _WITHOUT_PARTS or name in _REGISTERED or (kind in _CONTAINERS and not value):
                continue
            for tensor in _tensors_within(value):
                if id(tensor) not in known:
                    known.add(id(tensor))
                    yield f"{path}.{name}".lstrip("."), tensor


def _tensors_within(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif type(value) in (list, tuple, dict) and depth < 4:
        for item in value.values() if type(value) is dict else value:
            yield from _tensors_within(item, depth + 1)


def place_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Where a tensor lies; the same for two that share their memory. Also for tensors without data."""
    if tensor.layout is not torch.strided:
        return (id(tensor),)
    return (tensor.untyped_storage()._cdata, tuple(tensor.shape), tensor.storage_offset(), tensor.stride())


def once_each(replace: Replace) -> Replace:
    """The same replacement for tensors that share their memory, so that they go on sharing it."""
    made: dict[tuple[Any, ...], torch.Tensor] = {}

    def replace_once(name: str, tensor: torch.Tensor) -> torch.Tensor:
        place = place_of(tensor)
        if place not in made:
            made[place] = replace(name, tensor)
        return made[place]

    return replace_once


def cloned(model: nn.Module) -> nn.Module:
    """A copy with memory of its own."""
    return rebuild(model, once_each(lambda _, tensor: tensor.detach().clone()))


def sharing(model: nn.Module, written: Collection[str] = ()) -> nn.Module:
    """A copy with buffers of its own, and the parameters of the model except those that are written to.

    A model with its own way of changing modes may write to its weights there, unseen: it shares nothing.
    """
    if any(_changes_modes(module) for _, module in named_parts(model)):
        return cloned(model)
    shared = set(named_tensors(model, ("_parameters",))).difference(written)

    def replace(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach() if name in shared else tensor.detach().clone()

    return rebuild(model, once_each(replace))


def _changes_modes(module: nn.Module) -> bool:
    kind = type(module)
    own = "train" in vars(module) or "eval" in vars(module)
    return own or kind.train is not nn.Module.train or kind.eval is not nn.Module.eval


def rebuild(model: nn.Module, replace: Replace) -> nn.Module:
    """A deep copy of the structure with ``replace(name, tensor)`` in place of each tensor."""
    memo: dict[int, Any] = {}
    tensors = named_tensors(model)
    for name, tensor in tensors.items():
        new = replace(name, tensor)
        if isinstance(tensor, nn.Parameter) and not isinstance(new, nn.Parameter):
            new = new.clone() if new.is_inference() else new
            new = nn.Parameter(new, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = new
    for name, tensor in _loose(model, set(memo)):
        memo[id(tensor)] = replace(name, tensor.detach())
    try:
        made = _copied(model, memo)
        join_recurrent(made)
        return made  # type: ignore[no-any-return]
    except Exception as error:
        raise SapwoodError(
            f"expected a model that can be copied; copying {type(model).__name__} raised "
            f"{type(error).__name__}: {error}. Remove what cannot be copied (open files, locks, "
            "generators) from the modules' attributes before pruning."
        ) from error


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """What ``copy.deepcopy`` gives, in a fraction of the time for modules and the dicts and lists they are made of."""
    kind: Any = type(value)
    if kind in _WITHOUT_PARTS:
        return value
    found = memo.get(id(value), memo)
    if found is not memo:
        return found
    made: Any
    if kind in _EMPTY and not value and not (kind is OrderedDict and vars(value)):
        made = memo[id(value)] = kind()
        return made
    if kind in (tuple, set) and all(type(v) in _WITHOUT_PARTS for v in value):
        return value if kind is tuple else set(value)
    if kind is list:
        made = memo[id(value)] = []
        made.extend(_copied(v, memo) for v in value)
    elif kind is dict or (kind is OrderedDict and not vars(value)):
        made = memo[id(value)] = kind()
        for key, item in value.items():
            plain = type(key) in _WITHOUT_PARTS
            made[key if plain else _copied(key, memo)] = item if type(item) in _WITHOUT_PARTS else _copied(item, memo)
    elif isinstance(value, nn.Module) and _copies_plainly(kind):
        made = memo[id(value)] = kind.__new__(kind)
        usual = kind.__setstate__ is nn.Module.__setstate__
        state = vars(made) if usual else {}
        for name, item in vars(value).items():
            of = type(item)
            if of in _WITHOUT_PARTS:
                state[name] = item
            elif of in _EMPTY and not item and name in _HOOKS:
                state[name] = memo.setdefault(id(item), of())  # handles of hooks refer to it
            else:
                state[name] = _copied(item, memo)
        if not usual:
            made.__setstate__(state)
    else:
        made = copy.deepcopy(value, memo)
    return made


@functools.cache
def _copies_plainly(kind: type) -> bool:
    """Whether a class of modules leaves it to torch and Python how its instances are copied."""
    own = ("__new__", "__deepcopy__", "__reduce__", "__reduce_ex__", "__getstate__", "__getnewargs__")
    usual = all(getattr(kind, name, None) is getattr(nn.Module, name, None) for name in (*own, "__getnewargs_ex__"))
    return usual and not any("__slots__" in vars(base) for base in kind.__mro__)


def join_recurrent(model: nn.Module) -> None:
    """cuDNN wants the weights of a recurrent layer side by side."""
    for _, module in named_parts(model):
        if isinstance(module, nn.RNNBase) and all(type(p) is nn.Parameter for p in module.parameters()):
            module.flatten_parameters()


def require_plain(model: Any) -> nn.Module:
    """Refuse what cannot be traced, in plain words."""
    if not isinstance(model, nn.Module):
        raise explain("a torch.nn.Module", type(model).__name__, "Pass the model itself.", "model")
    model = unwrap(model)
    assert isinstance(model, nn.Module)
    if isinstance(model, torch.jit.ScriptModule):
        raise explain(
            "an eager nn.Module",
            f"a scripted {type(model).__name__}",
            "Prune the Python model and script the result.",
            "model",
        )
    for path, module in named_parts(model):
        kind = type(module).__module__
        if kind.startswith(("torch.ao.nn.quantized", "torch.nn.quantized", "torch.ao.nn.intrinsic.quantized")):
            raise explain(
                "float weights",
                f"a quantised {type(module).__name__} at {path!r}",
                "Prune first, then quantise.",
                "model",
            )
    tensors = named_tensors(model)
    for name, tensor in tensors.items():
        if tensor.is_quantized:
            raise explain("float weights", f"quantised {name!r}", "Prune first, then quantise.", "model")
        if nn.parameter.is_lazy(tensor):
            raise explain(
                "initialised parameters",
                f"lazy {name!r}",
                "Run the model once so that lazy layers know their sizes.",
                "model",
            )
    if not any(isinstance(t, nn.Parameter) for t in tensors.values()):
        raise explain(
            "a model with parameters",
            f"{type(model).__name__} without any",
            "There is nothing to prune in it.",
            "model",
        )
    return model
