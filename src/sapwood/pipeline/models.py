"""The small network of the demo, and models by name."""

from __future__ import annotations

import torch
from torch import nn


class SmallCNN(nn.Module):
    """Three convolutions with batch norm and a classifier, for 8 x 8 digits: about 100,000 parameters."""

    def __init__(self, width: int = 64, classes: int = 10) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *_block(1, width // 2), *_block(width // 2, width), nn.MaxPool2d(2), *_block(width, 2 * width)
        )
        self.head = nn.Linear(2 * width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x).mean((2, 3)))  # type: ignore[no-any-return]


def _block(inputs: int, outputs: int) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]


def named_model(name: str, arguments: dict) -> nn.Module:
    return SmallCNN()
