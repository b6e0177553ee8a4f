"""What pruning gave, in one sentence and three tiles: accuracy, latency, size; dense against pruned."""

from __future__ import annotations

import math
from typing import Any

from sapwood.measurement.clock import Timing
from sapwood.reporting.speed import outcome
from sapwood.reporting.variants import Variant

SAME = 0.05  # points of accuracy that print as nothing
COSTLY = 2.0  # points of accuracy that no speed makes up for unasked
TONES = {"faster": "good", "slower": "bad", "same": "same", "noisy": "noisy"}
NOISY = "the speed is too noisy to tell"
STAGES = {"training": "in training", "dense": "trained", "pruned": "right after pruning", "recovery": "recovering"}


def verdict(variant: Variant) -> tuple[str, str]:
    """The sentence, and its tone: good, mixed, bad or open."""
    if variant.recovered is None or variant.dense is None or variant.speed is None:
        return _so_far(variant), "open"
    points = 100 * (variant.recovered["mean"] - variant.dense["mean"])
    speed, smaller = speed_tone(variant), _ratio(variant.file_bytes) > 1.05
    gains = f"{speed_words(variant)}, {size_words(variant)}"
    if not math.isfinite(points):
        return f"It failed: its accuracy is not a number; {gains}.", "bad"
    if points < -COSTLY:
        return f"It cost too much: {accuracy_words(variant)}; {gains}.", "bad"
    if speed == "good":
        return f"It paid: {gains}, at {accuracy_words(variant)}.", "good"
    if smaller:
        how = {"bad": "and it got slower", "noisy": f"and {NOISY}"}.get(speed, "not in speed")
        return f"It paid in size, {how}: {size_words(variant)}, at {accuracy_words(variant)}.", "mixed"
    if speed == "noisy":
        return f"Not decided: {gains}, at {accuracy_words(variant)}.", "open"
    return f"It did not pay here: {gains}, at {accuracy_words(variant)}.", "bad"


def _so_far(variant: Variant) -> str:
    done = "The run is going on" if variant.run.running else "The run was stopped before its end"
    if variant.dense is None:
        return f"{done}: the dense model is being trained." if variant.run.running else f"{done}, in training."
    trained = f"the dense model reached {100 * variant.dense['mean']:.1f}%"
    fell = f", pruning took it to {100 * variant.after['mean']:.1f}%" if variant.after else ""
    return f"{done}: {trained}{fell}."


def accuracy_words(variant: Variant) -> str:
    """Points gained or lost, and whether that is more than seeds differ by."""
    assert variant.recovered is not None and variant.dense is not None
    points = 100 * (variant.recovered["mean"] - variant.dense["mean"])
    if abs(points) < SAME:
        return "the same accuracy"
    spread = 100 * max(variant.recovered["spread"], variant.dense["spread"])
    within = ", within the spread over seeds" if variant.count > 1 and abs(points) <= spread else ""
    told = f"{abs(points):.1f}"
    return f"{told} point{'' if told == '1.0' else 's'} {'more' if points > 0 else 'less'} accuracy{within}"


def speed_words(variant: Variant) -> str:
    tone, speed = speed_tone(variant), variant.speed or 1.0
    if tone == "good":
        return f"{speed:.2f} times as fast"
    return f"{1 / speed:.2f} times slower" if tone == "bad" else NOISY if tone == "noisy" else "no faster"


def speed_tone(variant: Variant) -> str:
    """The clock decides with its whole 95% interval, where it is known, as in the table of forms."""
    speed = variant.speed or 1.0
    low, high = variant.speed_interval or (speed, speed)
    if not all(math.isfinite(n) for n in (speed, low, high)):
        return "noisy"
    return TONES[outcome(Timing(0.0, 0.0, 0.0, 0.0, 0, speed, low, high, True))]


def size_words(variant: Variant) -> str:
    ratio = _ratio(variant.file_bytes)
    if ratio > 1.05:
        return f"a file {ratio:.1f} times smaller"
    return "a file as large as before" if ratio > 0.95 else f"a file {1 / ratio:.1f} times larger"


def _ratio(both: dict[str, Any]) -> float:
    return float(both["dense"]) / float(both["pruned"]) if both["dense"] and both["pruned"] else 1.0


def tiles(variant: Variant) -> list[dict[str, Any]]:
    """The three numbers people ask for first."""
    seeds = f"mean of {variant.count} seeds" if variant.count > 1 else "one seed"
    accuracy: dict[str, Any] = {"name": "Accuracy", "unit": "percent", "dense": None, "pruned": None, "change": ""}
    accuracy |= {"tone": "same", "note": f"on test data, {seeds}" if variant.count else "on test data"}
    accuracy["dense"] = variant.dense["mean"] if variant.dense else None
    if variant.recovered is not None and variant.dense is not None:
        points = 100 * (variant.recovered["mean"] - variant.dense["mean"])
        accuracy["pruned"] = variant.recovered["mean"]
        accuracy["change"] = "equal to dense" if abs(points) < SAME else f"{points:+.1f} points"
        accuracy["tone"] = "bad" if points < -COSTLY else "good" if points > -1 else "same"
        if not math.isfinite(points):
            accuracy["change"], accuracy["tone"] = "not a number", "bad"
        elif variant.count > 1:
            accuracy["note"] += f", ± {100 * variant.recovered['spread']:.1f}"
    elif variant.journey:
        now = variant.journey[-1]
        accuracy["change"] = f"now {100 * now['accuracy']:.1f}% ({STAGES.get(now['stage'], now['stage'])})"
    latency: dict[str, Any] = {"name": "Latency", "unit": "ms", "dense": None, "pruned": None, "change": ""}
    latency |= {"tone": "same", "note": variant.on or "not measured yet"}
    if variant.speed is not None:
        latency["dense"], latency["pruned"] = (variant.latency[k]["median"] for k in ("dense", "pruned"))
        latency["change"], latency["tone"] = speed_words(variant), speed_tone(variant)
        if latency["tone"] == "noisy":
            low, high = variant.speed_interval or (math.nan, math.nan)
            known = f": {low:.2f} to {high:.2f} times as fast" if math.isfinite(low + high) else ""
            latency["change"] = f"too noisy to tell{known}"
    size: dict[str, Any] = {"name": "Size", "unit": "bytes", **variant.file_bytes, "change": "", "tone": "same"}
    size["note"] = "the file of the weights"
    if size["dense"] and size["pruned"]:
        size["change"] = size_words(variant).removeprefix("a file ")
        size["tone"] = "good" if _ratio(variant.file_bytes) > 1.05 else "same"
    return [accuracy, latency, size]
