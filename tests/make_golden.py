"""Writes tests/data/golden-v1, once: a bundle of format version 1 that every later version must read.

python -m tests.make_golden
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

import sapwood as sw
from tests.helpers import build, halve, outputs


def main() -> None:
    folder = Path(__file__).parent / "data" / "golden-v1"
    torch.manual_seed(0)
    model, inputs = build("transformer_from_projection")
    done = halve(model, inputs)
    sw.save(folder / "bundle", done.model, done.plan, check=done.check, example_inputs=inputs)
    layer = nn.Linear(64, 32)
    with torch.no_grad():
        layer.weight[torch.rand_like(layer.weight) < 0.9] = 0
    plan = sw.make_plan(layer, torch.randn(2, 64), sw.Budget(channels=1.0))
    sw.save(folder / "sparse.safetensors", layer, plan)
    expected = {"input": inputs, "output": outputs(done.model, inputs)[0], "sparse": layer.weight.detach()}
    save_file({k: v.contiguous() for k, v in expected.items()}, folder / "expected.safetensors")


if __name__ == "__main__":
    main()
