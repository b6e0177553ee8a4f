"""Do scores and allocations rank alike with another network? A small one on a CPU, channels cut.

python -m benchmarks.cifar.second [--data ../shared/data/cifar10] [--seeds 3] [--epochs 4] [--base base.safetensors]
    ResNet-14 on 20,000 training images of 16 x 16 pixels, dense for 40 epochs (kept at --base), cut to 1 / 2.57 of its
    multiply-accumulates by each score and allocation, with and without the dense model as teacher, and recovered;
    accuracy on 5,000 other training images. Lines of JSON; ours are in benchmarks/results/cifar/second.jsonl
--table FILE   what comes of such lines, as Markdown
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import statistics
import time
from collections import defaultdict
from pathlib import Path

import torch

import sapwood as sw
from benchmarks.cifar.data import accuracy
from benchmarks.cifar.pace import dense, images
from benchmarks.cifar.tables import spread
from benchmarks.cifar.work import environment

SCORES, ALLOCATIONS = ("l1", "l2", "lamp", "bn_scale", "random"), ("uniform", "global")
FEWER = 2.57


def table(path: Path) -> str:
    runs = [json.loads(line) for line in path.read_text().splitlines()]
    found: dict[tuple[str, str, bool], list[float]] = defaultdict(list)
    for run in runs:
        found[run["score"], run["allocate"], run["distill"]].append(run["accuracy"])
    lines = ["| score | allocation | plain | distilled |", "|---|---|---|---|"]
    for score, allocate in itertools.product(SCORES, ALLOCATIONS):
        cells = [spread(seen) if (seen := found[score, allocate, d]) else "" for d in (False, True)]
        lines.append(f"| {score} | {allocate} | {' | '.join(cells)} |")
    lines.append("")
    for name in ("score", "allocate", "distill"):
        for value in dict.fromkeys(run[name] for run in runs):
            mean = statistics.mean(run["accuracy"] for run in runs if run[name] == value)
            lines.append(f"{name} {value}: {mean:.2f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data/cifar10"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=float, default=4)
    parser.add_argument("--base", type=Path, default=Path("scratch/pace-base.safetensors"))
    parser.add_argument("--table", type=Path)
    given = parser.parse_args()
    if given.table is not None:
        print(table(given.table))
        return
    torch.set_num_threads(1)
    loader, held, _ = images(given.data)
    model, example = dense(given.base, loader), torch.zeros(2, 3, 16, 16)
    known = {"dense": accuracy(model, held), "epochs": given.epochs, **environment(torch.device("cpu"))}
    for seed, *chosen in itertools.product(range(given.seeds), SCORES, ALLOCATIONS, (False, True)):
        score, allocate, distill = chosen
        began = time.monotonic()
        done = sw.prune_and_recover(
            model, example, loader, sw.Budget(flops=1 / FEWER), options={"score": score, "allocate": allocate},
            lr=0.1, epochs=given.epochs, anneal="cosine", warmup=0.02, clip=1.0, seed=seed, distill=distill, share=0.9,
        )  # fmt: skip
        told = {"date": datetime.date.today().isoformat(), "score": score, "allocate": allocate, "distill": distill}
        told |= {"seed": seed, "accuracy": accuracy(done.model.eval(), held)}
        told |= {"parameters": sum(p.numel() for p in done.model.parameters())}
        print(json.dumps({**told, "seconds": round(time.monotonic() - began), **known}), flush=True)


if __name__ == "__main__":
    main()
