"""Data by name: ``digits``, ``cifar10:FOLDER``, ``folder:PATH`` of images by class, ``package.module:loaders``.

Training data is split once, by a fixed seed, into what is trained on and what decisions are made on; test data is
only ever looked at for the final figures.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import send_to_device
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from sapwood.errors import SapwoodError, explain
from sapwood.recovery.distillation import logits_of
from sapwood.scoring.data import inputs_of

FORMS = "digits, cifar10:FOLDER, folder:PATH or package.module:loaders"
_MEAN, _STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
_IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".ppm")
Metric = Callable[[nn.Module, Any], float]


@dataclass(frozen=True)
class Data:
    """Loaders, an example input, and how to tell how good a model is."""

    train: Any
    validation: Any
    test: Any
    example: Any
    classes: int | None = None
    loss: Any = None
    metric: Metric | None = None

    @property
    def gives_classes(self) -> bool:
        """Whether models of it are trained and judged by class scores."""
        return self.loss is None and self.metric is None

    def score(self, model: nn.Module, on: str) -> float:
        """The metric (accuracy where none is given) on ``validation`` or ``test``."""
        return (self.metric or accuracy)(model, getattr(self, on))


@torch.no_grad()
def accuracy(model: nn.Module, loader: Any) -> float:
    """The share of examples whose largest class score is the right one."""
    modes = {m: m.training for m in model.modules()}
    device = next(model.parameters()).device
    right = seen = 0
    try:
        model.eval()
        for batch in loader:
            inputs = send_to_device(inputs_of(batch), device)
            labels = batch["labels"] if isinstance(batch, dict) else batch[1]
            output = model(**inputs) if isinstance(inputs, dict) else model(inputs)
            right += int((logits_of(output).argmax(-1).cpu() == labels.cpu()).sum())
            seen += labels.numel()
    finally:
        for module, mode in modes.items():
            module.training = mode
    return right / max(1, seen)


def load_data(name: str, batch: int = 128, size: int | None = None, workers: int = 0) -> Data:
    """The data set a recipe names."""
    kind, _, place = name.partition(":")
    if name == "digits":
        return _split(*_digits(), batch=batch, workers=workers)
    if kind == "cifar10" and place:
        return _split(*_cifar10(Path(place)), batch=batch, workers=workers, augment=_flip_and_shift)
    if kind == "folder" and place:
        return _folder(Path(place), batch, size or 224, workers)
    if place and kind not in ("cifar10", "folder"):
        return _own(kind, place)
    raise explain(FORMS, repr(name), "Name the data set.", "data")


def _split(
    x: torch.Tensor,
    y: torch.Tensor,
    test_x: torch.Tensor,
    test_y: torch.Tensor,
    batch: int,
    workers: int,
    augment: Callable[[list[Any]], Any] | None = None,
) -> Data:
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    held = max(1, len(y) // 10)
    train, kept = order[held:], order[:held]
    loader = DataLoader(TensorDataset(x[train], y[train]), batch, True, num_workers=workers, collate_fn=augment)
    quick = max(batch, 256)
    return Data(
        loader,
        DataLoader(TensorDataset(x[kept], y[kept]), quick),
        DataLoader(TensorDataset(test_x, test_y), quick),
        x[:2],
        int(y.max()) + 1,
    )


def _digits() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """1,797 images of handwritten digits, 8 x 8, that come with scikit-learn; 360 are the test set."""
    from sklearn.datasets import load_digits

    values, labels = load_digits(return_X_y=True)
    x = torch.tensor(values, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    y = torch.tensor(labels, dtype=torch.long)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(1))
    test, rest = order[:360], order[360:]
    return x[rest], y[rest], x[test], y[test]


def _flip_and_shift(items: list[Any]) -> Any:
    """Random mirror images, shifted by up to four pixels."""
    x, y = torch.stack([i[0] for i in items]), torch.stack([i[1] for i in items])
    flips = torch.rand(len(x)) < 0.5
    x = torch.where(flips[:, None, None, None], x.flip(-1), x)
    height, width = x.shape[-2:]
    wide = nn.functional.pad(x, (4, 4, 4, 4))
    down, right = torch.randint(0, 9, (2, len(x)))
    rows = (down[:, None] + torch.arange(height))[:, None, :, None]
    columns = (right[:, None] + torch.arange(width))[:, None, None, :]
    picked = wide[
        torch.arange(len(x))[:, None, None, None], torch.arange(x.shape[1])[None, :, None, None], rows, columns
    ]
    return picked, y


def _cifar10(folder: Path) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The official binary version (data_batch_1.bin ...), or sheets of 50 x 50 images with labels.npz."""
    inner = folder / "cifar-10-batches-bin"
    folder = inner if inner.is_dir() else folder
    try:
        if (folder / "data_batch_1.bin").exists():
            parts = [_binary(folder / f"data_batch_{i}.bin") for i in range(1, 6)]
            x, y = np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])
            test_x, test_y = _binary(folder / "test_batch.bin")
        elif (folder / "labels.npz").exists():
            labels = np.load(folder / "labels.npz")
            x, test_x = _sheets(folder, "train"), _sheets(folder, "test")
            y, test_y = labels["train"], labels["test"]
        else:
            raise explain(
                "data_batch_1.bin ... test_batch.bin (CIFAR-10's binary version)",
                "a folder without" if folder.is_dir() else "no such folder",
                "Fetch cifar-10-binary.tar.gz and unpack it; the pickled version is not read.",
                str(folder),
            )
    except (OSError, ValueError, KeyError) as error:
        raise SapwoodError(f"{folder}: CIFAR-10 could not be read ({error}). Fetch it again.") from None
    return _scaled(x), torch.from_numpy(y.astype(np.int64)), _scaled(test_x), torch.from_numpy(test_y.astype(np.int64))


def _binary(file: Path) -> tuple[np.ndarray, np.ndarray]:
    raw = np.frombuffer(file.read_bytes(), dtype=np.uint8).reshape(-1, 3073)
    return raw[:, 1:].reshape(-1, 3, 32, 32), raw[:, 0]


def _sheets(folder: Path, part: str) -> np.ndarray:
    from PIL import Image

    found = []
    for file in sorted(folder.glob(f"{part}-*.webp")):
        sheet = np.asarray(Image.open(file)).reshape(50, 32, 50, 32, 3)
        found.append(sheet.transpose(0, 2, 4, 1, 3).reshape(2500, 3, 32, 32))
    return np.concatenate(found)


def _scaled(images: np.ndarray) -> torch.Tensor:
    mean, std = torch.tensor(_MEAN).view(3, 1, 1), torch.tensor(_STD).view(3, 1, 1)
    return (torch.from_numpy(images.copy()).float() / 255 - mean) / std


class _Pictures(Dataset[tuple[torch.Tensor, int]]):
    def __init__(self, files: list[tuple[Path, int]], size: int) -> None:
        self.files, self.size = files, size

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        from PIL import Image, UnidentifiedImageError

        path, label = self.files[index]
        try:
            picture = Image.open(path).convert("RGB").resize((self.size, self.size))
        except (OSError, UnidentifiedImageError) as error:
            raise SapwoodError(f"{path}: could not be read as an image ({error}). Remove or replace it.") from None
        pixels = torch.from_numpy(np.asarray(picture).copy()).permute(2, 0, 1).float() / 255
        mean, std = torch.tensor((0.485, 0.456, 0.406)), torch.tensor((0.229, 0.224, 0.225))
        return (pixels - mean.view(3, 1, 1)) / std.view(3, 1, 1), label


def _folder(folder: Path, batch: int, size: int, workers: int) -> Data:
    """One folder per class; if there are ``train`` and ``test`` folders those are used, else a tenth is the test."""
    try:
        import PIL  # noqa: F401
    except ImportError:
        raise explain("pillow to read images", "none", "pip install pillow", "data") from None
    base = folder / "train" if (folder / "train").is_dir() else folder
    classes = sorted(d.name for d in base.iterdir() if d.is_dir()) if base.is_dir() else []
    if len(classes) < 2:
        raise explain("a folder with a folder of images per class", f"{len(classes)} of them", "Check it.", str(folder))
    files = _files(base, classes)
    order = torch.randperm(len(files), generator=torch.Generator().manual_seed(0)).tolist()
    tenth = max(1, len(files) // 10)
    if (folder / "test").is_dir():
        test: Any = _Pictures(_files(folder / "test", classes), size)
    else:
        test, order = Subset(_Pictures(files, size), order[:tenth]), order[tenth:]
    everything = _Pictures(files, size)
    kept, train = order[:tenth], order[tenth:]
    if not train:
        raise explain("enough images to split", f"{len(files)}", "Add more images.", str(folder))
    return Data(
        DataLoader(Subset(everything, train), batch, True, num_workers=workers),
        DataLoader(Subset(everything, kept), batch, num_workers=workers),
        DataLoader(test, batch, num_workers=workers),
        torch.stack([everything[train[0]][0], everything[train[-1]][0]]),
        len(classes),
    )


def _files(base: Path, classes: list[str]) -> list[tuple[Path, int]]:
    found = [
        (file, label)
        for label, name in enumerate(classes)
        for file in sorted((base / name).rglob("*"))
        if file.suffix.lower() in _IMAGES
    ]
    if not found:
        wanted = f"images ({', '.join(_IMAGES)}) in folders named {', '.join(classes[:5])}"
        raise explain(wanted, "none", "Check the folder.", str(base))
    return found


def _own(module: str, name: str) -> Data:
    """A function of the user's that returns a Data, or a dict of its fields."""
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        made = getattr(importlib.import_module(module), name)()
    except Exception as error:  # the user's code may raise anything
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise explain(FORMS, f"{module}:{name}, which raised {why}", "Check the function.", "data") from None
    if isinstance(made, Mapping):
        missing = {"train", "validation", "test", "example"} - set(made)
        odd = set(made) - set(Data.__dataclass_fields__)
        if missing or odd:
            got = f"{sorted(missing) or sorted(odd)} {'missing' if missing else 'too many'}"
            raise explain(
                "train, validation, test and example (loss, metric)", got, "Return a dict.", f"{module}:{name}"
            )
        made = Data(**made)
    if not isinstance(made, Data):
        raise explain("a dict of loaders", type(made).__name__, "Return train, validation, test, example.", name)
    return made
