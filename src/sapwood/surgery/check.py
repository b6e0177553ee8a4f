"""``check``: is the cut model the function it should be?

The cut model and the masked reference run on the same inputs. Where their output hardly depends on
the removed channels (a head of zeros, a layer scale of 1e-6) or is too coarse to tell (half precision),
the comparison is made once more on a float32 copy whose idle weights are given random values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from sapwood.capture.fakes import fake_inputs, fake_model, in_fake_mode
from sapwood.capture.isolation import copied, full_precision, reseed, uncollected, undisturbed
from sapwood.capture.modes import plain_paths
from sapwood.capture.run import Inputs, Seen, as_call, is_meta, results_in, watch
from sapwood.capture.skeleton import cloned, named_tensors, rebuild, require_plain
from sapwood.errors import SapwoodError
from sapwood.surgery.cut import cut, require_fit
from sapwood.surgery.reference import run_reference
from sapwood.types import CheckResult, Plan

_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
_HALF = (torch.float16, torch.bfloat16)
_NOTHING = 1e-3
_EXTREME = 1e4
"""Values this many times the median that are the same in both (masks of -1e9) set no scale."""


@undisturbed()
def check(model: nn.Module, small: nn.Module, plan: Plan, example_inputs: Any) -> CheckResult:
    """Compare the cut model with the masked reference on the example inputs."""
    model, small = require_plain(model), require_plain(small)
    require_fit(model, plan)
    return check_seen(model, small, plan, as_call(example_inputs))


@uncollected()
def check_seen(model: nn.Module, small: nn.Module, plan: Plan, inputs: Inputs, seen: Seen | None = None) -> CheckResult:
    """The same for who has watched the model already."""
    if is_meta(model):
        return in_fake_mode(lambda mode: _check_shapes(mode, model, small, plan, inputs))
    seen = seen or watch(model, inputs, data=True)
    result, wanted = _compare(model, small, plan, inputs, seen)
    if not result.passed or not plan.keep:
        return result
    doubtful = _has_idle_weights(model) or all(_is_idle(t) for t in wanted)
    if not _is_half(model) and not (doubtful and _same(wanted, run(model, inputs, seen))):
        return result
    notes = result.notes
    try:
        stirred, given = stir(model), in_float(inputs)
        dense = run(stirred, given, seen)
        second, wanted = _compare(stirred, cut(stirred, plan), plan, given, seen)
    except (RuntimeError, TypeError, SapwoodError):  # code that insists on its own dtype
        return CheckResult(result.status, result.max_error, result.tolerance, (*notes, "no float32 copy could be run"))
    if not second.passed:
        return second
    if _same(wanted, dense):
        notes = (*notes, "the output hardly depends on the removed channels: comparing it proves little")
    return CheckResult(result.status, result.max_error, result.tolerance, notes)


def _compare(
    model: nn.Module, small: nn.Module, plan: Plan, inputs: Inputs, seen: Seen
) -> tuple[CheckResult, list[torch.Tensor]]:
    """The result, and what the reference gave."""
    try:
        got = run(small, inputs, seen)
    except Exception as raised:
        return _failed(f"the cut model's forward raised {type(raised).__name__}: {raised}"), []
    reseed()
    with full_precision():
        wanted = list(results_in(model, run_reference(model, plan, inputs, seen)))
    problem = _differs(wanted, got)
    if problem:
        return _failed(problem), wanted
    worst, error, tolerance = -1.0, 0.0, 0.0
    for a, b in zip(wanted, got, strict=True):
        allowed, off = _TOLERANCE.get(a.dtype.to_real(), 0.0), relative_error(a, b)
        badness = off / allowed if allowed else off * 1e9
        if not badness <= worst:  # also when it is not a number
            worst, error, tolerance = badness, off, allowed
    if not error <= tolerance:
        return _failed(f"the output is off by {error:.1e} of its largest value", error, tolerance), wanted
    status = "exact" if plan.exact else "approximate"
    return CheckResult(status, error, tolerance, _notes(plan, status)), wanted


def _same(wanted: list[torch.Tensor], dense: list[torch.Tensor]) -> bool:
    """Whether the removed channels make no difference: then a wrong cut would not have been told from a right one."""
    pairs = [(a, b, 10 * _TOLERANCE.get(a.dtype.to_real(), 0.0)) for a, b in zip(wanted, dense, strict=True)]
    return not any(enough and relative_error(a, b) > enough for a, b, enough in pairs)


def _has_idle_weights(model: nn.Module) -> bool:
    """Where no weight is constant or next to nothing, outputs depend on what feeds them; biases only add."""
    weights = named_tensors(model, ("_parameters",))
    return any(_is_idle(p) for n, p in weights.items() if p.is_floating_point() and not n.endswith("bias"))


def run(model: nn.Module, inputs: Inputs, seen: Seen | None = None) -> list[torch.Tensor]:
    """Output tensors of a copy in evaluation mode: caches and counters of the model stay as they are."""
    own = (seen.working_copy(model) if seen else cloned(model)).eval()
    args, kwargs = copied(inputs)
    reseed()
    with torch.no_grad(), plain_paths(), full_precision():
        return list(results_in(own, own(*args, **kwargs)))


def relative_error(wanted: torch.Tensor, got: torch.Tensor) -> float:
    """max |difference| / max |wanted|; inf where one has a nan or inf that the other has not."""
    if wanted.numel() == 0 or (wanted.dtype is got.dtype and torch.equal(wanted, got)):
        return 0.0
    kind = torch.complex128 if wanted.is_complex() else torch.float64
    a, b = wanted.detach().to(kind), got.detach().to(kind)
    strange = ~torch.isfinite(a)
    if bool((strange != ~torch.isfinite(b)).any()):
        return float("inf")
    size = a.abs().masked_fill(strange, 0)
    middle = float(size[~strange].median()) if not bool(strange.all()) else 0.0
    if middle > 0:
        strange = strange | ((a == b) & (size > _EXTREME * middle))
    a, b = a.masked_fill(strange, 0), b.masked_fill(strange, 0)
    scale, difference = float(a.abs().max()), float((a - b).abs().max())
    return difference / scale if scale > 0 else difference


def stir(model: nn.Module) -> nn.Module:
    """A float32 copy whose idle tensors (constant, or next to nothing) get random values."""
    make = torch.Generator().manual_seed(0)

    def replace(name: str, tensor: torch.Tensor) -> torch.Tensor:
        new = tensor.detach().clone()
        if not new.is_floating_point():
            return new
        new = new.float() if new.dtype in _HALF else new
        if not _is_idle(new) or not (
            isinstance(tensor, nn.Parameter) or name.endswith(("running_mean", "running_var"))
        ):
            return new
        noise: torch.Tensor = torch.rand(new.shape, generator=make).to(new)
        if new.dim() > 1 and new[0].numel() > 1:
            noise = (noise - 0.5) * (2 / new[0].numel() ** 0.5)
        else:
            noise = noise - 0.5 if name.endswith(("bias", "running_mean")) else noise + 0.5
        return noise

    return rebuild(model, replace)


def _is_idle(values: torch.Tensor) -> bool:
    """Constant, or next to nothing."""
    flat = values.detach().reshape(-1)
    few = flat[: min(64, len(flat))]
    if len(few) == 0 or (bool((few != few[0]).any()) and float(few.abs().max()) >= _NOTHING):
        return False
    return bool((flat == flat[0]).all()) or float(flat.abs().max()) < _NOTHING


def in_float(inputs: Inputs) -> Inputs:
    return pytree.tree_map_only(torch.Tensor, lambda t: t.float() if t.dtype in _HALF else t, inputs)  # type: ignore[no-any-return]


def _is_half(model: nn.Module) -> bool:
    return any(p.dtype in _HALF for p in model.parameters())


def _failed(why: str, error: float = float("inf"), tolerance: float = 0.0) -> CheckResult:
    return CheckResult("failed", error, tolerance, (why,))


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


def _check_shapes(mode: FakeTensorMode, model: nn.Module, small: nn.Module, plan: Plan, inputs: Inputs) -> CheckResult:
    args, kwargs = fake_inputs(mode, inputs)
    outputs = []
    with torch.no_grad(), plain_paths():
        for module in (model, small):
            outputs.append(list(results_in(module, fake_model(mode, module).eval()(*args, **kwargs))))
    problem = _differs(*outputs)
    if problem:
        return _failed(problem)
    note = "weights on the meta device have no values: only shapes were compared"
    return CheckResult("exact" if plan.exact else "approximate", 0.0, 0.0, (*plan.notes, note))


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
