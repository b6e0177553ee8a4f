"""Sensitivity: what accuracy is left when a part of one group is cut, and everything else stays whole.

Each cell is a real cut of the trained model, without recovery, looked at on a few batches of the validation data.
What is known is kept in a file; stopped at any moment, it goes on from there.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import send_to_device
from safetensors.torch import load_file
from torch import nn

from sapwood.capture.isolation import undisturbed
from sapwood.capture.run import as_call
from sapwood.capture.skeleton import named_tensors, require_plain
from sapwood.capture.trace import Trace, trace
from sapwood.errors import SapwoodError, explain
from sapwood.measurement.counts import batch_of
from sapwood.pipeline.data import accuracy, load_data
from sapwood.pipeline.models import named_model, told
from sapwood.pipeline.recipe import Recipe, read_recipe
from sapwood.planning.counts import settle, units_of
from sapwood.planning.draft import plan_of_counts
from sapwood.scoring import Score, score_groups
from sapwood.storage.atomic import write_text
from sapwood.surgery.cut import cut
from sapwood.types import Tell
from sapwood.version import __version__

SENSITIVITY = "sensitivity.json"
SHARES = (0.1, 0.25, 0.5, 0.75, 0.9)
Metric = Callable[[nn.Module], float]
Cell = dict[str, Any]


@undisturbed()
def sensitivity(
    model: nn.Module,
    example_inputs: Any,
    metric: Metric,
    shares: Sequence[float] = SHARES,
    score: Score = "l1",
    known: Sequence[Cell] = (),
    tell: Tell | None = None,
    on_cell: Callable[[Cell], None] | None = None,
) -> list[Cell]:
    """For every group and every share removed of it: ``metric`` of the model cut there. ``known`` cells stay."""
    model, call = require_plain(model), as_call(example_inputs)
    seen = trace(model, call)
    if not seen.groups:
        got, remedy = f"{type(model).__name__}, of which nothing can be cut", "sapwood inspect says why."
        raise explain("a model with channels to cut", got, remedy, "sensitivity")
    scores = score_groups(named_tensors(model), seen.groups, score, seen.scales)
    found = {(c["group"], c["share"]): c for c in known}
    wanted = [(number, share) for number in range(len(seen.groups)) for share in shares]
    for done, (number, share) in enumerate(wanted):
        name = seen.groups[number].name
        if tell is not None:
            tell(name, done, len(wanted))
        if (name, share) not in found:
            found[name, share] = _cell(model, seen, scores, number, share, metric)
            if on_cell is not None:
                on_cell(found[name, share])
    if tell is not None:
        tell("done", len(wanted), len(wanted))
    return [found[seen.groups[number].name, share] for number, share in wanted]


def _cell(
    model: nn.Module, seen: Trace, scores: Sequence[np.ndarray], number: int, share: float, metric: Metric
) -> Cell:
    group, counts = seen.groups[number], counts_alone(seen, number, share)
    along = [g.name for i, g in enumerate(seen.groups) if i != number and counts[i] < g.width]
    cell: Cell = {"group": group.name, "share": share, "width": group.width, "kept": counts[number], "along": along}
    try:
        small = cut(model, plan_of_counts(seen, scores, counts, {}, {})).eval()
        return {**cell, "accuracy": float(metric(small))}
    except Exception as error:  # a cut that this model's code does not bear
        return {**cell, "accuracy": None, "why": told(error)}


def counts_alone(seen: Trace, number: int, share: float) -> list[int]:
    """How many channels every group keeps when this share of one is removed; those tied to it shrink along."""
    widths, kept = np.array(seen.dense, dtype=float), list(seen.dense)
    for unit in units_of(seen.dense, [form for form, _ in seen.constraints]):
        index = list(unit.groups)
        if number in index:
            targets = widths[index].copy()
            targets[index.index(number)] *= 1 - share
            steps, fixed = np.ones(len(index)), np.zeros(len(index), dtype=bool)
            for other, count in zip(index, settle(unit, targets, widths[index], steps, fixed), strict=True):
                kept[other] = int(count)
    return kept


def run_sensitivity(
    folder: Path,
    batches: int = 4,
    shares: Sequence[float] = SHARES,
    seed: int | None = None,
    anew: bool = False,
    tell: Tell | None = None,
) -> dict[str, Any]:
    """The sensitivity of a run's dense model, kept in its folder; goes on with what is there already."""
    if batches < 1:
        raise explain("at least one batch", str(batches), "For example 4.", "--batches")
    recipe = _recipe_of(folder)
    chosen = recipe.seeds[-1] if seed is None else seed
    weights = folder / f"seed-{chosen}" / "dense.safetensors"
    if not weights.exists():
        remedy = f"Finish the training: sapwood run --resume {folder}"
        raise explain(f"the trained model of seed {chosen}", "none yet", remedy, str(folder))
    data = load_data(recipe.data.name, recipe.data.batch, recipe.data.size, recipe.data.workers)
    looked_at = list(itertools.islice(data.validation, batches))
    score = next((p.score for p in recipe.prune if not p.step().is_mask and p.score), "l1")
    settings = {
        "seed": chosen,
        "batches": batches,
        "examples": sum(batch_of(as_call(tuple(b) if isinstance(b, list) else b)) for b in looked_at),
        "score": score,
        "shares": list(shares),
        "weights": hashlib.sha256(weights.read_bytes()).hexdigest()[:16],
    }
    device = torch.device("cuda" if torch.cuda.is_available() and recipe.device != "cpu" else "cpu")
    model = _model_of(recipe, weights).to(device).eval()
    metric = data.metric or accuracy
    file = _File(folder / SENSITIVITY, settings, anew)
    file.dense = metric(model, looked_at)
    try:
        cells = sensitivity(
            model,
            send_to_device(data.example, device),
            lambda m: metric(m, looked_at),
            shares,
            score,
            file.cells,
            tell,
            file.add,
        )
    finally:
        file.write()
    file.cells, file.done = cells, True
    file.write()
    return file.to_dict()


def _recipe_of(folder: Path) -> Recipe:
    if not (folder / "recipe.yaml").exists():
        raise explain("a run folder with recipe.yaml", "none", "Start one with: sapwood run RECIPE", str(folder))
    return read_recipe(folder / "recipe.yaml")


def _model_of(recipe: Recipe, weights: Path) -> nn.Module:
    torch.manual_seed(0)
    model = named_model(recipe.model.name, "model", arguments=recipe.model.arguments)
    try:
        model.load_state_dict(load_file(weights))
    except (OSError, RuntimeError, ValueError) as error:
        got = " ".join(str(error).split())[:200]
        remedy = "Was the model's code changed? Start the run anew."
        raise explain("weights of the recipe's model", got, remedy, str(weights)) from None
    return model


class _File:
    """What is known so far; written whole, twice a second at most."""

    def __init__(self, path: Path, settings: Mapping[str, Any], anew: bool) -> None:
        self.path, self.settings = path, dict(settings)
        self.cells: list[Cell] = []
        self.dense, self.done, self.written = 0.0, False, 0.0
        if path.exists() and not anew:
            self._read()

    def _read(self) -> None:
        try:
            known = json.loads(self.path.read_text())
            cells, settings = list(known["cells"]), known["settings"]
        except (ValueError, KeyError, TypeError):
            raise SapwoodError(f"{self.path}: expected JSON of a sensitivity; damaged. Start it with --anew.") from None
        if settings != self.settings:
            other = next(k for k in self.settings if settings.get(k) != self.settings[k])
            got, wanted = f"{other} {settings.get(other)}", f"{other} {self.settings[other]}"
            raise explain(wanted, f"{got} in what is there", "Ask for the same, or start with --anew.", str(self.path))
        self.cells = cells

    def add(self, cell: Cell) -> None:
        self.cells.append(cell)
        if time.monotonic() - self.written > 0.5:
            self.write()

    def write(self) -> None:
        write_text(self.path, json.dumps(self.to_dict(), indent=1) + "\n")
        self.written = time.monotonic()

    def to_dict(self) -> dict[str, Any]:
        return {
            "sapwood": __version__,
            "settings": self.settings,
            "dense": self.dense,
            "done": self.done,
            "cells": self.cells,
        }
