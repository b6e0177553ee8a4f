"""The curves of ``benchmarks.latency --part sweep`` as a picture (needs matplotlib).

python -m benchmarks.plot_latency benchmarks/results/latency_cpu_onnxruntime.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt

LINES = {
    "plain": ("the same share of every group", "tab:red"),
    "auto": ("round_to='auto'", "tab:blue"),
    "latency": ("latency budget of the same share", "tab:green"),
    "torch_pruning": ("Torch-Pruning", "tab:gray"),
}


def main() -> None:
    path = Path(sys.argv[1])
    found = json.loads(path.read_text())["sweep"]
    figure, axes = plt.subplots(1, len(found), figsize=(4.2 * len(found), 3.6), squeeze=False)
    for axis, (name, row) in zip(axes[0], found.items(), strict=True):
        for kind, (label, colour) in LINES.items():
            points = [(int(k[:-1]), v[kind]) for k, v in row["speed"].items() if isinstance(v.get(kind), float)]
            if points:
                axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=label, color=colour)
        axis.axhline(1.0, color="black", linewidth=0.8, linestyle=":")
        axis.set_yscale("log", base=2)
        axis.set_yticks([1, 2, 4, 8], ["1x", "2x", "4x", "8x"])
        axis.set_title(f"{name}\n{row['form']}", fontsize=9)
        axis.set_xlabel("% of channels removed, or of the latency")
    axes[0][0].set_ylabel("speed against dense")
    axes[0][0].legend(fontsize=7)
    figure.suptitle(f"{row['about']['device']}, {row['about']['dtype']}, {row['about']['date']}", fontsize=9)
    figure.tight_layout()
    figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
    print(f"Wrote {path.with_suffix('.svg')}")


if __name__ == "__main__":
    main()
