"""Run by tests/test_distributed.py in two processes (gloo), and in one: prints what came out, as JSON."""

from __future__ import annotations

import hashlib
import json
import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import sapwood as sw


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(16 * 36, 4),
    )  # fmt: skip


def digest(model: nn.Module) -> str:
    parts = [_whole(t).numpy().tobytes() for t in model.state_dict().values()]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().cpu().contiguous()


def main(what: str) -> None:
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(64, 1, 6, 6, generator=generator), torch.randint(0, 4, (64,), generator=generator)
    per_process = 16 // accelerator.num_processes  # the same sixteen examples a step, however many processes
    loader = DataLoader(TensorDataset(x, y), per_process, shuffle=True)
    options = {"lr": 0.05, "epochs": 2, "accelerator": accelerator}
    if what == "masked":
        model = sw.mask(net(), sw.Budget(sparsity=0.8))
        sw.recover(model, loader, **options)
    elif what == "sharded":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        model = sw.mask(net(), sw.Budget(sparsity=0.8))
        fully_shard(model, mesh=init_device_mesh("cpu", (accelerator.num_processes,)))
        sw.recover(model, loader, **options)
    elif what == "cubic":
        model = sw.prune_and_recover(
            net(), x[:2], loader, sw.Budget(sparsity=0.8), schedule="cubic", rounds=3, **options
        ).model
    elif what == "wanda":  # each process calibrates on data of its own, and still all end with the same zeros
        torch.manual_seed(accelerator.process_index)
        batches = [torch.randn(8, 1, 6, 6)]
        model = sw.prune_and_recover(
            net(), x[:2], loader, sw.Budget(sparsity=0.8), options={"score": "wanda", "calibration": batches}, **options
        ).model
    else:
        model = sw.prune_and_recover(
            net(), x[:2], loader, sw.Budget(channels=0.5), schedule="iterative", rounds=2, **options
        ).model
    tensors = {n: _whole(t) for n, t in model.state_dict().items()}
    result = {
        "rank": accelerator.process_index,
        "kind": str(accelerator.distributed_type),
        "digest": digest(model),
        "shapes": {n: list(t.shape) for n, t in tensors.items()},
        "zeros": {n: int((t == 0).sum()) for n, t in tensors.items() if t.dim() > 1},
        "weights": {n: t.view(-1)[:: max(1, t.numel() // 50)].tolist() for n, t in tensors.items()},
    }
    with open(f"{sys.argv[2]}.{accelerator.process_index}.json", "w") as file:
        json.dump(result, file)
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1])
