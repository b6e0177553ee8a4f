"""``check``: is the cut model the function it should be?"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from sapwood.capture.modes import plain_paths
from sapwood.capture.run import Inputs, as_call, fake_inputs, fake_model, fake_tensors, is_meta, tensors_in
from sapwood.capture.skeleton import require_plain
from sapwood.surgery.reference import masked_reference
from sapwood.types import CheckResult, Plan

_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


def check(model: nn.Module, small: nn.Module, plan: Plan, example_inputs: Any) -> CheckResult:
    """Compare the cut model with the masked reference on the example inputs."""
    model, small = require_plain(model), require_plain(small)
    inputs = as_call(example_inputs)
    if is_meta(model):
        return _check_shapes(model, small, plan, inputs)
    with full_precision():
        try:
            with evaluating(small), torch.no_grad(), plain_paths():
                got = list(tensors_in(small(*inputs[0], **inputs[1])))
        except Exception as raised:
            return _failed(f"the cut model's forward raised {type(raised).__name__}: {raised}")
        wanted = list(tensors_in(masked_reference(model, plan)(*inputs[0], **inputs[1])))
    problem = _differs(wanted, got)
    if problem:
        return _failed(problem)
    error, tolerance = 0.0, 0.0
    for a, b in zip(wanted, got, strict=True):
        tolerance = max(tolerance, _TOLERANCE.get(a.dtype.to_real(), 0.0))
        error = max(error, relative_error(a, b))
    if not error <= tolerance:
        return _failed(f"the output is off by {error:.1e} of its largest value", error, tolerance)
    status = "exact" if plan.exact else "approximate"
    return CheckResult(status, error, tolerance, _notes(plan, status))


def _failed(why: str, error: float = float("inf"), tolerance: float = 0.0) -> CheckResult:
    return CheckResult("failed", error, tolerance, (why,))


def relative_error(wanted: torch.Tensor, got: torch.Tensor) -> float:
    """max |difference| / max |wanted|; inf where one has a nan or inf that the other has not."""
    if wanted.numel() == 0:
        return 0.0
    kind = torch.complex128 if wanted.is_complex() else torch.float64
    a, b = wanted.detach().to(kind), got.detach().to(kind)
    strange = ~torch.isfinite(a)
    if bool((strange != ~torch.isfinite(b)).any()):
        return float("inf")
    a, b = a.masked_fill(strange, 0), b.masked_fill(strange, 0)
    scale = float(a.abs().max())
    difference = float((a - b).abs().max())
    return difference / scale if scale > 0 else difference


def _differs(wanted: list[torch.Tensor], got: list[torch.Tensor]) -> str:
    if len(wanted) != len(got):
        return f"the dense model gives {len(wanted)} tensors, the cut one {len(got)}"
    for number, (a, b) in enumerate(zip(wanted, got, strict=True)):
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"output {number} changed from {tuple(a.shape)} {a.dtype} to {tuple(b.shape)} {b.dtype}"
    return ""


def _notes(plan: Plan, status: str) -> tuple[str, ...]:
    if status == "approximate":
        return (*plan.notes, "a norm or a mean runs over a cut axis: statistics are taken over the survivors")
    return plan.notes


def _check_shapes(model: nn.Module, small: nn.Module, plan: Plan, inputs: Inputs) -> CheckResult:
    outputs = []
    with fake_tensors() as mode, torch.no_grad(), plain_paths():
        args, kwargs = fake_inputs(mode, inputs)
        for module in (model, small):
            outputs.append(list(tensors_in(fake_model(mode, module).eval()(*args, **kwargs))))
    problem = _differs(*outputs)
    if problem:
        return _failed(problem)
    note = "weights on the meta device have no values: only shapes were compared"
    return CheckResult("exact" if plan.exact else "approximate", 0.0, 0.0, (*plan.notes, note))


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """No TF32 on GPUs while values are compared: it would hide small errors and look like some."""
    matmul, convolution = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    try:
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = False
        yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        torch.backends.cudnn.allow_tf32 = convolution


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, with every module's own mode restored afterwards."""
    modes = [(m, m.training) for m in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
