"""Masks and recovery on a GPU: the same zeros as on the CPU, held through training with every switch."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import sapwood as sw

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(4, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(64 * 64, 4),
    )  # fmt: skip


def stripes(count: int = 256) -> tuple[DataLoader, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    y = torch.randint(0, 4, (count,), generator=generator)
    x = 0.7 * torch.randn(count, 4, 8, 8, generator=generator)
    for i, label in enumerate(y.tolist()):
        x[i, :, 2 * label : 2 * label + 2] += 1.5
    return DataLoader(TensorDataset(x, y), 32, shuffle=True), x, y


def accuracy(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    device = next(model.parameters()).device
    model.eval()
    with torch.no_grad():
        return float((model(x.to(device)).argmax(1).cpu() == y).float().mean())


@pytest.mark.parametrize(
    "options",
    [
        {"budget": sw.Budget(sparsity=0.9)},
        {"budget": sw.Budget(sparsity=0.9), "scope": "local"},
        {"budget": sw.Budget(sparsity=0.5), "scope": "row"},
        {"budget": sw.Budget(sparsity=0.5), "score": "random"},
        {"budget": sw.Budget(sparsity=0.5), "pattern": "block:8x8"},
        {"pattern": "2:4"},
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_zeros_as_on_the_cpu(options: dict[str, Any], dtype: torch.dtype) -> None:
    here, there = sw.mask(net().to(dtype), **options), sw.mask(net().to(dtype).cuda(), **options)
    for a, b in zip(here.state_dict().values(), there.state_dict().values(), strict=True):
        assert torch.equal(a == 0, (b == 0).cpu())


@pytest.mark.parametrize(
    "switches",
    [
        {},
        {"mixed_precision": "bf16", "channels_last": True},
        {"mixed_precision": "fp16"},
        {"accumulate": 2, "optimizer": "adamw", "lr": 0.003},
        {"compile": True},
    ],
)
def test_recovery_on_the_gpu(switches: dict[str, Any]) -> None:
    loader, x, y = stripes()
    model = net()
    sw.recover(model, loader, lr=0.02, epochs=4)
    masked = sw.mask(model, sw.Budget(sparsity=0.95))
    zeros = sw.sparsity(masked).zeros
    done = sw.recover(masked, loader, **{"lr": 0.02, **switches}, epochs=3, validate=lambda m: accuracy(m, x, y))
    assert done.metric is not None and done.metric > 0.9
    assert next(done.model.parameters()).is_cuda and sw.sparsity(done.model).zeros == zeros
    assert list(done.model.state_dict()) == list(net().state_dict())


def test_a_model_may_be_moved_after_hold() -> None:
    model = sw.mask(net(), sw.Budget(sparsity=0.8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    held = sw.hold(model, optimizer)
    model.cuda()
    model(torch.randn(2, 4, 8, 8, device="cuda")).sum().backward()
    optimizer.step()
    assert sw.sparsity(model).zeros == held.zeros


@pytest.mark.parametrize("budget", [sw.Budget(channels=0.5), sw.Budget(sparsity=0.9)], ids=str)
@pytest.mark.parametrize("schedule", [("iterative", 2), ("cubic", 3)])
def test_schedules_on_the_gpu(budget: sw.Budget, schedule: tuple[str, int]) -> None:
    loader, x, y = stripes()
    model = net()
    sw.recover(model, loader, lr=0.02, epochs=4)
    done = sw.prune_and_recover(
        model, x[:2].cuda(), loader, budget, lr=0.02, schedule=schedule[0], rounds=schedule[1], epochs=4,
        distill=True, validate=lambda m: accuracy(m, x, y),
    )  # fmt: skip
    assert done.metric is not None and done.metric > 0.9


SHARDED = """
import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
import sapwood as sw
from tests.test_gpu_training import net, stripes
plugin = FullyShardedDataParallelPlugin(fsdp_version=VERSION, use_orig_params=True if VERSION == 1 else None)
accelerator = Accelerator(fsdp_plugin=plugin)
model = sw.mask(net(), sw.Budget(sparsity=0.8))
before = {n: (t == 0) for n, t in model.state_dict().items() if t.dim() > 1}
done = sw.recover(model, stripes()[0], lr=0.02, epochs=2, accelerator=accelerator)
state = accelerator.get_state_dict(accelerator._models[0])
assert str(accelerator.distributed_type).endswith("FSDP"), accelerator.distributed_type
for name, zeros in before.items():
    assert bool((state[name].cpu()[zeros] == 0).all()), name
    assert int((state[name] == 0).sum()) == int(zeros.sum()), name
print("HELD")
"""


@pytest.mark.parametrize("version", [1, 2])
def test_zeros_are_held_in_a_model_that_accelerate_shards(version: int, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    root = Path(__file__).parents[1]
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    path = os.pathsep.join([str(root), str(root / "src"), os.environ.get("PYTHONPATH", "")])
    code = SHARDED.replace("VERSION", str(version))
    env = {**os.environ, **ranks, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300)
    assert "HELD" in done.stdout, done.stderr[-3000:]
