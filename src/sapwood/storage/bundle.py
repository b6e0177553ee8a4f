"""``save``: a pruned model on disk, without pickle; and the reader of what was written.

A bundle is a folder with ``model.safetensors`` and ``plan.json``, or one ``.safetensors`` file. The plan
also lies in the weights file's metadata, so that one rename replaces both at once.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import sapwood.version
from sapwood.capture.run import is_meta
from sapwood.capture.skeleton import named_tensors, unwrap
from sapwood.errors import explain
from sapwood.masking.hold import noted_masks
from sapwood.sparse.linear import packed_layers, unpack
from sapwood.storage import factories
from sapwood.storage.atomic import write_text
from sapwood.storage.examples import describe_inputs
from sapwood.storage.memory import roomy
from sapwood.storage.record import MAX_BYTES, Record, from_plan, read_record
from sapwood.storage.tensors import (
    VALUES,
    Reader,
    digest,
    encode,
    open_file,
    pack,
    require_digest,
    unpack_into,
    write,
)
from sapwood.types import CheckResult, Plan

WEIGHTS, INDEX, PLAN = "model.safetensors", "model.safetensors.index.json", "plan.json"
KEY = "sapwood"
_SHARD = re.compile(r"model-[0-9a-f]{8}-\d{5}-of-\d{5}\.safetensors")
_SMALL, _CUT = 2**16, 2**24
"""Bytes of a buffer outside the state_dict that the plan carries: any small one, and those that were cut."""
_BATCH = 2**18
"""Values that one thread fills at a time, at least."""


def save(
    path: str | Path,
    model: nn.Module,
    plan: Plan | None = None,
    *,
    check: CheckResult | None = None,
    factory: str | None = None,
    arguments: Mapping[str, Any] | None = None,
    example_inputs: Any = None,
    compress: bool = True,
    shard_bytes: int = 5 * 10**9,
) -> Path:
    """Write a cut or masked model; what was there before stays until all is written.

    A cut model needs the plan it was cut by; a masked one (and a dense one) needs none.

    ``factory`` (such as ``"torchvision:resnet50"``, with ``arguments``) lets ``load`` build the model by
    itself; transformers models name their own. Mostly-zero tensors are stored compressed.
    """
    path, plan = Path(path), plan or Plan({}, {}, {})
    model = unwrap(model)
    packed = packed_layers(model)
    if packed:
        model = unpack(model)
    if is_meta(model):
        raise explain("weights with values", "weights on the meta device", "Load the weights first.", "save")
    record = describe(
        model,
        plan,
        about=factories.describe(model, factory, arguments),
        inputs=None if example_inputs is None else describe_inputs(example_inputs),
        packed=packed,
        check=None if check is None else _plain_check(check),
    )
    write_bundle(path, record, _persistent(model), compress, shard_bytes)
    return path


def describe(model: nn.Module, plan: Plan, about: Mapping[str, Any] | None = None, **rest: Any) -> Record:
    """The record of a cut model and its plan."""
    persistent = _persistent(model)
    loose = {n: t for n, t in named_tensors(model).items() if n not in persistent}
    shown = {**persistent, **{n: t for n, t in loose.items() if n in plan.keep}}
    record = from_plan(
        plan,
        before={n: tuple(plan.shapes.get(n, t.shape)) for n, t in shown.items()},
        after={n: tuple(t.shape) for n, t in shown.items()},
        buffers={n: encode(t) for n, t in loose.items() if t.nbytes <= (_CUT if n in plan.keep else _SMALL)},
        aliases=_aliases(model, persistent),
        masks={n: pattern for n, pattern in noted_masks(model).items() if n in shown},
        versions={"sapwood": sapwood.version.__version__, "torch": torch.__version__},
        model=about or factories.describe(model, None, None),
        **rest,
    )
    _require_cut(record, plan)
    return record


def write_bundle(
    path: Path, record: Record, tensors: Mapping[str, torch.Tensor], compress: bool, shard_bytes: int
) -> None:
    """Pack, digest and write tensors under a record; one file, or shards with an index."""
    stored: dict[str, torch.Tensor] = {}
    folded: dict[str, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        parts, how = pack(name, tensor) if compress else ({name: tensor.detach().cpu().contiguous()}, None)
        stored |= parts
        if how is not None:
            folded[name] = how
    record = replace(record, compressed=folded, digests={n: digest(t) for n, t in sorted(stored.items())})
    text = record.to_json()
    if len(text) > MAX_BYTES:
        raise explain(f"a plan of at most {MAX_BYTES:,} bytes", f"{len(text):,}", "Save fewer tensors.", "save")
    read_record(text, "save")  # what is written can be read again
    total = sum(t.numel() * t.element_size() for t in stored.values())
    if path.suffix == ".safetensors":
        write(path, stored, {"format": "pt", KEY: text})
        return
    if total <= shard_bytes:
        write(path / WEIGHTS, stored, {"format": "pt", KEY: text})
        _forget(path, keep={WEIGHTS})
    else:
        _write_shards(path, stored, text, total, shard_bytes)
    write_text(path / PLAN, record.to_json(pretty=True))


def _write_shards(path: Path, stored: dict[str, torch.Tensor], text: str, total: int, limit: int) -> None:
    """Shards carry a digest in their names, so that new ones never overwrite old ones; the index comes last."""
    shards: list[dict[str, torch.Tensor]] = [{}]
    filled = 0
    for name, tensor in stored.items():
        size = tensor.numel() * tensor.element_size()
        if shards[-1] and filled + size > limit:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += size
    tag = hashlib.sha256(text.encode()).hexdigest()[:8]
    names = [f"model-{tag}-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        write(path / name, shard, {"format": "pt"})
    places = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    index = {"metadata": {"total_size": total, KEY: text}, "weight_map": places}
    write_text(path / INDEX, json.dumps(index, indent=1))
    _forget(path, keep={INDEX, *names})


def _forget(path: Path, keep: set[str]) -> None:
    """Remove weights of an earlier save, after the new ones are in place."""
    for old in [*path.glob("model*.safetensors"), path / INDEX]:
        if old.name not in keep and (old.name in (WEIGHTS, INDEX) or _SHARD.fullmatch(old.name)):
            with contextlib.suppress(OSError):
                old.unlink()


class Bundle:
    """An opened bundle: its record, and tensors read when asked for."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.readers: dict[str, Reader] = {}
        single = self.path / WEIGHTS if self.path.is_dir() else self.path
        if self.path.is_dir() and not single.exists() and (self.path / INDEX).exists():
            text = self._open_shards()
        else:
            if not single.exists():
                raise explain(f"a bundle ({WEIGHTS} or {INDEX})", "none", "Check the path.", str(self.path))
            reader = open_file(single)
            self.readers = dict.fromkeys(reader.shapes, reader)
            text = reader.metadata.get(KEY, "")
        if not text:
            raise explain("a plan in the file's metadata", "none", "It was not written by Sapwood.", str(single))
        self.record = read_record(text, str(self.path))
        self._require_consistent()

    def _open_shards(self) -> str:
        index = self.path / INDEX
        if index.stat().st_size > 2 * MAX_BYTES:
            raise explain("an index of reasonable size", f"{index.stat().st_size:,} bytes", "Save it anew.", str(index))
        try:
            body = json.loads(index.read_text())
            places, text = body["weight_map"], body["metadata"][KEY]
            good = isinstance(text, str) and all(isinstance(v, str) for v in places.values())
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError):
            good = False
        if not good:
            raise explain("an index of shards", "something else", "The file is damaged: save it anew.", str(index))
        for name in set(places.values()):
            if Path(name).name != name or not name.endswith(".safetensors"):
                raise explain("shards beside the index", repr(name)[:80], "The file is hostile.", str(index))
        opened = {name: open_file(self.path / name) for name in sorted(set(places.values()))}
        self.readers = {t: opened[name] for t, name in places.items()}
        return str(text)

    def _require_consistent(self) -> None:
        """What the record says and what the files hold must be the same thing."""
        record = self.record
        stored = set()
        for name, shape in record.after.items():
            how = record.compressed.get(name)
            if name in record.buffers:
                continue
            parts = self._parts(name)
            stored.update(parts)
            for part in parts:
                if part not in self.readers or part not in self.readers[part].shapes:
                    raise explain(f"{part!r} in the file", "nothing of that name", "Save it anew.", str(self.path))
            if how is None and self.readers[name].shapes[name] != shape:
                got = self.readers[name].shapes[name]
                raise explain(f"{name!r} of shape {shape}", str(got), "The bundle is damaged.", str(self.path))
            if how is not None and how.get("shape") != list(shape):
                raise explain(f"{name!r} of shape {shape}", repr(how)[:80], "The bundle is damaged.", str(self.path))
        if set(self.readers) != stored or set(record.digests) != stored:
            odd = sorted((set(self.readers) ^ stored) | (set(record.digests) ^ stored))[:3]
            raise explain("exactly the plan's tensors", f"others: {odd}", "Save it anew.", str(self.path))

    def tensors(
        self, verify: bool | str = True, into: Mapping[str, torch.Tensor] | None = None
    ) -> dict[str, torch.Tensor]:
        """All of them, in memory of their own or in what is given; every digest is compared before that is filled.

        Digests, copies and unpacking share the cores.
        """
        names = [n for n in self.record.after if n not in self.record.buffers]
        mapped = {name: self._mapped(name) for name in names}
        ready = into or {}
        made = {name: ready[name] if self._fits(name, ready) else self._room(name) for name in names}
        meanwhile = False if ready else verify  # memory of their own is thrown away when one is damaged

        def check(batch: list[str]) -> None:
            for name in batch:
                self._verify(mapped[name], verify)

        def fill(batch: list[str]) -> None:
            for name in batch:
                self._fill(name, made[name], mapped[name], meanwhile)

        batches = self._batches(names)
        with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
            if verify and ready:
                list(pool.map(check, batches))
            list(pool.map(fill, batches))
        return made

    def _batches(self, names: list[str]) -> list[list[str]]:
        """Small tensors go together: handing one to a thread takes longer than filling it."""
        batches: list[list[str]] = [[]]
        filled = 0
        for name in names:
            if filled >= _BATCH:
                batches.append([])
                filled = 0
            batches[-1].append(name)
            filled += math.prod(self.record.after[name])
        return batches

    def tensor(self, name: str, verify: bool | str = True) -> torch.Tensor:
        """One tensor, in memory of its own."""
        made = self._room(name)
        self._fill(name, made, self._mapped(name), verify)
        return made

    def _fits(self, name: str, ready: Mapping[str, torch.Tensor]) -> bool:
        """Whether memory that is there already can take a tensor as it is stored."""
        part = name if name not in self.record.compressed else name + VALUES
        found = ready.get(name)
        return (
            found is not None
            and found.device.type == "cpu"
            and found.is_contiguous()
            and tuple(found.shape) == tuple(self.record.after[name])
            and found.dtype == self.readers[part].dtypes[part]
        )

    def _room(self, name: str) -> torch.Tensor:
        part = name if name not in self.record.compressed else name + VALUES
        return roomy(torch.empty(self.record.after[name], dtype=self.readers[part].dtypes[part]))

    def _mapped(self, name: str) -> list[tuple[str, torch.Tensor]]:
        return [(part, self.readers[part].get(part)) for part in self._parts(name)]

    def _parts(self, name: str) -> list[str]:
        how = self.record.compressed.get(name)
        return [name] if how is None else [f"{name}#{how.get('by')}", name + VALUES]

    def _verify(self, parts: list[tuple[str, torch.Tensor]], verify: bool | str) -> None:
        for part, tensor in parts:
            require_digest(tensor, self.record.digests[part], f"{self.path}, {part!r}", verify == "full")

    def _fill(self, name: str, made: torch.Tensor, parts: list[tuple[str, torch.Tensor]], verify: bool | str) -> None:
        if verify:
            self._verify(parts, verify)
        if len(parts) == 2:
            by = str(self.record.compressed[name].get("by"))
            unpack_into(made, parts[0][1], parts[1][1], by, f"{self.path}, {name!r}")
        elif made.numel():  # by numpy: torch would start a team of threads in each of ours
            raw = made.view(-1).view(torch.uint8), parts[0][1].contiguous().view(-1).view(torch.uint8)
            np.copyto(raw[0].numpy(), raw[1].numpy())


def _persistent(model: nn.Module) -> dict[str, torch.Tensor]:
    """Tensors of the state_dict, each once, under their first name."""
    names = set(model.state_dict(keep_vars=True))
    return {n: t for n, t in named_tensors(model).items() if n in names}


def _aliases(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    first = {id(t): n for n, t in tensors.items()}
    everything = model.state_dict(keep_vars=True)
    return {n: first[id(t)] for n, t in everything.items() if isinstance(t, torch.Tensor) and first.get(id(t), n) != n}


def _require_cut(record: Record, plan: Plan) -> None:
    for name, dims in plan.keep.items():
        if name not in record.after:
            raise explain(f"a tensor {name!r}", "none", "Pass the plan this model was cut by.", "save")
        wanted = [len(dims.get(d, range(n))) for d, n in enumerate(plan.shapes[name])]
        if list(record.after[name]) != wanted:
            got = record.after[name]
            raise explain(f"{name!r} of shape {tuple(wanted)}", str(got), "Pass the cut model and its plan.", "save")


def require_model(model: nn.Module, record: Record, where: str) -> None:
    tensors = _persistent(model)
    kind = type(model).__name__
    for name in record.before:
        if name in record.buffers:
            continue
        if name not in tensors:
            raise explain(f"a model with {name!r}", f"{kind} without", "Build the model that was pruned.", where)
        if tuple(tensors[name].shape) != record.before[name]:
            got = tuple(tensors[name].shape)
            raise explain(
                f"{name!r} of shape {record.before[name]} before the cut", str(got), "Build it as it was pruned.", where
            )
    extra = sorted(set(tensors) - set(record.before))
    if extra:
        raise explain("a model whose tensors are all in the bundle", f"also {extra[:3]}", "Build it as it was.", where)
    for name in record.keep:
        if name not in record.before:
            raise explain(f"a shape for {name!r}", "none", "The bundle is damaged.", where)


def _plain_check(check: CheckResult) -> dict[str, Any]:
    return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(check).items()}


__all__ = ["Bundle", "save", "write_bundle"]
