"""CIFAR-10 as tensors on the training device, and how it gets to a machine that takes 64 MiB at a time.

python -m benchmarks.cifar.data pack --data ../shared/data/cifar10 --out scratch/cifar
    writes scratch/cifar/0, 1 and 2, 37 MiB each, so that a checkout has room beside it: carry one per call
python -m benchmarks.cifar.data join --out scratch/cifar
    there, when all have arrived: scratch/cifar/cifar10.npz and resnet56.safetensors

Pixels are stored as what is left after predicting them from their neighbours (as lossless image formats do: red and
blue as differences to green, the median edge detector of JPEG-LS), which zip shrinks to 61%; numpy undoes it quickly.
"""

from __future__ import annotations

import argparse
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
IMAGES, HELD_OUT, SPLIT_SEED = 50_000, 10_000, 20240
PARTS = 3
"""The weights go with the last."""
WEIGHTS, ARRAYS, PART = "resnet56.safetensors", "cifar10.npz", "part.npz"


@dataclass(frozen=True)
class Images:
    """Bytes (number, 3, 32, 32) and labels, on one device."""

    x: torch.Tensor
    y: torch.Tensor

    def chosen(self, places: torch.Tensor) -> Images:
        return Images(self.x[places], self.y[places])


def load(folder: Path, split: str, device: torch.device, limit: int = 0) -> tuple[Images, Images]:
    """What is trained on and what is looked at: ``validation`` holds 10,000 training images out, ``test`` uses all.

    ``folder`` holds cifar10.npz or the original WebP files; ``random`` makes noise, for tests.
    """
    arrays = _noise() if str(folder) == "random" else _arrays(folder)
    tensors = {k: torch.from_numpy(v) for k, v in arrays.items()}
    train = Images(tensors["train_x"].permute(0, 3, 1, 2), tensors["train_y"].long())
    test = Images(tensors["test_x"].permute(0, 3, 1, 2), tensors["test_y"].long())
    if split == "validation":
        order = torch.randperm(len(train.y), generator=torch.Generator().manual_seed(SPLIT_SEED))
        held = min(HELD_OUT, len(order) // 5)
        train, test = train.chosen(order[held:]), train.chosen(order[:held])
    if limit:
        train, test = (Images(part.x[:limit], part.y[:limit]) for part in (train, test))
    return tuple(Images(p.x.contiguous().to(device), p.y.to(device)) for p in (train, test))  # type: ignore[return-value]


@torch.no_grad()
def scores(model: torch.nn.Module, images: Images) -> torch.Tensor:
    """Of all classes, in evaluation mode; the modes are put back."""
    modes = {m: m.training for m in model.modules()}
    model.eval()
    mean, std = (torch.tensor(v, device=images.x.device).view(1, 3, 1, 1) * 255 for v in (MEAN, STD))
    found = [model((x.float() - mean) / std) for x in images.x.split(1000)]
    for module, mode in modes.items():
        module.training = mode
    return torch.cat(found)


def accuracy(model: torch.nn.Module, images: Images) -> float:
    """In percent."""
    return 100 * float((scores(model, images).argmax(1) == images.y).sum()) / len(images.y)


def loss(model: torch.nn.Module, images: Images) -> float:
    """Cross entropy at the temperature that suits the model best: what recipes are told apart by, where accuracies on
    10,000 images are within 0.2 points of each other by chance."""
    found = scores(model, images).float()
    return min(float(torch.nn.functional.cross_entropy(found * 0.9**k, images.y)) for k in range(-4, 25))


def _noise() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    found = {}
    for name, count in (("train", 640), ("test", 200)):
        found[f"{name}_y"] = rng.integers(0, 10, count)
        found[f"{name}_x"] = rng.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
    return found


def _arrays(folder: Path) -> dict[str, np.ndarray]:
    if (folder / ARRAYS).exists():
        with np.load(folder / ARRAYS) as file:
            return dict(file)
    return _decoded(folder)


def _decoded(folder: Path) -> dict[str, np.ndarray]:
    from PIL import Image  # only where the original files are read

    found = {}
    with np.load(folder / "labels.npz") as labels:
        for name in ("train", "test"):
            files = sorted(folder.glob(f"{name}-*.webp"))
            grids = [np.asarray(Image.open(f)).reshape(50, 32, 50, 32, 3) for f in files]
            images = [g.transpose(0, 2, 1, 3, 4).reshape(2500, 32, 32, 3) for g in grids]
            found[f"{name}_x"], found[f"{name}_y"] = np.concatenate(images), labels[name]
    return found


def _predicted(left: np.ndarray, above: np.ndarray, corner: np.ndarray) -> np.ndarray:
    low, high = np.minimum(left, above), np.maximum(left, above)
    found: np.ndarray = np.where(corner >= high, low, np.where(corner <= low, high, left + above - corner))
    return found


def shrunk(images: np.ndarray) -> np.ndarray:
    """(number, 32, 32, 3) bytes -> (3, 32, 32, number): green, red and blue less what their neighbours foretell."""
    wide = images.astype(np.int16).transpose(3, 1, 2, 0)
    result = np.empty(wide.shape, dtype=np.uint8)
    for place, plane in enumerate((wide[1], wide[0] - wide[1], wide[2] - wide[1])):
        padded = np.pad(plane, ((1, 0), (1, 0), (0, 0)))
        result[place] = (plane - _predicted(padded[1:, :-1], padded[:-1, 1:], padded[:-1, :-1])).astype(np.uint8)
    return result


def unshrunk(left_over: np.ndarray) -> np.ndarray:
    _, height, width, number = left_over.shape
    images = np.empty((3, height, width, number), dtype=np.uint8)
    for place, channel in enumerate((1, 0, 2)):
        plane = np.zeros((height + 1, width + 1, number), dtype=np.int16)
        green = images[1].astype(np.int16) if place else np.zeros((height, width, 1), dtype=np.int16)
        for i in range(height):
            for j in range(width):
                guess = _predicted(plane[i + 1, j], plane[i, j + 1], plane[i, j])
                value = (guess + left_over[place, i, j] + green[i, j]).astype(np.uint8)
                images[channel, i, j] = value
                plane[i + 1, j + 1] = value.astype(np.int16) - green[i, j]
    return np.ascontiguousarray(images.transpose(3, 1, 2, 0))


def pack(source: Path, out: Path) -> None:
    arrays = _decoded(source)
    pixels = np.concatenate([arrays["train_x"], arrays["test_x"]])
    for part, images in enumerate(np.array_split(pixels, PARTS)):
        folder = out / str(part)
        folder.mkdir(parents=True, exist_ok=True)
        labels = {k: arrays[k].astype(np.uint8) for k in ("train_y", "test_y")}
        np.savez_compressed(folder / PART, pixels=shrunk(images), train_y=labels["train_y"], test_y=labels["test_y"])
        if part == PARTS - 1:
            shutil.copyfile(source / WEIGHTS, folder / WEIGHTS)
        print(f"{folder}: {sum(f.stat().st_size for f in folder.iterdir()) / 2**20:.1f} MiB")


def join(out: Path) -> None:
    parts = [np.load(out / str(part) / PART) for part in range(PARTS)]
    pixels = np.concatenate([unshrunk(p["pixels"]) for p in parts])
    train_y, test_y = (parts[0][k].astype(np.int64) for k in ("train_y", "test_y"))
    count = len(train_y)
    np.savez(out / ARRAYS, train_x=pixels[:count], test_x=pixels[count:], train_y=train_y, test_y=test_y)
    shutil.copyfile(out / str(PARTS - 1) / WEIGHTS, out / WEIGHTS)
    print(f"{out / ARRAYS}: {len(train_y)} + {len(test_y)} images")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=("pack", "join"))
    parser.add_argument("--data", type=Path, default=Path("../shared/data/cifar10"))
    parser.add_argument("--out", type=Path, default=Path("scratch/cifar"))
    given = parser.parse_args()
    pack(given.data, given.out) if given.verb == "pack" else join(given.out)
