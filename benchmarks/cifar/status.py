"""How far the runs of a file of jobs are: for a machine that is only looked at from time to time."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.cifar.tables import ended

EVERY, START = 0.5, 10
"""Seconds between two looks, and until a runner that was just started is there."""


@contextlib.contextmanager
def running(runs: Path) -> Iterator[None]:
    """While this lasts, others can see that this process is at work."""
    runs.mkdir(parents=True, exist_ok=True)
    file = runs / "runner.pid"
    file.write_text(str(os.getpid()))
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


def is_running(runs: Path) -> bool:
    try:
        os.kill(int((runs / "runner.pid").read_text()), 0)
    except (OSError, ValueError):
        return False
    return True


def wait(seconds: float, is_over: Callable[[], bool]) -> bool:
    """Until it is over, so long at most: a machine that has nothing to do is not held. True when it is over."""
    began = time.monotonic()
    while (passed := time.monotonic() - began) < seconds and (passed < min(START, seconds) or not is_over()):
        time.sleep(EVERY)
    return is_over()


def told(results: Path) -> str:
    """A line for each run: what came of it, or how far it is."""
    files = sorted(results.glob("*.jsonl"), key=lambda file: file.stat().st_mtime)
    texts = {file.stem: file.read_text() for file in files}
    done = {name: event for name, text in texts.items() if (event := ended(text)) is not None}
    lines = [
        f"{name}: {e.get('accuracy')} at {e.get('fewer_macs')} times fewer MACs, {e.get('sparsity')} zeros, "
        f"{e.get('ms_per_step')} ms a step, {e.get('seconds')} s"
        for name, e in done.items()
    ]
    for name, text in texts.items():
        if name not in done and (last := _last(text)) is not None:
            of = f" {last['step']} of {last['total']}, {last.get('ms_per_step')} ms" if "step" in last else ""
            lines.append(f".. {name}: {last['event']}{of}, {last['time'][11:19]}")
    return "\n".join([*lines, time.strftime("%H:%M:%S, by the clock of this machine", time.gmtime())])


def _last(text: str) -> dict[str, Any] | None:
    for line in reversed(text.splitlines()):
        try:
            found: dict[str, Any] = json.loads(line)
        except ValueError:  # being written
            continue
        return found
    return None
