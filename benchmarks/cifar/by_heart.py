"""What do plans say with a network that knows its training images by heart? A small one on a CPU, in minutes.

python -m benchmarks.cifar.by_heart [--ways scout] [--data ../shared/data/cifar10] [--seeds 0 1] [--bases FOLDER]
    every run of these plans (plans.py) for ResNet-14 on 5,000 training images of 16 x 16 pixels, dense for 160
    epochs (kept there, one for each seed), zeros for 80; squares cut out are half as large, batches are of 128.
    Judged by 30,000 other training images. The networks of pace.py and second.py learn little by heart, so that they
    cannot say what harder images are worth. Lines of JSON; ours are in benchmarks/results/cifar/by_heart.jsonl
--table FILE   what each setting is worth by such lines, as Markdown
"""

from __future__ import annotations

import argparse
import datetime
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import sapwood as sw
from benchmarks.cifar.data import MEAN, STD, Images, accuracy, load, loss
from benchmarks.cifar.factors import effects
from benchmarks.cifar.kinds import Recipe
from benchmarks.cifar.mixing import Harder
from benchmarks.cifar.pace import dense, smaller
from benchmarks.cifar.plans import CHOICES, SMALL
from benchmarks.cifar.work import environment
from sapwood.recovery import TensorLoader

TRAINED, HELD, BATCH, PAD = 5_000, 30_000, 128, 2
BEFORE, EPOCHS = 160, 80
PLANS = {
    way: choice
    for way, choice in {**CHOICES, **SMALL}.items()
    if choice.start.schedule == "cubic" and choice.start.sparsity and "after" not in choice.factors
}
"""Gradual zeros, from the dense network."""


def images(data: Path) -> tuple[Images, Images]:
    """To train on, and to judge by."""
    whole, _ = load(data, "validation", torch.device("cpu"))
    small = smaller(whole, TRAINED + HELD)
    return Images(small.x[:TRAINED], small.y[:TRAINED]), Images(small.x[TRAINED:], small.y[TRAINED:])


def run(recipe: Recipe, model: nn.Module, train: Images, seed: int) -> nn.Module:
    r = replace(recipe, cutout=recipe.cutout // 2, batch=BATCH)
    loader = Harder(train, r, PAD)
    return sw.prune_and_recover(
        model, torch.zeros(2, 3, 16, 16), loader, sw.Budget(sparsity=r.sparsity), schedule=r.schedule, rounds=r.rounds,
        until=r.until, regrow=r.regrow, lr=r.lr, epochs=EPOCHS, fraction=1.0, anneal=r.anneal, warmup=r.warmup,
        weight_decay=r.weight_decay, clip=r.clip or None, distill=r.distill, temperature=r.temperature, share=r.share,
        options={"score": r.score, "scope": "global"}, seed=seed, on_step=loader.progress,
    ).model.eval()  # fmt: skip


def table(path: Path) -> Iterator[str]:
    runs = [json.loads(line) for line in path.read_text().splitlines()]
    for way in dict.fromkeys(r["way"] for r in runs):
        own, choice = [r for r in runs if r["way"] == way], PLANS[way]
        rows = [[2 * int(level) - 1 for level in r["levels"]] for r in own]
        worth, error = effects(rows, [[r["accuracy"], r["loss"]] for r in own])
        yield f"| {way}, {len(own)} runs | accuracy | cross entropy |"
        yield "|---|---|---|"
        for (name, (first, second)), (points, entropy) in zip(choice.factors.items(), worth, strict=True):
            yield f"| {name} {first}, {second} | {points:+.2f} | {entropy:+.4f} |"
        yield f"| standard error | {error[0]:.2f} | {error[1]:.4f} |"
        yield ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", choices=PLANS, default=["scout"])
    parser.add_argument("--data", type=Path, default=Path("../shared/data/cifar10"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--bases", type=Path, default=Path("scratch/by-heart"))
    parser.add_argument("--table", type=Path)
    given = parser.parse_args()
    if given.table is not None:
        print("\n".join(table(given.table)))
        return
    torch.set_num_threads(1)
    train, held = images(given.data)
    loader = TensorLoader(train.x, train.y, BATCH, pad=PAD, flip=True, mean=MEAN, std=STD, drop_last=True)
    for seed in given.seeds:
        model = dense(given.bases / f"{seed}.safetensors", loader, seed, BEFORE)
        known: dict[str, Any] = {"dense": round(accuracy(model, held), 3), "of training images": accuracy(model, train)}
        known |= {"epochs": EPOCHS, **environment(torch.device("cpu"))}
        for way, levels in [(name, row) for name in given.ways for row in PLANS[name].plan]:
            began = time.monotonic()
            found = run(PLANS[way].at(levels), model, train, seed)
            told = {"date": datetime.date.today().isoformat(), "way": way, "levels": levels, "seed": seed}
            told |= {"accuracy": round(accuracy(found, held), 3), "loss": round(loss(found, held), 5)}
            told |= {"seconds": round(time.monotonic() - began)}
            print(json.dumps({**told, **known}), flush=True)


if __name__ == "__main__":
    main()
