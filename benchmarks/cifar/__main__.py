"""Accuracy of pruned ResNet-56 on CIFAR-10, point by point, in sessions of a few minutes.

    python -m benchmarks.cifar --point structured-2.57-100 [--seeds 3] [--split test|validation] [--minutes 9]
                               [--data DIR] [--out DIR] [--variant NAME] [--each NAME ...] [--set FIELD=VALUE]
                               [--epochs N] [--compile]
    python -m benchmarks.cifar --point base --split validation --seeds 1     # before any other validation run
    python -m benchmarks.cifar --speed [SWITCHES] [--together 3]             # ms a step by switch
    python -m benchmarks.cifar --jobs FILE    # a line for each run, with what differs: --point nm24 --one 2;
                                              # benchmarks/cifar/record.jobs has all that the record needs;
                                              # lines may be added to the file while it is at work;
                               [--ms 25]      # and what would not end within --minutes at that speed is not begun
    python -m benchmarks.cifar --tables       # markdown from the events
    python -m benchmarks.cifar --collect DIR  # results and what is unfinished, as a few files
                               [--back DIR]   # the same after each run
    python -m benchmarks.cifar --merge results.tgz    # finished runs of such a file to benchmarks/results/cifar

--point takes several names, and groups: promise, ablation, and those of recipes.CHOICES. Of a file of jobs those run
first that stand first and whose base and choices are there. Runs that are done, here or in benchmarks/results/cifar,
are skipped, those that were stopped go on from their last checkpoint (runs/cifar).
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import itertools
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from benchmarks.cifar import tables
from benchmarks.cifar.choosing import decided, is_ready
from benchmarks.cifar.data import HELD_OUT, IMAGES
from benchmarks.cifar.recipes import POINTS, VARIANTS, Recipe, names_of, recipe_of
from benchmarks.cifar.side_by_side import run_all, shared_gpu
from benchmarks.cifar.transfer import collect, merge
from benchmarks.cifar.work import KEPT, Place, Run, TimeUpError, done

SHORT, TOGETHER = 20, 8
"""Runs of at most so many epochs go so many to a process."""
BESIDE_BASE = 3
"""Processes while the base of the validation split is in training: much waits for it."""
SET_UP, NEVER = 60, 1e6
"""Seconds before the first step of a run; minutes."""
DONE, WAITS, LATE = "done", "its base or a choice is missing", "it would not end in time"
"""Why a run does not begin."""


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--point", nargs="+", default=[])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--split", choices=("test", "validation"), default="test")
    parser.add_argument("--epochs", type=float)
    parser.add_argument("--variant", nargs="*", default=[], choices=sorted(VARIANTS))
    parser.add_argument("--each", nargs="*", default=[], choices=sorted(VARIANTS), help="as is, and with each of these")
    parser.add_argument("--set", nargs="*", default=[], metavar="FIELD=VALUE")
    parser.add_argument("--data", type=Path, default=Path("scratch/cifar"))
    parser.add_argument("--out", type=Path, default=Path("runs/results"))
    parser.add_argument("--kept", type=Path, default=KEPT, help="finished runs; these are not run again")
    parser.add_argument("--runs", type=Path, default=Path("runs/cifar"))
    parser.add_argument("--minutes", type=float, default=NEVER)
    parser.add_argument("--side-by-side", type=int, default=3)
    parser.add_argument("--mps", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--graph", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--limit", type=int, default=0, help="images, for a try")
    parser.add_argument("--blocks", type=int, default=9, help="a smaller network, for a try")
    parser.add_argument("--speed", nargs="*", metavar="SWITCHES")
    parser.add_argument("--profile", action="store_true", help="with --speed: by kernel")
    parser.add_argument("--together", type=int, default=1, help="processes that measure their speed side by side")
    parser.add_argument("--beside", default="alone", help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--tables", action="store_true")
    parser.add_argument("--jobs", type=Path)
    parser.add_argument("--collect", type=Path)
    parser.add_argument("--merge", type=Path, metavar="results.tgz")
    parser.add_argument("--back", type=Path, help="collect there after each run, so that a kill loses none")
    parser.add_argument("--one", type=int, metavar="SEED", help="run this seed here, in this process")
    parser.add_argument("--deadline", type=float, default=float("inf"), help=argparse.SUPPRESS)
    parser.add_argument("--ms", type=float, default=0.0, help="a step beside others: what cannot end in time waits")
    return parser


def main(words: list[str] | None = None) -> int:
    words = sys.argv[1:] if words is None else words
    given = options().parse_args(words)
    if given.minutes < NEVER and given.deadline == float("inf"):
        given.deadline = time.time() + 60 * given.minutes
        words = [*words, "--deadline", str(given.deadline)]
    place = Place(
        given.data, given.out, given.runs, given.split, given.deadline, given.compile, given.graph, given.limit,
        given.blocks, given.device, given.kept,
    )  # fmt: skip
    if given.collect is not None:
        return collect(place, given.collect)
    if given.merge is not None:
        return merge(given.merge, given.kept)
    if given.tables:
        print(tables.write(given.kept))
        return 0
    if given.speed is not None:
        from benchmarks.cifar.speed import measure, profile

        if given.profile:
            for name, taught in itertools.product(given.speed, (False, True)):
                profile(place, name, taught)
            return 0
        if given.together <= 1 or given.one is not None:
            measure(place, given.steps, given.speed, given.one or 0, given.beside)
            return 0
        with shared_gpu(given.mps) as env:
            beside = f"{given.together} processes{', MPS' if env else ''}"
            plain = [w for w in words if w not in ("--mps", "--no-mps")]
            command = [sys.executable, "-m", "benchmarks.cifar", *plain, "--beside", beside, "--one"]
            jobs = [(f"speed-{k}", [*command, str(k)]) for k in range(given.together)]
            return run_all(lambda: jobs, lambda: given.together, place.runs / "logs", env, time.time() + 60)
    changes = changes_of(given)
    if given.jobs is not None:
        at = words.index("--jobs")
        common = [*words[:at], *words[at + 2 :], "--one", "0"]
        failed = run_jobs(given, place, lambda: [(n, w) for n, w, why in listed(given.jobs, common) if not why])
        for name, _, why in listed(given.jobs, common):
            if why not in ("", DONE):
                print(f"{name} was not begun: {why}")
        return failed
    if given.one is None:
        return launch(given, place, words, changes)
    chosen = [recipe_of(name, given.variant, changes) for point in given.point for name in names_of(point)]
    for name, asked in chosen:
        if done(place, name, given.one) is None and fits(name, recipe := decided(asked, place), given):
            try:
                print(Run(name, recipe, given.one, place)(), flush=True)
            except TimeUpError:
                print(f"{name}, seed {given.one}: stopped, goes on next time")
                break
    return 0


def listed(file: Path, common: list[str]) -> list[tuple[str, list[str], str]]:
    """The runs of a file: their names, by their words, so that lines may be added anywhere; the words; what holds them
    up, nothing where they can begin."""
    found: dict[str, tuple[list[str], str]] = {}
    for words in map(str.split, file.read_text().splitlines()):
        said = "_".join(w.strip("-").replace("/", "-") for w in words)
        if words:
            whole = [*common, *words]
            found[f"{said[:80]}_{hashlib.sha256(said.encode()).hexdigest()[:6]}"] = (whole, reason(whole))
    return [(name, words, why) for name, (words, why) in found.items()]


def reason(words: list[str]) -> str:
    told = io.StringIO()
    try:
        with contextlib.redirect_stderr(told):
            return held_up(options().parse_args(words))
    except SystemExit as error:  # a line may be half written: others go on
        return told.getvalue().strip().rpartition("\n")[2] or str(error)


def changes_of(given: argparse.Namespace) -> list[str]:
    return [*given.set, *([f"epochs={given.epochs:g}"] if given.epochs is not None else [])]


def held_up(given: argparse.Namespace) -> str:
    """Why the runs of one process do not begin; empty where they can."""
    place = Place(given.data, given.out, given.runs, given.split, kept=given.kept)
    runs = [recipe_of(name, given.variant, changes_of(given)) for point in given.point for name in names_of(point)]
    left = [run for run in runs if done(place, run[0], given.one) is None]
    if not left:
        return DONE
    if not all(is_ready(recipe, place) for _, recipe in left):
        return WAITS
    name, recipe = left[0]
    return "" if fits(name, decided(recipe, place), given) else LATE


def fits(name: str, recipe: Recipe, given: argparse.Namespace) -> bool:
    """Whether a run would end in time, by --ms; one that goes on from a checkpoint is always welcome."""
    begun = not given.ms or Place(given.data, given.out, given.runs, given.split).checkpoint(name, given.one).exists()
    steps = recipe.epochs * (IMAGES - (HELD_OUT if given.split == "validation" else 0)) // recipe.batch
    return begun or time.time() + SET_UP + steps * given.ms / 1000 < given.deadline


def launch(given: argparse.Namespace, place: Place, words: list[str], changes: list[str]) -> int:
    """A process for each run that is not done; short ones of a seed share one, which saves its start."""
    points = [name for point in given.point for name in names_of(point)]
    ways = [given.variant, *([*given.variant, one] for one in given.each)]
    jobs: list[tuple[str, list[str]]] = []
    for seed, variants in itertools.product(range(given.seeds), ways):
        runs = [(point, *recipe_of(point, variants, changes)) for point in points]
        todo = [(point, name, recipe.epochs) for point, name, recipe in runs if done(place, name, seed) is None]
        while todo:
            share = TOGETHER if todo[0][2] <= SHORT else 1
            own, todo = todo[:share], todo[share:]
            more = ["--each", "--variant", *variants, "--point", *(p for p, _, _ in own), "--one", str(seed)]
            jobs.append((f"{own[0][1]}-{given.split}-{seed}", [*words, *more]))
    return run_jobs(given, place, lambda: jobs)


def run_jobs(given: argparse.Namespace, place: Place, jobs: Callable[[], list[tuple[str, list[str]]]]) -> int:
    """Each with its words, in a process of its own, so many side by side."""
    number = len(jobs())
    print(f"{number} processes to run, {given.side_by_side} at a time", flush=True)
    if not number:
        return 0

    def back() -> None:
        if given.back is not None:
            collect(place, given.back)

    command = [sys.executable, "-m", "benchmarks.cifar"]

    def room() -> int:
        based = is_ready(POINTS["nm24"], replace(place, split="validation"))
        return given.side_by_side if based else min(given.side_by_side, BESIDE_BASE)

    def whole() -> list[tuple[str, list[str]]]:
        return [(name, [*command, *words]) for name, words in jobs()]

    with shared_gpu(given.mps and given.device != "cpu" and given.side_by_side > 1) as env:
        failed = run_all(whole, room, place.runs / "logs", env, given.deadline - 20, back)
    print(tables.write(given.out) if given.out.exists() else "")
    return min(failed, 1)


if __name__ == "__main__":
    raise SystemExit(main())
