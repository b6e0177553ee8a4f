"""Results from the machine that trains to the repository."""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path

from benchmarks.cifar.tables import ended, finished
from benchmarks.cifar.work import Place

BASE = "base-validation.safetensors"
FILES_BACK = 6
"""Of which one holds the results; eight come back at once, with what else there is."""


def collect(place: Place, out: Path) -> int:
    """Events and the base in one file, checkpoints as they are, the newest first, as many as come back."""
    weights = out / "weights"
    weights.mkdir(parents=True, exist_ok=True)
    for earlier in weights.glob("*.safetensors"):
        earlier.unlink()
    with tarfile.open(out / "results.tgz", "w:gz") as file:
        if place.results.exists():
            file.add(place.results, arcname="cifar")
        if (place.runs / BASE).exists():
            file.add(place.runs / BASE, arcname=BASE)
        logs = place.runs / "logs"
        if logs.exists():
            file.add(logs, arcname="logs")
    unfinished = [f for f in place.runs.glob("*.safetensors") if f.name != BASE]
    kept = sorted(unfinished, key=lambda f: -f.stat().st_mtime)
    for path in kept[: FILES_BACK - 1]:
        shutil.copyfile(path, weights / path.name)
    print(f"{out}: results.tgz and {len(kept[: FILES_BACK - 1])} of {len(kept)} weights")
    return 0


def merge(file: Path, kept: Path) -> int:
    """Events of finished runs, and of speed, and the base; a finished run that is kept already is not replaced."""
    kept.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file) as found:
        for member in sorted(found.getmembers(), key=lambda m: m.name):
            name, content = Path(member.name).name, found.extractfile(member)
            if content is None or not (name == BASE or name.endswith(".jsonl")):
                continue
            data, there = content.read(), kept / name
            new = not there.exists() if name == BASE else ended(data.decode()) and not finished(there)
            if new or name.startswith("speed-"):
                there.write_bytes(data)
                print(name)
    return 0
