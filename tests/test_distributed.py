"""Two real processes (gloo): masks, shapes and weights agree, and equal those of one process on the same batches."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

WORKER = Path(__file__).parent / "distributed_worker.py"


def launch(what: str, processes: int, folder: Path) -> list[dict[str, Any]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    out = folder / f"{what}-{processes}"
    root = str(WORKER.parents[1])
    base = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    base["PYTHONPATH"] = os.pathsep.join([root, str(Path(root) / "src"), base.get("PYTHONPATH", "")])
    ranks = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(processes)}
    running = []
    for rank in range(processes):
        env = base | (ranks | {"RANK": str(rank), "LOCAL_RANK": str(rank)} if processes > 1 else {})
        command = [sys.executable, str(WORKER), what, str(out)]
        running.append(subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True))
    for process in running:
        _, errors = process.communicate(timeout=200)
        assert process.returncode == 0, errors[-3000:]
    return [json.loads(Path(f"{out}.{rank}.json").read_text()) for rank in range(processes)]


@pytest.mark.parametrize("what", ["masked", "sharded", "cubic", "wanda", "channels"])
def test_two_processes_agree_and_equal_one(what: str, tmp_path: Path) -> None:
    first, second = launch(what, 2, tmp_path)
    assert first["kind"] != "DistributedType.NO" and {first["rank"], second["rank"]} == {0, 1}
    assert first["digest"] == second["digest"]
    assert first["shapes"] == second["shapes"] and first["zeros"] == second["zeros"]
    (alone,) = launch("masked" if what == "sharded" else what, 1, tmp_path)
    assert alone["shapes"] == first["shapes"] and alone["zeros"] == first["zeros"]
    if what != "channels":
        assert sum(first["zeros"].values()) == round(0.8 * (8 * 9 + 16 * 72 + 4 * 16 * 36))
    for name, values in alone["weights"].items():
        assert first["weights"][name] == pytest.approx(values, abs=2e-5), name
