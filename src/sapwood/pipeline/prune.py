"""``make_plan`` and ``prune``: trace, score, plan, cut and check, and mend what fails."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from sapwood.capture.isolation import undisturbed
from sapwood.capture.run import as_call
from sapwood.capture.skeleton import require_plain, unchanging, unwrap
from sapwood.capture.trace import Trace
from sapwood.errors import SapwoodError, explain
from sapwood.pipeline.latency import LatencyPlanner
from sapwood.pipeline.planner import Planner
from sapwood.pipeline.rounding import preferred
from sapwood.planning.sharing import Allocate, require_allocation
from sapwood.scoring import Score
from sapwood.surgery.check import check_seen
from sapwood.surgery.cut import cut
from sapwood.types import Budget, CheckResult, Plan, Tell


@dataclass(frozen=True)
class Pruned:
    """What ``prune`` gives: the model, and how it came about."""

    model: nn.Module
    plan: Plan
    check: CheckResult
    trace: Trace


@undisturbed()
def make_plan(
    model: nn.Module,
    example_inputs: Any,
    budget: Budget,
    score: Score = "l1",
    allocate: Allocate = "global",
    ignore: Iterable[str] = (),
    round_to: int | str | None = None,
    backend: str = "auto",
    tell: Tell | None = None,
) -> Plan:
    """Decide what to keep. The plan is tried on tensors without data before it is handed out.

    With ``Budget(latency=...)`` widths are chosen by what operators take on the model's device, for a batch such as
    ``example_inputs``; the cut model is measured as ``deploy`` runs it by ``backend``, and the plan corrected until
    the budget is met within 3%. ``allocate`` shares other budgets out: one ranking of all channels (global), the same
    share everywhere (uniform), or shares by name in relation to one another. ``tell(what, done, of)`` is told how far
    it is.
    """
    planner = _planner(model, example_inputs, budget, score, allocate, ignore, round_to, backend, tell)
    return planner.plan_until(planner.runs)


@undisturbed()
def prune(
    model: nn.Module,
    example_inputs: Any,
    budget: Budget,
    score: Score = "l1",
    allocate: Allocate = "global",
    ignore: Iterable[str] = (),
    round_to: int | str | None = None,
    backend: str = "auto",
    tell: Tell | None = None,
) -> Pruned:
    """Trace, score, plan, cut and check. The model given is not changed; the one returned holds."""
    with unchanging(unwrap(model) if isinstance(model, nn.Module) else None):
        return _pruned(
            _planner(model, example_inputs, budget, score, allocate, ignore, round_to, backend, tell, data=True)
        )


def _pruned(planner: Planner) -> Pruned:
    results: dict[int, tuple[nn.Module, CheckResult]] = {}

    def fails(plan: Plan) -> str:
        small = cut(planner.model, plan)
        result = check_seen(planner.model, small, plan, planner.inputs, planner.seen)
        results.clear()
        results[id(plan)] = (small, result)
        return planner.trains(plan, small) if result.passed else result.notes[-1]

    plan = planner.plan_until(fails)
    if id(plan) not in results:  # a latency plan: the one chosen need not be the last one tried
        fails(plan)
    small, result = results[id(plan)]
    return Pruned(small, plan, result, planner.trace)


def _planner(
    model: nn.Module,
    example_inputs: Any,
    budget: Budget,
    score: Score,
    allocate: Allocate,
    ignore: Iterable[str],
    round_to: int | str | None,
    backend: str,
    tell: Tell | None,
    data: bool = False,
) -> Planner:
    if not isinstance(budget, Budget):
        raise SapwoodError(
            f"budget: expected a Budget; got {budget!r}. For example sw.Budget(flops=0.5) keeps half of the FLOPs."
        )
    if budget.kind == "sparsity":
        raise SapwoodError(
            "budget: expected channels, params, flops or latency; got sparsity, which is about zeros. "
            "Use sw.mask for it."
        )
    require_allocation(allocate, budget.kind)
    whole = isinstance(round_to, int) and not isinstance(round_to, bool) and round_to >= 1
    if not (round_to in (None, "auto") or whole):
        got, remedy = repr(round_to), "For example round_to=8, or round_to='auto'."
        raise explain("a whole number of at least 1, or 'auto'", got, remedy, "round_to")
    try:
        names = (ignore,) if isinstance(ignore, str) else tuple(ignore or ())
    except TypeError:
        remedy = "For example ignore=('fc', 're:layer1.*')."
        raise explain("names of modules or parameters", repr(ignore), remedy, "ignore") from None
    model, call = require_plain(model), as_call(example_inputs)
    name = score if isinstance(score, str) else getattr(score, "__name__", "callable")
    latency = budget.kind == "latency"
    steps: Any = preferred(model, call, backend) if round_to == "auto" or (latency and round_to is None) else round_to
    options: dict[str, Any] = {"allocate": allocate, "ignore": names, "round_to": steps, "score_name": name}
    if latency:
        return LatencyPlanner(model, call, budget, score, options, tell, backend, with_data=data)
    return Planner(model, call, budget, score, options, tell, with_data=data)
