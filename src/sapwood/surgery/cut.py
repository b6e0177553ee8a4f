"""``cut``: a new, smaller model; the one given is not touched."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from sapwood.capture.fakes import fake
from sapwood.capture.isolation import uncollected, undisturbed
from sapwood.capture.skeleton import Replace, named_tensors, once_each, place_of, rebuild, require_plain
from sapwood.errors import SapwoodError, explain
from sapwood.types import Plan


@undisturbed()
@uncollected()
def cut(model: nn.Module, plan: Plan) -> nn.Module:
    """A copy of the model without the channels the plan leaves out."""
    model = require_plain(model)
    require_fit(model, plan)
    return _rebuilt(model, plan, once_each(lambda name, tensor: sliced(name, tensor, plan)))


def shape_of_cut(mode: FakeTensorMode, model: nn.Module, plan: Plan) -> nn.Module:
    """The cut model with tensors that have shapes but no data: to see whether it would run."""

    def replace(name: str, tensor: torch.Tensor) -> torch.Tensor:
        dims = plan.keep.get(name)
        if dims is None:
            return fake(mode, tensor)
        shape = [len(dims[d]) if d in dims else n for d, n in enumerate(tensor.shape)]
        device = "cpu" if tensor.is_meta else tensor.device
        with mode:
            return torch.empty(shape, dtype=tensor.dtype, device=device)

    return _rebuilt(require_plain(model), plan, replace)


def _rebuilt(model: nn.Module, plan: Plan, replace: Replace) -> nn.Module:
    small = rebuild(model, replace)
    set_attributes(small, plan)
    return small


def set_attributes(small: nn.Module, plan: Plan) -> None:
    for path, value in plan.attributes.items():
        _set_attribute(small, path, value)


def sliced(name: str, tensor: torch.Tensor, plan: Plan) -> torch.Tensor:
    """The part of a tensor that stays, in its own memory and memory format."""
    with torch.no_grad():
        result = slice_like(name, tensor.detach(), plan)
        for scale in plan.scales.get(name, ()):
            result = _rescale(result, name, scale.dim, scale.positions, scale.factor, plan)
        if place_of(result)[0] == place_of(tensor)[0]:
            result = result.clone(memory_format=torch.preserve_format)
        return result


def slice_like(name: str, tensor: torch.Tensor, plan: Plan) -> torch.Tensor:
    """Slice a tensor shaped like the parameter ``name`` (its momentum, its gradient)."""
    result = tensor
    for dim, kept in sorted(plan.keep.get(name, {}).items(), key=lambda item: len(item[1])):
        result = result.index_select(dim, _index(tuple(kept)).to(tensor.device))
    layout = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
    if layout and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=layout):
        result = result.contiguous(memory_format=layout)
    return result


@functools.lru_cache(maxsize=512)
def _index(kept: tuple[int, ...]) -> torch.Tensor:
    """Indices as a tensor; many weights keep the same ones."""
    return torch.tensor(kept)


@functools.lru_cache(maxsize=512)
def _is_selection(kept: tuple[int, ...], size: int) -> bool:
    return bool(kept) and min(kept) >= 0 and max(kept) < size and len(set(kept)) == len(kept)


def _rescale(
    tensor: torch.Tensor, name: str, dim: int, positions: tuple[int, ...], factor: float, plan: Plan
) -> torch.Tensor:
    wanted = set(positions)
    kept = plan.keep.get(name, {}).get(dim, range(plan.shapes.get(name, tensor.shape)[dim]))
    factors = [factor if index in wanted else 1.0 for index in kept]
    shape = [-1 if d == dim else 1 for d in range(tensor.dim())]
    return tensor * torch.tensor(factors, dtype=tensor.dtype, device=tensor.device).view(shape)


def require_fit(model: nn.Module, plan: Plan) -> None:
    """Refuse a plan that was made for another model."""
    tensors = named_tensors(model)
    for name, shape in plan.shapes.items():
        if name not in tensors:
            raise explain(
                f"a model with a parameter or buffer {name!r} of shape {tuple(shape)}",
                f"{type(model).__name__}, which has none of that name",
                "The plan was made for another model: make a plan for this one.",
                "plan",
            )
        if tuple(tensors[name].shape) != tuple(shape):
            raise explain(
                f"{name!r} of shape {tuple(shape)}",
                f"shape {tuple(tensors[name].shape)}",
                "The plan was made for another model, or this one is cut already.",
                "plan",
            )
        for dim, kept in plan.keep.get(name, {}).items():
            if not _is_selection(tuple(kept), shape[dim]):
                raise explain(
                    f"distinct indices from 0 to {shape[dim] - 1} for {name!r}, dim {dim}",
                    f"{len(kept)} of them from {min(kept, default=None)} to {max(kept, default=None)}",
                    "The plan is damaged: make it anew.",
                    "plan",
                )


def _set_attribute(model: nn.Module, path: str, value: Any) -> None:
    """Set an attribute of a module, of an object it holds, or an entry of a dict it holds."""
    *parents, name = path.split(".")
    owner: Any = model
    try:
        for parent in parents:
            owner = owner[parent] if isinstance(owner, dict) else getattr(owner, parent)
        held = owner[name] if isinstance(owner, dict) else getattr(owner, name)
    except (AttributeError, KeyError):
        raise SapwoodError(
            f"plan: expected an attribute {path!r}; {type(model).__name__} has none. "
            "The plan was made for another model: make a plan for this one."
        ) from None
    if type(held) not in (int, tuple, list) or isinstance(value, int) != isinstance(held, int):
        raise explain(f"a size in the attribute {path!r}", type(held).__name__, "The plan is another model's.", "plan")
    new = tuple(value) if isinstance(held, tuple) else value
    if isinstance(owner, dict):
        owner[name] = new
    elif name in getattr(owner, "__dict__", {}):
        vars(owner)[name] = new  # past any validation of its own
    else:
        setattr(owner, name, new)
