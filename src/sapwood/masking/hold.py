"""``hold``: zeros that stay zero, whatever the optimizer does.

After every step of the optimizer the held weights are zeroed again, so weight decay, momentum, mixed precision,
gradient accumulation and data parallelism all work as they are, and the model keeps its names and its structure.

Zeros have gradients, too, and the sparser a model, the more these outweigh the others: where gradients are clipped by
their norm, those of zeros are cleared first, or the weights that are left hardly move.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from sapwood.capture.skeleton import unwrap
from sapwood.errors import explain
from sapwood.masking.targets import MARK, maskable

_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")


Held = tuple[torch.Tensor, torch.Tensor]
"""A weight, and a byte for each of its numbers: all bits where it stays, none where it is zero."""

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Hold:
    """The zeros of a model, put back after each step; ``apply()`` does it by hand, ``release()`` ends it.

    ``clear_gradients()`` is for a loop that clips gradients, before it does; with ``gradients=True`` those of zeros are
    cleared as they are computed, for loops that leave no room for the call. Of weights that are sharded (FSDP) only the
    former does.
    """

    def __init__(self, held: Sequence[Held], optimizer: torch.optim.Optimizer | None, gradients: bool = False) -> None:
        self.held = list(held)
        self._bits: list[tuple[int, torch.Tensor]] = [(0, kept) for _, kept in held]
        self._hooks: list[Any] = [] if optimizer is None else [optimizer.register_step_post_hook(self._after_step)]
        if gradients or isinstance(optimizer, torch.optim.LBFGS):  # which looks along them: none may leave the zeros
            whole = [(weight, kept) for weight, kept in held if not hasattr(weight, "to_local")]
            self._hooks += [weight.register_hook(_cleared(kept)) for weight, kept in whole if weight.requires_grad]

    @torch.no_grad()
    def apply(self) -> None:
        for index, (weight, kept) in enumerate(self.held):
            place, bits = self._bits[index]
            if not place or weight.data_ptr() != place or bits.stride() != weight.stride():  # moved, or sharded
                bits = _as_bits(_local(weight))
                if kept.device != bits.device:  # the model was moved after hold
                    kept = kept.to(bits.device)
                    self.held[index] = (weight, kept)
                self._bits[index] = (0 if hasattr(weight, "to_local") else weight.data_ptr(), bits)
            bits.bitwise_and_(kept)

    @torch.no_grad()
    def clear_gradients(self) -> None:
        """Between backward and clipping: zeros do not move, so their gradients say nothing about the step."""
        for weight, kept in self.held:
            if weight.grad is not None and weight.grad.layout == torch.strided:
                bits = _as_bits(_local(weight.grad))
                bits.bitwise_and_(kept.to(bits.device))

    @torch.no_grad()
    def renew(self) -> None:
        """Hold the zeros that the same weights have now, in the same memory: a captured step reads it there."""
        for weight, kept in self.held:
            kept.copy_(_kept(weight))

    @property
    def zeros(self) -> int:
        """How many numbers are held at zero in this process."""
        return sum(kept.numel() - int(kept.count_nonzero()) for _, kept in self.held)

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.apply()

    def release(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def hold(model: nn.Module, optimizer: Any = None, *, gradients: bool = False) -> Hold:
    """Keep a masked model's zeros through training with this optimizer.

    A loop that clips gradients calls ``clear_gradients()`` of what this returns before it does; ``gradients=True``
    clears those of zeros as they are computed instead.

    Which weights are held was noted by ``mask`` (and by ``load``); without a note, every maskable weight that is
    partly zero is. Call it after moving or sharding the model (FSDP), so that the zeros held are those trained.
    """
    if isinstance(model, torch.optim.Optimizer):
        raise explain("a model, then an optimizer", "an optimizer first", "sw.hold(model, optimizer)", "hold")
    inner = optimizer
    while isinstance(getattr(inner, "optimizer", None), torch.optim.Optimizer):
        inner = inner.optimizer  # Accelerate and others wrap it
    if not (inner is None or isinstance(inner, torch.optim.Optimizer)):
        raise explain("a torch optimizer", type(optimizer).__name__, "sw.hold(model, optimizer)", "hold")
    if not isinstance(model, nn.Module):
        raise explain("a torch.nn.Module", type(model).__name__, "sw.hold(model, optimizer)", "hold")
    return Hold(list(held_weights(model).values()), inner, gradients)


def held_weights(model: nn.Module) -> dict[str, Held]:
    """By name, what there is to hold: all that ``mask`` has noted or, without a note, what is partly zero."""
    parameters = {plain_name(n): p for n, p in unwrap(model).named_parameters()}
    noted = noted_masks(model)
    held: dict[str, Held] = {}
    for name in noted or map(plain_name, maskable(model)):
        if name not in parameters:
            raise explain(f"the masked weight {name!r}", "a model without", "Mask the model anew.", "hold")
        kept = _kept(parameters[name])
        if noted or partly_zero(kept):
            held[name] = (parameters[name], kept)
    if not noted and not held:
        raise explain("a masked model", "one without zeros", "Call sw.mask first.", "hold")
    return held


def noted_masks(model: nn.Module) -> dict[str, str]:
    """Which weights ``mask`` has masked, and in which pattern; also where a masked model is a part of this one."""
    found: dict[str, str] = {}
    for path, module in unwrap(model).named_modules():
        for name, pattern in vars(module).get(MARK, {}).items():
            found[plain_name(f"{path}.{name}" if path else name)] = pattern
    return found


def partly_zero(values: torch.Tensor) -> bool:
    """Zeros and others: a weight that is all zero was never trained rather than masked."""
    return bool(values.any()) and not bool(values.all())


def note_masks(model: nn.Module, masks: Mapping[str, str]) -> None:
    """Note on a model which of its weights are masked, in place of what was noted before."""
    vars(model).pop(MARK, None)
    if masks:
        setattr(model, MARK, dict(masks))


def plain_name(name: str) -> str:
    """A parameter's name without what wrappers (compile, FSDP, checkpointing) put into it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _cleared(kept: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    def clear(gradient: torch.Tensor) -> torch.Tensor:
        if gradient.layout != torch.strided:
            return gradient
        if gradient.requires_grad:  # gradients of gradients are asked for, which bits have not
            return gradient.masked_fill(kept.to(gradient.device) == 0, 0)
        return torch.bitwise_and(_as_bits(gradient), kept.to(gradient.device)).view(gradient.dtype)

    return clear


def _kept(weight: torch.Tensor) -> torch.Tensor:
    return (_local(weight) != 0).to(torch.int8).neg_()


def _as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as whole numbers: clearing bits is much faster than masked_fill_, and clears nan, too."""
    return tensor.view(_BITS[tensor.element_size()])


def _local(parameter: torch.Tensor) -> torch.Tensor:
    """The part of a parameter that this process holds."""
    to_local = getattr(parameter, "to_local", None)
    data = parameter.detach()
    return data.to_local() if to_local is not None else data  # type: ignore[attr-defined]
