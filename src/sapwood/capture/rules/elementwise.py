"""Operators that work position by position, with broadcasting."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from sapwood.capture.facts import Ids, Maker
from sapwood.capture.registry import Call, rule, tensors
from sapwood.capture.tracker import Tracker


def broadcast(tracker: Tracker, operands: Iterable[torch.Tensor], rank: int, what: str) -> list[Ids]:
    """Link the operands' axes, aligned from the right; give the ids of the result."""
    result: list[Ids] = [None] * rank
    sizes = [1] * rank
    for tensor in operands:
        ids = tracker.ids(tensor)
        for dim, size in enumerate(tensor.shape):
            place = rank - tensor.dim() + dim
            if size == 1 or place < 0:
                continue
            result[place] = ids[dim] if sizes[place] == 1 else tracker.link(result[place], ids[dim], what)
            sizes[place] = size
    return result


# Torch tags these as pointwise, though not in every version and overload.
_POINTWISE = """
    relu relu6 hardtanh hardswish hardsigmoid silu mish gelu elu celu selu
    leaky_relu softplus softshrink hardshrink threshold log_sigmoid log_sigmoid_forward logit sigmoid tanh abs
    neg exp log sqrt rsqrt pow clamp clamp_min clamp_max sin cos
    erf add sub rsub mul div where masked_fill lerp addcmul addcdiv
    maximum minimum fmod remainder floor_divide eq ne lt le gt ge
    logical_and logical_or logical_not bitwise_and bitwise_or bitwise_not isnan isinf nan_to_num sign round
    floor ceil trunc square reciprocal expm1 log1p atan2 special_expit polar complex
"""


@rule(
    "pointwise",
    *(f"aten::{name}" for name in _POINTWISE.split()),
    "aten::clone",
    "aten::_to_copy",
    "aten::copy",
    "aten::detach",
    "aten::alias",
    "aten::lift_fresh",
    "aten::lift_fresh_copy",
    "aten::contiguous",
    "aten::zeros_like",
    "aten::ones_like",
    "aten::full_like",
    "aten::empty_like",
    "aten::rand_like",
    "aten::randn_like",
    "aten::fill",
    "aten::zero",
    "aten::dropout",
    "aten::native_dropout",
    "aten::bernoulli",
    "aten::uniform",
    "aten::normal",
    "aten::exponential",
    "aten::log_normal",
    "aten::random",
    "aten::rrelu_with_noise",
    "aten::_conj",
    "aten::resolve_conj",
    "aten::resolve_neg",
)
def elementwise(call: Call) -> None:
    tracker = call.tracker
    outputs = list(tensors([call.outputs]))
    rank = max((t.dim() for t in outputs), default=0)
    operands = list(call.inputs())
    dims = broadcast(tracker, operands, rank, call.name)
    for out in outputs:
        if out.shape == outputs[0].shape:
            tracker.assign(out, [d if n > 1 else None for d, n in zip(dims, out.shape, strict=True)])
    _keep_maker(call, operands)


def _keep_maker(call: Call, operands: list[torch.Tensor]) -> None:
    """Scaling a factor scales a product; scaling all terms scales a sum."""
    tracker = call.tracker
    found = [tracker.makers.get(t) for t in operands]
    known = [m for m in found if m is not None]
    linear = {"aten::clone", "aten::_to_copy", "aten::detach", "aten::alias", "aten::neg", "aten::contiguous"}
    if not known:
        return
    same = all(m.sites == known[0].sites for m in known)
    product = call.name in ("aten::mul", "aten::div") and found[0] is not None and len(known) == 1
    total = call.name in ("aten::add", "aten::sub") and len(known) == len(operands) and same
    if call.name in linear or product:  # the one that was made may be stretched to more dimensions
        first = next(t for t, m in zip(operands, found, strict=True) if m is not None)
        more = call.out.dim() - first.dim()
        tracker.makers[call.out] = known[0].moved([d - more if d >= more else None for d in range(call.out.dim())])
    elif total:
        exact = _alike(known) and all(t.dim() == call.out.dim() for t in operands)
        tracker.makers[call.out] = known[0] if exact else known[0].blurred(*known[1:])


def _alike(makers: list[Maker]) -> bool:
    first = makers[0]
    return all(m.axes == first.axes and np.array_equal(m.positions, first.positions) for m in makers)


@rule("aten::prelu", "aten::_prelu_kernel")
def prelu(call: Call) -> None:
    tracker, x, weight = call.tracker, call["self"], call["weight"]
    ids = tracker.ids(x)
    if weight.dim() == 1 and weight.numel() > 1:
        tracker.link(ids[1], tracker.ids(weight)[0], call.name)
    elif weight.dim() > 1:
        ids = broadcast(tracker, (x, weight), x.dim(), call.name)
    tracker.assign(call.out, ids)


@rule(
    "aten::zeros",
    "aten::ones",
    "aten::full",
    "aten::empty",
    "aten::rand",
    "aten::randn",
    "aten::randint",
    "aten::randperm",
    "aten::arange",
    "aten::linspace",
    "aten::eye",
    "aten::scalar_tensor",
    "aten::new_zeros",
    "aten::new_ones",
    "aten::new_full",
    "aten::new_empty",
    "aten::tril_indices",
    "aten::triu_indices",
    "aten::sym_size",
    "aten::is_same_size",
    "aten::_local_scalar_dense",
    "aten::equal",
    "aten::_assert_async",
    "aten::_assert_scalar",
    "aten::_assert_tensor_metadata",
    "prim::device",
)
def makes_new(call: Call) -> None:
    """Tensors made from numbers: their sizes are read from the arguments, at the function level."""
