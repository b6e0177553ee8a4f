"""The runs that a file of jobs asks for, and what holds each of them up."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import time
from pathlib import Path

from benchmarks.cifar.choosing import decided, is_ready
from benchmarks.cifar.data import HELD_OUT, IMAGES
from benchmarks.cifar.kinds import Recipe
from benchmarks.cifar.options import changes_of, options
from benchmarks.cifar.recipes import names_of, recipe_of
from benchmarks.cifar.work import Place, done

SET_UP = 60
"""Seconds before the first step of a run."""
DONE, LATE = "done", "it would not end in time"
WAITS = "its base or a choice is missing, or the weights at the end of what it goes on from, which only that run leaves"
"""Why a run does not begin."""


def listed(file: Path, common: list[str]) -> list[tuple[str, list[str], str]]:
    """The runs of a file: their names, by their words, so that lines may be added anywhere; the words; what holds them
    up, nothing where they can begin."""
    found: dict[str, tuple[list[str], str]] = {}
    for words in map(str.split, file.read_text().splitlines()):
        said = "_".join(w.strip("-").replace("/", "-") for w in words)
        if words:
            whole = [*common, *words]
            found[f"{said[:80]}_{hashlib.sha256(said.encode()).hexdigest()[:6]}"] = (whole, reason(whole))
    return [(name, words, why) for name, (words, why) in found.items()]


def reason(words: list[str]) -> str:
    told = io.StringIO()
    try:
        with contextlib.redirect_stderr(told):
            return held_up(options().parse_args(words))
    except SystemExit as error:  # a line may be half written: others go on
        return told.getvalue().strip().rpartition("\n")[2] or str(error)


def held_up(given: argparse.Namespace) -> str:
    """Why the runs of one process do not begin; empty where they can."""
    place = Place(given.data, given.out, given.runs, given.split, kept=given.kept)
    runs = [recipe_of(name, given.variant, changes_of(given)) for point in given.point for name in names_of(point)]
    left = [run for run in runs if done(place, run[0], given.one) is None]
    if not left:
        return DONE
    if not all(is_ready(recipe, place, given.one) for _, recipe in left):
        return WAITS
    name, recipe = left[0]
    return "" if fits(name, decided(recipe, place), given) else LATE


def fits(name: str, recipe: Recipe, given: argparse.Namespace) -> bool:
    """Whether a run would end in time, by --ms; one that goes on from a checkpoint is always welcome."""
    begun = not given.ms or Place(given.data, given.out, given.runs, given.split).checkpoint(name, given.one).exists()
    steps = recipe.epochs * (IMAGES - (HELD_OUT if given.split == "validation" else 0)) // recipe.batch
    return begun or time.time() + SET_UP + steps * given.ms / 1000 < given.deadline
