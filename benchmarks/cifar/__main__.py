"""Accuracy of pruned ResNet-56 on CIFAR-10; see options.py for what it takes."""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable

from benchmarks.cifar import tables
from benchmarks.cifar.choosing import decided
from benchmarks.cifar.jobs import DONE, fits, listed
from benchmarks.cifar.options import NEVER, changes_of, options
from benchmarks.cifar.recipes import names_of, recipe_of
from benchmarks.cifar.side_by_side import run_all, shared_gpu
from benchmarks.cifar.status import is_running, running, told, wait
from benchmarks.cifar.transfer import collect, merge
from benchmarks.cifar.work import Place, Run, TimeUpError, done

SHORT, TOGETHER = 20, 8
"""Runs of at most so many epochs go so many to a process."""


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
        if given.look is not None:
            over = wait(given.look, lambda: not is_running(place.runs))
            print(f"{told(place.results)}{'; nothing runs any more' if over else ''}", flush=True)
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
            return run_all(lambda: jobs, given.together, place.runs / "logs", env, time.time() + 60)
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

    def whole() -> list[tuple[str, list[str]]]:
        return [(name, [*command, *words]) for name, words in jobs()]

    wanted = given.mps and given.device != "cpu" and given.side_by_side > 1
    with running(place.runs), shared_gpu(wanted) as env:
        failed = run_all(whole, given.side_by_side, place.runs / "logs", env, given.deadline - 20, back)
    print(tables.write(given.out) if given.out.exists() else "")
    return min(failed, 1)


if __name__ == "__main__":
    raise SystemExit(main())
