"""What is run, as data: every point of the comparison is a Recipe, every choice in it a field.

Why these. The base was trained to a rate of zero, so whatever is cut, weights must move far: a high rate, annealed by
cosine over all epochs, is said to beat a low one in long trainings (Renda et al., 2020; Le & Hua, 2021). The dense
model teaches the pruned one on the same augmented images, which is worth most where the student is small and the
training long (Beyer et al., 2022). A trained network's first steps at a high rate are far too long, so that short
trainings clip gradients. Seen on a refitted cut to 1 / 2.11 (30 steps of 64 images at a rate of 0.05, 320 training
images, statistics taken anew): 86% before; 28% after plain steps, 22% with the teacher, the weights' norms 1.4 and 2.2
times what they were; with clipping to 1, 92% with the same teacher, and norms as before. At 40 epochs, one seed
each, clipped 92.03 and unclipped 92.00 and 92.36 are within the noise.
Zeros come gradually by the cubic schedule and have a good part of the epochs left to anneal in. The residual stream is
cut, too, which is worth 0.17 points by ``shape``; how much more is cut early makes no difference, so that what comes
after it takes widths that kernels like instead.

``tuned`` recipes follow two plans of experiments on the validation split (benchmarks/results/cifar/first-base). They
misled: on the test images the one for 40 epochs had 93.04, a gentle one (half the base's rate, clipped) 93.50. The base
they started from had been trained for 100 epochs, and models with channels cut that were trained at a high rate for 80
more were better than it, 92.67 against 92.44, which none is on the test images: a base that is not done learning speaks
for high rates. So the base of the validation split is trained as the shared one was, for 200 epochs, and what is asked
of it are plans of experiments (CHOICES): every run has each factor at its first or its second setting, so that all runs
speak for all factors, and the points with that ``way`` are made of the settings with the better means, not by hand
(but even-4-200, which takes even widths in place of a factor that made no difference).

The recipe of a point that has been run on test images stays as it is (FIRST); another one is a point of its own, and
tables show both, so that it can be seen how many were tried on them.

Torch-Pruning is compared after 20 epochs, both trained by the settings that ``cut`` found: what follows from a cut is
washed out the more the longer both train alike. Ours is cut as the same plan says (cut), which was behind
Torch-Pruning's group norm at 2.11 times and level with its L1 at 2.57; the ablation says that one ranking of all
channels is better than the same share of every layer, most of all by LAMP, which keeps a wide residual stream; and that
group norm, which leaves the late layers nearly whole, was the better one of theirs at 2.11 times and the worse one at
2.57 and 4. So there is a plan for each size at which ours was not ahead (where): one ranking, or more kept stage by
stage, by L1 and by LAMP. Of an earlier one at 4 times (try-late4) only two runs were made.

The first zeros of 80, 90, 95 and 98% (sparse) are one training of 300 epochs with four annealings, at the end of which
each share is judged: the epochs of the earlier ones count for the later ones. It held what is asked for at 80% only.
Clipping counted the gradients of zeros then, which makes a gradient 4 times as long at 95% and up to 36 times at 98%;
and the 160 epochs up to 90% gave no more than 60 on the validation split did, so that the ones before a new annealing
seem to be lost. So each share is now a training of its own. The fewer weights are left, the smaller is their norm, the
longer a step of the same rate in proportion, and the more there is to learn anew: 95% and 98% have a plan each (few,
fewest). That for 95% decided for 90% (few-90), too, but for mixup and the rate: these are what zeros found, at 0.05
with the old clipping, which came to between 0.05 and 0.0175 as zeros grew more. Its first seed had 94.00 on the test
images, less than asked for; so 90% has a plan of its own (tenth), longer steps and more mixup among its settings. With
what it found, 200 epochs gave 93.99: 120, 160 and 200 epochs are all alike, so that it is not for want of training.
Then a better start and better teachers were tried (again): the dense model, trained for 100 epochs more with itself as
teacher and images made harder, to go on from and to teach together with the base. Neither paid; the plan chose cutout
alone, of which 150 epochs had 93.96 on the test images (one seed), but with a lower cross entropy than any before.
By that, which is less a matter of chance than accuracies that are 0.1 apart, cutout, more mixup and longer steps are
each better in every clipped plan of 90% zeros. The accuracy on test images has not followed: images that are harder
all the time are not those that are judged by. So the last plan, for the 300 epochs that are asked for and decided by
cross entropy, asks whether a fifth of the steps at the end should have plain images (calm; He et al., 2019, saw that
this makes up for such a gap), for still longer steps, and for labels beside the teacher. Before it was run, a small
network that knows its images by heart (by_heart.py) was asked what else might be worth a try (scout): zeros that may
come back, and mixup in some batches and cutmix in the others, were, so that the plan asks for these, too. It chose
labels, zeros that may come back and cutmix, not plain images at the end nor longer steps; 300 epochs gave 94.74.

Then clipping and the pace of what is hidden had changed since 2:4, 90% at once, 80, 95 and 98% were run (alike.py tells
which points the library still computes bit for bit as it did). So all of these were run once more, by points of their
own: the first two as they were, 80% by what ``last`` found, and 95 and 98% with what helped at 90% put to the
validation split first (mixed95, mixed98), since fewer weights may have no room for harder images: labels helped both,
harder images only 98%, and there only by cross entropy.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

from benchmarks.cifar.kinds import Recipe
from benchmarks.cifar.plans import AT_ONCE, CHOICES, COMPARED

_LONG = Recipe(fade=0.25, mend=8, mixup=0.2, clip=0.0)
_MATCHED = replace(_LONG, mixup=1.0, share=1.0, decay_all=True)
_TUNED = replace(_MATCHED, mixup=0.2, fade=0.0, lr=0.2)
_PROMISE = Recipe(mend=16, lr=0.05, warmup=0.05)
STRUCTURED = {("2.11", 200): 94.2, ("2.57", 100): 93.7, ("2.57", 200): 94.0}
UNSTRUCTURED = {("80", 90): 94.3, ("90", 160): 94.1, ("95", 230): 93.6, ("98", 300): 92.0}
"""What is asked for, by epochs after the base with all that is pruned in them; zeros within 300, those of UNSTRUCTURED
going on from one another."""
FIRST: dict[str, Recipe] = {
    "oneshot-90": replace(AT_ONCE, sparsity=0.9, target=93.37, clip=1.0),
    "structured-2.57-100": replace(_LONG, fewer=2.57, epochs=100, target=93.7),
    "structured-4-100": replace(_LONG, fewer=4.0, epochs=100),
    "matched-2.57-100": replace(_MATCHED, fewer=2.57, epochs=100, target=93.7),
    "tuned-2.11-40": replace(_TUNED, fewer=2.11, epochs=40, target=93.37),
    "promise-half-40": replace(_TUNED, channels=0.5, inner=False, epochs=40, target=92.37),
    "promise-2.57-40": replace(_PROMISE, fewer=2.57, epochs=40),
    "promise-4-40": replace(_PROMISE, fewer=4.0, epochs=40),
    "peer-2.57-40-l1": replace(_PROMISE, fewer=2.57, epochs=40, peer="l1", mend=0),
    "few-90-120": Recipe(way="few", sparsity=0.9, epochs=120, lr=0.025, mixup=0.5, target=94.1),
    "again-90-150": Recipe(way="again", sparsity=0.9, epochs=150, target=94.1),
}
"""Earlier recipes for points of the record, which have been run on test images."""


POINTS: dict[str, Recipe] = {
    **FIRST,
    "base": Recipe("ResNet-56 without the validation images", only="train", distill=False, clip=0.0, decay_all=True),
    "promise-20": replace(_PROMISE, fewer=2.11, epochs=20, target=92.37),
    "promise-40": replace(_PROMISE, fewer=2.11, epochs=40, target=93.37),
    "half-40": Recipe(way="half", epochs=40, target=92.37),
    "half-everywhere-40": Recipe(way="half", channels=0.5, inner=False, epochs=40, target=92.37),
    "drop": Recipe("right after pruning", only="drop", epochs=0.5, fewer=2.11, mend=16),
    "drop-half": Recipe("right after pruning", only="drop", epochs=0.5, channels=0.5, inner=False, mend=16),
    "oneshot-90-40": Recipe(way="oneshot", sparsity=0.9, epochs=40, target=93.37),
    "nm24": replace(AT_ONCE, pattern="2:4", lr=0.05, target=94.2, clip=1.0),
}
POINTS |= {f"try-{way}-{levels}": choice.at(levels) for way, choice in CHOICES.items() for levels in choice.plan}
_before, _total = "", 0
for (_share, _epochs), _target in UNSTRUCTURED.items():
    _name, _share_of = f"sparse-{_share}-{_epochs}", int(_share) / 100
    POINTS[_name] = Recipe(way="zeros", sparsity=_share_of, epochs=_epochs - _total, after=_before, target=_target)
    _before, _total = _name, _epochs
POINTS |= {
    "tenth-90-200": Recipe(way="tenth", sparsity=0.9, epochs=200, target=94.1),
    "again-100": Recipe(
        channels=1.0, inner=False, epochs=100, lr=0.05, mixup=0.5, cutout=8
    ),  # the dense model, as shape
    "last-90-300": Recipe(way="last", sparsity=0.9, epochs=300, target=94.1),
    "few-95-150": Recipe(way="few", sparsity=0.95, epochs=150, target=93.6),
    "fewest-98-220": Recipe(way="fewest", sparsity=0.98, epochs=220, target=92.0),
    "last-80-60": Recipe(way="last", sparsity=0.8, epochs=60, target=94.3),
    "mixed-95-120": Recipe(way="mixed95", sparsity=0.95, epochs=120, target=93.6),
    "mixed-98-200": Recipe(way="mixed98", sparsity=0.98, epochs=200, target=92.0),
}
POINTS |= {f"{name}-again": POINTS[name] for name in ("nm24", "oneshot-90-40")}
POINTS["drop-half-2"] = replace(POINTS["drop-half"], epochs=2)
POINTS["long-2.57-100"] = Recipe(way="long", fewer=2.57, epochs=100, target=93.7)
for (_fewer, _epochs), _target in STRUCTURED.items():
    POINTS[f"shape-{_fewer}-{_epochs}"] = Recipe(way="shape", fewer=float(_fewer), epochs=_epochs, target=_target)
POINTS["even-4-200"] = Recipe(
    fewer=4.0, epochs=200, mend=8, lr=0.05, inner=False, last=0.75, mixup=0.5, cutout=8, target=93.0
)  # as shape found, with even widths in place of late: half of all, and a little less in the last block, which makes 4
for _fewer in COMPARED:
    POINTS[f"ours-{_fewer}-40"] = Recipe(way="shape", fewer=float(_fewer), epochs=40)  # run before there was cut
    if f"where{_fewer}" in CHOICES:
        POINTS[f"where-{_fewer}-20"] = Recipe(way=f"where{_fewer}", fewer=float(_fewer), epochs=20)
    POINTS[f"cut-{_fewer}-20"] = Recipe(way="cut", fewer=float(_fewer), epochs=20)
    for _method in ("l1", "group", "sparse"):
        POINTS[f"theirs-{_fewer}-20-{_method}"] = replace(POINTS[f"cut-{_fewer}-20"], peer=_method)
POINTS["cut-4-20"] = replace(POINTS["cut-4-20"], channels=0.5)  # as Torch-Pruning's nearest, half of every layer
POINTS["cut-2.55-20"] = replace(POINTS["cut-2.57-20"], channels=0.625)  # likewise: 10, 20, 40 channels; added when
# cut-2.57-20, a little smaller than Torch-Pruning's, had been seen behind it on the test images

ABLATION: dict[str, Recipe] = {}
for _score, _allocate, _rate, _distill in itertools.product(
    ("l1", "l2", "lamp", "bn_scale", "taylor", "random"), ("uniform", "global"), ("finetune", "rewind"), (False, True)
):
    _name = f"{_score}-{_allocate}-{_rate}-{'distilled' if _distill else 'plain'}"
    _short = Recipe(epochs=12, rate=_rate, distill=_distill, allocate=_allocate, score=_score, inner=False)
    ABLATION[f"ablation-2.57-{_name}"] = replace(_short, fewer=2.57)
    if _score in ("l1", "lamp", "taylor", "random"):  # of single weights l1, l2 and bn_scale rank alike
        weights = "magnitude" if _score == "l1" else _score
        ABLATION[f"ablation-90-{_name.replace('l1', 'magnitude', 1)}"] = replace(_short, sparsity=0.9, score=weights)
POINTS |= ABLATION

GROUPS: dict[str, list[str]] = {
    "promise": ["drop", "drop-half", "drop-half-2", "promise-20", "promise-40", "half-40"],
    "ablation": list(ABLATION),
    **{way: [f"try-{way}-{levels}" for levels in choice.plan] for way, choice in CHOICES.items()},
}

VARIANTS: dict[str, dict[str, Any]] = {
    "stream": {"inner": False},
    "global": {"allocate": "global"},
    "stream-global": {"inner": False, "allocate": "global"},
    "small-cuts": {"schedule": "cubic", "rounds": 12, "until": 0.25, "fade": 0.0},
    "at-once": {"fade": 0.0},
    "slowly": {"fade": 0.5},
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


def all_epochs(recipe: Recipe) -> float:
    """Of everything that follows the base."""
    return recipe.epochs + sum(POINTS[name].epochs for name in _before_it(recipe))


def _before_it(recipe: Recipe) -> set[str]:
    return recipe.needed.union(*(_before_it(POINTS[name]) for name in recipe.needed))


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
    if recipe.way and (variants or changes):
        raise SystemExit(f"{point} follows from {', '.join(names_of(recipe.way))}: change one of these instead")
    for variant in variants:
        recipe, name = replace(recipe, **VARIANTS[variant]), f"{name}_{variant}"
    for change in changes:
        key, _, text = change.partition("=")
        kind = type(getattr(Recipe(), key)) if getattr(Recipe(), key) is not None else float
        value: Any = text in ("1", "true", "True") if kind is bool else kind(text)
        recipe, name = replace(recipe, **{key: value}), f"{name}_{key}-{text}"
    return name, recipe
