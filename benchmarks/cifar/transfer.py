"""Results from the machine that trains to the repository."""

from __future__ import annotations

import contextlib
import shutil
import tarfile
from pathlib import Path

from benchmarks.cifar.tables import ended, finished
from benchmarks.cifar.work import Place

BASE = "base-validation.safetensors"
FILES_BACK = 8
"""As many as come back at once, of which one holds the results."""


def collect(place: Place, out: Path) -> int:
    """Events, the base and what others go on from in one file, as many checkpoints as come back: that of a base first,
    then the newest."""
    weights = out / "weights"
    weights.mkdir(parents=True, exist_ok=True)
    for earlier in weights.glob("*.safetensors"):
        earlier.unlink()
    whole = out / "results.tgz"
    with tarfile.open(whole.with_suffix(".new"), "w:gz") as file:
        own = ((place.runs / name, name) for name in (BASE, "ends", "logs"))
        for path, name in ((place.results, "cifar"), *own):
            if path.exists():
                file.add(path, arcname=name)
    whole.with_suffix(".new").replace(whole)  # a kill leaves the last one
    unfinished = [f for f in place.runs.glob("*.safetensors") if f.name != BASE]
    first = sorted(unfinished, key=lambda f: (not f.name.startswith("base-"), -_written(f)))[: FILES_BACK - 1]
    for path in first:
        with contextlib.suppress(FileNotFoundError):  # finished by now
            shutil.copyfile(path, weights / path.name)
    print(f"{out}: results.tgz and {len(first)} of {len(unfinished)} weights")
    return 0


def _written(path: Path) -> float:
    """When, as far as it is still there."""
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_mtime
    return 0.0


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
