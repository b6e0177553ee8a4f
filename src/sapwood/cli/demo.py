"""``make demo``: trace and cut a small CNN and a small transformer, and show what happened."""

from __future__ import annotations

import time

import torch
from rich.console import Console
from torch import nn

import sapwood as sw
from sapwood.reporting import frozen_table, groups_table, result_table


class SmallCNN(nn.Module):
    """A residual block, a depthwise convolution and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU())
        self.inner = nn.Sequential(nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU())
        self.outer = nn.Conv2d(64, 32, 3, padding=1)
        self.depthwise = nn.Conv2d(32, 32, 3, padding=1, groups=32)
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = torch.relu(x + self.outer(self.inner(x)))
        return self.head(self.depthwise(x).mean((2, 3)))  # type: ignore[no-any-return]


class SmallTransformer(nn.Module):
    """Token embedding, two standard encoder layers and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 8, 256, batch_first=True, norm_first=True)
        self.embed = nn.Embedding(100, 64)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, 5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embed(tokens)).mean(1))  # type: ignore[no-any-return]


def show(console: Console, title: str, model: nn.Module, inputs: torch.Tensor, budget: sw.Budget) -> None:
    """Prune one model and print the tables."""
    start = time.perf_counter()
    done = sw.prune(model, inputs, budget, score="l1", allocate="uniform")
    seconds = time.perf_counter() - start
    console.rule(f"[bold]{title}")
    for table in (groups_table(done.trace, done.plan), frozen_table(done.trace), result_table(done)):
        console.print(table)
        console.print()
    kept = f"Budget({budget.kind}={getattr(budget, budget.kind)})"
    console.print(f"{kept}, score l1, uniform: traced, planned, cut and checked in {seconds:.1f} s.\n")


def main() -> None:
    torch.manual_seed(0)
    console = Console()
    show(console, "A small CNN", SmallCNN(), torch.randn(2, 3, 32, 32), sw.Budget(channels=0.5))
    tokens = torch.randint(0, 100, (2, 16))
    show(console, "A small transformer", SmallTransformer(), tokens, sw.Budget(params=0.4))
    console.print(
        "Nothing was told to Sapwood about these models: channels that belong together, attention heads "
        "and the attributes that name their sizes were found by watching one forward.\n"
        "[i]exact[/i]: the cut model computes what the dense one does with those channels switched off. "
        "[i]approximate[/i]: a norm runs over the cut channels, so its statistics are those of the survivors."
    )


if __name__ == "__main__":
    main()
