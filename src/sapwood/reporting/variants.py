"""Runs and demos as variants: one pruned model beside its dense one, with all that is known of the two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sapwood.pipeline.demo import BATCH, EPOCHS
from sapwood.pipeline.figures import over
from sapwood.reporting.runs import wanted
from sapwood.reporting.sources import Run, distinct

Figure = dict[str, float]
Both = dict[str, Any]
"""What the dense model has, and what the pruned one has: {"dense": ..., "pruned": ...}."""
DENSE: dict[str, Any] = {"dense": None, "pruned": None}


@dataclass
class Variant:
    """What is not known yet is None."""

    run: Run
    name: str
    title: str = ""
    dense: Figure | None = None
    after: Figure | None = None
    """Right after pruning; of pruning in rounds, after the last of them."""
    rounds: int = 1
    recovered: Figure | None = None
    latency: Both = field(default_factory=lambda: dict(DENSE))
    """Milliseconds: a median, its spread and the rounds."""
    speed: float | None = None
    speed_interval: tuple[float, float] | None = None
    on: str = ""
    file_bytes: Both = field(default_factory=lambda: dict(DENSE))
    counts: Both = field(default_factory=lambda: {"dense": {}, "pruned": {}})
    seeds: list[dict[str, Any]] = field(default_factory=list)
    journey: list[dict[str, Any]] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return len(self.seeds)

    @property
    def where(self) -> str:
        """Figures with the same text here can be compared: the same data, measured alike on the same machine."""
        about = (self.run.results or {}).get("environment") or {}
        data = self.run.plan_of.get("data") or {}
        name = data.get("name") if isinstance(data, dict) else data
        machine = [str(about[k]) + ("" if k == "device" else " threads") for k in ("device", "threads") if k in about]
        return "; ".join([str(name or ("digits" if self.run.is_demo else self.run.label)), self.on, *machine])


def variants_of(runs: Sequence[Run]) -> list[Variant]:
    """Of a run the last step of its pruning, of a demo each way of pruning."""
    found: list[Variant] = []
    for run in runs:
        found += _of_demo(run) if run.is_demo else [_of_results(run) if run.results else _of_events(run)]
    several = len(runs) > 1
    names = [(f"{v.run.label}: {v.name}" if several else v.name, v.run.place) for v in found]
    for variant, title in zip(found, distinct(names)):
        variant.title = title
    return found


def _of_results(run: Run) -> Variant:
    results: dict[str, Any] = run.results or {}
    summary, measured, first = results["summary"], results["measured"], results["seeds"][-1]
    step = summary["steps"][-1]
    times, last = measured["latency_ms"], first["steps"][-1]
    by_seed = measured.get("seeds", {})
    interval = measured.get("speed_interval")
    return Variant(
        run,
        ", then ".join(wanted(s["prune"]) for s in first["steps"]),
        dense=summary["dense"],
        after=summary["steps"][0]["after_pruning"],
        rounds=int(first["steps"][0]["prune"].get("rounds") or 1),
        recovered=step["recovered"],
        latency={"dense": times["dense"], "pruned": times["pruned"]},
        speed=measured["speedup"],
        speed_interval=None if interval is None else (interval[0], interval[1]),
        on=measured["on"],
        file_bytes=dict(measured["file_bytes"]),
        counts={"dense": first["dense"], "pruned": last},
        seeds=[_seed(s, by_seed) for s in results["seeds"]],
        journey=_training(run) + [p for s in results["seeds"] for p in _recovery(s, _epochs(run))],
        details=run.parts.get("details", {}),
    )


def _seed(figures: dict[str, Any], by_seed: dict[str, Any]) -> dict[str, Any]:
    last, timing = figures["steps"][-1], by_seed.get(str(figures["seed"]), {})
    return {
        "seed": figures["seed"],
        "dense": figures["dense"]["test"],
        "accuracy": last["recovered"]["test"],
        "latency_ms": timing.get("median"),
        "speed": timing.get("speedup"),
        "params": last["params"],
    }


def _epochs(run: Run) -> float:
    return float((run.plan_of.get("train") or {}).get("epochs", EPOCHS))


def _training(run: Run) -> list[dict[str, Any]]:
    """Points of the original training; what was done twice, after a stop, counts once."""
    points: dict[tuple[int, float], dict[str, Any]] = {}
    for event in run.events:
        if event.get("event") == "point" and event.get("stage") == "train" and event.get("test") is not None:
            key = event["seed"], event["epochs"]
            points[key] = _point(event["seed"], "training", event["epochs"], event["test"])
    return list(points.values())


def _recovery(figures: dict[str, Any], start: float) -> list[dict[str, Any]]:
    """The dense model, then each step: right after pruning, and the way back."""
    seed, found = figures["seed"], []
    if "dense" in figures:
        found.append(_point(seed, "dense", start, figures["dense"]["test"]))
    for step in figures["steps"]:
        for number, point in enumerate(step["curve"]):
            stage = "recovery" if number else "pruned"
            found.append(_point(seed, stage, start + point["epochs"], point["test"]))
        start += step["curve"][-1]["epochs"]
    return found


def _point(seed: int, stage: str, epochs: float, accuracy: float) -> dict[str, Any]:
    return {"seed": seed, "stage": stage, "epochs": epochs, "accuracy": accuracy}


def _of_events(run: Run) -> Variant:
    """A run that goes on, or was stopped: what its events tell so far."""
    steps = run.plan_of.get("prune") or [{}]
    steps = [steps] if isinstance(steps, dict) else steps
    name = ", then ".join(_wanted(s) for s in steps)
    variant = Variant(run, name or "pruning", journey=_training(run))
    start = _epochs(run)
    dense: dict[int, float] = {}
    offsets: dict[tuple[int, str], float] = {}
    curve: dict[tuple[int, str, float], dict[str, Any]] = {}
    for event in run.events:
        kind, seed = event.get("event"), event.get("seed")
        if kind == "trained" and seed is not None:
            dense[seed] = event["dense"]["test"]
            variant.counts["dense"] = event["dense"]
        elif kind == "point" and str(event.get("stage")).startswith("step-") and event.get("test") is not None:
            offset = offsets.setdefault((seed or 0, event["stage"]), start + _earlier(curve, seed, event["stage"]))
            stage = "recovery" if event["epochs"] else "pruned"
            point = _point(seed or 0, stage, offset + event["epochs"], event["test"])
            curve[seed or 0, event["stage"], event["epochs"]] = {**point, "step_epochs": event["epochs"]}
    variant.journey += [_point(seed, "dense", start, accuracy) for seed, accuracy in dense.items()]
    variant.journey += [{k: v for k, v in p.items() if k != "step_epochs"} for p in curve.values()]
    variant.dense = over(list(dense.values())) if dense else None
    pruned = [p["accuracy"] for (_, stage, epochs), p in curve.items() if stage == "step-0" and not epochs]
    variant.after = over(pruned) if pruned else None
    return variant


def _earlier(curve: dict[tuple[int, str, float], dict[str, Any]], seed: Any, stage: str) -> float:
    """The epochs that earlier steps of this seed took."""
    longest: dict[str, float] = {}
    for (other, name, epochs), _ in curve.items():
        if other == seed and name < stage:
            longest[name] = max(longest.get(name, 0.0), epochs)
    return sum(longest.values())


def _wanted(step: dict[str, Any]) -> str:
    try:
        return wanted(step)
    except (KeyError, TypeError):
        return "pruning"


def _of_demo(run: Run) -> list[Variant]:
    results: dict[str, Any] = run.results or {}
    dense, *rows = results["rows"]
    start = float(results.get("epochs", EPOCHS))
    training = [
        _point(s["seed"], "training", p["epochs"], p["test"]) for s in dense.get("seeds", ()) for p in s["training"]
    ]
    return [_demo_row(run, dense, row, training, start) for row in rows]


def _demo_row(
    run: Run, dense: dict[str, Any], row: dict[str, Any], training: list[dict[str, Any]], start: float
) -> Variant:
    seeds, trained = row.get("seeds", []), {s["seed"]: s["recovered"] for s in dense.get("seeds", ())}
    timing = row["timing"]
    journey = list(training)
    for s in seeds:
        figures = {"seed": s["seed"], "dense": {"test": trained[s["seed"]]}, "steps": [{"curve": s["curve"]}]}
        journey += _recovery(figures, start)
    return Variant(
        run,
        row["name"],
        dense=dense["recovered"],
        after=row["after_pruning"],
        recovered=row["recovered"],
        latency={name: _latency(entry["timing"]) for name, entry in (("dense", dense), ("pruned", row))},
        speed=timing["speed"],
        speed_interval=(timing["speed_low"], timing["speed_high"]),
        on=(run.results or {}).get("on", f"eager, a batch of {BATCH}"),
        file_bytes={"dense": dense["file_bytes"], "pruned": row["file_bytes"]},
        counts={"dense": dense["counts"], "pruned": row["counts"]},
        seeds=[
            {
                "seed": s["seed"],
                "dense": trained[s["seed"]],
                "accuracy": s["recovered"],
                "latency_ms": s["latency_ms"],
                "speed": s["speed"],
                "params": row["counts"]["params"],
            }
            for s in seeds
        ],
        journey=journey,
        details=row.get("details", {}),
    )


def _latency(timing: dict[str, Any]) -> dict[str, float]:
    return {"median": timing["median_ms"], "spread": timing["spread_ms"], "rounds": timing["rounds"]}
