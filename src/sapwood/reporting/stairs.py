"""The staircase as a table with bars."""

from __future__ import annotations

from rich.table import Table

from sapwood.measurement.measure import NOISY, verdict
from sapwood.pipeline.staircase import Stair, Staircase

WIDE = 30


def stairs_table(found: Staircase) -> Table:
    """Latency against width; bars are as long as the time."""
    first = found.stairs[0].timing
    title = f"Latency against width: {found.form}, batch {found.batch}, on {found.machine['device']}"
    table = Table(title=title, title_justify="left")
    for column in ("channels", "FLOPs", "ms", "speed", "of dense", ""):
        table.add_column(column, justify="left" if column in ("of dense", "") else "right")
    for stair in found.stairs:
        share = stair.timing.median_ms / first.median_ms if stair is found.stairs[0] else 1 / stair.timing.speed
        table.add_row(
            f"{stair.channels:.0%}",
            f"{stair.flops:.0%}",
            f"{stair.timing.median_ms:.3g}",
            f"{stair.timing.speed:.2f}",
            _bar(share),
            f"cliff: {stair.cliff}" if stair.cliff else "",
            style="bold" if stair.cliff else "",
        )
    return table


def _bar(share: float) -> str:
    full = round(min(share, 2.0) * WIDE * 8 / 2)
    return "█" * (full // 8) + "▏▎▍▌▋▊▉"[full % 8 - 1 : full % 8 or None] * (full % 8 > 0)


def stairs_words(found: Staircase) -> list[str]:
    """What the curve says."""
    half = min(found.stairs[1:], key=lambda s: abs(s.channels - 0.5))
    lines = [f"{half.channels:.0%} of the channels ({half.flops:.0%} of the FLOPs): {verdict(half.timing)}."]
    cliffs, unsure = [s for s in found.stairs if s.cliff], [s for s in found.stairs if _noisy(s)]
    if unsure:
        told = "; ".join(
            f"{s.channels:.0%} between {s.timing.speed_low:.2f} and {s.timing.speed_high:.2f} times the speed of dense"
            for s in unsure
        )
        lines.append(f"Too noisy to find all cliffs: {told}.")
    if cliffs:
        told = "; ".join(f"{s.channels:.0%} is {s.cliff}" for s in cliffs)
        lines.append(f"Cliffs: {told}. Avoid them with round_to='auto' or a latency budget.")
    elif not unsure:
        lines.append("No cliffs: every narrower model is at least as fast as the wider ones.")
    slower = [s for s in found.stairs if _slower(s)]
    if slower:
        lines.append(f"Slower than dense: {', '.join(f'{s.channels:.0%}' for s in slower)} of the channels.")
    return lines + [f"Note: {note}." for note in found.notes]


def _noisy(stair: Stair) -> bool:
    return (stair.timing.speed_high - stair.timing.speed_low) / 2 > NOISY * stair.timing.speed


def _slower(stair: Stair) -> bool:
    return stair.timing.speed_high < 0.98
