"""The operators of one forward, with the sizes of their tensors as forms of what each group keeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from sapwood.capture.calls import RawCall, RawSized
from sapwood.capture.forms import Form


@dataclass(frozen=True)
class Sized:
    """A tensor argument or result: the size of each dimension, its dtype, and the order of dimensions in memory."""

    dims: tuple[Form, ...]
    dtype: torch.dtype
    order: tuple[int, ...]

    def shape(self, kept: Sequence[int]) -> tuple[int, ...]:
        return tuple(form.value(list(kept)) for form in self.dims)

    def groups(self) -> set[int]:
        return {g for form in self.dims for g, _ in form.terms}


@dataclass(frozen=True)
class OpCall:
    """One operator call: ``args`` by schema name, with ``Sized`` in place of tensors."""

    name: str
    op: Any
    args: tuple[tuple[str, Any], ...]
    results: tuple[Sized, ...]

    def tensors(self) -> list[Sized]:
        """All tensor arguments, in order."""
        leaves = pytree.tree_leaves([value for _, value in self.args])
        return [v for v in leaves if isinstance(v, Sized)]

    def groups(self) -> set[int]:
        return {g for sized in (*self.tensors(), *self.results) for g in sized.groups()}


def operator_calls(calls: Sequence[RawCall], form: Callable[[int], Form]) -> tuple[OpCall, ...]:
    """Calls as they were noted, with a form for the number of every id vector."""

    known: dict[RawSized, Sized] = {}

    def sized(raw: RawSized) -> Sized:
        if raw not in known:
            pairs = zip(raw.sizes, raw.vectors, strict=True)
            known[raw] = Sized(tuple(Form(n) if v is None else form(v) for n, v in pairs), raw.dtype, raw.order)
        return known[raw]

    def convert(value: Any) -> Any:
        if isinstance(value, RawSized):
            return sized(value)
        return type(value)(convert(v) for v in value) if type(value) in (list, tuple) else value

    return tuple(
        OpCall(c.name, c.op, tuple((k, convert(v)) for k, v in c.args), tuple(sized(r) for r in c.results))
        for c in calls
    )
