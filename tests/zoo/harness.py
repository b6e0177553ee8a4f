"""Run one model of the zoo: halve its channels, check the result, note what it cost."""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import sapwood as sw
from sapwood.capture.run import as_call, results_in
from sapwood.measurement.counts import flop_counter

LIMIT = 1e-4
planner: Any = importlib.import_module("sapwood.pipeline.planner")
pruning: Any = importlib.import_module("sapwood.pipeline.prune")


@dataclass
class Row:
    """One line of zoo.csv."""

    model: str
    status: str = "raised"
    max_error: float = float("inf")
    params_before: int = 0
    params_after: int = 0
    body_left: float = 1.0
    """Fraction of the parameters left, outside embeddings and those that make the outputs (the classifier)."""
    gflops_before: float = 0.0
    gflops_after: float = 0.0
    groups: int = 0
    left_whole: int = 0
    seconds_trace: float = 0.0
    seconds_plan: float = 0.0
    seconds_cut: float = 0.0
    seconds_check: float = 0.0
    frozen: int = 0
    reasons: str = ""
    problem: str = field(default="")

    @property
    def ok(self) -> bool:
        return self.status in ("exact", "approximate") and self.max_error < LIMIT and not self.problem

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def randomise(model: nn.Module, seed: int = 0) -> nn.Module:
    """Give norms, their statistics and zero-initialised weights values that a wrong cut would betray."""
    make = torch.Generator().manual_seed(seed)

    def fill(tensor: torch.Tensor, low: float, high: float) -> None:
        tensor.copy_(torch.rand(tensor.shape, generator=make) * (high - low) + low)

    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                fill(buffer, -0.2, 0.2)
            elif name.endswith("running_var"):
                fill(buffer, 0.5, 1.5)
        for parameter in model.parameters():
            constant = parameter.numel() > 1 and bool((parameter == parameter.flatten()[0]).all())
            if constant and float(parameter.flatten()[0].detach()) == 0.0:
                fill(parameter, -0.1, 0.1)
            elif constant and parameter.dim() == 1:
                fill(parameter, 0.5, 1.5)
    return model


def flops_of(model: nn.Module, inputs: Any) -> float:
    """Giga floating-point operations (2 x MACs) of one forward, by torch's own counter."""
    args, kwargs = as_call(inputs)
    with flop_counter() as counter, torch.no_grad():
        model.eval()(*args, **kwargs)
    return counter.get_total_flops() / 1e9


def run_entry(name: str, build: Any, make_inputs: Any, count_flops: bool = True, device: str = "cpu") -> Row:
    torch.manual_seed(0)
    model, inputs = randomise(build()).to(device), make_inputs()
    inputs = pytree.tree_map_only(torch.Tensor, lambda t: t.to(device), inputs)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    row = Row(name)
    try:
        _fill_row(row, model, inputs, count_flops)
    except Exception as error:  # a zoo run reports, it does not stop
        row.status, row.problem = "raised", f"{type(error).__name__}: {error}"[:400]
    after = model.state_dict()
    if list(before) != list(after) or any(not torch.equal(before[n], after[n]) for n in before):
        row.problem += " the input model was changed"
    return row


def _fill_row(row: Row, model: nn.Module, inputs: Any, count_flops: bool) -> None:
    with _timed(row):
        done = sw.prune(model, inputs, sw.Budget(channels=0.5), score="l1", allocate="uniform")
    trace = done.trace
    row.status, row.max_error = done.check.status, done.check.max_error
    row.groups, row.left_whole = len(trace.groups), len(done.plan.notes)
    row.frozen = len(trace.frozen)
    row.reasons = " | ".join(f.reason for f in trace.frozen)[:2000]
    row.params_before = sum(p.numel() for p in model.parameters())
    row.params_after = sum(p.numel() for p in done.model.parameters())
    row.body_left = _body(done.model, trace) / max(_body(model, trace), 1)
    if list(model.state_dict()) != list(done.model.state_dict()):
        row.problem = "state_dict names changed"
    wanted = [tuple(t.shape) for t in results_in(model, _run(model, inputs))]
    if wanted != [tuple(t.shape) for t in results_in(model, _run(done.model, inputs))]:
        row.problem = "output shapes changed"
    if count_flops:
        row.gflops_before = flops_of(model, inputs)
        row.gflops_after = flops_of(done.model, inputs)


_STAGES = {
    "seconds_trace": ((planner, "watch"), (planner, "trace_of")),
    "seconds_plan": ((planner, "score_groups"), (planner.Planner, "draft")),
    "seconds_cut": ((pruning, "cut"),),
    "seconds_check": ((pruning, "check_seen"), (planner.Planner, "trains")),
}


@contextlib.contextmanager
def _timed(row: Row) -> Iterator[None]:
    """Fill in the seconds that each stage of a call of ``prune`` takes."""

    def timed(stage: str, function: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                setattr(row, stage, getattr(row, stage) + time.perf_counter() - start)

        return run

    places = [(stage, owner, name) for stage, parts in _STAGES.items() for owner, name in parts]
    before = [getattr(owner, name) for _, owner, name in places]
    try:
        for (stage, owner, name), function in zip(places, before, strict=True):
            setattr(owner, name, timed(stage, function))
        yield
    finally:
        for (_, owner, name), function in zip(places, before, strict=True):
            setattr(owner, name, function)


def _run(model: nn.Module, inputs: Any) -> Any:
    args, kwargs = as_call(inputs)
    with torch.no_grad():
        return model.eval()(*args, **kwargs)


def _body(model: nn.Module, trace: sw.Trace) -> int:
    """Parameters outside embeddings (rows that are looked up) and classifiers (rows that are outputs)."""
    ends = ("model's output", "rows are looked up by number")
    outside = {n for f in trace.frozen if any(e in f.reason for e in ends) for n, dim in f.sites if dim == 0}
    return sum(p.numel() for n, p in model.named_parameters() if n not in outside)
