"""The facts that a trace is made of: grids, equations, work, who made a tensor, what an operator read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sapwood.capture.sizes import Expr
from sapwood.types import Site

Ids = np.ndarray | None
SOFTMAX = "a softmax runs over these channels"


@dataclass(frozen=True)
class Grid:
    """A product axis: position (i, j, ...) goes if its row, its column, ... goes."""

    cells: np.ndarray  # ids, in the shape of the grid
    axes: tuple[np.ndarray, ...]  # one id vector per axis of the grid
    where: str


@dataclass(frozen=True)
class Equation:
    """Code computes a size as ``expr``; it must equal the survivors of id vector ``vector``."""

    expr: Expr
    vector: int
    where: str


@dataclass(frozen=True)
class Work:
    """Floating-point operations of one call: ``factor`` times the product of surviving widths."""

    factor: int
    vectors: tuple[int, ...]


@dataclass(frozen=True)
class Maker:
    """The parameters whose output axis a tensor is a linear image of (to rescale it later).

    ``positions`` along that axis, in the shape of the tensor's dimensions ``axes`` that still run along it; without
    axes, all positions that may have a part in it.
    """

    sites: tuple[Site, ...]
    axes: tuple[int, ...]
    positions: np.ndarray

    def moved(self, places: Sequence[int | None]) -> Maker:
        """After a change of dimensions; ``places[i]`` is where dimension i came from."""
        if not all(axis in places for axis in self.axes):
            return self.blurred()
        return Maker(self.sites, tuple(places.index(axis) for axis in self.axes), self.positions)

    def at(self, dim: int, part: slice | int) -> Maker:
        """After a dimension was sliced, or one entry of it was picked."""
        if dim not in self.axes:
            shift = isinstance(part, int)
            axes = tuple(a - (shift and a > dim) for a in self.axes)
            return Maker(self.sites, axes, self.positions)
        place = self.axes.index(dim)
        positions = self.positions[(slice(None),) * place + (part,)]
        if isinstance(part, slice):
            return Maker(self.sites, self.axes, positions)
        axes = tuple(a - (a > dim) for a in self.axes if a != dim)
        return Maker(self.sites, axes, np.atleast_1d(positions)) if axes else Maker(self.sites, (), positions.ravel())

    def blurred(self, *others: Maker) -> Maker:
        """Which position is where is no longer known."""
        return Maker(self.sites, (), np.unique(np.concatenate([m.positions.ravel() for m in (self, *others)])))


@dataclass(frozen=True)
class Rescale:
    """Attention divides by the root of this width; the maker must make up for a change of it."""

    vector: int
    maker: Maker
    where: str


class WritesToWeightsError(Exception):
    """A forward is about to change a parameter."""


Reading = tuple[Any, tuple[tuple[tuple[int, ...], list[Ids]], ...]]
"""An operator, and the shape and ids of each tensor it was given."""
