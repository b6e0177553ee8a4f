"""Every packed kernel on small and odd shapes, against dense products: for compute-sanitizer, which is slow.

    compute-sanitizer --tool memcheck python -m benchmarks.sparse_check
    compute-sanitizer --tool racecheck python -m benchmarks.sparse_check --setting EACH=32

In the kernel of tiles one lane comes to a barrier for its warp, after the warp has met; racecheck does not follow that.
With ``EACH=32`` each lane comes for itself.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.sparse_settings import use
from sapwood.sparse import cuda
from sapwood.sparse.format import pack_weight

NEAR = {torch.bfloat16: 2**-6, torch.float16: 2**-9, torch.float32: 2**-18}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", default="", help="as for benchmarks.sparse_settings")
    parser.add_argument("--shapes", default="40x104,300x4504,1064x4096,700x8192,130x12296,72x20008,50x101")
    parser.add_argument("--batch", default="1,3,8,9,16")
    parser.add_argument("--dtypes", default="bfloat16,float32")
    options = parser.parse_args()
    use(options.setting, Path(tempfile.mkdtemp()))
    shapes = [tuple(map(int, s.split("x"))) for s in options.shapes.split(",")]
    done = 0
    for (rows, columns), name in itertools.product(shapes, options.dtypes.split(",")):
        dtype = getattr(torch, name)
        weight = torch.randn(rows, columns).to(dtype)
        weight[torch.rand(rows, columns) < 0.8] = 0
        packed = pack_weight(weight.cuda())
        if not torch.equal(cuda.unpack(packed).cpu(), weight):
            raise SystemExit(f"{rows}x{columns} {dtype}: unpacked, it is not the same")
        for batch in map(int, options.batch.split(",")):
            x = torch.randn(batch, columns).to(dtype)
            found = cuda.linear(x.cuda(), packed, None).cpu().double()
            wanted = F.linear(x.double(), weight.double())
            off = float((found - wanted).norm() / wanted.norm())
            if not off < NEAR[dtype]:
                raise SystemExit(f"{rows}x{columns} {dtype} batch {batch}: off by {off:.1e}")
            done += 1
    print(f"{done} products are right")


if __name__ == "__main__":
    main()
