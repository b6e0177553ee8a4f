"""The tables of README and docs, as markdown, from the raw output of ``benchmarks.latency``, ``forms``, ``sparse`` and
``decode``.

python -m benchmarks.tables benchmarks/results/latency_h200.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from statistics import geometric_mean
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
    columns = ["at the latency of", "its latency", "its score", "latency plan's", "score of that"]
    yield from head([*columns, "Torch-Pruning, as many channels"])
    for name, row in rows.items():
        other, peer = name.rsplit(", ", 1)[1], row.get("torch_pruning")
        cells = [f"{1 / row[other]['speed']:.3f}", f"{row['score_other']:.1%}"]
        cells += [f"{1 / row['latency']['speed']:.3f}", f"{row['score_latency']:.1%}"]
        yield line([name, *cells, f"{1 / peer['speed']:.3f}" if peer else str(row.get("peer", ""))])


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


def packed(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Speeds of one row of inputs by shape, and geometric means over the shapes for each number of rows."""
    measured = [r for r in rows if "speed" in r and r["form"] == "packed"]
    zeros, batches = sorted({r["zeros"] for r in measured}), sorted({r["batch"] for r in measured})
    yield from head(["zeros", *(f"{z:.0%}" for z in zeros)])

    def over(what: str, own: list[dict[str, Any]], words: str) -> list[str]:
        return [words.format(geometric_mean(r[what] for r in own if r["zeros"] == z)) for z in zeros]

    for shape in dict.fromkeys(r["shape"] for r in measured) if batches == [1] else ():
        yield line([shape.replace("x", " x "), *over("speed", [r for r in measured if r["shape"] == shape], "{:.2f}")])
    for batch in batches:
        own = [r for r in measured if r["batch"] == batch]
        yield line([f"geometric mean, batch {batch}", *over("speed", own, "{:.2f}")])
        if batches == [1]:
            yield line(["TB/s", *over("tb_per_s", own, "{:.2f}")])
            yield line(["of the format's bound", *over("of_bound", own, "{:.0%}")])


def decoding(rows: Rows) -> Iterator[str]:
    columns = ["zeros", "dense, tokens/s", "masked", "packed", "speed", "memory of the masked layers", "of all weights"]
    yield from head(columns)
    for zeros, row in rows.items():
        rates = [f"{row['tokens_per_s'][n]:.0f}" for n in ("dense", "masked", "packed")]
        yield line([zeros, *rates, f"{row['speed']:.2f}", f"{row['linear_bytes']:.0%}", f"{row['all_bytes']:.0%}"])


def main() -> None:
    for path in sys.argv[1:]:
        with open(path) as file:
            results = json.load(file)
        for part, table in (("half", half), ("plans", plans), ("equal", equal), ("sweep", sweep)):
            if part in results:
                print(f"\n{part}, {path}\n")
                print("\n".join(table(results[part])))
        for part in ("batch1", "batches"):
            if part in results:
                print(f"\n{part}, {path}\n\n" + "\n".join(packed(results[part]["rows"])))
        if "zeros" in results:
            print(f"\ndecode, {path}\n\n" + "\n".join(decoding(results["zeros"])))
        for shape in results.get("shapes", []):
            print("\n" + "\n".join(forms(shape)))


if __name__ == "__main__":
    main()
