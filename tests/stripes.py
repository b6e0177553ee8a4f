"""Four classes of noisy stripes, and a small network that can tell them apart."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import sapwood as sw


def blobs(count: int = 256, batch: int = 32) -> tuple[DataLoader, torch.Tensor, torch.Tensor]:
    """Four classes of noisy stripes on 8 x 8 images."""
    generator = torch.Generator().manual_seed(5)
    y = torch.randint(0, 4, (count,), generator=generator)
    x = 0.7 * torch.randn(count, 1, 8, 8, generator=generator)
    for i, label in enumerate(y.tolist()):
        x[i, 0, 2 * label : 2 * label + 2] += 1.5
    return DataLoader(TensorDataset(x, y), batch, shuffle=True), x, y


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, stride=2, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 16, 4),
    )


def accuracy(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    model.eval()
    with torch.no_grad():
        return float((model(x).argmax(1) == y).float().mean())


def trained_net() -> nn.Module:
    loader, x, y = blobs()
    model = net()
    sw.recover(model, loader, lr=0.05, epochs=6)
    assert accuracy(model, x, y) > 0.97
    return model
