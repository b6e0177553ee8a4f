"""Ours against Torch-Pruning with other networks, small ones on a CPU: the same weights, epochs and loop.

python -m benchmarks.cifar.second_peer [--data ../shared/data/cifar10] [--seeds 0 1 2 3 4 5] [--bases scratch/second]
    The ResNet-14 of second.py, a dense one of its own for each seed (kept at --bases), since which channels a method
    happens to choose in one network is worth some tenths; cut to 1 / 2.11, 2.57 and 4 of its multiply-accumulates and
    trained for a tenth of its epochs. Ours cuts in six rounds, each refitted, and at once, not refitted, as
    Torch-Pruning does. --ways has some of them only. Lines of JSON; ours are in
    benchmarks/results/cifar/second_peer.jsonl
--table FILE   what comes of such lines, as Markdown
"""

from __future__ import annotations

import argparse
import copy
import datetime
import itertools
import json
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import sapwood as sw
from benchmarks.cifar import peer
from benchmarks.cifar.data import accuracy
from benchmarks.cifar.pace import dense, images
from benchmarks.cifar.plans import COMPARED
from benchmarks.cifar.tables import apart, spread
from benchmarks.cifar.work import environment
from sapwood.measurement import count

EPOCHS, BATCHES = 4, 16
OURS = {"ours, uniform": ("uniform", 6), "ours, global": ("global", 6), "ours, uniform, one cut": ("uniform", 1)}
"""How a cut is shared out, and in how many rounds."""
THEIRS = {"Torch-Pruning, L1": "l1", "Torch-Pruning, group norm": "group"}
HOW: dict[str, Any] = {"lr": 0.05, "anneal": "cosine", "warmup": 0.02, "clip": 1.0, "share": 0.9}


def cut_and_train(way: str, fewer: float, model: nn.Module, loader: Any, seed: int) -> nn.Module:
    example, how = torch.zeros(2, 3, 16, 16), {**HOW, "epochs": EPOCHS, "seed": seed}
    if way in THEIRS:
        small = peer.shrunk(copy.deepcopy(model), example, THEIRS[way], fewer)
        return sw.recover(small, loader, teacher=model, fraction=1.0, **how).model
    torch.manual_seed(7)
    allocate, rounds = OURS[way]
    mend = list(itertools.islice(loader, BATCHES)) if rounds > 1 else []
    return sw.prune_and_recover(
        model, example, loader, sw.Budget(flops=1 / fewer), schedule="cubic", rounds=rounds, until=0.3, mend=mend,
        distill=True, options={"allocate": allocate}, **how,
    ).model  # fmt: skip


def table(path: Path) -> Iterator[str]:
    found: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for run in map(json.loads, path.read_text().splitlines()):
        found[run["way"], run["asked"]].append(run)
    yield f"| fewer MACs | {' | '.join([*OURS, *THEIRS])} |"
    yield "|---" * (1 + len(OURS) + len(THEIRS)) + "|"
    for asked in COMPARED:
        cells = []
        for way in (*OURS, *THEIRS):
            runs = found[way, asked]
            size = f" ({runs[0]['fewer_macs']:.2f})" if runs else ""
            cells.append(f"{spread([r['accuracy'] for r in runs])}{size}" if runs else "")
        yield f"| {asked} | {' | '.join(cells)} |"
    theirs = "Torch-Pruning, L1"
    for asked, way in itertools.product(COMPARED, OURS):
        other = {run["seed"]: run["accuracy"] for run in found[theirs, asked]}
        pairs = [run["accuracy"] - other[run["seed"]] for run in found[way, asked] if run["seed"] in other]
        yield f"{asked}: {way} against {theirs}, points and networks: {apart(pairs)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data/cifar10"))
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(6)))
    parser.add_argument("--bases", type=Path, default=Path("scratch/second"))
    parser.add_argument("--ways", nargs="+", choices=[*OURS, *THEIRS], default=[*OURS, *THEIRS])
    parser.add_argument("--table", type=Path)
    given = parser.parse_args()
    if given.table is not None:
        print("\n".join(table(given.table)))
        return
    torch.set_num_threads(1)
    loader, held, _ = images(given.data)
    example = torch.zeros(2, 3, 16, 16)
    for seed in given.seeds:
        model = dense(given.bases / f"{seed}.safetensors", loader, seed)
        whole = float(count(model, example)["flops"])
        known = {"dense": accuracy(model, held), "epochs": EPOCHS, **environment(torch.device("cpu"))}
        for asked, way in itertools.product(COMPARED, given.ways):
            began = time.monotonic()
            small = cut_and_train(way, float(asked), model, loader, seed).eval()
            told = {"date": datetime.date.today().isoformat(), "way": way, "asked": asked, "seed": seed}
            told |= {"accuracy": accuracy(small, held), "parameters": sum(p.numel() for p in small.parameters())}
            told |= {"fewer_macs": round(whole / float(count(small, example)["flops"]), 3)}
            print(json.dumps({**told, "seconds": round(time.monotonic() - began), **known}), flush=True)


if __name__ == "__main__":
    main()
