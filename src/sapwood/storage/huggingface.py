"""transformers models: ``save_pretrained`` and ``from_pretrained`` for pruned ones.

The configuration keeps the dense sizes, which build the model, and says under ``sapwood`` what was cut.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sapwood.capture.skeleton import rebuild, unwrap
from sapwood.errors import explain
from sapwood.storage import factories
from sapwood.storage.bundle import describe, require_model
from sapwood.storage.loading import load_record
from sapwood.storage.record import Record, read_record
from sapwood.storage.tensors import Reader, open_file
from sapwood.surgery.cut import set_attributes
from sapwood.types import Plan


def save_pretrained(model: nn.Module, plan: Plan, folder: str | Path, **options: Any) -> Path:
    """What ``model.save_pretrained`` writes, with a configuration that says what was cut."""
    plain: Any = unwrap(model)
    if not hasattr(plain, "save_pretrained") or not hasattr(plain, "config"):
        raise explain("a transformers model", type(plain).__name__, "Use sw.save for other models.", "save_pretrained")
    record = describe(plain, plan)
    plain.config.sapwood = json.loads(record.to_json())
    try:
        plain.save_pretrained(folder, **options)
    finally:
        del plain.config.sapwood
    return Path(folder)


def from_pretrained(folder: str | Path) -> nn.Module:
    """The pruned model in a folder that ``save_pretrained`` wrote; dense weights are never held."""
    folder = Path(folder)
    config = folder / "config.json"
    if not config.exists():
        raise explain("config.json", "none", "Check the path.", str(folder))
    body = json.loads(config.read_text())
    if not isinstance(body.get("sapwood"), dict):
        raise explain("a configuration that says what was cut", "none", "Use transformers itself.", str(config))
    record = read_record(json.dumps(body["sapwood"]), str(config))
    with torch.device("meta"):
        dense = factories.build(record.model)
    require_model(dense, record, str(folder))
    readers = _readers(folder)
    plan = record.plan()

    def fill(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return load_record(name, record, folder) if name in record.buffers else _read(name, record, readers)

    small = rebuild(dense, fill)
    set_attributes(small, plan)
    return small.eval()


def _readers(folder: Path) -> dict[str, Reader]:
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise explain("model.safetensors", "none", "Save with safetensors.", str(folder))
    return {name: reader for reader in map(open_file, files) for name in reader.shapes}


def _read(name: str, record: Record, readers: dict[str, Reader]) -> torch.Tensor:
    also = [alias for alias, first in record.aliases.items() if first == name]
    stored = next((n for n in [name, *also] if n in readers), None)
    if stored is None:
        raise explain(f"a tensor {name!r}", "none", "Save the model anew.", "from_pretrained")
    if readers[stored].shapes[stored] != record.after[name]:
        got = str(readers[stored].shapes[stored])
        raise explain(f"{name!r} of shape {record.after[name]}", got, "Save the model anew.", "from_pretrained")
    return readers[stored].get(stored).clone()
