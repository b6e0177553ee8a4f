"""The tables of README and docs, as markdown, from the raw output of ``benchmarks.latency`` and ``forms``.

python -m benchmarks.tables benchmarks/results/latency_h200.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

Rows = dict[str, dict[str, Any]]
KINDS = {"plain": "plain", "torch_pruning": "Torch-Pruning", "auto": '`round_to="auto"`', "latency": "latency budget"}


def line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def head(cells: list[str]) -> Iterator[str]:
    yield line(cells)
    yield "|" + "---|" * len(cells)


def half(rows: Rows) -> Iterator[str]:
    yield from head(
        [
            "half of the channels removed",
            "dense ms",
            "half ms",
            "speed",
            "Torch-Pruning",
            "FLOPs saved",
            "became speed",
            "dense, of roofline",
            "half, of roofline",
        ]
    )
    for name, row in rows.items():
        cut, peer = row["half"], row.get("torch_pruning")
        low, high = cut["speed_interval"]
        yield line(
            [
                f"{name}, {row['about']['backend']}",
                f"{row['dense']['ms']:.2f}",
                f"{cut['ms']:.2f}",
                f"{cut['speed']:.2f} ({low:.2f} to {high:.2f})",
                f"{peer['speed']:.2f}" if isinstance(peer, dict) else str(row.get("peer", "")),
                f"{row['flops_saved']:.2f}",
                f"{row['became_speed']:.0%}",
                f"{row['dense']['of_roofline']:.0%}",
                f"{cut['of_roofline']:.0%}",
            ]
        )


def plans(rows: Rows) -> Iterator[str]:
    yield from head(["latency budget", "measured", "off by", "planned in", "score kept", "batch 1", "Torch-Pruning"])
    for name, row in rows.items():
        if "failed" in row:
            yield line([name, row["failed"], "", "", "", "", ""])
            continue
        share, one, peer = float(name.rsplit(", ", 1)[1]), row.get("batch 1"), row.get("torch_pruning")
        yield line(
            [
                name,
                f"{row['latency']:.3f}",
                f"{row['latency'] / share - 1:+.1%}",
                f"{row['plan_s']:.0f} s",
                f"{row['score_kept']:.0%}",
                f"{1 / one['cut']['speed']:.2f}" if one else "",
                f"{1 / peer['speed']:.2f}" if isinstance(peer, dict) else str(row.get("peer", "")),
            ]
        )


def equal(rows: Rows) -> Iterator[str]:
    yield from head(["at the latency of", "its latency", "its score", "latency plan's", "score of that"])
    for name, row in rows.items():
        other = name.rsplit(", ", 1)[1]
        cells = [f"{1 / row[other]['speed']:.3f}", f"{row['score_other']:.1%}"]
        yield line([name, *cells, f"{1 / row['latency']['speed']:.3f}", f"{row['score_latency']:.1%}"])


def sweep(rows: Rows) -> Iterator[str]:
    for name, row in rows.items():
        yield f"{name}, {row['form']}"
        yield ""
        yield from head(["channels removed (or time)", *row["speed"]])
        for kind, words in KINDS.items():
            found = [point.get(kind) for point in row["speed"].values()]
            if any(isinstance(v, float) for v in found):
                yield line([words, *(f"{v:.2f}" if isinstance(v, float) else "failed" for v in found)])
        yield ""


def forms(shape: dict[str, Any]) -> Iterator[str]:
    """Speeds against dense: a line for each form and sparsity, a column for each batch size."""
    points = shape["points"]
    batches = sorted({p["batch"] for p in points})
    found = {
        (r["form"], p["sparsity"], p["batch"]): r["timing"]["speed"]
        for p in points
        for r in p["rows"]
        if r["form"] != "dense"
    }
    dense = {p["batch"]: r["timing"]["median_ms"] for p in points for r in p["rows"] if r["form"] == "dense"}
    rows, columns = shape["what"]["rows"], shape["what"]["cols"]
    yield from head([f"{rows} x {columns}, batch", *map(str, batches)])
    yield line(["dense, us", *(f"{1000 * dense[b]:.3g}" for b in batches)])
    for form, sparsity in dict.fromkeys((form, sparsity) for form, sparsity, _ in found):
        speeds = [found.get((form, sparsity, b)) for b in batches]
        cells = ["" if s is None else f"{s:.2f}" if s >= 0.1 else f"{s:.1g}" for s in speeds]
        yield line([f"{form}, {sparsity:.0%}", *cells])


def main() -> None:
    for path in sys.argv[1:]:
        with open(path) as file:
            results = json.load(file)
        for part, table in (("half", half), ("plans", plans), ("equal", equal), ("sweep", sweep)):
            if part in results:
                print(f"\n{part}, {path}\n")
                print("\n".join(table(results[part])))
        for shape in results.get("shapes", []):
            print("\n" + "\n".join(forms(shape)))


if __name__ == "__main__":
    main()
