"""What is said of a run (Recipe), and of a plan of runs that decides something (Choice)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.cifar.factors import effects


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
    """The share of every layer's channels that stays, in place of ``fewer``."""
    sparsity: float | None = None
    pattern: str = "unstructured"
    score: str = "l1"
    allocate: str = "uniform"
    inner: bool = True
    """Channels are cut inside blocks only; the residual stream stays."""
    late: float = 0.0
    """Each stage keeps 2 to the power of this times the share that the one before it keeps; over ``allocate``."""
    last: float = 1.0
    """What the inside of the last block keeps, of the share that the others keep; over ``allocate``."""
    schedule: str = "one-shot"
    rounds: int = 1
    until: float = 0.5
    regrow: float = 0.0
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
    cutmix: float = 0.0
    """How much of another image, as the parameters of beta distributions; with both, each batch has one of them."""
    calm: float = 0.0
    """The share of the steps, at the end, that are without mixup, cutmix and cutout."""
    batch: int = 256
    peer: str = ""
    """A method of Torch-Pruning in place of ours: l1, group or sparse."""
    way: str = ""
    """One of CHOICES: what a point does not say itself is as it was best on the validation split."""
    after: str = ""
    """A point that this one goes on from, with the same seed: its epochs count, too. The base still teaches."""
    taught: str = ""
    """A point whose end teaches together with the base, with the same seed: its epochs count, too."""
    only: str = ""
    """``drop`` looks at what is left right after pruning, ``train`` trains the base itself."""

    def told(self) -> dict[str, Any]:
        """What differs from the defaults."""
        plain = asdict(Recipe())
        return {k: v for k, v in asdict(self).items() if v != plain[k]}

    @property
    def needed(self) -> set[str]:
        """The points that come before this one."""
        return {self.after, self.taught} - {""}


@dataclass(frozen=True)
class Choice:
    """Factors, each with a first and a second setting, and the runs that tell which is better.

    Half of the runs have a factor at its first setting, half at its second, and any two factors come in all four ways
    equally often: a plan of 4 runs for 2 or 3 factors, of 8 for 4 or 5. With 3 and 5 what two factors do only together
    looks like what another one does. ``levels`` are a digit, 0 or 1, for each factor.
    """

    start: Recipe
    factors: Mapping[str, tuple[Any, Any]]
    by: str = "accuracy"
    """What decides: accuracy, or loss, which is the cross entropy of the held images and less a matter of chance."""

    @property
    def plan(self) -> list[str]:
        rows = itertools.product((0, 1), repeat=2 if len(self.factors) <= 3 else 3)
        whole = ((*r, r[0] ^ r[1]) if len(r) == 2 else (*r, r[0] ^ r[1] ^ r[2], r[1] ^ r[2]) for r in rows)
        return ["".join(map(str, row[: len(self.factors)])) for row in whole]

    def at(self, levels: str) -> Recipe:
        chosen = {name: pair[int(level)] for level, (name, pair) in zip(levels, self.factors.items(), strict=True)}
        return replace(self.start, **chosen)

    def worth(self, found: Mapping[str, float]) -> tuple[dict[str, float], float]:
        """By how much the second setting of each factor is above the first, in the mean; and the standard error."""
        rows = [[2 * int(level) - 1 for level in levels] for levels in found]
        gained, error = effects(rows, [[value] for value in found.values()])
        return dict(zip(self.factors, gained[:, 0].tolist(), strict=True)), float(error[0])
