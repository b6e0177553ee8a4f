"""How closely plans meet parameter and FLOP budgets on real networks.

    python -m benchmarks.budgets [--out FILE]

For each model, budget, allocation and fraction: budget minus what the plan leaves, as a fraction of dense.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import warnings
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import sapwood as sw
from tests.zoo.torchvision_models import import_torchvision

MODELS = (
    "resnet50",
    "resnext50_32x4d",
    "mobilenet_v2",
    "densenet121",
    "shufflenet_v2_x1_0",
    "vit_b_16",
    "swin_t",
    "maxvit_t",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="benchmarks/results/budgets.json")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    models = import_torchvision().models
    rows = []
    for name in MODELS:
        model, inputs = models.get_model(name), torch.randn(1, 3, 224, 224)
        for kind in ("params", "flops"):
            for allocate in ("global", "uniform"):
                for fraction in (0.7, 0.5):
                    plan = sw.make_plan(model, inputs, sw.Budget(**{kind: fraction}), allocate=allocate)
                    left = plan.achieved[kind] / plan.achieved[f"dense_{kind}"]
                    rows.append(
                        {"model": name, "budget": kind, "allocate": allocate, "fraction": fraction, "left": left}
                    )
    about = {
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "command": "python -m benchmarks.budgets",
    }
    Path(options.out).write_text(json.dumps({"environment": about, "rows": rows}, indent=1))
    table = Table(title="Budget not used, as a fraction of the dense total")
    for column in ("model", "largest gap", "overshoots"):
        table.add_column(column, justify="right" if column != "model" else "left")
    for name in MODELS:
        gaps = [r["fraction"] - r["left"] for r in rows if r["model"] == name]
        table.add_row(name, f"{max(gaps):.2%}", str(sum(g < 0 for g in gaps)))
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
