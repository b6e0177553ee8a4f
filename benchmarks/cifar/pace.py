"""How fast should masked weights go on learning out of sight? A small network on a CPU, 95% zeros.

python -m benchmarks.cifar.pace [--data ../shared/data/cifar10] [--pace 0.2] [--epochs 20] [--base base.safetensors]
    ResNet-14 on 20,000 training images of 16 x 16 pixels, dense for 40 epochs (kept at --base), then zeros gradually
    with regrow=0.8 at this pace (0: zeros stay; inf: as the optimizer has it); accuracy on 5,000 other training images.
    A line of JSON; ours are in benchmarks/results/cifar/pace.jsonl
"""

from __future__ import annotations

import argparse
import datetime
import json
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

import sapwood as sw
from benchmarks.cifar.data import MEAN, STD, Images, accuracy, load, loss
from benchmarks.cifar.model import ResNet, base
from benchmarks.cifar.work import environment
from sapwood.masking import regrow
from sapwood.recovery import TensorLoader

TRAINED, HELD, BLOCKS, BATCH = 20_000, 5_000, 2, 128
SPARSITY, RATE = 0.95, 0.4


def smaller(images: Images, count: int) -> Images:
    halved = nn.functional.avg_pool2d(images.x[:count].float(), 2)
    return Images(halved.round().to(torch.uint8), images.y[:count])


def images(data: Path) -> tuple[TensorLoader, Images, Images]:
    """To train on, as a loader; others, to judge by; and those that are trained on."""
    whole = load(data, "validation", torch.device("cpu"))
    train, held = (smaller(part, count) for part, count in zip(whole, (TRAINED, HELD), strict=True))
    loader = TensorLoader(train.x, train.y, BATCH, pad=2, flip=True, mean=MEAN, std=STD, drop_last=True)
    return loader, held, train


def dense(path: Path, loader: TensorLoader, seed: int = 0, epochs: float = 40) -> nn.Module:
    if not path.exists():
        torch.manual_seed(seed)
        model = ResNet(BLOCKS)
        sw.recover(model, loader, lr=0.1, epochs=epochs, anneal="cosine", warmup=0.02, seed=seed)
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(model.state_dict(), path)
    return base(path, BLOCKS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data/cifar10"))
    parser.add_argument("--pace", type=float, default=regrow.PACE)
    parser.add_argument("--epochs", type=float, default=20)
    parser.add_argument("--base", type=Path, default=Path("scratch/pace-base.safetensors"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    regrow.PACE = given.pace
    loader, held, train = images(given.data)
    model, began = dense(given.base, loader), time.monotonic()
    done = sw.prune_and_recover(
        model, torch.zeros(2, 3, 16, 16), loader, sw.Budget(sparsity=SPARSITY), schedule="cubic", rounds=100,
        regrow=0.8 if given.pace else 0.0, lr=RATE, epochs=given.epochs, anneal="cosine", warmup=0.02, clip=1.0,
        distill=True, share=0.9, options={"scope": "global"},
    )  # fmt: skip
    found = done.model.eval()
    figures = {"accuracy": accuracy(found, held), "loss": round(loss(found, held), 4), "dense": accuracy(model, held)}
    figures["of training images"] = accuracy(found, Images(train.x[:HELD], train.y[:HELD]))
    told = {"date": datetime.date.today().isoformat(), "pace": str(given.pace), "epochs": given.epochs, **figures}
    print(json.dumps({**told, "seconds": round(time.monotonic() - began), **environment(torch.device("cpu"))}))


if __name__ == "__main__":
    main()
