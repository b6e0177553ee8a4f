"""Which form of zeros pays, over shapes, batch sizes and sparsities: the table behind the claims.

    python -m benchmarks.forms --device cuda [--out benchmarks/results/forms.json]

All forms of one point take turns with dense in one run. On a GPU each runs as a CUDA graph over as many copies of the
weights as fill the cache twice. Every output is checked against a dense product with the same zeros first. Points with
very slow forms get few rounds; the intervals say how sure they are.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import sys
import time
from pathlib import Path

from rich.console import Console

from sapwood.cli.bench import parse_batches, parse_matmul, summary
from sapwood.cli.common import parse_fractions
from sapwood.measurement.forms import FORMS
from sapwood.pipeline.bench import bench_matmul
from sapwood.reporting.speed import note_words, skipped_words, speed_table, summary_words


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="benchmarks/results/forms.json")
    parser.add_argument("--device", default=None)
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--shapes", default="14336x4096,4096x4096,8192x8192")
    parser.add_argument("--batch", default="1,16,64,256,1024,4096")
    parser.add_argument("--sparsity", default="0.5,0.9,0.99")
    parser.add_argument("--seconds", type=float, default=0.3)
    parser.add_argument("--forms", default=",".join(FORMS), help="leave some out, where one takes long to compile")
    options = parser.parse_args()
    console, start = Console(width=170), time.perf_counter()
    results = []
    for shape in options.shapes.split(","):
        found = bench_matmul(
            *parse_matmul(shape),
            parse_batches(options.batch),
            parse_fractions(options.sparsity, "--sparsity"),
            options.device,
            options.dtype,
            None,
            options.seconds,
            lambda what, done, total, shape=shape: print(f"{shape}: {done}/{total} {what}", file=sys.stderr),
            options.forms.split(","),
        )
        console.print(speed_table(found))
        for line in (*summary_words(found), *skipped_words(found), *note_words(found)):
            console.print(line, highlight=False, markup=False)
        results.append({**summary(found), "took_seconds": time.perf_counter() - start})
        about = {
            "date": datetime.date.today().isoformat(),
            "python": platform.python_version(),
            "command": "python -m benchmarks.forms " + " ".join(sys.argv[1:]),
            **found.machine,
        }
        Path(options.out).parent.mkdir(parents=True, exist_ok=True)
        Path(options.out).write_text(json.dumps({"environment": about, "shapes": results}, indent=1) + "\n")
    print(f"{time.perf_counter() - start:.0f} s", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
