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
                               [--look 150]   # first wait so many seconds, or until nothing runs any more, and tell
                                              # how far all runs are
    python -m benchmarks.cifar --merge results.tgz    # finished runs of such a file to benchmarks/results/cifar

--point takes several names, and groups: promise, ablation, and those of plans.CHOICES. Of a file of jobs those run
first that stand first and whose base and choices are there. Runs that are done, here or in benchmarks/results/cifar,
are skipped, those that were stopped go on from their last checkpoint (runs/cifar).
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.cifar.recipes import VARIANTS
from benchmarks.cifar.work import KEPT

NEVER = 1e6
"""Minutes."""


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
    parser.add_argument("--look", type=float, metavar="SECONDS", help="with --collect: wait, and tell how far all are")
    parser.add_argument("--merge", type=Path, metavar="results.tgz")
    parser.add_argument("--back", type=Path, help="collect there after each run, so that a kill loses none")
    parser.add_argument("--one", type=int, metavar="SEED", help="run this seed here, in this process")
    parser.add_argument("--first", action="store_true", help="before others on the GPU, since some wait for it")
    parser.add_argument("--deadline", type=float, default=float("inf"), help=argparse.SUPPRESS)
    parser.add_argument("--ms", type=float, default=0.0, help="a step beside others: what cannot end in time waits")
    return parser


def changes_of(given: argparse.Namespace) -> list[str]:
    return [*given.set, *([f"epochs={given.epochs:g}"] if given.epochs is not None else [])]
