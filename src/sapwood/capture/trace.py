"""``trace``: the groups of a model, what is frozen and why, and what each channel costs."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import nn

from sapwood.capture.classes import ALL_TIED, Classes
from sapwood.capture.forms import Form, System
from sapwood.capture.isolation import uncollected, undisturbed
from sapwood.capture.mirrors import Mirror, find_mirrors
from sapwood.capture.operators import OpCall, operator_calls
from sapwood.capture.rules.contraction import KERNEL
from sapwood.capture.run import Seen, as_call, watch
from sapwood.capture.sizes import Attr, Expr, Width
from sapwood.capture.skeleton import named_tensors, require_plain
from sapwood.capture.tracker import Tracker, leaves
from sapwood.types import Frozen, Group, Site

NOT_MADE = "no operator makes these channels out of weights"
SINGLE = "a single channel cannot be cut"


@dataclass(frozen=True)
class Costs:
    """Parameters and FLOPs as functions of how many channels each group keeps."""

    params: tuple[tuple[int, tuple[Form, ...]], ...]
    flops: tuple[tuple[int, tuple[Form, ...]], ...]

    def evaluate(self, kind: str, kept: Sequence[int]) -> int:
        """2 x multiply-accumulates for ``flops``; elements of parameters for ``params``."""
        if kind == "channels":
            return int(sum(kept))
        values: dict[Form, int] = {}
        total = 0
        for factor, forms in getattr(self, kind):
            for form in forms:
                if form not in values:
                    values[form] = form.value(kept)
                factor *= values[form]
            total += factor
        return total

    def per_channel(self, kind: str, dense: Sequence[int]) -> list[int]:
        """What is saved by one channel less, of each group."""
        saved = [0] * len(dense)
        values: dict[Form, int] = {}
        for factor, forms in getattr(self, kind):
            for form in forms:
                if form not in values:
                    values[form] = form.value(dense)
            whole = factor * math.prod(values[f] for f in forms)
            for group in {g for form in forms for g, _ in form.terms}:
                less = factor * math.prod(values[f] - dict(f.terms).get(group, 0) for f in forms)
                saved[group] += whole - less
        return saved


@dataclass(frozen=True)
class Trace:
    """What a trace found. ``groups`` can be cut, ``frozen`` cannot."""

    groups: tuple[Group, ...]
    frozen: tuple[Frozen, ...]
    costs: Costs = field(repr=False)
    constraints: tuple[tuple[Form, str], ...] = field(repr=False, default=())
    attributes: dict[Expr, Form] = field(repr=False, default_factory=dict)
    attribute_values: dict[Expr, int] = field(repr=False, default_factory=dict)
    attribute_roots: dict[str, Any] = field(repr=False, default_factory=dict)
    mirrors: tuple[Mirror, ...] = field(repr=False, default=())
    rescales: tuple[tuple[Form, Any], ...] = field(repr=False, default=())
    shapes: dict[str, tuple[int, ...]] = field(repr=False, default_factory=dict)
    scales: frozenset[Site] = field(repr=False, default=frozenset())
    made: frozenset[Site] = field(repr=False, default=frozenset())
    outputs: list[tuple[int, ...]] = field(repr=False, default_factory=list)
    find_calls: Callable[[], tuple[OpCall, ...]] = field(repr=False, compare=False, default=tuple)
    mode: str = "fake"
    trains: bool = True
    """Whether a forward in training mode ran, so that the cut model's must run, too."""
    notes: tuple[str, ...] = ()

    @functools.cached_property
    def calls(self) -> tuple[OpCall, ...]:
        """The operators of one forward; only who plans for time, or measures it, wants to know."""
        return self.find_calls()

    @property
    def dense(self) -> list[int]:
        return [g.width for g in self.groups]

    @property
    def params(self) -> int:
        return self.costs.evaluate("params", self.dense)

    @property
    def flops(self) -> int:
        return self.costs.evaluate("flops", self.dense)


@undisturbed()
def trace(model: nn.Module, example_inputs: Any) -> Trace:
    """Watch the model run once and find which channels belong together."""
    model = require_plain(model)
    return trace_of(model, watch(model, as_call(example_inputs)))


@uncollected()
def trace_of(model: nn.Module, seen: Seen) -> Trace:
    """From what was seen of a model to its groups."""
    parameters = set(named_tensors(model, ("_parameters",)))
    shapes = {name: tuple(t.shape) for name, t in named_tensors(model).items()}
    builder = _Builder(seen.tracker, seen.classes, parameters, shapes)
    builder.mirrors = tuple(find_mirrors(model))
    return builder.build(seen.mode)


class _Builder:
    """Turns classes into groups, freezing until every equation on sizes can be met."""

    def __init__(
        self, tracker: Tracker, classes: Classes, parameters: set[str], shapes: dict[str, tuple[int, ...]]
    ) -> None:
        self.tracker, self.classes, self.shapes = tracker, classes, shapes
        self.parameters = parameters
        self.sites = [s for s, ids in tracker.coordinates.items() if len(ids) > 1]
        self.labels = [classes.label[tracker.coordinates[s]] for s in self.sites]
        self.keys = [labels.tobytes() for labels in self.labels]  # most sites have the classes of many others
        self.equations: list[tuple[Expr, Expr, str]] = [
            (e.expr, Width(e.vector), e.where) for e in tracker.equations
        ] + list(tracker.equalities)
        self.mirrors: tuple[Mirror, ...] = ()
        self.made: set[Site] = set()
        self.reason = classes.reason.copy()
        self.reasons = list(classes.reasons)

    def build(self, mode: str) -> Trace:
        self._freeze_what_nothing_makes()
        for _ in range(20):
            members = self._group()
            system = self._solve()
            if not system.freeze:
                break
            for numbers, why in system.freeze:
                for number in numbers:
                    self._pin(np.flatnonzero(self.group_of == number), why)
        return self._assemble(members, system, mode)

    def _pin(self, classes: np.ndarray, why: str) -> None:
        self.reasons.append(why)
        open_ = classes[self.reason[classes] < 0]
        self.reason[open_] = len(self.reasons) - 1

    def _freeze_what_nothing_makes(self) -> None:
        made = np.zeros(self.classes.count, dtype=bool)
        owned = np.zeros(self.classes.count, dtype=bool)
        for ids in self.tracker.made:
            made[self.classes.label[ids]] = True
        read = {int(ids[0]) for ids in self.tracker.read}
        for site, labels in zip(self.sites, self.labels, strict=True):
            owned[labels] = True
            if made[labels].any() and int(self.tracker.coordinates[site][0]) not in read:
                self.made.add(site)
        self._pin(np.flatnonzero(owned & ~made), NOT_MADE)
        self._pin(np.flatnonzero(~owned), NOT_MADE)

    def _group(self) -> list[np.ndarray]:
        """Classes with the same footprint are interchangeable: one group."""
        rng = np.random.default_rng(0)
        size = self.classes.count
        signature = np.zeros(size, dtype=np.uint64)
        used = sorted(
            {leaf.vector for e in self.equations for x in e[:2] for leaf in leaves(x) if isinstance(leaf, Width)}
        )
        footprints = [*self.labels, *(self.classes.label[self.tracker.vectors[v]] for v in used)]
        weights = rng.integers(1, 2**63, len(footprints), dtype=np.uint64)
        for labels, weight in zip(footprints, weights, strict=True):
            np.add.at(signature, labels, weight)
        open_ = np.flatnonzero(self.reason < 0)
        self.group_of = np.full(size, -1)
        members: list[np.ndarray] = []
        if len(open_):
            _, first, inverse, sizes = np.unique(
                signature[open_], return_index=True, return_inverse=True, return_counts=True
            )
            parts = np.split(open_[np.argsort(inverse, kind="stable")], np.cumsum(sizes)[:-1])
            members = [parts[number] for number in np.argsort(first, kind="stable")]
        members = self._in_order(members)
        for number, classes in enumerate(members):
            self.group_of[classes] = number
        self.widths = [len(m) for m in members]
        self.forms: dict[bytes, Form] = {}
        return members

    def _in_order(self, members: list[np.ndarray]) -> list[np.ndarray]:
        """Sort by where they first appear in the model; leave out what is too narrow to cut."""
        first = np.full(self.classes.count, np.iinfo(np.int64).max)
        for site, labels in zip(self.sites, self.labels, strict=True):
            np.minimum.at(first, labels, self.tracker.coordinates[site])
        kept = []
        for classes in members:
            if len(classes) == 1:
                self._pin(classes, SINGLE if not self._is_block(classes) else ALL_TIED)
            else:
                kept.append(classes[np.argsort(first[classes])])
        return sorted(kept, key=lambda c: first[c[0]])

    def _is_block(self, classes: np.ndarray) -> bool:
        return any((labels == classes[0]).sum() > 1 for labels in self.labels)

    def _form(self, labels: np.ndarray) -> Form:
        key = labels.tobytes()
        if key not in self.forms:
            self.forms[key] = self._count(labels)
        return self.forms[key]

    def _count(self, labels: np.ndarray) -> Form:
        groups = self.group_of[labels]
        constant = int((groups < 0).sum())
        counts = np.bincount(groups[groups >= 0], minlength=0)
        return Form.of(constant, {g: int(n) // self.widths[g] for g, n in enumerate(counts) if n})

    def _solve(self) -> System:
        used = {leaf.vector for e in self.equations for x in e[:2] for leaf in leaves(x) if isinstance(leaf, Width)}
        widths = {v: self._form(self.classes.label[self.tracker.vectors[v]]) for v in used}
        system = System(widths, self.tracker.attribute_values)
        system.solve(self.equations)
        dense = self.widths
        for form, where in system.constraints:
            if form.value(dense) != 0:
                numbers = {g for g, _ in form.terms}
                system.freeze.append((numbers, f"code computes its size in a way we cannot follow: {where}"))
        return system

    def _assemble(self, members: list[np.ndarray], system: System, mode: str) -> Trace:
        tracker = self.tracker
        by_site = {s: self._form(labels) for s, labels in zip(self.sites, self.labels, strict=True)}
        params = tuple(
            (1, tuple(by_site.get((name, d), Form(n)) for d, n in enumerate(self.shapes[name])))
            for name in self.shapes
            if name in self.parameters
        )
        cache: dict[int, Form] = {}

        def form(vector: int) -> Form:
            if vector not in cache:
                cache[vector] = self._form(self.classes.label[tracker.vectors[vector]])
            return cache[vector]

        flops = tuple((w.factor, tuple(form(v) for v in w.vectors)) for w in tracker.work)
        costs = Costs(params, flops)
        rescales = tuple((self._form(self.classes.label[tracker.vectors[r.vector]]), r.maker) for r in tracker.rescales)
        return Trace(
            groups=self._groups(members, costs),
            frozen=self._frozen(),
            costs=costs,
            constraints=tuple(dict.fromkeys(system.constraints)),
            attributes={a: f for a, f in system.attributes.items() if isinstance(a, Attr) and f.terms},
            attribute_values=tracker.attribute_values,
            attribute_roots=tracker.attribute_roots,
            mirrors=self.mirrors,
            rescales=tuple((f, m) for f, m in rescales if f.terms),
            shapes=self.shapes,
            scales=frozenset(tracker.scales),
            made=frozenset(self.made),
            outputs=tracker.outputs,
            find_calls=lambda: operator_calls(tracker.calls, form),
            mode=mode,
            trains=tracker.trains,
            notes=tuple(f"the model reads a parameter that is not its own: {at}" for at in sorted(tracker.foreign)),
        )

    def _groups(self, members: list[np.ndarray], costs: Costs) -> tuple[Group, ...]:
        found: list[dict[Site, np.ndarray]] = [{} for _ in members]
        place = np.zeros(self.classes.count, dtype=np.int64)
        for classes in members:
            place[classes] = np.arange(len(classes))
        known: dict[bytes, dict[int, np.ndarray]] = {}
        for site, labels, key in zip(self.sites, self.labels, self.keys, strict=True):
            if key not in known:
                known[key] = self._members(labels, place)
            for number, indices in known[key].items():
                found[number][site] = indices
        per_channel = {kind: costs.per_channel(kind, self.widths) for kind in ("params", "flops")}
        names: dict[str, int] = {}
        result = []
        for number, classes in enumerate(members):
            result.append(
                Group(
                    name=self._name(found[number], names),
                    width=len(classes),
                    sites=tuple(found[number]),
                    exact=not self.classes.inexact[classes].any(),
                    params_per_channel=per_channel["params"][number],
                    flops_per_channel=per_channel["flops"][number],
                    members=found[number],
                )
            )
        return tuple(result)

    def _members(self, labels: np.ndarray, place: np.ndarray) -> dict[int, np.ndarray]:
        """For each group among these classes, a row per channel: its indices."""
        groups = self.group_of[labels]
        found = {}
        for number in np.unique(groups[groups >= 0]).tolist():
            indices = np.flatnonzero(groups == number)
            order = np.argsort(place[labels[indices]], kind="stable")
            found[number] = indices[order].reshape(self.widths[number], -1)
        return found

    def _name(self, sites: dict[Site, np.ndarray], names: dict[str, int]) -> str:
        by_kind = sorted(sites, key=lambda s: (s not in self.made, len(self.shapes[s[0]]) < 2))
        made = by_kind[0]
        base = made[0].removesuffix(".weight").removesuffix(".bias")
        names[base] = names.get(base, 0) + 1
        return base if names[base] == 1 else f"{base}#{names[base]}"

    def _frozen(self) -> tuple[Frozen, ...]:
        """Frozen channels, gathered by reason."""
        found: dict[str, dict[Site, int]] = {}
        known: dict[bytes, list[tuple[int, int]]] = {}
        for site, labels, key in zip(self.sites, self.labels, self.keys, strict=True):
            if site[0] not in self.parameters:
                continue
            if key not in known:
                reasons = self.reason[labels]
                numbers, counts = np.unique(reasons[reasons >= 0], return_counts=True)
                known[key] = list(zip(numbers.tolist(), counts.tolist(), strict=True))
            for number, count in known[key]:
                text = self.reasons[number]
                if KERNEL not in text:
                    found.setdefault(text, {})[site] = count
        return tuple(Frozen(tuple(sites), text, max(sites.values())) for text, sites in found.items())
