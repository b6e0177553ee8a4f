"""What the validation split says: the better setting of every factor, and the recipes that wait for it."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.cifar.kinds import Recipe
from benchmarks.cifar.plans import CHOICES
from benchmarks.cifar.work import Place, done


def best_levels(way: str, place: Place) -> str | None:
    """Each factor at the setting with the better mean on the validation split; None while runs are missing."""
    choice, held = CHOICES[way], replace(place, split="validation")
    found = {levels: run for levels in choice.plan if (run := done(held, f"try-{way}-{levels}", 0))}
    if len(found) < len(choice.plan):
        return None
    if len(bases := {run["base_digest"] for run in found.values()}) > 1:
        raise SystemExit(f"runs of try-{way} started from {len(bases)} different bases: remove those of all but one")
    better = -1 if choice.by == "loss" else 1
    worth, _ = choice.worth({levels: better * run[choice.by] for levels, run in found.items()})
    return "".join("1" if round(gained, 6) > 0 else "0" for gained in worth.values())


def is_ready(recipe: Recipe, place: Place, seed: int = 0) -> bool:
    """Whether what a run starts from is there: its base, trained to the end, a decision where it asks for one, and what
    it goes on from."""
    if recipe.only == "train":
        return True
    if recipe.way and best_levels(recipe.way, place) is None:
        return False
    based = place.base.exists() and (place.split == "test" or done(place, "base", 0) is not None)
    return based and all(place.end(name, seed).exists() for name in decided(recipe, place).needed)


def decided(recipe: Recipe, place: Place) -> Recipe:
    """All that a point leaves to a choice, as it was decided."""
    if not recipe.way:
        return recipe
    best = best_levels(recipe.way, place)
    if best is None:
        raise SystemExit(f"{recipe.way} is not decided: --split validation --point {recipe.way} comes first")
    own = {k: v for k, v in recipe.told().items() if k not in ("way", "epochs")}
    if recipe.fewer:
        own["channels"] = recipe.channels  # not those of the plan
    about = f"{recipe.way}: {best} of {', '.join(CHOICES[recipe.way].factors)}"
    cut = {"mend": 0, "inner": False, "late": 0.0, "rounds": 1} if recipe.peer else {}  # its own matter
    return replace(CHOICES[recipe.way].at(best), **{"about": about, "epochs": recipe.epochs, **own, **cut})
