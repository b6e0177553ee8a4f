"""Several runs at a time on one GPU, each a process of its own; with NVIDIA's MPS, where it starts, kernels overlap."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

STARTING, MORE = 40, 2
"""Seconds in which a process sets up, and how many more there may be for that."""
FIRST = "--first"
"""Said of a run that others wait for."""
TOUCH = "import torch; torch.ones(1, device='cuda').add_(1).item()"


@contextmanager
def shared_gpu(wanted: bool) -> Iterator[dict[str, str]]:
    """Environment for the processes; empty, with a word why, where MPS is not to be had."""
    control = shutil.which("nvidia-cuda-mps-control") or _beside_driver()
    if not wanted or control is None:
        if wanted:
            print("no nvidia-cuda-mps-control here: processes take turns on the GPU", flush=True)
        yield {}
        return
    folder = Path(f"/tmp/sapwood-mps-{os.getpid()}")
    folder.mkdir(exist_ok=True)
    extra = {"CUDA_MPS_PIPE_DIRECTORY": str(folder), "CUDA_MPS_LOG_DIRECTORY": str(folder)}
    env = {**os.environ, **extra}
    try:
        subprocess.run([control, "-d"], env=env, timeout=30, check=True, capture_output=True)
        subprocess.run([sys.executable, "-c", TOUCH], env=env, timeout=120, check=True, capture_output=True)
    except (OSError, subprocess.SubprocessError) as error:
        print(f"MPS does not work here ({str(error)[:200]}): processes take turns on the GPU", flush=True)
        _quit(control, env)
        yield {}
        return
    print("MPS is on: kernels of several processes overlap", flush=True)
    try:
        yield extra
    finally:
        _quit(control, env)


def _beside_driver() -> str | None:
    places = [Path("/usr/local/nvidia/bin/nvidia-cuda-mps-control"), Path("/usr/bin/nvidia-cuda-mps-control")]
    return next((str(p) for p in places if p.exists()), None)


def _quit(control: str, env: dict[str, str]) -> None:
    try:
        subprocess.run([control], input=b"quit\n", env=env, timeout=30, capture_output=True, check=False)
    except (OSError, subprocess.SubprocessError):
        print("MPS could not be ended", flush=True)


def _priority(command: Sequence[str]) -> dict[str, str]:
    """MPS lets the kernels of what others wait for go first."""
    return {"CUDA_MPS_CLIENT_PRIORITY": "0" if FIRST in command else "1"}


def run_all(
    jobs: Callable[[], Sequence[tuple[str, list[str]]]],
    at_once: int,
    logs: Path,
    env: dict[str, str],
    end: float,
    after_each: Callable[[], object] = lambda: None,
) -> int:
    """Run commands by name, so many at a time; none is started after ``end``. Gives how many failed.

    One that has just been started leaves the GPU to others for a while and counts half, so that there can be MORE,
    and as many again of those that others wait for. What there is to run is asked for whenever there is room, so that
    jobs can be added on the way.
    """
    logs.mkdir(parents=True, exist_ok=True)
    begun: set[str] = set()
    failed = 0
    going: dict[str, tuple[subprocess.Popen[bytes], float]] = {}
    try:
        while True:
            busy = sum(0.5 if time.time() - since < STARTING else 1 for _, since in going.values())
            room = min(at_once - math.ceil(busy), at_once + MORE - len(going))
            waiting = [] if room <= -MORE else [job for job in jobs() if job[0] not in begun]
            if waiting and time.time() >= end and not going:
                print(f"time is up; not begun: {', '.join(n for n, _ in waiting)}", flush=True)
            if not going and (not waiting or time.time() >= end):
                return failed
            fit = [job for place, job in enumerate(waiting) if place < room + (MORE if FIRST in job[1] else 0)]
            for name, command in fit if time.time() < end else []:
                with (logs / f"{name}.log").open("a") as log:
                    own = {**os.environ, **env, **_priority(command)}
                    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=own)
                begun.add(name)
                going[name] = (process, time.time())
            time.sleep(0.2)
            for name, (process, since) in list(going.items()):
                if process.poll() is not None:
                    del going[name]
                    failed += process.returncode != 0
                    tail = (logs / f"{name}.log").read_text().strip().splitlines()[-1:] or [""]
                    print(f"{name}: rc {process.returncode}, {time.time() - since:.0f} s  {tail[0][:300]}", flush=True)
                    after_each()
    finally:
        for process, _ in going.values():
            process.terminate()
