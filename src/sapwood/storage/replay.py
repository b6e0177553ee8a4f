"""A dense checkpoint and a plan are enough: cut the file, no model needed."""

from __future__ import annotations

from pathlib import Path

import torch

from sapwood.errors import SapwoodError, explain
from sapwood.storage.bundle import write_bundle
from sapwood.storage.record import MAX_BYTES, Record, read_record
from sapwood.storage.tensors import Reader, open_file
from sapwood.surgery.cut import sliced


def read_plan(path: str | Path) -> Record:
    """A plan.json, checked."""
    path = Path(path)
    try:
        if path.stat().st_size > MAX_BYTES:
            raise explain(f"at most {MAX_BYTES:,} bytes", f"{path.stat().st_size:,}", "This is no plan.", str(path))
        return read_record(path.read_bytes(), str(path))
    except OSError as error:
        raise SapwoodError(f"{path}: could not be read ({error.strerror}). Check the path.") from None


def cut_file(plan: str | Path, dense: str | Path, out: str | Path) -> Path:
    """Cut a dense safetensors file by a plan: the same bytes that ``save`` writes for the cut model."""
    record, reader, out = read_plan(plan), open_file(Path(dense)), Path(out)
    names = _find(record, reader)
    decided = record.plan()
    tensors: dict[str, torch.Tensor] = {}
    for name, stored in names.items():
        tensors[name] = sliced(name, reader.get(stored), decided)
    write_bundle(out, record, tensors, compress=True, shard_bytes=5 * 10**9)
    return out


def _find(record: Record, reader: Reader) -> dict[str, str]:
    """For each tensor of the plan, its name in the dense file (tied weights may go by another one)."""
    found = {}
    for name, shape in record.before.items():
        if name in record.buffers:
            continue
        also = [alias for alias, first in record.aliases.items() if first == name]
        stored = next((n for n in [name, *also] if n in reader.shapes), None)
        if stored is None:
            raise explain(f"a tensor {name!r}", "none", "The plan was made for another model.", str(reader.path))
        if reader.shapes[stored] != shape:
            got = str(reader.shapes[stored])
            raise explain(f"{name!r} of shape {shape}", got, "The plan was made for another model.", str(reader.path))
        found[name] = stored
    extra = sorted(set(reader.shapes) - set(found.values()) - set(record.aliases))
    if extra:
        raise explain(
            "only the plan's tensors", f"also {extra[:3]}", "The plan is for another model.", str(reader.path)
        )
    return found
