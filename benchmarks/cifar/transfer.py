"""Results from the machine that trains to the repository."""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path

from benchmarks.cifar.tables import ended, finished
from benchmarks.cifar.work import Place

FILES_BACK = 6
"""Of which one holds the results; eight come back at once, with what else there is."""


def collect(place: Place, out: Path) -> int:
    """Events in one file, checkpoints and bases as they are, the newest first, as many as come back."""
    weights = out / "weights"
    weights.mkdir(parents=True, exist_ok=True)
    for earlier in weights.glob("*.safetensors"):
        earlier.unlink()
    with tarfile.open(out / "results.tgz", "w:gz") as file:
        if place.results.exists():
            file.add(place.results, arcname="cifar")
        logs = place.runs / "logs"
        if logs.exists():
            file.add(logs, arcname="logs")
    kept = sorted(place.runs.glob("*.safetensors"), key=lambda f: (not f.name.startswith("base-"), -f.stat().st_mtime))
    for path in kept[: FILES_BACK - 1]:
        shutil.copyfile(path, weights / path.name)
    print(f"{out}: results.tgz and {len(kept[: FILES_BACK - 1])} of {len(kept)} weights")
    return 0


def merge(file: Path, kept: Path) -> int:
    """Events of finished runs, and of speed; a finished run that is kept already is not replaced."""
    kept.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file) as found:
        for member in sorted(found.getmembers(), key=lambda m: m.name):
            name, content = Path(member.name).name, found.extractfile(member)
            if content is None or not name.endswith(".jsonl"):
                continue
            data, there = content.read(), kept / name
            if name.startswith("speed-") or (ended(data.decode()) and not finished(there)):
                there.write_bytes(data)
                print(name)
    return 0
