"""When how much goes: all at once, in rounds, or gradually."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sapwood.errors import explain

KINDS = ("one-shot", "iterative", "cubic")


@dataclass(frozen=True)
class Schedule:
    """``one-shot`` prunes once; ``iterative`` prunes and recovers ``rounds`` times, the same share of what is left
    each time; ``cubic`` prunes in ``rounds`` steps over the first part of one recovery (``until``, half of it), most of
    it early (Zhu & Gupta, 2017). With ``regrow`` zeros may come back, and rounds go on at the last sparsity, as far
    apart as before, up to that part of the recovery."""

    kind: str = "one-shot"
    rounds: int = 1
    until: float = 0.5
    regrow: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise explain(f"one of {', '.join(KINDS)}", repr(self.kind), "For example 'cubic'.", "schedule")
        if not isinstance(self.rounds, int) or isinstance(self.rounds, bool) or self.rounds < 1:
            raise explain("a whole number of rounds", repr(self.rounds), "For example rounds=5.", "rounds")
        if self.kind == "one-shot" and self.rounds != 1:
            remedy = "Choose schedule='iterative' or 'cubic' for more."
            raise explain("one round of a one-shot schedule", repr(self.rounds), remedy, "rounds")
        if not isinstance(self.until, (int, float)) or not 0 < self.until <= 1:
            raise explain("a share of the recovery", repr(self.until), "For example until=0.5.", "until")
        number = isinstance(self.regrow, (int, float)) and not isinstance(self.regrow, bool)
        known = number and (self.regrow == 0 or self.until <= self.regrow <= 1)
        if not known or (self.regrow and self.kind != "cubic"):
            got = f"regrow={self.regrow!r}, until={self.until!r}, schedule={self.kind!r}"
            remedy = "For example schedule='cubic', rounds=40, regrow=0.8."
            raise explain("a share of the recovery, from until to 1, on a cubic schedule", got, remedy, "regrow")

    @property
    def times(self) -> int:
        """How often it prunes: once a round, and with ``regrow`` as often again as there is room for."""
        return max(self.rounds, math.ceil(self.rounds * self.regrow / self.until - 1e-9))

    def kept(self, final: float) -> list[float]:
        """What is left after each round, as fractions; the last is ``final`` itself."""
        left = []
        for k in range(1, self.rounds + 1):
            t = k / self.rounds
            left.append(1 - (1 - final) * (1 - (1 - t) ** 3) if self.kind == "cubic" else final**t)
        return [*left[:-1], final]

    def moments(self, total: int) -> list[list[int]]:
        """For each phase of recovery, after which of its steps to prune; phases share ``total`` steps evenly."""
        if self.kind == "cubic":
            return [[k * int(total * self.until) // self.rounds for k in range(self.times)]]
        return [[0] for _ in range(self.rounds)]
