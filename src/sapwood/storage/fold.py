"""Batch norm folded into the convolution or linear layer before it, where that is the same function."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval
from torch.utils._python_dispatch import TorchDispatchMode

from sapwood.capture.fakes import fake_inputs, fake_model, in_fake_mode
from sapwood.capture.registry import tensors
from sapwood.capture.run import Inputs
from sapwood.capture.skeleton import rebuild

_LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Linear)


class _CountUses(TorchDispatchMode):
    """How many operators read each tensor."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.uses: dict[int, int] = {}
        self.alive: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        asks_only = func.namespace == "prim"  # prim::device reads no values
        for tensor in tensors([] if asks_only else [*args, *(kwargs or {}).values()]):
            self.uses[id(tensor)] = self.uses.get(id(tensor), 0) + 1
            self.alive.append(tensor)
        return func(*args, **(kwargs or {}))


def fold_batch_norms(model: nn.Module, inputs: Inputs) -> tuple[nn.Module, list[str]]:
    """A copy in evaluation mode without the batch norms that could be folded, and their names."""
    folded = rebuild(model, lambda _, tensor: tensor.detach().clone()).eval()
    pairs = _pairs(folded, inputs)
    for layer_name, norm_name in pairs:
        layer, norm = folded.get_submodule(layer_name), folded.get_submodule(norm_name)
        assert isinstance(norm, nn.modules.batchnorm._BatchNorm)
        if isinstance(layer, nn.Linear):
            fused: nn.Module = fuse_linear_bn_eval(layer, norm)
        else:
            assert isinstance(layer, nn.modules.conv._ConvNd)
            fused = fuse_conv_bn_eval(layer, norm, transpose=bool(layer.transposed))
        folded.set_submodule(layer_name, fused)
        folded.set_submodule(norm_name, nn.Identity())
    return folded, [norm for _, norm in pairs]


def _is_fixed_norm(module: nn.Module) -> bool:
    norm = isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None
    return norm and not _hooked(module)


def _hooked(module: nn.Module) -> bool:
    """Hooks of the user's see, or change, what would no longer be there."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _grouped_transpose(module: nn.Module) -> bool:
    """torch's own folding has no case for these."""
    return isinstance(module, nn.modules.conv._ConvNd) and module.transposed and module.groups > 1


def _pairs(model: nn.Module, inputs: Inputs) -> list[tuple[str, str]]:
    """(layer, norm) where the norm alone reads the layer's output and each runs once."""
    return in_fake_mode(lambda mode: _pairs_in(mode, model, inputs))


def _pairs_in(mode: FakeTensorMode, model: nn.Module, inputs: Inputs) -> list[tuple[str, str]]:
    made: dict[int, str] = {}
    runs: dict[str, int] = {}
    follows: dict[str, tuple[str, int]] = {}
    with torch.no_grad(), _CountUses() as counter:
        copied = fake_model(mode, model).eval()
        for name, module in copied.named_modules():
            if type(module) in _LAYERS and not _hooked(module) and not _grouped_transpose(module):

                def after(_: nn.Module, __: Any, out: Any, name: str = name) -> None:
                    runs[name] = runs.get(name, 0) + 1
                    made[id(out)] = name
                    counter.alive.append(out)

                module.register_forward_hook(after)
            elif _is_fixed_norm(module):

                def before(_: nn.Module, args: Any, name: str = name) -> None:
                    runs[name] = runs.get(name, 0) + 1
                    if args and id(args[0]) in made:
                        follows[name] = (made[id(args[0])], id(args[0]))

                module.register_forward_pre_hook(before)
        args, kwargs = fake_inputs(mode, inputs)
        copied(*args, **kwargs)
    return [
        (layer, norm)
        for norm, (layer, tensor) in follows.items()
        if runs[layer] == runs[norm] == 1 and counter.uses.get(tensor) == 1
    ]
