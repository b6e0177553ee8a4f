"""What can be mended right after pruning, from a few batches and without training.

A removed channel often resembles a mixture of those that stay. ``refit_`` finds that mixture by least squares and adds
it to the weights that read the channel, so that much of what it said is still heard. ``refresh_norms_`` then takes
the running statistics of batch norms anew: they were those of the whole model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import nn

from sapwood.capture.run import as_call
from sapwood.capture.skeleton import require_plain
from sapwood.errors import explain
from sapwood.scoring.data import inputs_of
from sapwood.surgery.cut import require_fit
from sapwood.types import Plan

RIDGE = 1e-3
"""Of the mean square of the channels that stay: keeps the mixture sane where they resemble each other."""


@torch.no_grad()
def refit_(small: nn.Module, dense: nn.Module, plan: Plan, batches: Iterable[Any]) -> nn.Module:
    """Let the weights that read removed channels make up for them, in place; returns the small model.

    ``small`` is what ``cut(dense, plan)`` gave. Convolutions without groups and linear layers are refitted; a bias
    takes up what is constant. Others, and layers that lost no inputs, stay as they are.
    """
    small, dense = require_plain(small), require_plain(dense)
    require_fit(dense, plan)
    readers = {n: m for n, m in dense.named_modules() if _refits(m, plan.keep.get(f"{n}.weight", {}))}
    sums = {name: _Moments() for name in readers}
    hooks = [m.register_forward_pre_hook(sums[n].watch) for n, m in readers.items()]
    try:
        _run(dense, batches)
    finally:
        for hook in hooks:
            hook.remove()
    parts = dict(small.named_modules())
    for name, module in readers.items():
        keep = plan.keep[f"{name}.weight"]
        if sums[name].count:
            _refit(parts[name], module, keep, sums[name])
    return small


@torch.no_grad()
def refresh_norms_(model: nn.Module, batches: Iterable[Any]) -> nn.Module:
    """Take the running statistics of all batch norms anew, as plain means over the batches; returns the model."""
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.track_running_stats]
    if not norms:
        return model
    before = [m.momentum for m in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # a plain mean
    try:
        _run(model, batches, training=norms)
    finally:
        for norm, momentum in zip(norms, before, strict=True):
            norm.momentum = momentum
    return model


class _Moments:
    """Sums and sums of products of a layer's inputs, channel by channel."""

    def __init__(self) -> None:
        self.count, self.sum, self.products = 0, torch.zeros(()), torch.zeros(())

    def watch(self, module: nn.Module, args: Any) -> None:
        inputs = args[0].detach()
        if isinstance(module, nn.Linear):
            rows = inputs.reshape(-1, inputs.shape[-1]).double()
        else:
            rows = inputs.transpose(1, -1).reshape(-1, inputs.shape[1]).double()
        self.count += len(rows)
        self.sum = self.sum.to(rows.device) + rows.sum(0)
        self.products = self.products.to(rows.device) + rows.T @ rows


def _refits(module: nn.Module, keep: Any) -> bool:
    plain = isinstance(module, nn.Linear) or (
        isinstance(module, nn.modules.conv._ConvNd)
        and not isinstance(module, nn.modules.conv._ConvTransposeNd)
        and module.groups == 1
    )
    return plain and 1 in keep


def _refit(small: Any, dense: Any, keep: Any, moments: _Moments) -> None:
    """W_kept + W_gone B, where B is the best mixture of kept channels for each of those that are gone."""
    stays = torch.tensor(keep[1], device=moments.sum.device)
    gone = torch.ones(len(moments.sum), dtype=torch.bool, device=stays.device)
    gone[stays] = False
    products, mean = moments.products / moments.count, moments.sum / moments.count
    if small.bias is not None:
        products = products - torch.outer(mean, mean)
    own = products[stays][:, stays]
    own = own + RIDGE * own.diagonal().mean().clamp_min(1e-12) * torch.eye(len(stays), device=own.device).double()
    mixture = torch.linalg.solve(own, products[stays][:, gone]).T  # gone x stays
    rows = dense.weight.detach().double()
    if 0 in keep:
        rows = rows[list(keep[0])]
    lost = rows[:, gone]
    weight = rows[:, stays] + torch.einsum("og...,gs->os...", lost, mixture)
    small.weight.copy_(weight)
    if small.bias is not None:
        constant = mean[gone] - mixture @ mean[stays]
        small.bias.add_((lost.flatten(2).sum(2) if lost.dim() > 2 else lost).to(constant) @ constant)


def _run(model: nn.Module, batches: Iterable[Any], training: Iterable[nn.Module] = ()) -> None:
    """Forward passes without gradients, in evaluation mode but for some modules."""
    place = next((t.device for t in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    seen = 0
    with _modes_kept(model):
        model.eval()
        for module in training:
            module.training = True
        for batch in batches:
            args, kwargs = as_call(send_to_device(inputs_of(batch), place))
            model(*args, **kwargs)
            seen += 1
    if not seen:
        raise explain("at least one batch", "none", "Pass a list of batches.", "mend")


@contextmanager
def _modes_kept(model: nn.Module) -> Iterator[None]:
    modes = {m: m.training for m in model.modules()}
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
