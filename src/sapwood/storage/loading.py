"""``load`` and ``load_``: a saved model back in memory, on a dense one that is cut and filled."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from sapwood.capture.skeleton import join_recurrent, named_tensors, rebuild, unwrap
from sapwood.errors import explain
from sapwood.masking.hold import note_masks
from sapwood.sparse.linear import pack_
from sapwood.storage import factories
from sapwood.storage.bundle import Bundle, require_model
from sapwood.storage.record import Record
from sapwood.storage.tensors import decode
from sapwood.surgery.cut import set_attributes, slice_like
from sapwood.types import Plan


def load(path: str | Path, model: nn.Module | None = None, *, verify: bool | str = True) -> nn.Module:
    """The saved model: a freshly built dense one (given, or built by name) is cut and filled.

    The model given is not touched. Give one on the meta device to avoid ever holding dense weights.
    ``verify=False`` skips the checksums, ``verify="full"`` compares the SHA-256 of every tensor as well.
    """
    return _load(path, model, verify, own=model is None)  # a model we built ourselves is ours to fill


def load_(path: str | Path, model: nn.Module, *, verify: bool | str = True) -> nn.Module:
    """Cut and fill the given model itself, as ``load_state_dict`` would.

    Tensors that keep their shape take no new memory. A damaged bundle is refused before anything is filled.
    """
    return _load(path, model, verify, own=True)


def _load(path: str | Path, model: nn.Module | None, verify: bool | str, own: bool) -> nn.Module:
    bundle = Bundle(path)
    dense = unwrap(factories.build(bundle.record.model) if model is None else model)
    require_model(dense, bundle.record, str(bundle.path))
    plan = bundle.record.plan()
    loaded = bundle.tensors(verify, {n: t.detach() for n, t in named_tensors(dense).items()} if own else None)

    def fill(name: str, tensor: torch.Tensor) -> torch.Tensor:
        found = loaded.pop(name, None)
        if found is not None:
            return found if tensor.is_meta else found.to(tensor.device)
        if not tensor.is_meta:
            part = slice_like(name, tensor.detach(), plan)
            return part if own else part.clone()
        if name in bundle.record.buffers:
            return load_record(name, bundle.record, bundle.path)
        raise explain(
            f"a value for {name!r}, which is not part of the state_dict",
            "a tensor on the meta device",
            "Build the model on the CPU.",
            str(bundle.path),
        )

    if own:
        small = _refill(dense, {name: fill(name, t) for name, t in named_tensors(dense).items()}, plan)
    else:
        small = rebuild(dense, fill)
        set_attributes(small, plan)
    note_masks(small, bundle.record.masks)
    return pack_(small, bundle.record.packed)


def _refill(model: nn.Module, tensors: dict[str, torch.Tensor], plan: Plan) -> nn.Module:
    """Give a model its new tensors, by the parameters it has; those that were filled where they lie stay."""
    swapped: dict[int, torch.Tensor] = {}
    for name, old in named_tensors(model).items():
        new = tensors[name]
        if isinstance(old, nn.Parameter) and not old.is_meta:
            if new.data_ptr() != old.data_ptr() or new.shape != old.shape:
                old.data, old.grad = new, None
        else:
            swapped[id(old)] = nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, entry in held.items():
                if id(entry) in swapped:
                    held[name] = swapped[id(entry)]  # type: ignore[assignment]
    set_attributes(model, plan)
    join_recurrent(model)
    return model


def load_record(name: str, record: Record, where: Path) -> torch.Tensor:
    """A small buffer that the record itself holds."""
    return decode(record.buffers[name], f"{where}, {name!r}")
