"""The plans of runs on the validation split, as data; recipes.py says why these."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.cifar.kinds import Choice, Recipe

ZEROS = Recipe(score="magnitude", allocate="global", schedule="cubic", rounds=40, until=0.4, clip=0.0)
AT_ONCE = replace(ZEROS, schedule="one-shot", rounds=1, epochs=40, mend=8)
COMPARED = ("2.11", "2.57", "4")
"""Times fewer multiply-accumulates, where we are compared with Torch-Pruning."""
_SETTINGS = {"batch": (256, 128), "mixup": (0.0, 0.2)}
_CUTS = {**_SETTINGS, "allocate": ("uniform", "global"), "clip": (1.0, 0.0)}
_ONCE = replace(AT_ONCE, sparsity=0.9, clip=1.0)
_HARDER = {"mixup": (0.2, 0.5), "cutout": (0, 8)}
_FEW = replace(ZEROS, clip=1.0, rounds=100, until=0.5)
_CUT = Recipe(  # as cut found
    epochs=20, inner=False, schedule="cubic", rounds=6, until=0.3, mend=16, lr=0.05, mixup=0.5, cutout=8
)
_WHERE = {"score": ("l1", "lamp"), "late": (0.0, 0.4)}
_MIXED = {"share": (0.9, 0.5), "cutmix": (0.0, 1.0), "cutout": (0, 8)}
_CHOSEN = {"regrow": (0.0, 0.8), "score": ("magnitude", "lamp")}
CHOICES: dict[str, Choice] = {
    "long": Choice(Recipe(fewer=2.57, epochs=80, mend=8), {"lr": (0.05, 0.1), **_CUTS}),
    "shape": Choice(
        Recipe(fewer=2.57, epochs=80, mend=8, lr=0.05),
        {"inner": (True, False), "late": (0.0, 0.4), "weight_decay": (5e-4, 1e-3), **_HARDER},
    ),
    "cut": Choice(
        Recipe(fewer=4.0, channels=0.5, epochs=20, inner=False, schedule="cubic", until=0.3),
        {"lr": (0.05, 0.1), "rounds": (1, 6), "mend": (0, 16), **_HARDER},
    ),
    "half": Choice(Recipe(fewer=4.0, epochs=40, mend=8), {"lr": (0.1, 0.2), **_CUTS}),
    "sparse": Choice(replace(ZEROS, sparsity=0.9, epochs=60), {"lr": (0.05, 0.1), **_SETTINGS}),
    "zeros": Choice(replace(ZEROS, sparsity=0.9, epochs=60, clip=1.0), {"lr": (0.05, 0.1), **_HARDER}),
    "tenth": Choice(
        replace(_FEW, sparsity=0.9, epochs=45),
        {"lr": (0.03, 0.08), "mixup": (0.5, 1.0), "until": (0.5, 0.25)},
    ),
    "few": Choice(
        replace(_FEW, sparsity=0.95, epochs=32),
        {"lr": (0.03, 0.1), "mixup": (0.2, 0.5), "weight_decay": (5e-4, 1.5e-4), **_CHOSEN},
    ),
    "fewest": Choice(
        replace(_FEW, sparsity=0.98, epochs=40),
        {"lr": (0.06, 0.2), "mixup": (0.0, 0.3), "weight_decay": (5e-4, 1e-4), **_CHOSEN},
    ),
    "oneshot": Choice(_ONCE, {"lr": (0.05, 0.1), **_SETTINGS}),
    "where2.11": Choice(
        replace(_CUT, fewer=2.11, allocate="global"), {**_WHERE, "rounds": (6, 1), "mend": (16, 0)}
    ),  # the least that is cut: does it need six refitted cuts, which were decided at 4 times?
    "where2.57": Choice(replace(_CUT, fewer=2.57, allocate="global"), _WHERE),
    "again": Choice(
        replace(_FEW, sparsity=0.9, epochs=45, lr=0.03, mixup=1.0, until=0.25),
        {"after": ("", "again-100"), "taught": ("", "again-100"), "cutout": (0, 8)},
    ),
    "last": Choice(
        replace(_FEW, sparsity=0.9, epochs=60, mixup=1.0, until=0.25, cutout=8),
        {
            "lr": (0.05, 0.1),
            "share": (0.9, 0.5),
            "cutmix": (0.0, 1.0),
            "regrow": (0.0, 0.8),
            "calm": (0.0, 0.2),
        },
        by="loss",
    ),
    "mixed95": Choice(
        replace(_FEW, sparsity=0.95, epochs=32, lr=0.1, mixup=0.5, weight_decay=1.5e-4, regrow=0.8), _MIXED, by="loss"
    ),
    "mixed98": Choice(
        replace(_FEW, sparsity=0.98, epochs=40, lr=0.2, mixup=0.3, weight_decay=1e-4, regrow=0.8), _MIXED, by="loss"
    ),
}
"""What is asked of the validation split before the points with that way are run; shape starts from what long found, cut
from shape, where from cut, zeros from sparse, few, fewest and tenth from zeros, again from tenth, last from
again, mixed95 and mixed98 from few and fewest. In plans of zeros before few their gradients counted in clipping."""
SMALL: dict[str, Choice] = {
    "scout": Choice(
        replace(_FEW, sparsity=0.9, epochs=60, mixup=1.0, until=0.25, lr=0.1, share=0.5, cutout=8),
        {
            "cutmix": (0.0, 1.0),
            "regrow": (0.0, 0.8),
            "temperature": (4.0, 2.0),
            "weight_decay": (5e-4, 2e-4),
            "until": (0.25, 0.1),
        },
        by="loss",
    ),
}
"""Asked of a small network only (by_heart.py): what else the last plan might ask."""
