"""What our own work costs: seconds to trace, plan and cut, and peak memory, on this machine.

    python -m benchmarks.cost [--out FILE]

Memory is the process's peak while cutting with almost all channels kept (the worst case): the model
plus what the cut adds, over the size of the model; for weights without data, the whole process. Each
model runs in a process of its own, three times with different budgets; the first is reported as cold
(after a tiny model, so that imports do not count), the slower of the others as warm.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import sapwood as sw
from tests.zoo.torchvision_models import import_torchvision

CASES = ("resnet50", "vit_b_16", "resnet50 on cuda", "vit_b_16 on cuda", "llama 1.1B on meta")


def high_water_bytes() -> int:
    """Peak resident memory of this process."""
    text = Path("/proc/self/status").read_text()
    return int(text.split("VmHWM:")[1].split()[0]) * 1024


def build(case: str) -> tuple[torch.nn.Module, Any]:
    torchvision = import_torchvision()
    if case.startswith("llama"):
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=32000,
            hidden_size=2048,
            intermediate_size=5632,
            num_hidden_layers=22,
            num_attention_heads=32,
            num_key_value_heads=4,
        )
        with torch.device("meta"):
            return LlamaForCausalLM(config), {"input_ids": torch.ones(1, 64, dtype=torch.long), "use_cache": False}
    name, device = case.split()[0], "cuda" if "cuda" in case else "cpu"
    return torchvision.models.get_model(name).to(device), torch.randn(1, 3, 224, 224, device=device)


def measure(case: str) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    if "cuda" in case and not torch.cuda.is_available():
        return {"case": case, "skipped": "no CUDA device"}
    tiny = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    sw.prune(tiny, torch.randn(2, 4), sw.Budget(channels=0.5))  # imports, not the model's memory
    import_torchvision()
    model, inputs = build(case)
    size = sum(t.numel() * t.element_size() for t in model.parameters())
    rounds = []
    for budget in (sw.Budget(channels=0.5), sw.Budget(flops=0.5), sw.Budget(channels=0.95)):
        start = time.perf_counter()
        sw.trace(model, inputs)
        traced = time.perf_counter()
        plan = sw.make_plan(model, inputs, budget)
        if "meta" not in case:
            Path("/proc/self/clear_refs").write_text("5")  # forget the high-water mark
        before = high_water_bytes()
        planned = time.perf_counter()
        small = sw.cut(model, plan)
        done = time.perf_counter()
        # make_plan traces by itself: its time contains a trace
        rounds.append({"trace": traced - start, "trace_and_plan": planned - traced, "cut": done - planned})
        del small
    peak = high_water_bytes()
    growth = peak - before
    result: dict[str, Any] = {"case": case, "params": sum(p.numel() for p in model.parameters()), "rounds": rounds}
    result["total_cold"] = rounds[0]["trace_and_plan"] + rounds[0]["cut"]
    result["total_warm"] = max(r["trace_and_plan"] + r["cut"] for r in rounds[1:])
    if "meta" in case:
        result["peak_gb"] = peak / 1e9
    elif "cuda" not in case:
        result["peak_over_model"] = 1 + growth / size
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="benchmarks/results/cost.json")
    parser.add_argument("--case", help="measure one case in this process and print JSON")
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measure(options.case)))
        return 0
    rows = []
    for case in CASES:
        command = [sys.executable, "-m", "benchmarks.cost", "--case", case]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        rows.append(json.loads(output.splitlines()[-1]))
    where = {
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu_threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "command": "python -m benchmarks.cost",
    }
    Path(options.out).parent.mkdir(parents=True, exist_ok=True)
    Path(options.out).write_text(json.dumps({"environment": where, "rows": rows}, indent=1))
    table = Table(title="Trace, plan and cut: seconds and memory")
    for column in ("model", "parameters", "cold s", "warm s", "peak memory"):
        table.add_column(column, justify="right" if column != "model" else "left")
    for row in rows:
        if "skipped" in row:
            table.add_row(row["case"], row["skipped"], "", "", "")
            continue
        memory = f"{row['peak_over_model']:.2f} x model" if "peak_over_model" in row else ""
        memory = f"{row['peak_gb']:.2f} GB in all" if "peak_gb" in row else memory
        table.add_row(row["case"], f"{row['params']:,}", f"{row['total_cold']:.2f}", f"{row['total_warm']:.2f}", memory)
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
