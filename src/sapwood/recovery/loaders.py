"""Batches for recovery: what a user hands in, dealt out to the devices; and images that lie on the device already."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device

from sapwood.errors import explain

Transform = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""(images, labels) of one batch -> what is trained on."""

_AT_ONCE = 8192


class TensorLoader:
    """Batches of images that lie as tensors on one device: shuffled, shifted and flipped there, many at once.

    ``images`` are (number, channels, height, width), bytes or floats, and stay where they are: put them on the GPU
    that trains. ``pad`` shifts by up to so many pixels (reflected at the border), ``flip`` mirrors every other image,
    ``cutout`` blanks a square of so many pixels. Bytes are divided by 255; ``mean`` and ``std`` are per channel.
    ``transform`` may change a batch (mixup, say). Random numbers are those of ``torch.manual_seed``.
    """

    def __init__(
        self,
        images: torch.Tensor,
        labels: torch.Tensor,
        batch: int = 256,
        *,
        pad: int = 0,
        flip: bool = False,
        cutout: int = 0,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
        transform: Transform | None = None,
    ) -> None:
        if images.dim() != 4 or len(images) != len(labels) or images.device != labels.device:
            got = f"{tuple(images.shape)} on {images.device}, {tuple(labels.shape)} on {labels.device}"
            remedy = "Give (number, channels, height, width) and as many labels, on one device."
            raise explain("images and their labels", got, remedy, "TensorLoader")
        if batch < 1 or not 0 <= pad < min(images.shape[2:]) or cutout < 0:
            got = f"batch={batch}, pad={pad}, cutout={cutout}"
            raise explain("a batch of at least 1, a shift within the image", got, "Mend it.", "TensorLoader")
        self.labels, self.batch, self.pad, self.flip, self.cutout = labels, batch, pad, flip, cutout
        self.shuffle, self.drop_last, self.transform = shuffle, drop_last, transform
        self.size = tuple(images.shape[2:])
        places = [_reflected(n, pad, images.device) for n in self.size]
        self._padded = images.permute(0, 2, 3, 1)[:, places[0]][:, :, places[1]].contiguous()
        channels = images.shape[1]
        scale = 255.0 if images.dtype == torch.uint8 else 1.0
        self._mean = torch.tensor(mean or [0.0] * channels, device=images.device) * scale
        self._std = torch.tensor(std or [1.0] * channels, device=images.device) * scale

    def __len__(self) -> int:
        count = len(self.labels)
        return count // self.batch if self.drop_last else -(-count // self.batch)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        device, count = self.labels.device, len(self.labels)
        order = torch.randperm(count, device=device) if self.shuffle else torch.arange(count, device=device)
        order = order[: len(self) * self.batch]
        for part in order.split(max(1, _AT_ONCE // self.batch) * self.batch):
            images, labels = self._look(part), self.labels[part]
            for x, y in zip(images.split(self.batch), labels.split(self.batch), strict=True):
                yield (x, y) if self.transform is None else self.transform(x, y)

    def _look(self, which: torch.Tensor) -> torch.Tensor:
        """These images, shifted and flipped anew; channels last in memory."""
        height, width = self.size
        rows = torch.arange(height, device=which.device).expand(len(which), -1)
        columns = torch.arange(width, device=which.device).expand(len(which), -1)
        if self.flip:
            mirrored = torch.randint(2, (len(which), 1), device=which.device, dtype=torch.bool)
            columns = torch.where(mirrored, width - 1 - columns, columns)
        hidden = self._hidden(rows, columns) if self.cutout else None
        if self.pad:
            shifts = torch.randint(2 * self.pad + 1, (2, len(which), 1), device=which.device)
            rows, columns = rows + shifts[0], columns + shifts[1]
        chosen = self._padded[which[:, None, None], rows[:, :, None], columns[:, None, :]]
        images = (chosen.float() - self._mean) / self._std
        if hidden is not None:
            images = images.masked_fill(hidden, 0.0)
        return images.permute(0, 3, 1, 2)

    def _hidden(self, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        centres = [torch.randint(n, (len(rows), 1), device=rows.device) for n in self.size]
        low, high = self.cutout // 2, self.cutout - self.cutout // 2
        near = [(c - low <= p) & (p < c + high) for c, p in zip(centres, (rows, columns), strict=True)]
        return (near[0][:, :, None] & near[1][:, None, :])[..., None]


def _reflected(size: int, pad: int, device: torch.device) -> torch.Tensor:
    """Positions of a padded axis in the axis itself, mirrored at both ends."""
    places = torch.arange(-pad, size + pad, device=device).abs()
    return torch.where(places >= size, 2 * (size - 1) - places, places)


class _Batches:
    """Batches that do not come from a DataLoader: moved to the device, dealt out over the processes."""

    def __init__(self, batches: Any, accelerator: Accelerator) -> None:
        self.batches, self.accelerator = batches, accelerator

    def __len__(self) -> int:
        return int(len(self.batches) // self.accelerator.num_processes)

    def __iter__(self) -> Iterator[Any]:
        number, own = self.accelerator.num_processes, self.accelerator.process_index
        for index, batch in enumerate(self.batches):
            if index % number == own and index // number < len(self):
                yield send_to_device(batch, self.accelerator.device)


def seed_all(seed: int, loader: Any, generator: Any) -> None:
    """Every generator that a loader may draw from: torch's, numpy's, Python's, its sampler's and its own."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    for own in (getattr(getattr(loader, "sampler", None), "generator", None), generator):
        if isinstance(own, torch.Generator):
            own.manual_seed(seed)


def own_order(loader: Any) -> Any:
    """The sampler of a loader that shuffles, with a generator of ours until training ends; None where it has one."""
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, torch.utils.data.RandomSampler) or sampler.generator is not None:
        return None
    sampler.generator = torch.Generator()
    return sampler


def prepared(loader: Any, accelerator: Accelerator) -> Any:
    if isinstance(loader, torch.utils.data.DataLoader):
        return accelerator.prepare_data_loader(loader)
    return _Batches(loader, accelerator)
