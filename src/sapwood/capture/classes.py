"""From links to classes: which coordinates must go together, and which may not go at all."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components

from sapwood.capture.facts import SOFTMAX, Grid
from sapwood.capture.tracker import Tracker

OTHER_SIDE = "it is one side of a grid whose other side is cut (heads, not head width)"
ALL_TIED = "all of these channels depend on one another"
_MAX_ROUNDS = 6


@dataclass(frozen=True)
class Classes:
    """``label[id]`` is an id's class; ``reason[class]`` is -1 or a number of ``reasons``."""

    label: np.ndarray
    count: int
    reason: np.ndarray
    reasons: list[str]
    inexact: np.ndarray

    @property
    def pinned(self) -> np.ndarray:
        return self.reason >= 0


def components(count: int, edges: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """The connected component of each id."""
    if not edges:
        return np.arange(count)
    left = np.concatenate([a.ravel() for a, _ in edges])
    right = np.concatenate([b.ravel() for _, b in edges])
    matrix = coo_matrix((np.ones(len(left), dtype=np.int8), (left, right)), shape=(count, count))
    return connected_components(matrix, directed=False)[1]  # type: ignore[no-any-return]


def _nodes(grids: list[Grid], label: np.ndarray) -> list[list[int]]:
    """A number per grid and axis; axes that share a class are the same node."""
    flat = [axis for grid in grids for axis in grid.axes]
    offset = len(flat)
    edges = [(np.full(len(axis), number), label[axis] + offset) for number, axis in enumerate(flat)]
    node = components(offset + int(label.max(initial=0)) + 1, edges)
    numbers = iter(node[:offset].tolist())
    return [[next(numbers) for _ in grid.axes] for grid in grids]


def _choose(nodes: list[list[int]], unusable: set[int], shared: set[int], preferred: set[int]) -> set[int]:
    """Free nodes such that no grid has two: those preferred, then outer axes (heads) before inner ones (head width).

    Axes that a softmax runs over come last: their entries share out a whole.
    """
    places: dict[int, list[int]] = {}
    for row in nodes:
        for place, node in enumerate(row):
            places.setdefault(node, []).append(place)
    order = sorted(
        places, key=lambda n: (n in shared, n not in preferred, sum(places[n]) / len(places[n]), -len(places[n]))
    )
    rivals: dict[int, set[int]] = {}
    for row in nodes:
        for node in row:
            others = [n for n in row if n != node]
            rivals.setdefault(node, set()).update(others if len(others) == len(row) - 1 else [*others, node])
    free: set[int] = set()
    for node in order:
        if node not in unusable and not rivals[node] & free and node not in rivals[node]:
            free.add(node)
    return free


def find_classes(tracker: Tracker) -> Classes:
    """Resolve the grids, then give every id its class and every frozen class its reason."""
    grids = tracker.grids
    label = _link_twins(tracker)
    pinned = _flags(label, [ids for ids, _ in tracker.pins])
    nodes = _nodes(grids, label)
    sides = [
        (axis, node) for grid, row in zip(grids, nodes, strict=True) for axis, node in zip(grid.axes, row, strict=True)
    ]
    unusable = {node for axis, node in sides if pinned[label[axis]].all()}
    softmax = _flags(label, [ids for ids, why in tracker.inexact if why == SOFTMAX])
    shared = {node for axis, node in sides if softmax[label[axis]].any()}
    wanted = _flags(label, tracker.preferred)
    preferred = {node for axis, node in sides if wanted[label[axis]].any()}
    for _ in range(_MAX_ROUNDS):
        free = _choose(nodes, unusable, shared, preferred)
        found = _resolve(tracker, nodes, free)
        collapsed = _collapsed(found, grids, nodes, free) - unusable
        if not collapsed:
            break
        unusable |= collapsed
    return found


def _link_twins(tracker: Tracker) -> np.ndarray:
    """Grids with the same cells have the same sides; linking those may make more cells the same."""
    label = components(tracker.count, tracker.edges)
    while True:
        first: dict[tuple[bytes, tuple[int, ...]], Grid] = {}
        before = len(tracker.edges)
        for grid in tracker.grids:
            twin = first.setdefault((label[grid.cells].tobytes(), grid.cells.shape), grid)
            for mine, theirs in zip(grid.axes, twin.axes, strict=True):
                if (label[mine] != label[theirs]).any():
                    tracker.edges.append((mine, theirs))
        if len(tracker.edges) == before:
            return label
        label = components(tracker.count, tracker.edges)


def _resolve(tracker: Tracker, nodes: list[list[int]], free: set[int]) -> Classes:
    edges, pins = list(tracker.edges), list(tracker.pins)
    for grid, row in zip(tracker.grids, nodes, strict=True):
        chosen = [place for place, node in enumerate(row) if node in free]
        for place, axis in enumerate(grid.axes):
            if place not in chosen:
                pins.append((axis, f"{OTHER_SIDE} ({grid.where})"))
        if not chosen:
            pins.append((grid.cells.ravel(), f"both sides of its grid have a fixed size ({grid.where})"))
            continue
        axis = grid.axes[chosen[0]]
        shape = [1] * grid.cells.ndim
        shape[chosen[0]] = -1
        edges.append((grid.cells, np.broadcast_to(axis.reshape(shape), grid.cells.shape)))
    label = components(tracker.count, edges)
    reason = np.full(int(label.max(initial=-1)) + 1, -1)
    for number in range(len(pins) - 1, -1, -1):
        reason[label[pins[number][0]]] = number
    inexact = _flags(label, [ids for ids, _ in tracker.inexact])
    return Classes(label, len(reason), reason, [text for _, text in pins], inexact)


def _flags(label: np.ndarray, marked: list[np.ndarray]) -> np.ndarray:
    flags = np.zeros(int(label.max(initial=-1)) + 1, dtype=bool)
    for ids in marked:
        flags[label[ids]] = True
    return flags


def _collapsed(found: Classes, grids: list[Grid], nodes: list[list[int]], free: set[int]) -> set[int]:
    """Free nodes that turned out to have nothing left to choose from."""
    bad = set()
    for grid, row in zip(grids, nodes, strict=True):
        for axis, node in zip(grid.axes, row, strict=True):
            if node in free:
                classes = np.unique(found.label[axis])
                if (~found.pinned[classes]).sum() < min(2, len(axis)):
                    bad.add(node)
    return bad
