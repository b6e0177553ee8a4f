"""Book-keeping of a trace: coordinates, the links between them, and what may not be cut.

Every dimension of every parameter and buffer owns one *coordinate id* per index. Every tensor that
flows through the model carries, per dimension, either a vector of ids (one per position) or None
(an axis of fixed size, such as the batch). Operator rules move these vectors along and call
``link``, ``pin``, ``split`` and ``merge``; nothing here knows any operator.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from sapwood.capture.calls import RawCall, RawSized, memory_order
from sapwood.capture.facts import Equation, Grid, Ids, Maker, Reading, Rescale, Work, WritesToWeightsError
from sapwood.capture.sizes import Expr, Op, TaggedInt, Width
from sapwood.capture.weakly import ByTensor
from sapwood.types import Site

STRICT = False
"""Whether a rule that raises stops the trace (in our tests) or freezes what reached it."""


@dataclass
class Tracker:
    """All facts gathered while a model runs once."""

    module_names: dict[int, str]
    count: int = 0
    edges: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    pins: list[tuple[np.ndarray, str]] = field(default_factory=list)
    inexact: list[tuple[np.ndarray, str]] = field(default_factory=list)
    grids: list[Grid] = field(default_factory=list)
    preferred: list[np.ndarray] = field(default_factory=list)
    """Sides of grids to cut before others."""
    vectors: list[np.ndarray] = field(default_factory=list)
    equations: list[Equation] = field(default_factory=list)
    equalities: list[tuple[Expr, Expr, str]] = field(default_factory=list)
    attribute_roots: dict[str, Any] = field(default_factory=dict)
    attribute_values: dict[Expr, int] = field(default_factory=dict)
    work: list[Work] = field(default_factory=list)
    calls: list[RawCall] = field(default_factory=list)
    rescales: list[Rescale] = field(default_factory=list)
    coordinates: dict[Site, np.ndarray] = field(default_factory=dict)
    made: list[np.ndarray] = field(default_factory=list)
    read: list[np.ndarray] = field(default_factory=list)
    constant: ByTensor[bool] = field(default_factory=ByTensor)
    scales: set[Site] = field(default_factory=set)
    touched: set[str] = field(default_factory=set)
    names: ByTensor[tuple[str, tuple[int, ...]]] = field(default_factory=ByTensor)
    state: ByTensor[list[Ids]] = field(default_factory=ByTensor)
    makers: ByTensor[Maker] = field(default_factory=ByTensor)
    positions: ByTensor[Ids] = field(default_factory=ByTensor)
    """Tensors that hold positions along an axis; whoever uses one freezes that axis."""
    _memory: dict[tuple[Any, ...], str] = field(default_factory=dict)
    outputs: list[tuple[int, ...]] = field(default_factory=list)
    swayed: bool = False
    """Whether made-up values may have decided which operators ran, or on tensors of which size."""
    noting: bool = True
    """Whether operators are counted and listed, and what they read: of the forward in evaluation mode only."""
    readings: list[Reading] = field(default_factory=list)
    written: set[str] = field(default_factory=set)
    """Parameters and buffers that a forward writes to."""
    storages: dict[int, set[str]] = field(default_factory=dict)
    guarded: bool = False
    """Whether parameters are the user's own, so that a forward that writes to one must be stopped."""
    refused: bool = False
    weights: set[str] = field(default_factory=set)
    with_tags: bool = True
    trains: bool = False
    alike: bool = False
    """Whether training mode makes no difference to which operators run on which channels."""
    complete: bool = True
    foreign: set[str] = field(default_factory=set)
    strict: bool = field(default_factory=lambda: STRICT)
    hints: dict[str, Any] = field(default_factory=dict)
    _vector_of: dict[int, int] = field(default_factory=dict)
    _merged: dict[tuple[bytes, ...], np.ndarray] = field(default_factory=dict)
    _sides_of: dict[tuple[bytes, tuple[int, ...]], tuple[np.ndarray, ...]] = field(default_factory=dict)
    _split: dict[tuple[bytes, tuple[int, ...]], tuple[Ids, ...]] = field(default_factory=dict)

    # -- ids of tensors ---------------------------------------------------------------------

    def fresh(self, size: int) -> np.ndarray:
        start = self.count
        self.count += size
        return np.arange(start, self.count)

    def register(self, name: str, tensor: torch.Tensor) -> None:
        """Give every dimension of a parameter or buffer its coordinates, once."""
        dims: list[Ids] = []
        twin = self._twin(name, tensor)
        for dim, size in enumerate(tensor.shape):
            site = (name, dim)
            if site not in self.coordinates:
                self.coordinates[site] = self.fresh(size)
                if twin is not None:
                    self.edges.append((self.coordinates[site], self.coordinates[twin, dim]))
            dims.append(self.coordinates[site] if size > 1 else None)
        self.state[tensor] = dims
        self.names[tensor] = (name, tuple(range(tensor.dim())))
        self.constant[tensor] = True
        if tensor.layout is torch.strided:
            self.storages.setdefault(tensor.untyped_storage()._cdata, set()).add(name)
        if isinstance(tensor, torch.nn.Parameter):
            self.weights.add(name)

    def _twin(self, name: str, tensor: torch.Tensor) -> str | None:
        """The parameter registered before that lies in the same memory, if there is one."""
        if tensor.layout is not torch.strided or tensor.numel() < 2:
            return None
        memory = tensor.untyped_storage()._cdata, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
        first = self._memory.setdefault(memory, name)
        return None if first == name else first

    def use(self, tensor: torch.Tensor) -> None:
        """Note that code reads this tensor's values."""
        held = self.positions.get(tensor)
        if held is not None:
            self.pin(held, "positions along it are used")

    def ids(self, tensor: torch.Tensor) -> list[Ids]:
        found = self.state.get(tensor)
        return list(found) if found is not None else [None] * tensor.dim()

    def assign(self, tensor: torch.Tensor, dims: Sequence[Ids]) -> None:
        for position, size in enumerate(tensor.shape):
            held = dims[position]
            if held is not None and len(held) != size:
                raise AssertionError(f"a rule gave {len(held)} ids to a dimension of {size}")
        self.state[tensor] = [d if n > 1 else None for d, n in zip(dims, tensor.shape, strict=True)]

    def site(self, tensor: torch.Tensor, dim: int) -> Site | None:
        """The parameter dimension that this (possibly permuted) tensor dimension is."""
        found = self.names.get(tensor)
        return (found[0], found[1][dim]) if found is not None else None

    # -- facts ------------------------------------------------------------------------------

    def link(self, left: Ids, right: Ids, what: str) -> Ids:
        """The two axes meet position by position: they go together, or neither may go."""
        if left is None and right is None:
            return None
        if left is None or right is None:
            self.pin(left if right is None else right, f"it meets an axis of fixed size in {what}")
            return None
        if left is not right:
            self.edges.append((left, right))
        return left

    def pin(self, ids: Ids, reason: str, where: str | None = None) -> None:
        """These coordinates may not be removed, for a reason a user can read."""
        if ids is not None and len(ids):
            self.pins.append((ids.ravel(), f"{reason} ({where or self.where()})"))

    def mark_inexact(self, ids: Ids, reason: str) -> None:
        """Removing one of these changes statistics taken over the axis."""
        if ids is not None:
            self.inexact.append((ids, reason))

    def mark_contraction(self, made: Ids, read: Ids) -> None:
        """A weight makes one axis and reads another."""
        if made is not None:
            self.made.append(made)
        if read is not None:
            self.read.append(read)

    def split(self, ids: Ids, shape: Sequence[int]) -> list[Ids]:
        """The id vectors of an axis viewed as ``shape``."""
        if ids is None:
            return [None] * len(shape)
        key = (ids.tobytes(), tuple(shape))
        if key not in self._split:
            cells = ids.reshape(tuple(shape))
            found = [_distinct(cells, axis) for axis in range(len(shape))]
            core = cells[np.ix_(*(first for first, _ in found))]
            moving = [axis for axis, n in enumerate(core.shape) if n > 1]
            core = core.squeeze()
            parts = [core] if len(moving) == 1 else self._sides(core)
            axes: list[Ids] = [None] * len(shape)
            for axis, part in zip(moving, parts, strict=True):
                axes[axis] = part[found[axis][1]]
            self._split[key] = tuple(axes)
        return list(self._split[key])

    def _sides(self, cells: np.ndarray) -> list[np.ndarray]:
        """The axes of a grid: those it was merged from, or new ones."""
        key = (cells.tobytes(), cells.shape)
        if key not in self._sides_of:
            self._remember_grid(cells, tuple(self.fresh(n) for n in cells.shape))
        return list(self._sides_of[key])

    def merge(self, axes: Sequence[Ids], shape: Sequence[int]) -> Ids:
        """The id vector of several axes flattened into one."""
        moving = [a for a, ids in enumerate(axes) if ids is not None]
        if not moving:
            return None
        held = [ids for ids in axes if ids is not None]
        if len(held) == 1:
            cells = held[0]
        else:
            found = [_distinct(ids, 0) for ids in held]
            parts = tuple(ids[first] for ids, (first, _) in zip(held, found, strict=True))
            key = tuple(p.tobytes() for p in parts)
            if key not in self._merged:
                grid_shape = tuple(len(p) for p in parts)
                self._remember_grid(self.fresh(int(np.prod(grid_shape))).reshape(grid_shape), parts)
            cells = self._merged[key][np.ix_(*(inverse for _, inverse in found))]
        shown = cells.reshape(tuple(n if a in moving else 1 for a, n in enumerate(shape)))
        return np.ascontiguousarray(np.broadcast_to(shown, tuple(shape))).ravel()

    def _remember_grid(self, cells: np.ndarray, parts: tuple[np.ndarray, ...]) -> None:
        self.grids.append(Grid(cells, parts, self.where()))
        self._merged[tuple(p.tobytes() for p in parts)] = cells
        self._sides_of[cells.tobytes(), cells.shape] = parts

    # -- sizes ------------------------------------------------------------------------------

    def vector(self, ids: np.ndarray) -> int:
        found = self._vector_of.get(id(ids))
        if found is None:
            found = self._vector_of[id(ids)] = len(self.vectors)
            self.vectors.append(ids)
        return found

    def tagged(self, size: int, ids: Ids) -> int:
        """A dimension's size as code sees it."""
        return size if ids is None else TaggedInt(size, Width(self.vector(ids)), self)

    def equate(self, expr: Expr, ids: Ids, what: str) -> None:
        """Code says ``expr`` where the survivors of ``ids`` will be counted."""
        if ids is None or len(ids) == 0:
            return
        if isinstance(expr, int):
            self.pin(ids, f"{what} is written as the number {expr}")
        elif not (isinstance(expr, Width) and self.vectors[expr.vector] is ids):
            self.equations.append(Equation(expr, self.vector(ids), f"{what}, {self.where()}"))

    def on_equal(self, left: Expr, right: Expr) -> None:
        if left != right:
            self.equalities.append((left, right, self.where()))

    def on_factor(self, expr: Expr, value: int) -> None:
        """A size became a factor: it must stay the same, or the values computed would change."""
        self.equalities.append((expr, value, f"used as a factor, {self.where()}"))

    def count_work(self, factor: int, *dims: tuple[Ids, int]) -> None:
        if not self.noting:
            return
        vectors = []
        for ids, size in dims:
            if ids is None:
                factor *= size
            else:
                vectors.append(self.vector(ids))
        self.work.append(Work(factor, tuple(vectors)))

    def raw(self, value: Any) -> Any:
        """An argument with tensors replaced by what is known of their sizes."""
        if isinstance(value, torch.Tensor):
            vectors = tuple(None if i is None else self.vector(i) for i in self.ids(value))
            return RawSized(tuple(value.shape), vectors, value.dtype, memory_order(value))
        if isinstance(value, (list, tuple)):
            return type(value)(self.raw(v) for v in value) if type(value) in (list, tuple) else None
        return value

    def note_reading(self, op: Any, inputs: Sequence[torch.Tensor]) -> None:
        if self.noting:
            self.readings.append((op, tuple([(tuple(t.shape), self.ids(t)) for t in inputs])))

    def note_write(self, tensor: torch.Tensor) -> None:
        """Code is about to write to this tensor's memory: whose is it?"""
        if tensor.layout is torch.strided and (names := self.storages.get(tensor.untyped_storage()._cdata)):
            self.written |= names
            if self.guarded and self.weights & names:
                self.refused = True
                raise WritesToWeightsError

    def note_call(self, name: str, op: Any, args: Mapping[str, Any], outputs: Any) -> None:
        if not self.noting:
            return
        results = outputs if isinstance(outputs, (list, tuple)) else [outputs]
        made = tuple(self.raw(t) for t in results if isinstance(t, torch.Tensor))
        self.calls.append(RawCall(name, op, tuple((k, self.raw(v)) for k, v in args.items()), made))

    # -- where we are -----------------------------------------------------------------------

    def where(self) -> str:
        """Module path and source line of the user's code that is running now."""
        frame = sys._getframe(1)
        line, path = "", ""
        while frame is not None:
            package = frame.f_globals.get("__name__", "").split(".")[0]
            if not line and package not in ("torch", "sapwood", "contextlib", "functools"):
                line = f"{frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno}"
            code = frame.f_code
            if not path and ("self" in code.co_varnames or "self" in code.co_freevars):
                path = self.module_names.get(id(frame.f_locals.get("self")), "")
            if line and path:
                break
            frame = frame.f_back  # type: ignore[assignment]
        return " in ".join(p for p in (line, path) if p) or "the model's forward"


def _distinct(cells: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """Positions along an axis that differ: first occurrences, and for each position its number."""
    flat = cells.ravel()
    if (flat[1:] > flat[:-1]).all():  # all of them: no id appears twice
        each = np.arange(cells.shape[axis])
        return each, each
    rows = np.moveaxis(cells, axis, 0).reshape(cells.shape[axis], -1).astype(np.uint64)
    weights = np.random.default_rng(0).integers(1, 2**63, rows.shape[1], dtype=np.uint64)
    _, first, inverse = np.unique((rows * weights).sum(axis=1), return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return first[order], rank[inverse]


def leaves(expr: Expr) -> list[Expr]:
    """The attributes and widths an expression is made of."""
    if isinstance(expr, Op):
        return leaves(expr.left) + leaves(expr.right)
    return [] if isinstance(expr, int) else [expr]
