"""The sections of a page about accuracy and structure: a chart is drawn from the table beside it, never from more."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from sapwood.reporting.variants import Variant

Section = dict[str, Any]
Row = list[Any]


def section(
    name: str,
    title: str,
    lead: str,
    columns: Sequence[tuple[str, str]],
    rows: Sequence[Row],
    missing: str,
    chart: dict[str, Any] | None = None,
    by_variant: bool = False,
    notes: Sequence[str] = (),
) -> Section:
    """Columns are names and units: text, percent, ms, bytes, count, number or ratio. Without rows, how to get them.

    A chart draws the rows that have numbers in the columns it needs; the table shows them all.
    """
    return {
        "id": name,
        "title": title,
        "lead": lead,
        "table": {"columns": [list(c) for c in columns], "rows": [list(r) for r in rows]},
        "missing": "" if rows else missing,
        "chart": chart,
        "by_variant": by_variant,
        "notes": list(dict.fromkeys(notes)),
    }


def accuracy_section(variants: Sequence[Variant]) -> Section:
    """Through training, the drop, and the way back."""
    rows = [[v.title, p["seed"], p["stage"], p["epochs"], p["accuracy"]] for v in variants for p in v.journey]
    words = []
    for v in variants:
        if v.dense and v.after and v.recovered:
            drop, back = (100 * (v.dense["mean"] - f["mean"]) for f in (v.after, v.recovered))
            where = "all of it back" if back < 0.05 else f"{back:.1f} points short of dense"
            if not math.isfinite(drop + back):
                continue
            when = "with pruning" if v.rounds == 1 else f"after {v.rounds} rounds of pruning, the first of them marked"
            words.append(f"{v.title}: {drop:.1f} points down {when}, {where} after recovery.")
    rounds = {v.title: v.rounds for v in variants}
    return section(
        "accuracy",
        "Accuracy, all the way",
        "Test accuracy through training, right after pruning, and through recovery; the mean over seeds.",
        [("variant", "text"), ("seed", "text"), ("stage", "text"), ("epochs", "number"), ("accuracy", "percent")],
        rows,
        "Nothing has been trained yet. Once it has, the accuracy shows here.",
        {"kind": "journey", "alt": " ".join(words) or "Test accuracy against epochs.", "needs": [4], "rounds": rounds},
        notes=words,
    )


def pareto_section(variants: Sequence[Variant]) -> Section:
    """Accuracy against measured latency: every seed, the mean of each variant, and the front."""
    rows: list[Row] = []
    for run in dict.fromkeys(id(v.run) for v in variants):
        rows += _dense_rows([v for v in variants if id(v.run) == run])
    for v in variants:
        rows += [
            [v.title, str(s["seed"]), s["accuracy"], s["latency_ms"], s["speed"], s["params"], v.where, "no"]
            for s in v.seeds
            if s["latency_ms"] is not None
        ]
        if v.recovered and v.speed is not None:
            params = v.counts["pruned"].get("params")
            rows.append(
                [v.title, "mean", v.recovered["mean"], v.latency["pruned"]["median"], v.speed, params, v.where, "no"]
            )
    _mark_front(rows)
    conditions = list(dict.fromkeys(r[6] for r in rows))
    notes = ["The mean of a variant stands at the latency of its last seed, which the tiles show, too."] if rows else []
    if len(conditions) > 1:
        told = "; ".join(conditions)
        notes.append(f"Not all was measured alike ({told}): there is a front for each kind, and none for all.")
    best = [r[0] for r in rows if r[7] == "yes"]
    alt = f"On the front: {', '.join(best)}." if best else "Accuracy against latency."
    return section(
        "pareto",
        "Accuracy against latency",
        "Up and to the left is better. Large dots are means over seeds, small ones single seeds. Nothing given here is "
        "both faster and more accurate than what is on the front, the dashed line.",
        [
            ("variant", "text"),
            ("seed", "text"),
            ("accuracy", "percent"),
            ("latency", "ms"),
            ("speed", "ratio"),
            ("parameters", "count"),
            ("measured on", "text"),
            ("front", "text"),
        ],
        rows,
        "Latency is measured at the end of a run; it has not come there yet.",
        {"kind": "pareto", "alt": alt, "needs": [2, 3]},
        notes=notes,
    )


def _dense_rows(variants: Sequence[Variant]) -> list[Row]:
    first = variants[0]
    if first.speed is None or first.dense is None:
        return []
    name = "dense" if first.title == first.name else f"{first.run.label}: dense"
    ms, params = first.latency["dense"]["median"], first.counts["dense"].get("params")
    return [[name, "mean", first.dense["mean"], ms, 1.0, params, first.where, "no"]]


def _mark_front(rows: list[Row]) -> None:
    """Of the means that were measured alike, on the same data: those that no other beats in both."""
    means = [r for r in rows if r[1] == "mean" and math.isfinite(r[2] + r[3])]
    for row in means:
        others = [r for r in means if r is not row and r[6] == row[6]]
        if not any(o[2] >= row[2] and o[3] <= row[3] and (o[2] > row[2] or o[3] < row[3]) for o in others):
            row[7] = "yes"


def channels_section(variants: Sequence[Variant]) -> Section:
    """Kept and removed channels by group, in the order of the model; frozen ones with their reasons."""
    rows: list[Row] = []
    notes = []
    for v in variants:
        found = v.details.get("channels") or []
        rows += [
            [v.title, c["name"], c["width"], c["kept"], c["width"] - c["kept"], _yes(c["frozen"]), c["reason"]]
            for c in found
        ]
        open_ = [c for c in found if not c["frozen"]]
        if open_:
            kept, all_ = sum(c["kept"] for c in open_), sum(c["width"] for c in open_)
            notes.append(f"{v.title}: {kept:,} of {all_:,} channels stay in {len(open_)} groups.")
    return section(
        "channels",
        "Channels kept and removed",
        "Group by group, in the order of the model. Frozen channels may not be cut; the table says why.",
        [
            ("variant", "text"),
            ("group", "text"),
            ("channels", "count"),
            ("kept", "count"),
            ("removed", "count"),
            ("frozen", "text"),
            ("reason", "text"),
        ],
        rows,
        _left_out(variants, "channels", "No channel was removed here: these runs make zeros, or are not done."),
        {"kind": "channels", "alt": " ".join(notes)},
        by_variant=True,
        notes=notes,
    )


def zeros_section(variants: Sequence[Variant]) -> Section:
    rows = [
        [v.title, z["weight"], z["weights"], z["weights"] - z["zeros"], z["zeros"], z["pattern"] or "none"]
        for v in variants
        for z in v.details.get("zeros") or []
    ]
    return section(
        "zeros",
        "Zeros by layer",
        "Weights that stay and weights that are zero, in the order of the model. Shapes do not change.",
        [
            ("variant", "text"),
            ("weight", "text"),
            ("weights", "count"),
            ("stay", "count"),
            ("zero", "count"),
            ("pattern", "text"),
        ],
        rows,
        "No zeros were made here.",
        {"kind": "zeros", "alt": "The share of zeros in each layer."},
        by_variant=True,
    )


def scores_section(variants: Sequence[Variant]) -> Section:
    """Histograms of the scores, with the cut line."""
    rows: list[Row] = []
    cuts: dict[str, dict[str, float | None]] = {}
    what: dict[str, str] = {}
    for v in variants:
        found = v.details.get("scores")
        if not found:
            continue
        edges, cuts[v.title] = found["edges"], {}
        what[v.title] = found["what"]
        for part in found["of"]:
            cuts[v.title][part["name"]] = part["cut"]
            for low, high, kept, removed in zip(edges, edges[1:], part["kept"], part["removed"]):
                if kept or removed:
                    rows.append([v.title, part["name"], low, high, kept, removed])
    return section(
        "scores",
        "Scores and the cut",
        "How important channels or weights looked before pruning, and where the line was drawn. "
        "As many lie below the line as were removed; in rounds, or with widths rounded, the two colours overlap.",
        [
            ("variant", "text"),
            ("group", "text"),
            ("from", "number"),
            ("to", "number"),
            ("kept", "count"),
            ("removed", "count"),
        ],
        rows,
        _left_out(variants, "scores", "Scores are noted at the end of a run: details.json in its folder."),
        {"kind": "scores", "alt": "Histogram of scores.", "cuts": cuts, "what": what, "pick": 1, "picking": "group"},
        by_variant=True,
    )


def _left_out(variants: Sequence[Variant], part: str, otherwise: str) -> str:
    why = [v.details.get("left_out", {}).get(part) for v in variants]
    return next((f"Left out: {w}." for w in why if w), otherwise)


def _yes(value: object) -> str:
    return "yes" if value else "no"
