"""The table of operator rules.

A rule says how the ids of an operator's outputs follow from its inputs and which ids it links. It is
a function of a ``Call`` and is looked up by the operator's schema name, without the overload.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from sapwood.capture.facts import Ids
from sapwood.capture.tracker import Tracker
from sapwood.errors import SapwoodError

Rule = Callable[["Call"], None]
RULES: dict[str, Rule] = {}
SUMS: dict[str, tuple[tuple[str, int], ...]] = {}
"""Operators that sum over axes of these arguments; in the reference, removed channels are zero there."""


@dataclass
class Call:
    """One operator call, after it ran: arguments by schema name, outputs, and the tracker."""

    op: torch._ops.OpOverload
    args: dict[str, Any]
    outputs: Any
    tracker: Tracker

    def __getitem__(self, name: str) -> Any:
        return self.args[name]

    @property
    def name(self) -> str:
        return short_name(self.op)

    @property
    def out(self) -> torch.Tensor:
        found = self.outputs[0] if isinstance(self.outputs, (tuple, list)) else self.outputs
        return found  # type: ignore[no-any-return]

    def ids(self, tensor: torch.Tensor) -> list[Ids]:
        return self.tracker.ids(tensor)

    def inputs(self) -> Iterator[torch.Tensor]:
        yield from tensors(self.args.values())


def tensors(values: Any) -> Iterator[torch.Tensor]:
    """All tensors in nested lists and tuples."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors(value)


def rule(*names: str, sums: Sequence[tuple[str, int]] = ()) -> Callable[[Rule], Rule]:
    """Register a rule for operators such as ``"mylib::wiggle"``. Registering twice is refused.

    ``sums`` names the arguments, and for each the dimension, that the operator sums over: removed channels count as
    zeros there when a cut is checked.
    """

    def register(function: Rule) -> Rule:
        for name in names:
            if "::" not in name and name != "pointwise":
                raise SapwoodError(
                    f'@rule({name!r}): expected a name such as "mylib::wiggle"; got none of a library. '
                    "Take it from torch.ops.mylib.wiggle.default._schema.name."
                )
            if name in RULES:
                raise SapwoodError(
                    f"expected one rule per operator; got a second one for {name}. "
                    f"Remove one of the two @rule({name!r})."
                )
            RULES[name] = function
            if sums:
                SUMS[name] = tuple(sums)
        find_rule.cache_clear()
        return function

    return register


@cache
def short_name(op: torch._ops.OpOverload) -> str:
    """``aten::relu`` for relu, relu_ and all of their overloads."""
    name = op._schema.name
    plain = name[:-1] if name.endswith("_") and not name.endswith("__") else name
    return plain


@cache
def find_rule(op: torch._ops.OpOverload) -> Rule | None:
    """The rule for an operator: by name, by the name of its out-of-place form, by its tag."""
    found = RULES.get(op._schema.name) or RULES.get(short_name(op))
    return found or (RULES["pointwise"] if _is_pointwise(op) else None)


def _is_pointwise(op: torch._ops.OpOverload) -> bool:
    """Torch tags most pointwise operators, though seldom every overload and in-place form."""
    space, _, name = short_name(op).partition("::")
    packet = getattr(getattr(torch.ops, space), name, op.overloadpacket)
    forms = [op, *(getattr(packet, o) for o in packet.overloads())]
    return any(torch.Tag.pointwise in form.tags for form in forms)


@cache
def _moves_nothing(op: torch._ops.OpOverload) -> bool:
    """Views, and questions about tensors."""
    views = any(r.alias_info is not None and not r.alias_info.is_write for r in op._schema.returns)
    return views or op.namespace == "prim" or op._schema.name in ("aten::_unsafe_view", "aten::empty")


@cache
def _tells_values(op: torch._ops.OpOverload) -> bool:
    """Whether Python, or the size of the result, learns of values."""
    return bool({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(op.tags))


_aten = torch.ops.aten
_STATISTICS = {_aten.native_batch_norm, _aten.cudnn_batch_norm, _aten.miopen_batch_norm}
"""Operators that write to their statistics in training mode, and do not say so."""


@cache
def _written(op: torch._ops.OpOverload) -> tuple[str, ...]:
    """The arguments that an operator writes to."""
    if op._overloadpacket in _STATISTICS:
        return ("running_mean", "running_var")
    return tuple(a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write)


@cache
def _parameters(op: torch._ops.OpOverload) -> tuple[tuple[str, Any], ...]:
    return tuple((a.name, a.default_value) for a in op._schema.arguments)


def bind(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by schema name, defaults filled in."""
    bound = {}
    for position, (name, default) in enumerate(_parameters(op)):
        bound[name] = args[position] if position < len(args) else kwargs.get(name, default)
    return bound


def note_writes(tracker: Tracker, op: Any, args: Any, kwargs: Any) -> None:
    """Before an operator runs: tell the tracker what it will write to."""
    if not isinstance(op, torch._ops.OpOverload):  # it hides others, which may write anywhere
        for tensor in tensors([*args, *kwargs.values()]):
            tracker.note_write(tensor)
    elif names := _written(op):
        bound = bind(op, args, kwargs)
        if op._overloadpacket in _STATISTICS and not bound["training"]:
            return
        for tensor in tensors([bound[name] for name in names]):
            tracker.note_write(tensor)


def apply_rule(tracker: Tracker, op: Any, args: Any, kwargs: Any, outputs: Any) -> None:
    """Run an operator's rule; freeze what reaches an operator that has none."""
    if not isinstance(op, torch._ops.OpOverload):  # a higher-order operator: it hides others
        _freeze(tracker, [*args, *kwargs.values()], f"the operator {op} has no rule")
        tracker.swayed = True
        return
    call = Call(op, bind(op, args, kwargs), outputs, tracker)
    inputs = list(call.inputs())
    if tracker.noting and _tells_values(op):
        masks = any(t.dtype in (torch.bool, torch.uint8) for t in inputs[1:])
        tracker.swayed = (
            tracker.swayed or masks or not short_name(op).startswith(("aten::index", "aten::_unsafe_index"))
        )
    tracker.note_reading(op, inputs)
    _follow(call, inputs)
    if not _moves_nothing(op):
        tracker.note_call(op._schema.name, op, call.args, outputs)


def _follow(call: Call, inputs: list[torch.Tensor]) -> None:
    """Apply the operator's rule."""
    tracker, op, outputs = call.tracker, call.op, call.outputs
    for tensor in inputs:
        tracker.use(tensor)
        found = tracker.names.get(tensor)
        if found is not None:
            tracker.touched.add(found[0])
        elif isinstance(tensor, torch.nn.Parameter):
            tracker.foreign.add(f"{tuple(tensor.shape)} ({tracker.where()})")
    if inputs and all(t in tracker.constant for t in inputs):  # made of weights alone
        for out in tensors([outputs]):
            tracker.constant[out] = True
    function = find_rule(op)
    reason = f"the operator {op._schema.name} has no rule; one can be added with @sapwood.rule"
    if function is not None:
        try:
            function(call)
            return
        except Exception as error:
            if tracker.strict:
                raise
            reason = f"the rule for {op._schema.name} failed ({type(error).__name__}: {error})"
    _freeze(tracker, [*inputs, *tensors([outputs])], reason)


def _freeze(tracker: Tracker, values: Any, reason: str) -> None:
    for tensor in tensors(values):
        for ids in tracker.ids(tensor):
            tracker.pin(ids, reason)
