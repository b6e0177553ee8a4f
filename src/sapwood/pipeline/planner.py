"""Plans that hold: draft one, try it, and leave whole what fails."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from sapwood.capture.fakes import fake_inputs, in_fake_mode
from sapwood.capture.isolation import copied, uncollected
from sapwood.capture.modes import Hollow, plain_paths
from sapwood.capture.run import Inputs, results_in, watch
from sapwood.capture.skeleton import named_tensors
from sapwood.capture.trace import trace_of
from sapwood.errors import SapwoodError
from sapwood.planning.counts import units_of
from sapwood.planning.draft import build_plan, draft_plan
from sapwood.planning.sharing import AsBefore
from sapwood.scoring import Score, score_groups
from sapwood.surgery.cut import cut, shape_of_cut
from sapwood.types import Budget, Plan, Tell

Fails = Callable[[Plan], str]
"""A plan -> what is wrong with the model it gives; empty when nothing is."""


@dataclass
class Planner:
    """One trace and one set of scores, from which plans are drafted until one holds."""

    model: nn.Module
    inputs: Inputs
    budget: Budget
    score: Score
    options: dict[str, Any]
    tell: Tell | None = None
    with_data: bool = field(default=False, kw_only=True)
    """Whether the cut will be checked on data, so that the model may as well be watched on them."""

    def __post_init__(self) -> None:
        self.seen = watch(self.model, self.inputs, self.with_data)
        self.trace = trace_of(self.model, self.seen)
        tensors = named_tensors(self.model)
        shared = self.options["allocate"]
        before = shared.standing if isinstance(shared, AsBefore) else None
        self.scores = score_groups(tensors, self.trace.groups, self.score, self.trace.scales, before=before)
        self.barred: dict[str, str] = {}
        if self.score == "bn_scale":
            alone = [g.name for g in self.trace.groups if not self.trace.scales.intersection(g.sites)]
            told = f"no batch norm follows {len(alone)} of {len(self.trace.groups)} groups: l1 ranks their channels"
            self.trace = replace(self.trace, notes=(*self.trace.notes, *([told] if alone else [])))

    def told(self, what: str, done: int, of: int) -> None:
        if self.tell is not None:
            self.tell(what, done, of)

    def draft(self) -> Plan:
        return draft_plan(self.trace, self.scores, self.budget, frozen_groups=self.barred, **self.options)

    def plan_until(self, fails: Fails) -> Plan:
        """Draft a plan; while it fails, find the groups at fault and leave them whole."""
        while True:
            plan = self.draft()
            problem = fails(plan)
            if not problem:
                return plan
            found = {n: why for n, why in self._at_fault(plan, fails, problem).items() if n not in self.barred}
            if not found:
                raise SapwoodError(
                    f"{type(self.model).__name__}: expected the same output from the same inputs; even with nothing "
                    f"cut, {problem}. A model whose output differs from run to run cannot be checked: make it "
                    "deterministic in evaluation mode."
                )
            self.barred |= found

    def _at_fault(self, plan: Plan, fails: Fails, problem: str) -> dict[str, str]:
        """Bisect over groups (with those they are tied to) for one that fails by itself."""
        units = self._tied(list(plan.groups))
        while len(units) > 1:
            half = len(units) // 2
            for part in (units[:half], units[half:]):
                found = fails(self._only(plan, part))
                if found:
                    units, problem = part, found
                    break
            else:
                break  # only together do they fail: leave out all that is left
        return {name: problem for unit in units for name in unit}

    def _only(self, plan: Plan, units: Sequence[Sequence[str]]) -> Plan:
        wanted = {name for unit in units for name in unit}
        return build_plan(self.trace, {n: k for n, k in plan.groups.items() if n in wanted})

    def _tied(self, names: list[str]) -> list[list[str]]:
        """Groups of the plan that must be cut together because sizes depend on one another."""
        index = {g.name: i for i, g in enumerate(self.trace.groups)}
        units = units_of(self.trace.dense, [f for f, _ in self.trace.constraints])
        by_group = {g: n for n, u in enumerate(units) for g in u.groups}
        found: dict[int, list[str]] = {}
        for name in names:
            found.setdefault(by_group[index[name]], []).append(name)
        return list(found.values())

    def runs(self, plan: Plan) -> str:
        """Try the cut, without data where the trace did: does it run, and give outputs of the same shapes?"""
        return self._attempt(plan, train=False) or self.trains(plan)

    def trains(self, plan: Plan, small: nn.Module | None = None) -> str:
        """If the dense model runs in training mode, the cut one must."""
        tried = self.trace.trains and not self.seen.tracker.alike
        return self._attempt(plan, True, small) if tried else ""

    @uncollected()
    def _attempt(self, plan: Plan, train: bool, small: nn.Module | None = None) -> str:
        if not plan.keep:
            return ""
        if self.seen.mode == "fake":
            return in_fake_mode(
                lambda mode: self._try(shape_of_cut(mode, self.model, plan), fake_inputs(mode, self.inputs), train)
            )
        made = cut(self.model, plan) if small is None else small
        found = self._try(self.seen.working_copy(made), copied(self.inputs), train, Hollow()) if train else "not tried"
        return found and self._try(self.seen.working_copy(made), copied(self.inputs), train)

    def _try(self, small: nn.Module, inputs: Inputs, train: bool, *modes: Any) -> str:
        try:
            with torch.no_grad(), plain_paths(), contextlib.ExitStack() as stack:
                for mode in modes:
                    stack.enter_context(mode)
                outputs = small.train(train)(*inputs[0], **inputs[1])
        except Exception as error:
            when = " in training mode" if train else ""
            return f"the cut model's forward raised {type(error).__name__}{when}: {error}"
        shapes = [tuple(t.shape) for t in results_in(small, outputs)]
        if not train and shapes != self.trace.outputs:
            return f"outputs changed from {self.trace.outputs} to {shapes}"
        return ""
