"""What a page is made of: run folders, and the JSON that other verbs write."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from sapwood.errors import SapwoodError, explain

RESULTS, RECIPE, EVENTS = "results.json", "recipe.yaml", "events.jsonl"
PARTS = {"details": "details.json", "sensitivity": "sensitivity.json", "staircase": "staircase.json"}
BENCH = "bench.json"
LARGEST = 200_000_000  # bytes of one file; what Sapwood writes is far smaller
REMEDY = "Name a run folder, or what sapwood bench, staircase or sensitivity wrote with --out."


@dataclass(frozen=True)
class Run:
    """A run as it lies in its folder: finished, going on, or stopped; ``results`` of a demo have ``rows``."""

    label: str
    place: str
    """The folder's name, without where it is on this machine."""
    results: dict[str, Any] | None
    recipe: str = ""
    events: tuple[dict[str, Any], ...] = ()
    parts: dict[str, Any] = field(default_factory=dict)
    running: bool = False

    @property
    def is_demo(self) -> bool:
        return self.results is not None and "rows" in self.results

    @property
    def plan_of(self) -> dict[str, Any]:
        """The recipe as data; empty where there is none that can be read."""
        try:
            found = yaml.safe_load(self.recipe) if self.recipe else {}
        except yaml.YAMLError:
            return {}
        return found if isinstance(found, dict) else {}


@dataclass(frozen=True)
class Sources:
    """All that was given, by kind; each entry beside its label."""

    runs: tuple[Run, ...] = ()
    benches: tuple[tuple[str, dict[str, Any]], ...] = ()
    stairs: tuple[tuple[str, dict[str, Any]], ...] = ()
    sensitivities: tuple[tuple[str, dict[str, Any]], ...] = ()


def read_sources(paths: Sequence[Path]) -> Sources:
    """Read folders and files; what is none of Sapwood's is said at once."""
    runs: list[Run] = []
    others: dict[str, list[tuple[str, dict[str, Any]]]] = {kind: [] for kind in ("benches", "stairs", "sensitivities")}
    for path in paths:
        if path.is_dir():
            _read_folder(path, runs, others)
        else:
            _read_file(path, runs, others)
    runs = [replace(r, label=label) for r, label in zip(runs, distinct([(r.label, r.place) for r in runs]))]
    return Sources(tuple(runs), *(tuple(_labelled(others[k])) for k in ("benches", "stairs", "sensitivities")))


def distinct(names: Sequence[tuple[str, str]]) -> list[str]:
    """Labels that tell one from the other: the name, the name and the place, or with a number."""
    found: list[str] = []
    for name, place in names:
        label = name if sum(n == name for n, _ in names) == 1 else f"{name} ({place})"
        number, base = 2, label
        while label in found:
            label, number = f"{base} #{number}", number + 1
        found.append(label)
    return found


def _labelled(entries: list[tuple[str, dict[str, Any]]]) -> list[tuple[str, dict[str, Any]]]:
    return list(zip(distinct([(label, label) for label, _ in entries]), (body for _, body in entries)))


def _read_folder(folder: Path, runs: list[Run], others: dict[str, list[tuple[str, dict[str, Any]]]]) -> None:
    bench = _read(folder / BENCH)
    if (folder / RECIPE).exists() or (folder / RESULTS).exists():
        runs.append(_run(folder))
    elif bench is None:
        found = [f for f in PARTS.values() if (folder / f).exists()]
        if not found:
            raise explain(f"a run folder with {RECIPE} or {RESULTS}", "a folder without", REMEDY, str(folder))
        for name in found:
            _read_file(folder / name, runs, others)
    if bench is not None:
        others["benches"].append((_bench_label(bench), bench))


def _run(folder: Path) -> Run:
    results = _read(folder / RESULTS)
    recipe = _text(folder / RECIPE)
    events = _events(folder / EVENTS)
    parts = {name: body for name, file in PARTS.items() if (body := _read(folder / file)) is not None}
    place = folder.resolve().name
    run = Run(place, place, results, recipe, events, parts, results is None and _alive(events))
    name = (results or {}).get("name") or run.plan_of.get("name") or place
    return replace(run, label=str(name))


def _read_file(path: Path, runs: list[Run], others: dict[str, list[tuple[str, dict[str, Any]]]]) -> None:
    body = _read(path)
    if body is None:
        raise explain("a folder or a file", "an empty file" if path.exists() else "neither", REMEDY, str(path))
    if "points" in body and "what" in body:
        others["benches"].append((_bench_label(body), body))
    elif "stairs" in body:
        others["stairs"].append((path.stem, body))
    elif "cells" in body:
        others["sensitivities"].append((path.stem, body))
    elif "rows" in body or "summary" in body:
        runs.append(Run(str(body.get("name", path.stem)), path.stem, body))
    else:
        raise explain("results of Sapwood", "JSON of something else", REMEDY, str(path))


def _bench_label(bench: dict[str, Any]) -> str:
    what = bench.get("what", {})
    about = f"{what['rows']}x{what['cols']} weights" if what.get("kind") == "matmul" else str(what.get("model"))
    return f"{about}, {bench.get('dtype')}, {bench.get('backend')}"


def _read(path: Path) -> dict[str, Any] | None:
    """A JSON object; None where there is no such file."""
    text = _text(path)
    if not text:
        return None
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        raise SapwoodError(f"{path}: expected JSON; it is damaged. Remove it, or make it anew.") from None
    if not isinstance(body, dict):
        raise explain("results of Sapwood", f"JSON of a {type(body).__name__}", REMEDY, str(path))
    return body


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > LARGEST:
            raise explain("a file of results", f"{path.stat().st_size:,} bytes", REMEDY, str(path))
        return path.read_text()
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise SapwoodError(f"{path}: could not be read ({error}). Check the file.") from None


def _events(path: Path) -> tuple[dict[str, Any], ...]:
    """Whole lines only: the last one may be on its way."""
    found = []
    for line in _text(path).splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict):
            found.append(event)
    return tuple(found)


def _alive(events: Sequence[dict[str, Any]]) -> bool:
    """Whether the process that began last is still there."""
    pids = [e["pid"] for e in events if e.get("event") == "start" and isinstance(e.get("pid"), int)]
    if not pids or pids[-1] <= 0:
        return False
    try:
        os.kill(pids[-1], 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return not _is_zombie(pids[-1])


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (OSError, IndexError):
        return False
