"""Does the library still compute what the figures were measured with? Tried in small, on a CPU.

python -m benchmarks.cifar.alike [POINT ...] [--data scratch/cifar]
    Every point that has been run on the test images, or those named ("ablation" is all of it): its recipe for 4 epochs
    on 512 training images, by the library as it was committed last when a seed of it began, and as it is here. The end
    of both is compared, bit for bit. About 40 minutes on two cores.
    A line of JSON for each; ours are in benchmarks/results/cifar/alike.jsonl
--table FILE   what comes of such lines, as Markdown

Images are mixed and Torch-Pruning is called by this benchmark as it is here. What runs on a GPU only (captured graphs,
fused optimizers, compiled blocks) is not seen so.
"""

from __future__ import annotations

import argparse
import datetime
import inspect
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import sapwood as sw
from benchmarks.cifar.choosing import decided
from benchmarks.cifar.recipes import ABLATION, POINTS, names_of
from benchmarks.cifar.work import KEPT, Place, Run, environment
from sapwood.scoring.weights import NAMES

IMAGES, EPOCHS, BATCHES = 512, 4, 4
HERE = "as it is here"


def begun(point: str) -> dict[str, list[int]]:
    """By the commit that was the last one when a run of the point began: its seeds."""
    found: dict[str, list[int]] = defaultdict(list)
    split = "validation" if point in ABLATION else "test"
    for path in sorted(KEPT.glob(f"{point}-{split}-*.jsonl")):
        start = json.loads(path.read_text().splitlines()[0])
        command = ["git", "log", "-1", "--format=%h", f"--before={start['time']}"]
        commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        found[commit].append(start["seed"])
    return dict(found)


def in_small(point: str, data: Path, folder: Path, blocks: int = 9) -> str:
    """A digest of the weights at the end, or what went wrong."""
    place = Place(data, folder / "results", folder / "runs", limit=IMAGES, blocks=blocks, device="cpu")
    recipe = decided(POINTS[point], place)
    recipe = replace(recipe, epochs=EPOCHS, mend=min(recipe.mend, BATCHES), after="", taught="", way="")
    run = Run(point, recipe, 0, place)
    try:
        with mock.patch.object(sw, "prune_and_recover", older(sw.prune_and_recover)):
            return str((run.run_peer() if recipe.peer else run.prune())["digest"])
    except (TypeError, sw.SapwoodError) as error:
        return f"{type(error).__name__}: {str(error)[:120]}"


def older(real: Any) -> Any:
    """What a library of before knows: the dense model as teacher by a switch, no zeros that come back, channels by LAMP
    only as a function. Nothing is kept on the way."""
    known = inspect.signature(real).parameters

    def call(*args: Any, teacher: Any = None, regrow: float = 0.0, **more: Any) -> Any:
        more |= {"teacher": teacher} if "teacher" in known else {"distill": teacher is not None}
        more |= {"regrow": regrow} if regrow or "regrow" in known else {}
        if more["options"].get("score") == "lamp" and "allocate" in more["options"] and "lamp" not in NAMES:
            more["options"] = {**more["options"], "score": lamp}
        return real(*args, **{k: v for k, v in more.items() if k != "checkpoint"})

    return call


def lamp(weight: torch.Tensor, dim: int) -> torch.Tensor:
    """As this benchmark had it until the library named it: a square over the sum of those at least as large."""
    squares = weight.detach().double().square().sum(dim=[d for d in range(weight.dim()) if d != dim])
    ordered, places = squares.sort()
    result = torch.empty_like(squares)
    result[places] = ordered / ordered.flip(0).cumsum(0).flip(0).clamp_min(1e-30)
    return result.float()


def each(points: list[str], commit: str, data: Path) -> Iterator[tuple[str, str]]:
    """The points and their digests, by the library of a commit, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        paths = "src"
        if commit != HERE:
            packed = Path(folder) / "src.tar"
            subprocess.run(["git", "archive", f"--output={packed}", commit, "src"], check=True)
            with tarfile.open(packed) as file:
                file.extractall(folder, filter="data")
            paths = str(Path(folder) / "src")
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.cifar.alike", *points]
        command += ["--data", str(data), "--one", folder]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([paths, "."])}
        with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
            for number, line in enumerate(process.stdout or (), 1):
                point, _, digest = line.strip().partition(" ")
                print(f"{commit}: {point}, {number} of {len(points)}", file=sys.stderr, flush=True)
                yield point, digest
    if process.returncode:
        raise SystemExit(f"the library of {commit} ended with {process.returncode}")


def table(path: Path) -> str:
    lines = ["| point | commit | seeds | computes the same now |", "|---|---|---|---|"]
    for found in map(json.loads, path.read_text().splitlines()):
        said = found["then"] if ":" in found["then"] else "yes" if found["then"] == found["now"] else "no"
        lines.append(f"| {found['point']} | {found['commit']} | {', '.join(map(str, found['seeds']))} | {said} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("points", nargs="*")
    parser.add_argument("--data", type=Path, default=Path("scratch/cifar"))
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--table", type=Path)
    given = parser.parse_args()
    if given.table is not None:
        print(table(given.table))
        return
    if given.one is not None:
        for point in given.points:
            print(point, in_small(point, given.data, given.one), flush=True)
        return
    named = [name for point in given.points for name in names_of(point)]
    asked = named or [name for name, recipe in POINTS.items() if not recipe.only and name not in ABLATION]
    runs = {point: commits for point in asked if (commits := begun(point))}
    if not runs:
        expected = f"expected points of the record or of the ablation that have been run, in {KEPT}; there are none"
        raise SystemExit(f"{', '.join(asked)}: {expected}")
    now = dict(each(list(runs), HERE, given.data))
    said = {"date": datetime.date.today().isoformat(), **environment(torch.device("cpu"))}
    for commit in dict.fromkeys(commit for commits in runs.values() for commit in commits):
        for point, then in each([p for p, commits in runs.items() if commit in commits], commit, given.data):
            told = {"point": point, "commit": commit, "seeds": runs[point][commit], "then": then, "now": now[point]}
            print(json.dumps({**told, **said}), flush=True)


if __name__ == "__main__":
    main()
