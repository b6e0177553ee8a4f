"""What is run, as data: every point of the comparison is a Recipe, every choice in it a field.

Why these. The base was trained to a rate of zero, so whatever is cut, weights must move far: a high rate, annealed by
cosine over all epochs, beats a low one once there are 40 epochs or more (Renda et al., 2020; Le & Hua, 2021). The
dense model teaches the pruned one on the same augmented images, which is worth most where the student is small and the
training long (Beyer et al., 2022). A trained network's first steps at a high rate are far too long, so that short
trainings clip gradients. Seen on a refitted cut to 1 / 2.11 (30 steps of 64 images at a rate of 0.05, 320 training
images, statistics taken anew): 86% before; 28% after plain steps, 22% with the teacher, the weights' norms 1.4 and 2.2
times what they were; with clipping to 1, 92% with the same teacher, and norms as before. At 40 epochs, one seed
each, clipped 92.03 and unclipped 92.00 and 92.36 are within the noise; the long recipes do not clip.
Zeros come gradually by the cubic schedule and have more than half of the epochs left to anneal in. Channels are cut
inside blocks only; cutting the residual stream, too, or a global ranking made no difference beyond the noise.

``tuned`` points follow two plans of experiments on the validation split (benchmarks/results/cifar/factors.txt, with
what of it comes from unfinished runs; 40 epochs, 2.57 times fewer MACs). An effect in the first plan has a standard
error of 0.07 points: a little mixup (1.0 loses 0.13), weight decay as the base had it, on all parameters (2e-4 loses
0.13), no features inside the network as targets (lose 0.09). The cut comes at once and is refitted, since fading
channels out first gave nothing. The temperature stays: 2 loses 0.09 points, but gains in cross entropy. Labels beside
the teacher's answers and the rate made no difference. In the second plan a product of rate and decay of 1e-4 with mixup
0.2 had 92.2 to 92.5, one of 5e-5 or 2e-4 without mixup 91.9 to 92.3, which cannot be told apart; nothing is to be seen
of a teacher that looks at the mirror image, too, and of more channels in late stages. The base had a product of 5e-5
over 200 epochs. So a rate of 0.2 for up to 100 epochs, and 0.1 for 200.

The recipe of a point that has been run on test images stays as it is (FIRST); another one is a point of its own, and
tables show both, so that it can be seen how many were tried on them.

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
    sam: float = 0.0
    """The radius of sharpness-aware steps. They compute two gradients, so that each of their epochs counts twice."""
    distill: bool = True
    temperature: float = 4.0
    share: float = 0.9
    cutout: int = 0
    mixup: float = 0.0
    cutmix: float = 0.0
    """Of mixup and cutmix one at most: how much of another image, as the parameter of a beta distribution."""
    batch: int = 256
    peer: str = ""
    """A method of Torch-Pruning in place of ours: l1, group or sparse."""
    only: str = ""
    """``drop`` looks at what is left right after pruning, ``train`` trains the base itself."""

    @property
    def trained(self) -> float:
        """Epochs that are trained; ``epochs`` are those that count."""
        return self.epochs / 2 if self.sam else self.epochs

    def told(self) -> dict[str, Any]:
        """What differs from the defaults."""
        plain = asdict(Recipe())
        return {k: v for k, v in asdict(self).items() if v != plain[k]}


_LONG = Recipe(fade=0.25, mend=8, mixup=0.2, clip=0.0)
_MATCHED = replace(_LONG, mixup=1.0, share=1.0, decay_all=True)
_TUNED = replace(_MATCHED, mixup=0.2, fade=0.0)
_FLAT = replace(_TUNED, sam=0.5, lr=0.2)
_PROMISE = Recipe(fewer=2.11, mend=16, lr=0.05, warmup=0.05)
_ZEROS = Recipe(score="magnitude", allocate="global", schedule="cubic", rounds=40, until=0.4, clip=0.0)
_AT_ONCE = replace(_ZEROS, schedule="one-shot", rounds=1, epochs=40, mend=8)
_LIGHTER = {"95": 3e-4, "98": 2e-4}
_RATES = {40: 0.2, 100: 0.2, 200: 0.1}
"""By epochs."""
STRUCTURED = {("2.11", 40): 93.37, ("2.11", 200): 94.2, ("2.57", 100): 93.7, ("2.57", 200): 94.0, ("4", 200): 93.0}
UNSTRUCTURED = {"80": 94.3, "90": 94.1, "95": 93.6, "98": 92.0}
"""What is asked for, by epochs after the base with all that is pruned in them; those of UNSTRUCTURED within 300."""

FIRST: dict[str, Recipe] = {
    "promise-40": replace(_PROMISE, epochs=40, target=93.37),
    "oneshot-90": replace(_AT_ONCE, sparsity=0.9, target=93.37, clip=1.0),
    "structured-2.57-100": replace(_LONG, fewer=2.57, epochs=100, target=93.7),
    "structured-4-100": replace(_LONG, fewer=4.0, epochs=100),
    "matched-2.57-100": replace(_MATCHED, fewer=2.57, epochs=100, target=93.7),
}
"""Earlier recipes for points of the record, which have been run on test images."""

POINTS: dict[str, Recipe] = {
    **FIRST,
    "base": Recipe("ResNet-56 without the validation images", only="train", distill=False, clip=0.0),
    "promise-20": replace(_PROMISE, epochs=20, target=92.37),
    "promise-half-40": replace(_TUNED, channels=0.5, inner=False, epochs=40, lr=_RATES[40], target=92.37),
    "drop": Recipe("right after pruning", only="drop", fewer=2.11, mend=16),
    "drop-half": Recipe("right after pruning", only="drop", channels=0.5, inner=False, mend=16),
    "oneshot-unclipped-90": replace(_AT_ONCE, sparsity=0.9, target=93.37),
    "nm24": replace(_AT_ONCE, pattern="2:4", lr=0.05, target=94.2, clip=1.0),
}
for _share, _target in UNSTRUCTURED.items():
    _point = replace(_ZEROS, sparsity=int(_share) / 100)
    POINTS[f"unstructured-{_share}-100"] = replace(_point, epochs=100, weight_decay=_LIGHTER.get(_share, 5e-4))
    POINTS[f"sparse-{_share}-200"] = replace(_point, epochs=200, mixup=0.2, share=1.0, target=_target)
for _fewer, _epochs in itertools.product(("2.11", "2.57", "4"), (40, 100, 200)):
    _ours = replace(_TUNED, fewer=float(_fewer), epochs=_epochs, lr=_RATES[_epochs])
    _asked = STRUCTURED.get((_fewer, _epochs))
    POINTS[f"tuned-{_fewer}-{_epochs}"] = replace(_ours, target=_asked)
    POINTS[f"flat-{_fewer}-{_epochs}"] = replace(_FLAT, fewer=float(_fewer), epochs=_epochs, target=_asked)
    for _method in ("l1", "group", "sparse"):
        POINTS[f"peer-{_fewer}-{_epochs}-{_method}"] = replace(_ours, peer=_method, mend=0)

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
    "promise": ["drop", "drop-half", "promise-20", "tuned-2.11-40", "promise-half-40"],
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
    "much-mixup": {"mixup": 1.0},
    "cutmix": {"mixup": 0.0, "cutmix": 1.0},
    "taught-only": {"share": 1.0},
    "low-rate": {"lr": 0.05},
    "clipped": {"clip": 1.0},
    "light": {"weight_decay": 2e-4},
    "decay-all": {"decay_all": True},
    "early": {"until": 0.25},
    "lamp": {"score": "lamp"},
    "plain": {"mixup": 0.0},
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
