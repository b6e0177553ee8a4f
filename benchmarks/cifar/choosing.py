"""What the validation split says: which way is the best one, and the recipes that wait for it."""

from __future__ import annotations

import statistics
from dataclasses import replace

from benchmarks.cifar.recipes import TRIES, WAYS, Recipe
from benchmarks.cifar.work import Place, done


def best_way(way: str, place: Place) -> str | None:
    """The way with the best mean on the validation split; None while runs are missing."""
    held, means, bases = replace(place, split="validation"), {}, set()
    for name in WAYS[way]:
        found = [run for seed in range(TRIES) if (run := done(held, f"try-{way}-{name}", seed))]
        if len(found) < TRIES:
            return None
        means[name] = statistics.mean(run["accuracy"] for run in found)
        bases |= {run["base_digest"] for run in found}
    if len(bases) > 1:
        raise SystemExit(f"runs of try-{way} started from {len(bases)} different bases: remove those of all but one")
    return max(means, key=means.__getitem__)


def is_ready(recipe: Recipe, place: Place) -> bool:
    """Whether what a run starts from is there: its base, trained to the end, and a decision where it asks for one."""
    if recipe.only == "train":
        return True
    based = place.base.exists() and (place.split == "test" or done(place, "base", 0) is not None)
    return based and (not recipe.way or best_way(recipe.way, place) is not None)


def decided(recipe: Recipe, place: Place) -> Recipe:
    """All that a point leaves to a choice, as it was decided."""
    if not recipe.way:
        return recipe
    best = best_way(recipe.way, place)
    if best is None:
        raise SystemExit(f"{recipe.way} is not decided: --split validation --point {recipe.way} comes first")
    own = {k: v for k, v in recipe.told().items() if k not in ("way", "epochs")}
    about = f"{recipe.way}: {best} of {', '.join(WAYS[recipe.way])}"
    return replace(WAYS[recipe.way][best], **{"about": about, "epochs": recipe.epochs, **own})
