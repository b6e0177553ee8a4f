"""Which form of zeros pays, as a table with a verdict for each row, and in a few words for each form."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from sapwood.measurement.clock import Timing
from sapwood.measurement.measure import verdict
from sapwood.measurement.points import Bench, Point, Row


def outcome(timing: Timing) -> str:
    """faster, slower, same or noisy, as the verdict says."""
    words = verdict(timing)
    if words.startswith("too noisy"):
        return "noisy"
    return "faster" if "as fast" in words else "slower" if "slower" in words else "same"


def share_words(share: float) -> str:
    return "half" if abs(share - 0.5) < 1e-9 else f"{100 * share:g}%"


def phrase(form: str, sparsity: float, bench: Bench) -> str:
    """A form by what it is: ``90% sparse CSR``, ``half of the rows removed``."""
    share = f"{100 * sparsity:g}%"
    if form == "zeros":
        return f"{share} zeros in dense storage"
    if form == "CSR":
        return f"{share} sparse CSR"
    if form == "packed":
        return f"{share} sparse packed"
    if form == "BSR":
        return f"{share} sparse BSR"
    if form == "cut":
        channels = bench.what.get("channels")
        if channels is not None:
            return f"{share_words(1 - channels)} of the channels removed"
        return f"{share_words(sparsity)} of the rows removed"
    return form


def row_words(row: Row, sparsity: float, bench: Bench) -> str:
    """What the clock says about a row, in plain words."""
    words, name, found = verdict(row.timing), phrase(row.form, sparsity, bench), outcome(row.timing)
    if row.form == "dense":
        return words
    if found == "noisy" or row.form == "cut":
        return f"{name}: {words}"
    if found == "faster":
        return f"{name} {'pay' if row.form == 'zeros' else 'pays'}: {words}"
    if row.form.startswith("2:4"):
        return f"{name} does not pay here: {words}"
    return f"zeros do not pay here: {name} {'are' if row.form == 'zeros' else 'is'} {words}"


def speed_table(bench: Bench) -> Table:
    """Every row that was measured, point by point; narrow enough for any terminal."""
    table = Table(title=_title(bench), title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("form", no_wrap=True)
    for column in ("time", "speed (95%)", "estimate", "reached"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("verdict", min_width=14)
    for point in (p for p in bench.points if p.rows):
        table.add_row(f"batch {point.batch}, {100 * point.sparsity:g}%", style="bold")
        for row in point.rows:
            t = row.timing
            low, middle, high = (ratio(r) for r in (t.speed_low, t.speed, t.speed_high))
            table.add_row(
                row.form,
                duration(t.median_ms),
                "1" if row.form == "dense" else f"{middle} ({low}-{high})",
                "" if row.floor_ms is None else duration(row.floor_ms),
                _reached(row.reached),
                row_words(row, point.sparsity, bench),
                end_section=row is point.rows[-1],
            )
    table.caption = (
        "Speed is against dense, taking turns with it. The estimate is the least time for the form's FLOPs and bytes "
        "at the rates this machine was measured to reach."
    )
    table.caption_justify = "left"
    return table


def _title(bench: Bench) -> str:
    what, device = bench.what, bench.machine.get("device", bench.device)
    about = f"{what['rows']}x{what['cols']} weights" if what["kind"] == "matmul" else str(what["model"])
    return f"{about}, {bench.dtype}, {bench.backend}, on {device}"


def _reached(share: float | None) -> str:
    return "" if share is None else "<1%" if share < 0.01 else f"{share:.0%}"


def ratio(value: float) -> str:
    return f"{value:.2f}" if value >= 0.095 else f"{value:.2g}"


def duration(ms: float) -> str:
    """A time with its unit, to three digits."""
    for limit, factor, unit in ((1e-3, 1e6, "ns"), (1.0, 1e3, "us"), (1e3, 1.0, "ms")):
        if ms < limit:
            return f"{ms * factor:.3g} {unit}"
    return f"{ms / 1000:.3g} s"


def summary_words(bench: Bench) -> list[str]:
    """For each form and sparsity: where it pays, over all batch sizes."""
    found: dict[tuple[str, float], list[tuple[int, Row]]] = {}
    for point in bench.points:
        for row in point.rows:
            if row.form != "dense":
                same_everywhere = row.form == "cut" and "channels" in bench.what
                key = (row.form, 0.0 if same_everywhere else point.sparsity)
                found.setdefault(key, []).append((point.batch, row))
    return [
        _sentence(phrase(form, share, bench), form, sorted(rows, key=lambda r: r[0]))
        for (form, share), rows in found.items()
    ]


def _sentence(name: str, form: str, rows: Sequence[tuple[int, Row]]) -> str:
    """Where a form pays: everywhere, from or up to a batch size, at some, or nowhere."""
    several = form == "zeros"
    outcomes: dict[int, list[str]] = {}
    for batch, row in rows:
        outcomes.setdefault(batch, []).append(outcome(row.timing))
    batches = list(outcomes)
    paying = [b for b in batches if set(outcomes[b]) == {"faster"}]
    noisy = [b for b in batches if b not in paying and "noisy" in outcomes[b]]
    unsure = f" Too noisy to decide at batch {_listed(noisy)}." if noisy and len(noisy) < len(batches) else ""
    if len(noisy) == len(batches):
        return f"{name}: this machine is too noisy to decide."
    if not paying:
        if form == "zeros" and all(o == "same" for found in outcomes.values() for o in found if o != "noisy"):
            return f"{name} change nothing.{unsure}"
        if form == "cut":
            return f"{name}: no faster than dense here.{unsure}"
        best = max((row.timing.speed, batch) for batch, row in rows if outcome(row.timing) != "noisy")
        at = f", at batch {best[1]}" if len(batches) > 1 else ""
        pays = f"never {'pay' if several else 'pays'} here"
        if noisy:
            decided = _listed([b for b in batches if b not in noisy])
            pays, at = f"{'do' if several else 'does'} not pay at batch {decided}", ""
        return f"{name} {pays}: at best {ratio(best[0])} times the speed of dense{at}.{unsure}"
    speeds = [row.timing.speed for batch, row in rows if batch in paying]
    low, high = ratio(min(speeds)), ratio(max(speeds))
    gain = f"{low} times as fast" if low == high else f"{low} to {high} times as fast"
    if form == "cut":
        return f"{name}: {gain}, {_where(paying, batches)}.{unsure}"
    return f"{name} {'pay' if several else 'pays'} {_where(paying, batches)}: {gain}.{unsure}"


def _where(paying: Sequence[int], batches: Sequence[int]) -> str:
    if len(batches) == 1:
        return f"at batch {batches[0]}"
    if len(paying) == len(batches):
        return "at every batch size"
    if len(paying) > 1 or paying[0] in (batches[0], batches[-1]):
        if list(paying) == list(batches[-len(paying) :]):
            return f"from batch {paying[0]}"
        if list(paying) == list(batches[: len(paying)]):
            return f"up to batch {paying[-1]}"
    return f"at batch {_listed(paying)}"


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:-1])) + (" and " if len(numbers) > 1 else "") + str(numbers[-1])


def skipped_words(bench: Bench) -> list[str]:
    """What has no result, and why; what is the same at several points is told once."""
    found: dict[tuple[str, str], list[Point]] = {}
    for point in bench.points:
        for form, why in point.skipped.items():
            found.setdefault((form, why), []).append(point)
    lines = []
    for (form, why), points in found.items():
        where = ""
        if len(points) < len(bench.points):
            batches = list(dict.fromkeys(p.batch for p in points))
            shares = list(dict.fromkeys(p.sparsity for p in points))
            where = f" at batch {_listed(batches)}, sparsity {', '.join(f'{s:g}' for s in shares)}"
        lines.append(f"No result for {form if form != 'dense' else 'any form'}{where}: {why}.")
    return lines


def note_words(bench: Bench) -> list[str]:
    """What must be known beside the figures, each once."""
    rows = [row for point in bench.points for row in point.rows]
    found = dict.fromkeys(f"{row.form}: {note}" for row in rows for note in row.notes)
    warm = [r.form for r in rows if r.cold is False]
    lines = [f"Note: {note}." for note in (*bench.notes, *found)]
    if warm:
        names = ", ".join(dict.fromkeys(warm))
        lines.append(f"Note: some weights fit into the GPU's cache and may stay there between runs: {names}.")
    if any(r.cold is None and (r.reached or 0) > 1.05 for r in rows):
        lines.append("Note: weights that stay in the processor's caches reach more than the estimate.")
    return lines
