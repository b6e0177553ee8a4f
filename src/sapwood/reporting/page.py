"""One self-contained HTML file that shows what pruning gave: no network, opens from disk."""

from __future__ import annotations

import base64
import datetime
import hashlib
import html
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sapwood.errors import explain
from sapwood.measurement.clock import Timing
from sapwood.reporting.sections import (
    Section,
    accuracy_section,
    channels_section,
    pareto_section,
    scores_section,
    section,
    zeros_section,
)
from sapwood.reporting.sections_time import (
    forms_section,
    layers_section,
    sensitivity_section,
    staircase_section,
)
from sapwood.reporting.sources import Run, Sources, read_sources
from sapwood.reporting.speed import outcome
from sapwood.reporting.story import tiles, verdict
from sapwood.reporting.variants import Variant, variants_of
from sapwood.storage.atomic import write_text
from sapwood.version import __version__

ASSETS = Path(__file__).parent / "assets"
SCRIPTS = ("echarts.min.js", "base.js", "tables.js", "charts.js", "charts_model.js", "page.js")
PAGE = "report.html"
LARGEST = 2_900_000
NOTHING_PAYS = "No form of zeros pays here, and no cut."
COUNTS = (("params", "Parameters"), ("nonzeros", "Non-zeros"), ("flops", "FLOPs (2 x MACs)"))


def write_page(path: Path, sources: Sources | Sequence[Path], title: str = "") -> dict[str, Any]:
    """Write the page and give what it shows."""
    found = sources if isinstance(sources, Sources) else read_sources(sources)
    data = page_data(found, title)
    text = page_html(data)
    thinned = 0
    while len(text.encode()) > LARGEST:
        if not _thin(data, thinned):
            got, remedy = f"{len(text.encode()):,} bytes", "Name fewer runs."
            raise explain(f"a page of at most {LARGEST:,} bytes", got, remedy, str(path))
        thinned += 1
        text = page_html(data)
    write_text(path, text)
    return data


def page_data(sources: Sources, title: str = "") -> dict[str, Any]:
    """All that the page shows, as plain data; the page's script only draws it."""
    try:
        return _page_data(sources, title)
    except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
        got = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise explain("results as this Sapwood writes them", got, "Make them anew.", _title(sources)) from error


def _page_data(sources: Sources, title: str) -> dict[str, Any]:
    variants = variants_of(sources.runs)
    cards = [_card(f"v{n}", v) for n, v in enumerate(variants)]
    cards += [_bench_card(f"b{n}", label, body) for n, (label, body) in enumerate(sources.benches)] if not cards else []
    sections = [
        compare_section([v for v in variants if len(variants) > 1 or v.recovered is not None]),
        accuracy_section(variants),
        pareto_section(variants),
        channels_section(variants),
        zeros_section(variants),
        scores_section(variants),
        staircase_section(sources, variants),
        forms_section(sources, variants),
        layers_section(variants),
        sensitivity_section(sources),
    ]
    only_benches = not sources.runs and bool(sources.benches)
    return {
        "title": title or _title(sources),
        "made": datetime.datetime.now().astimezone().isoformat(timespec="minutes"),
        "sapwood": __version__,
        "live": None,
        "cards": cards,
        "chosen": _best(variants, cards),
        "sections": [s for s in sections if _has_place(s, sources, only_benches)],
        "runs": [_about(r) for r in sources.runs] + [_about_bench(*b) for b in sources.benches],
    }


def _has_place(one: Section, sources: Sources, only_benches: bool) -> bool:
    """Of zeros and channels, those there are; a page about a bench alone needs no word on what it lacks."""
    if one["id"] in ("zeros", "compare"):
        return not one["missing"]
    if one["id"] == "channels" and one["missing"] and not one["missing"].startswith("Left out"):
        return False
    return not (one["missing"] and (only_benches or not sources.runs))


def _title(sources: Sources) -> str:
    names = [r.label for r in sources.runs] or [label for label, _ in (*sources.benches, *sources.stairs)]
    names = names or [label for label, _ in sources.sensitivities]
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return shown or "Sapwood"


def _card(key: str, variant: Variant) -> dict[str, Any]:
    sentence, tone = verdict(variant)
    return {"id": key, "title": variant.title, "verdict": sentence, "tone": tone, "tiles": tiles(variant)}


def _best(variants: Sequence[Variant], cards: Sequence[dict[str, Any]]) -> str | None:
    """Which one is shown first: of those that paid, the fastest; else one that paid in part."""
    paid = [(v.speed or 0.0, c) for v, c in zip(variants, cards) if c["tone"] == "good"]
    partly = [c for c in cards if c["tone"] == "mixed"]
    best = max(paid, key=lambda p: p[0])[1] if paid else next(iter([*partly, *cards]), None)
    return str(best["id"]) if best else None


def _bench_card(key: str, label: str, bench: dict[str, Any]) -> dict[str, Any]:
    """Of a bench: dense against the fastest form, at up to three points."""
    shown = []
    for point in [p for p in bench["points"] if p["rows"]][:3]:
        dense = point["rows"][0]
        sure = [r for r in point["rows"] if outcome(Timing(**r["timing"])) == "faster"]
        best = max(sure, key=lambda r: float(r["timing"]["speed"])) if sure else dense
        speed = best["timing"]["speed"]
        shown.append(
            {
                "name": f"Batch {point['batch']}, {100 * point['sparsity']:g}% zeros",
                "unit": "ms",
                "dense": dense["timing"]["median_ms"],
                "pruned": best["timing"]["median_ms"],
                "label": str(best["form"])[:8],
                "change": f"{best['form']}: {speed:.2f} times as fast" if sure else "nothing is surely faster",
                "tone": "good" if sure else "same",
                "note": f"{bench['backend']}, {bench['dtype']}, {bench['device']}",
            }
        )
    return {"id": key, "title": label, "verdict": _bench_words(bench), "tone": "open", "tiles": shown}


def _bench_words(bench: dict[str, Any]) -> str:
    """What pays, in a sentence; two at most."""
    paying = [s for s in bench.get("summary", ()) if "times as fast" in s]
    if not paying:
        timings = [Timing(**row["timing"]) for point in bench["points"] for row in point["rows"]]
        noisy = any(outcome(t) == "noisy" for t in timings)
        return "Nothing pays here for sure; some of it is too noisy to tell." if noisy else NOTHING_PAYS
    return "What pays here: " + " ".join(paying[:2])


def compare_section(variants: Sequence[Variant]) -> Section:
    """Every figure of every variant, side by side."""
    rows = []
    for v in variants:
        both = [*(v.file_bytes[k] for k in ("dense", "pruned"))]
        counts = [v.counts[k].get(kind) for kind, _ in COUNTS for k in ("dense", "pruned")]
        accuracy = [f["mean"] if f else None for f in (v.dense, v.after, v.recovered)]
        spread = v.recovered["spread"] if v.recovered else None
        latency = [v.latency[k]["median"] if v.latency[k] else None for k in ("dense", "pruned")]
        rows.append([v.title, *accuracy, spread, *latency, v.speed, *both, *counts, v.on, verdict(v)[0]])
    pairs = [(f"{name}, {k}", "count") for _, name in COUNTS for k in ("dense", "pruned")]
    columns = [
        ("variant", "text"),
        ("accuracy, dense", "percent"),
        ("after pruning", "percent"),
        ("recovered", "percent"),
        ("spread over seeds", "percent"),
        ("latency, dense", "ms"),
        ("latency, pruned", "ms"),
        ("speed", "ratio"),
        ("file, dense", "bytes"),
        ("file, pruned", "bytes"),
        *pairs,
        ("measured on", "text"),
        ("verdict", "text"),
    ]
    title = "Side by side" if len(variants) > 1 else "All figures"
    lead = "Choose one: the tiles above and the sections about one model follow." if len(variants) > 1 else ""
    return section("compare", title, lead, columns, rows, "No runs were given.", None)


def _about(run: Run) -> dict[str, Any]:
    results = run.results or {}
    state = "finished" if run.results else "going on" if run.running else "stopped"
    environment = {k: str(v) for k, v in (results.get("environment") or {}).items()}
    about = run.plan_of.get("about") or results.get("about") or ""
    return {
        "label": run.label,
        "folder": run.place,
        "state": state,
        "about": str(about),
        "recipe": run.recipe,
        "environment": environment,
    }


def _about_bench(label: str, bench: dict[str, Any]) -> dict[str, Any]:
    machine = {k: str(v) for k, v in (bench.get("machine") or {}).items() if v is not None}
    return {"label": label, "folder": "", "state": "finished", "about": "", "recipe": "", "environment": machine}


def _thin(data: dict[str, Any], times: int) -> bool:
    """Make a page smaller by what is missed least: histograms of single groups, then the quickest layers."""
    for one in data["sections"]:
        rows = one["table"]["rows"]
        if times == 0 and one["id"] == "scores":
            one["table"]["rows"] = [r for r in rows if r[1] == "all"]
            one["notes"].append("To keep the page small, single groups are left out; they are in details.json.")
            return True
        if times == 1 and one["id"] == "layers":
            one["table"]["rows"] = [r for r in rows if max(r[3] or 0, r[4] or 0) > 0.05]
            one["notes"].append("To keep the page small, the quickest layers are left out.")
            return True
    return times < 2


def page_html(data: dict[str, Any]) -> str:
    """Styles, data, library and script in one file, locked up: no network, no scripts but these."""
    scripts = [(ASSETS / name).read_text() for name in SCRIPTS]
    connect = "'self'" if data["live"] else "'none'"
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; connect-src {connect}; "
        f"base-uri 'none'; form-action 'none'; script-src {' '.join(_digest(s) for s in scripts)}"
    )
    parts = {
        "@@POLICY@@": html.escape(policy),
        "@@TITLE@@": html.escape(f"{data['title']} | Sapwood"),
        "@@STYLE@@": (ASSETS / "page.css").read_text(),
        "@@DATA@@": script_json(data),
        "@@SCRIPTS@@": "\n".join(f"<script>{s}</script>" for s in scripts),
    }
    page = (ASSETS / "page.html").read_text()
    pieces = []
    for mark, value in parts.items():  # from front to back, so that nothing in a value is taken for a mark
        before, _, page = page.partition(mark)
        pieces += [before, value]
    return "".join([*pieces, page])


def script_json(data: Any) -> str:
    """JSON that cannot end the script it stands in; numbers that JSON does not have become null."""
    text = json.dumps(finite(data), ensure_ascii=True, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(k): finite(v) for k, v in value.items()}
    return [finite(v) for v in value] if isinstance(value, (list, tuple)) else value


def _digest(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
