"""What is run, as data: every point of the comparison is a Recipe, every choice in it a field.

Why these. The base was trained to a rate of zero, so whatever is cut, weights must move far: a high rate, annealed by
cosine over all epochs, beats a low one once there are 40 epochs or more (Renda et al., 2020; Le & Hua, 2021). The
dense model teaches the pruned one on the same augmented images, which is worth most where the student is small and the
training long (Beyer et al., 2022). Gradients are clipped: a trained network's first steps at a high rate are far too
long. Seen on a refitted cut to 1 / 2.11 (30 steps of 64 images at a rate of 0.05, 320 training images, statistics taken
anew): 86% before; 28% after plain steps, 22% with the teacher, the weights' norms 1.4 and 2.2 times what they were,
which slows all later steps; with clipping to 1, 92% with the same teacher, and norms as before.
Channels fade out over the first part of the training, so that the cut itself costs nothing; zeros come gradually by
the cubic schedule and have more than half of the epochs left to anneal in. Short trainings (20 and 40 epochs) cannot
afford to forget: they start from weights that were refitted after the cut, at half the rate. Channels are cut inside
blocks only until the validation split says otherwise (``--each stream global stream-global``).

Choices are compared on a validation split (``--split validation``) with a base that has not seen it.
"""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Recipe:
    """One training from the base, with all that is pruned in it."""

    about: str = ""
    epochs: float = 200
    target: float | None = None
    """The test accuracy asked for, in percent."""
    fewer: float | None = None
    """Times fewer multiply-accumulates."""
    channels: float | None = None
    sparsity: float | None = None
    pattern: str = "unstructured"
    score: str = "l1"
    allocate: str = "uniform"
    inner: bool = True
    """Channels are cut inside blocks only; the residual stream stays."""
    schedule: str = "one-shot"
    rounds: int = 1
    until: float = 0.5
    fade: float = 0.0
    mend: int = 0
    """Batches to refit and to take norms' statistics from, after each cut."""
    lr: float = 0.1
    rate: str = "rewind"
    anneal: str = "cosine"
    warmup: float = 0.02
    weight_decay: float = 5e-4
    decay_all: bool = False
    """Weight decay on norms and biases, too, as the base had it."""
    clip: float = 1.0
    """The largest norm of the gradient; 0 does not clip."""
    distill: bool = True
    temperature: float = 4.0
    share: float = 0.9
    cutout: int = 0
    mixup: float = 0.0
    batch: int = 256
    peer: str = ""
    """A method of Torch-Pruning in place of ours: l1, group or sparse."""
    only: str = ""
    """``drop`` looks at what is left right after pruning, ``train`` trains the base itself."""

    def told(self) -> dict[str, Any]:
        """What differs from the defaults."""
        plain = asdict(Recipe())
        return {k: v for k, v in asdict(self).items() if v != plain[k]}


_LONG = Recipe(fade=0.25, mend=8)
_PROMISE = Recipe(fewer=2.11, mend=16, lr=0.05, warmup=0.05)
_ZEROS = Recipe(epochs=300, score="magnitude", allocate="global", schedule="cubic", rounds=40, until=0.4)

POINTS: dict[str, Recipe] = {
    "base": Recipe("ResNet-56 without the validation images", only="train", distill=False, clip=0.0),
    "structured-2.11": replace(_LONG, fewer=2.11, target=94.2),
    "structured-2.57": replace(_LONG, fewer=2.57, target=94.0),
    "structured-4": replace(_LONG, fewer=4.0, target=93.0),
    "structured-2.57-100": replace(_LONG, fewer=2.57, epochs=100, target=93.7),
    "promise-20": replace(_PROMISE, epochs=20, target=92.37),
    "promise-40": replace(_PROMISE, epochs=40, target=93.37),
    "promise-half-40": replace(_PROMISE, fewer=None, channels=0.5, inner=False, epochs=40, target=92.37),
    "drop": Recipe("right after pruning", only="drop", fewer=2.11, mend=16),
    "drop-half": Recipe("right after pruning", only="drop", channels=0.5, inner=False, mend=16),
    "unstructured-80": replace(_ZEROS, sparsity=0.8, target=94.3),
    "unstructured-90": replace(_ZEROS, sparsity=0.9, target=94.1),
    "unstructured-95": replace(_ZEROS, sparsity=0.95, target=93.6, weight_decay=3e-4),
    "unstructured-98": replace(_ZEROS, sparsity=0.98, target=92.0, weight_decay=2e-4),
    "oneshot-90": replace(_ZEROS, sparsity=0.9, schedule="one-shot", rounds=1, epochs=40, target=93.37, mend=8),
    "nm24": replace(_ZEROS, pattern="2:4", schedule="one-shot", rounds=1, epochs=40, lr=0.05, target=94.2, mend=8),
}
for _fewer in ("2.11", "2.57", "4"):
    _ours = POINTS[f"structured-{_fewer}"]
    for _method in ("l1", "group", "sparse"):
        POINTS[f"peer-{_fewer}-{_method}"] = replace(_ours, peer=_method, target=None, fade=0.0, mend=0)

ABLATION: dict[str, Recipe] = {}
for _score, _allocate, _rate, _distill in itertools.product(
    ("l1", "l2", "lamp", "bn_scale", "taylor", "random"), ("uniform", "global"), ("finetune", "rewind"), (False, True)
):
    _name = f"{_score}-{_allocate}-{_rate}-{'distilled' if _distill else 'plain'}"
    _short = Recipe(epochs=15, rate=_rate, distill=_distill, allocate=_allocate, score=_score, inner=False)
    ABLATION[f"ablation-2.57-{_name}"] = replace(_short, fewer=2.57)
    if _score in ("lamp", "taylor", "random") or _score == "l1":  # of single weights l1, l2 and bn_scale rank alike
        weights = "magnitude" if _score == "l1" else _score
        ABLATION[f"ablation-90-{_name.replace('l1', 'magnitude', 1)}"] = replace(_short, sparsity=0.9, score=weights)
POINTS |= ABLATION

GROUPS: dict[str, list[str]] = {
    "structured": ["structured-2.11", "structured-2.57", "structured-4", "structured-2.57-100"],
    "promise": ["drop", "drop-half", "promise-20", "promise-40", "promise-half-40"],
    "unstructured": [n for n in POINTS if n.startswith("unstructured-")],
    "torch-pruning": [n for n in POINTS if n.startswith("peer-") and not n.endswith("-sparse")],
    "torch-pruning-sparse": [n for n in POINTS if n.startswith("peer-") and n.endswith("-sparse")],
    "ablation": list(ABLATION),
}

VARIANTS: dict[str, dict[str, Any]] = {
    "stream": {"inner": False},
    "global": {"allocate": "global"},
    "stream-global": {"inner": False, "allocate": "global"},
    "small-cuts": {"schedule": "cubic", "rounds": 12, "until": 0.25, "fade": 0.0},
    "at-once": {"fade": 0.0},
    "late": {"fade": 0.5},
    "no-teacher": {"distill": False},
    "soft": {"share": 0.5},
    "cool": {"temperature": 2.0},
    "cutout": {"cutout": 8},
    "mixup": {"mixup": 0.2},
    "low-rate": {"lr": 0.05},
    "unclipped": {"clip": 0.0},
    "light": {"weight_decay": 2e-4},
    "decay-all": {"decay_all": True},
    "early": {"until": 0.25},
    "lamp": {"score": "lamp"},
    "iterative": {"schedule": "iterative", "rounds": 3},
}
"""Changes to try on the validation split: --variant NAME; --set FIELD=VALUE for others."""


def names_of(point: str) -> list[str]:
    if point in GROUPS:
        return GROUPS[point]
    if point in POINTS:
        return [point]
    raise SystemExit(
        f"--point {point}: expected one of {', '.join([*GROUPS, *(n for n in POINTS if n not in ABLATION)])}"
    )


def recipe_of(point: str, variants: list[str], changes: list[str]) -> tuple[str, Recipe]:
    """A recipe with changes, and the name of its runs."""
    recipe, name = POINTS[point], point
    for variant in variants:
        recipe, name = replace(recipe, **VARIANTS[variant]), f"{name}_{variant}"
    for change in changes:
        key, _, text = change.partition("=")
        kind = type(getattr(Recipe(), key)) if getattr(Recipe(), key) is not None else float
        value: Any = text in ("1", "true", "True") if kind is bool else kind(text)
        recipe, name = replace(recipe, **{key: value}), f"{name}_{key}-{text}"
    return name, recipe
