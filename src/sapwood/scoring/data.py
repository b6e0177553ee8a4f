"""What scores learn from data: the norms of a weight's inputs, and gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from sapwood.capture.modes import plain_paths
from sapwood.capture.run import as_call
from sapwood.errors import explain

aten = torch.ops.aten
Loss = Callable[[nn.Module, Any], torch.Tensor]
"""(model, batch) -> the loss of this batch."""


class _WatchInputs(TorchDispatchMode):
    """Sums the squares of what each weight is multiplied with, by the weight's memory."""

    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names = {w.untyped_storage().data_ptr(): n for n, w in weights.items()}
        self.weights = weights
        self.sums: dict[str, tuple[torch.Tensor, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.addmm.default:
            self._matrix(args[1], args[2])
        elif func in (aten.mm.default, aten.bmm.default):
            self._matrix(args[0], args[1])
        elif func is aten.convolution.default:
            self._convolution(args[0], args[1], args[6], args[8])
        return func(*args, **(kwargs or {}))

    def _name(self, tensor: torch.Tensor) -> str | None:
        return self.names.get(tensor.untyped_storage().data_ptr())

    def _matrix(self, x: torch.Tensor, matrix: torch.Tensor) -> None:
        name = self._name(matrix)
        if name is None:
            return
        weight = self.weights[name]
        squares = x.detach().float().square().sum(dim=tuple(range(x.dim() - 1)))
        # in the weight as it is kept, the dimension that is summed over is the one this stride belongs to
        strides = [d for d in range(weight.dim()) if weight.stride(d) == matrix.stride(-2)]
        sizes = [d for d in strides if weight.shape[d] == len(squares)]
        if sizes:
            self._add(name, squares, sizes[-1])

    def _convolution(self, x: torch.Tensor, weight: torch.Tensor, transposed: bool, groups: int) -> None:
        name = self._name(weight)
        if name is None:
            return
        over = [d for d in range(x.dim()) if d != 1]
        squares = x.detach().float().square().sum(dim=over)
        if transposed:
            self._add(name, squares, 0)
        else:  # the weight has the inputs of one group; its rows belong to different groups
            rows = squares.view(groups, -1).repeat_interleave(len(weight) // groups, 0)
            self._add(name, rows, 1)

    def _add(self, name: str, squares: torch.Tensor, dim: int) -> None:
        before = self.sums.get(name)
        self.sums[name] = (squares if before is None or before[1] != dim else before[0] + squares, dim)


def input_norms(
    model: nn.Module, weights: Mapping[str, torch.Tensor], batches: Iterable[Any]
) -> dict[str, torch.Tensor]:
    """The L2 norm of each input of each weight over the calibration batches, in a shape that multiplies the weight."""
    watch = _WatchInputs(weights)
    was_training = {m: m.training for m in model.modules()}
    seen = 0
    try:
        model.eval()
        with torch.no_grad(), plain_paths():  # the fused path of attention hides its products
            for batch in batches:
                args, kwargs = as_call(inputs_of(batch))
                with watch:
                    model(*args, **kwargs)
                seen += 1
    finally:
        for module, mode in was_training.items():
            module.training = mode
    _require_data(seen)
    missing = [n for n in weights if n not in watch.sums]
    if missing:
        raise explain(
            "every masked weight in a matrix product or convolution of the calibration batches",
            f"none with {missing[:3]}",
            "Leave these out with ignore= (recurrent and bilinear layers), or give batches that reach them.",
            "wanda",
        )
    return {n: _beside(s.sqrt(), d, weights[n]) for n, (s, d) in watch.sums.items()}


def _beside(norms: torch.Tensor, dim: int, weight: torch.Tensor) -> torch.Tensor:
    """Norms in a shape that multiplies the weight: one per input, or one per output and input of its group."""
    if norms.dim() == 2:
        return norms.view(*norms.shape, *[1] * (weight.dim() - 2))
    return norms.view([-1 if d == dim else 1 for d in range(weight.dim())])


def gradients(
    model: nn.Module, weights: Mapping[str, torch.Tensor], batches: Iterable[Any], loss: Loss
) -> dict[str, torch.Tensor]:
    """The gradient of the mean loss over the batches; the model's own gradients are left as they were."""
    held = [weights[n] for n in weights]
    needed = [p.requires_grad for p in held]
    total: list[torch.Tensor] | None = None
    seen = 0
    modes = {m: m.training for m in model.modules()}
    try:
        model.eval()  # no dropout, and running statistics stay
        for weight in held:
            weight.requires_grad_(True)
        with torch.enable_grad():
            for batch in batches:
                found = torch.autograd.grad(loss(model, batch), held, allow_unused=True)
                grads = [g if g is not None else torch.zeros_like(w) for g, w in zip(found, held, strict=True)]
                total = grads if total is None else [a + b for a, b in zip(total, grads, strict=True)]
                seen += 1
    finally:
        for weight, flag in zip(held, needed, strict=True):
            weight.requires_grad_(flag)
        for module, mode in modes.items():
            module.training = mode
    _require_data(seen)
    assert total is not None
    return {n: t / seen for n, t in zip(weights, total, strict=True)}


def inputs_of(batch: Any) -> Any:
    """The model's inputs in a batch of a data loader: of (inputs, targets) the first, of a dict all but labels."""
    if isinstance(batch, Mapping):
        return {k: v for k, v in batch.items() if k not in ("labels", "label", "target", "targets")}
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0]
    return batch


def default_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """The model's own loss where it returns one, else cross entropy of (inputs, targets)."""
    if isinstance(batch, Mapping):
        output = model(**batch)
        found = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
        if isinstance(found, torch.Tensor):
            return found
    elif isinstance(batch, (tuple, list)) and len(batch) == 2:
        output = model(batch[0])
        logits = output[0] if isinstance(output, (tuple, list)) else getattr(output, "logits", output)
        return nn.functional.cross_entropy(logits, batch[1])
    raise explain(
        "batches of (inputs, targets), or a dict with labels for a model that returns a loss",
        type(batch).__name__,
        "Pass loss=, a function of (model, batch).",
        "loss",
    )


def require_iterable(batches: Any) -> None:
    if not isinstance(batches, Iterable):
        raise explain("an iterable of batches", type(batches).__name__, "For example a list of them.", "calibration")


def _require_data(seen: int) -> None:
    if not seen:
        raise explain("at least one batch", "none", "Pass calibration=, an iterable of batches.", "calibration")
