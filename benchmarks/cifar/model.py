"""The ResNet-56 of the shared weights: three times nine basic blocks of 16, 32 and 64 channels."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import cast

import torch
from safetensors.torch import load_file
from torch import nn


class Block(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.down: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            self.down = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(inner)) + self.down(x))


class ResNet(nn.Module):
    def __init__(self, blocks: int = 9, widths: tuple[int, ...] = (16, 32, 64), classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, widths[0], 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(widths[0])
        layers, before = [], widths[0]
        for stage, width in enumerate(widths):
            for index in range(blocks):
                layers.append(Block(before, width, 2 if stage and not index else 1))
                before = width
        self.layers = nn.Sequential(*layers)
        self.fc = nn.Linear(before, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers(torch.relu(self.bn1(self.conv1(x))))
        return cast(torch.Tensor, self.fc(x.mean((2, 3))))


class Another(ResNet):
    """By another name, so that in two side by side it is the blocks that repeat: these are compiled, not networks."""


class Both(nn.Module):
    """Two networks that teach together: what they say in the mean."""

    def __init__(self, one: nn.Module, another: nn.Module) -> None:
        super().__init__()
        self.one, self.another = one, another

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, (self.one(x) + self.another(x)) / 2)


STREAM = ("conv1", r"re:layers\.\d+\.conv2", r"re:layers\.\d+\.down.*")
"""What makes the channels of the residual stream: ignoring these cuts inside blocks only."""


def stages(blocks: int) -> list[str]:
    """A pattern for the blocks of each size of image."""
    parts = [range(first, first + blocks) for first in range(0, 3 * blocks, blocks)]
    return [rf"re:layers\.({'|'.join(map(str, part))})\..*" for part in parts]


def base(weights: Path, blocks: int = 9, kind: type[ResNet] = ResNet) -> nn.Module:
    model = kind(blocks)
    model.load_state_dict(load_file(weights))
    return model.eval()


def digest(model: nn.Module) -> str:
    """Tells the weights of one model from those of another."""
    found = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()
