"""The sections of a page about time: the staircase, which form of zeros pays, time by layer; and sensitivity."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from sapwood.measurement.clock import Timing
from sapwood.measurement.measure import verdict
from sapwood.pipeline.models import SmallCNN
from sapwood.reporting.sections import Row, Section, section
from sapwood.reporting.sources import Run, Sources
from sapwood.reporting.variants import Variant

OUTSIDE = "(the model itself)"


def staircase_section(sources: Sources, variants: Sequence[Variant]) -> Section:
    """Latency against width, with the widths that were chosen."""
    found = [(label, body) for label, body in sources.stairs]
    for run in sources.runs:
        if "staircase" in run.parts:
            found.append((run.label, run.parts["staircase"]))
    given = {label for label, _ in found}
    found += [
        (f"uniform cut ({v.title})", s)
        for v in variants
        if (s := v.details.get("staircase")) and v.run.label not in given
    ]
    rows: list[Row] = []
    for label, body in found:
        for stair in body["stairs"]:
            t = stair["timing"]
            of_dense = 1 / t["speed"] if t["speed"] else None
            rows.append([label, stair["channels"], stair["flops"], t["median_ms"], of_dense, stair.get("cliff", "")])
    chosen = [
        {"variant": v.title, "channels": share, "of_dense": 1 / v.speed}
        for v in variants
        if v.speed and math.isfinite(v.speed) and (share := kept_share(v)) is not None
    ]
    notes = [f"{c['variant']}: {c['channels']:.0%} of the channels, {c['of_dense']:.0%} of the time." for c in chosen]
    notes += [f"{label}: {body['form']}, a batch of {body['batch']}." for label, body in found]
    notes += [f"{row[0]}: {row[1]:.0%} of the channels is a cliff, {row[5]}." for row in rows if row[5]]
    name, alt = _model_name(variants), " ".join(notes[: len(chosen)]) or "Latency against width."
    return section(
        "staircase",
        "The latency staircase",
        "Time does not fall evenly with width. The same share of every group was cut and measured; "
        "diamonds are the widths that the runs chose, which differ from group to group.",
        [
            ("measured", "text"),
            ("channels left", "percent"),
            ("FLOPs left", "percent"),
            ("latency", "ms"),
            ("of dense", "percent"),
            ("cliff", "text"),
        ],
        rows,
        _why(variants, "staircase") + f"Measure it with: sapwood staircase {name} --input SHAPE --out staircase.json, "
        "and hand the file to sapwood report, too.",
        {"kind": "staircase", "alt": alt, "chosen": chosen, "needs": [1, 4]},
        notes=notes,
    )


def kept_share(variant: Variant) -> float | None:
    """The share of the channels that may be cut and were kept."""
    rows = [c for c in variant.details.get("channels") or [] if not c["frozen"]]
    width = sum(c["width"] for c in rows)
    return sum(c["kept"] for c in rows) / width if width else None


def forms_section(sources: Sources, variants: Sequence[Variant]) -> Section:
    """Dense, zeros, CSR, 2:4 and cut: time and verdict of each."""
    rows: list[Row] = []
    notes: list[str] = []
    for label, bench in sources.benches:
        for point in bench["points"]:
            where = f"batch {point['batch']}, {100 * point['sparsity']:g}% zeros"
            for row in point["rows"]:
                t = row["timing"]
                rows.append([label, where, row["form"], *_times(t), row.get("verdict") or verdict(Timing(**t))])
        notes += [*bench.get("summary", ()), *bench.get("skipped", ())]
    for run in sources.runs:
        rows += _demo_forms(run.label, run.results) if run.is_demo and run.results else []
    if rows and not sources.benches:
        notes.append(f"CSR and 2:4 kernels: sapwood bench {_model_name(variants)} --input SHAPE --out bench.json.")
    alt = " ".join(notes[:4]) or "Speed of each form against dense."
    return section(
        "forms",
        "Which form of zeros pays",
        "Every form took turns with the dense one. Above 1 is faster than dense.",
        [
            ("measured", "text"),
            ("at", "text"),
            ("form", "text"),
            ("latency", "ms"),
            ("speed", "ratio"),
            ("at least", "ratio"),
            ("at most", "ratio"),
            ("verdict", "text"),
        ],
        rows,
        f"Measure it with: sapwood bench {_model_name(variants)} --input SHAPE --out bench.json, and hand the file to "
        "sapwood report, too. It compares dense, zeros, CSR, 2:4 and a cut model.",
        {"kind": "forms", "alt": alt, "pick": 0, "picking": "", "needs": [4]},
        notes=notes,
    )


def _demo_forms(label: str, results: dict[str, Any]) -> list[Row]:
    where = results.get("on", "")
    return [[label, where, r["name"], *_times(r["timing"]), verdict(Timing(**r["timing"]))] for r in results["rows"]]


def _times(timing: dict[str, Any]) -> list[Any]:
    return [timing["median_ms"], timing["speed"], timing["speed_low"], timing["speed_high"]]


def layers_section(variants: Sequence[Variant]) -> Section:
    """Where the time goes, layer by layer, before and after."""
    rows: list[Row] = []
    notes = []
    for v in variants:
        found = v.details.get("layers")
        if not found:
            continue
        for layer in found["layers"]:
            ms = layer["ms"]
            rows.append([v.title, layer["layer"] or OUTSIDE, layer["kind"], ms.get("dense"), ms.get("pruned")])
        notes.append(f"How: {found['method']}. The clocks take time themselves: read shares, not latencies.")
    return section(
        "layers",
        "Where the time goes",
        "Milliseconds in each layer, dense and pruned, in the order of the model.",
        [("variant", "text"), ("layer", "text"), ("kind", "text"), ("dense", "ms"), ("pruned", "ms")],
        rows,
        _why(variants, "layers") + "Time by layer is noted at the end of a run: details.json in its folder.",
        {"kind": "layers", "alt": "Milliseconds by layer, dense and pruned."},
        by_variant=True,
        notes=notes,
    )


def sensitivity_section(sources: Sources) -> Section:
    """Accuracy against the fraction removed, group by group, as a heat map."""
    found = [*sources.sensitivities]
    found += [(r.label, body) for r in sources.runs if (body := _sensitivity_of(r)) is not None]
    rows: list[Row] = []
    dense: dict[str, float] = {}
    notes = []
    for label, body in found:
        dense[label] = body["dense"]
        asked = body["settings"]
        for c in body["cells"]:
            removed = 1 - c["kept"] / c["width"]
            along = ", ".join(c["along"])
            rows.append([label, c["group"], c["width"], c["share"], removed, c["accuracy"], along])
        unfinished = "" if body.get("done", True) else " It is not finished: call it again to go on."
        notes.append(
            f"{label}: {asked['batches']} batch{'es' * (asked['batches'] != 1)} of validation data "
            f"({asked['examples']:,} examples), "
            f"whole model {100 * body['dense']:.1f}%, no training after the cuts.{unfinished}"
        )
    place = sources.runs[0].place if sources.runs else "RUN_FOLDER"
    return section(
        "sensitivity",
        "Sensitivity",
        "What accuracy is left when a share of one group is removed and all else stays. "
        "Light rows bear a cut, dark ones do not.",
        [
            ("measured", "text"),
            ("group", "text"),
            ("channels", "count"),
            ("asked", "percent"),
            ("removed", "percent"),
            ("accuracy", "percent"),
            ("cut along", "text"),
        ],
        rows,
        f"Compute it with: sapwood sensitivity {place}, and make this page again.",
        {"kind": "sensitivity", "alt": " ".join(notes), "dense": dense, "pick": 0, "picking": ""},
        notes=notes,
    )


def _sensitivity_of(run: Run) -> dict[str, Any] | None:
    """Of a run what ``sapwood sensitivity`` left in its folder, of a demo what it found itself."""
    if run.is_demo and run.results is not None:
        return (run.results["rows"][0].get("details") or {}).get("sensitivity")
    return run.parts.get("sensitivity")


def _why(variants: Sequence[Variant], part: str) -> str:
    why = [v.details.get("left_out", {}).get(part) for v in variants]
    return next((f"Left out: {w}. " for w in why if w), "")


def _model_name(variants: Sequence[Variant]) -> str:
    names = [(v.run.plan_of.get("model") or {}) for v in variants]
    found = [n.get("name") if isinstance(n, dict) else n for n in names]
    found += [f"{SmallCNN.__module__}:{SmallCNN.__name__}" for v in variants if v.run.is_demo]
    return str(next((n for n in found if n), "MODEL"))
