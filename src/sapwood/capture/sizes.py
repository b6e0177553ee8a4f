"""Integers that remember where they came from.

While a model is traced, its integer attributes and the shapes of its tensors are handed out as
``TaggedInt``: an int that carries the expression it was computed by. When such an int arrives as a
size (``view``, ``split``, ``groups=...``) we know which attribute has to change with the channels.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Attr:
    """An int attribute of a module; ``index`` points into (nested) tuples and lists."""

    path: str
    index: tuple[int, ...] = ()

    def __str__(self) -> str:
        return self.path + "".join(f"[{i}]" for i in self.index)


@dataclass(frozen=True)
class Width:
    """The length of a tensor dimension, as a number of the tracker's id vectors."""

    vector: int

    def __str__(self) -> str:
        return "a tensor's size"


@dataclass(frozen=True)
class Op:
    """An arithmetic operation on sizes; ``symbol`` is one of + - * // %."""

    symbol: str
    left: Expr
    right: Expr

    def __str__(self) -> str:
        return f"({self.left} {self.symbol} {self.right})"


Expr = int | Attr | Width | Op


class Listener(Protocol):
    """Who hears that code used a size for something other than a size."""

    def on_equal(self, left: Expr, right: Expr) -> None: ...

    def on_factor(self, expr: Expr, value: int) -> None: ...


class TaggedInt(int):
    """An int with provenance. Everything not listed here quietly gives a plain int."""

    expr: Expr
    listener: Listener

    def __new__(cls, value: int, expr: Expr, listener: Listener) -> TaggedInt:
        self = super().__new__(cls, value)
        self.expr = expr
        self.listener = listener
        return self

    __hash__ = int.__hash__

    def __eq__(self, other: object) -> bool:
        same = int(self).__eq__(other) if not isinstance(other, TaggedInt) else _plain_equal(self, other)
        if same is True and type(other) is not bool:
            self.listener.on_equal(self.expr, expr_of(other))
        return same

    def __ne__(self, other: object) -> bool:
        same = self.__eq__(other)
        return same if same is NotImplemented else not same

    def __neg__(self) -> int:
        return TaggedInt(-int.__int__(self), Op("-", 0, self.expr), self.listener)

    def __float__(self) -> float:
        self.listener.on_factor(self.expr, int.__int__(self))
        return float(int(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> int:
        return int(self)

    def __reduce__(self) -> Any:
        return (int, (int(self),))


def _plain_equal(left: int, right: int) -> bool:
    return int.__eq__(left, right)


def expr_of(value: object) -> Expr:
    """The expression behind an int; a plain int is a constant."""
    if isinstance(value, TaggedInt):
        return value.expr
    return int(value)  # type: ignore[call-overload, no-any-return]


def strip(value: Any) -> Any:
    """Remove tags from ints, also inside tuples, lists, dicts and slices."""
    kind = type(value)
    if kind is TaggedInt:
        return int.__int__(value)
    if kind is tuple:
        return tuple([strip(v) for v in value])
    if kind is list:
        return [strip(v) for v in value]
    if kind is dict:
        return {k: strip(v) for k, v in value.items()}
    if kind is slice:
        return slice(strip(value.start), strip(value.stop), strip(value.step))
    if isinstance(value, tuple) and kind.__name__ == "Size":
        return kind([int.__int__(v) for v in value])
    return value


def _arithmetic(name: str, symbol: str, compute: Any) -> None:
    def forward(self: TaggedInt, other: Any) -> Any:
        if not isinstance(other, int):
            if isinstance(other, float):
                self.listener.on_factor(self.expr, int.__int__(self))
            return getattr(int, f"__{name}__")(int.__int__(self), other)
        value = compute(int.__int__(self), int.__int__(other))
        return TaggedInt(value, Op(symbol, self.expr, expr_of(other)), self.listener)

    def reverse(self: TaggedInt, other: Any) -> Any:
        if not isinstance(other, int):
            return getattr(int, f"__r{name}__")(int.__int__(self), other)
        value = compute(int.__int__(other), int.__int__(self))
        return TaggedInt(value, Op(symbol, expr_of(other), self.expr), self.listener)

    setattr(TaggedInt, f"__{name}__", forward)
    setattr(TaggedInt, f"__r{name}__", reverse)


def _leaves_ints(name: str) -> None:
    def method(self: TaggedInt, other: Any, *rest: Any) -> Any:
        self.listener.on_factor(self.expr, int.__int__(self))
        return getattr(int, name)(int.__int__(self), strip(other), *rest)

    setattr(TaggedInt, name, method)


for _name, _symbol, _compute in (
    ("add", "+", operator.add),
    ("sub", "-", operator.sub),
    ("mul", "*", operator.mul),
    ("floordiv", "//", operator.floordiv),
    ("mod", "%", operator.mod),
):
    _arithmetic(_name, _symbol, _compute)
for _name in ("__truediv__", "__rtruediv__", "__pow__", "__rpow__"):
    _leaves_ints(_name)
