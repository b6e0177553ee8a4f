"""Tensors in safetensors files: mostly-zero ones as bitmap and values, each with a digest.

Read after a strict look at the header, by the safetensors library, straight from the mapped file;
nothing is allocated until a tensor's shape is known to be the one the model wants.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from sapwood.errors import SapwoodError
from sapwood.storage.atomic import replacing

MAX_HEADER = 64 * 2**20
BITMAP, VALUES = "#bitmap", "#values"
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def pack(name: str, tensor: torch.Tensor) -> tuple[dict[str, torch.Tensor], dict[str, Any] | None]:
    """A tensor as it is stored, and how to unfold it (None when it is stored as it is)."""
    flat = tensor.detach().to("cpu").contiguous()
    if flat.numel() < 64 or flat.dtype not in _NAMES or flat.is_complex() or flat.dtype == torch.bool:
        return {name: flat}, None
    bits = flat.view(-1).view(_BITS[flat.element_size()])
    there = (bits != 0).numpy()  # by bits: -0.0 is a value
    kept = int(np.count_nonzero(there))
    if len(there) / 8 + kept * flat.element_size() > 0.9 * flat.numel() * flat.element_size():
        return {name: flat}, None
    bitmap = torch.from_numpy(np.packbits(there, bitorder="little"))
    values = flat.view(-1)[torch.from_numpy(np.flatnonzero(there))]
    return {name + BITMAP: bitmap, name + VALUES: values}, {"shape": list(flat.shape), "dtype": _NAMES[flat.dtype]}


def unpack(bitmap: torch.Tensor, values: torch.Tensor, shape: tuple[int, ...], where: str) -> torch.Tensor:
    """The dense tensor behind a bitmap and its values, bit for bit."""
    size = int(np.prod(shape, dtype=np.int64))
    if bitmap.dtype != torch.uint8 or bitmap.dim() != 1 or len(bitmap) != (size + 7) // 8 or values.dim() != 1:
        got = tuple(bitmap.shape)
        raise SapwoodError(f"{where}: expected a bitmap of {(size + 7) // 8} bytes; got {got}. Save it anew.")
    places = np.flatnonzero(np.unpackbits(bitmap.numpy(), count=size, bitorder="little"))
    if len(places) != len(values):
        raise SapwoodError(f"{where}: expected {len(places)} values for its bitmap; got {len(values)}. Save it anew.")
    result = torch.zeros(size, dtype=values.dtype)
    kind = _BITS[values.element_size()]
    result.view(kind).numpy()[places] = values.view(kind).numpy()
    return result.view(shape)


def encode(tensor: torch.Tensor) -> dict[str, Any]:
    """A small tensor as text."""
    flat = tensor.detach().cpu().contiguous()
    raw = flat.view(-1).view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return {"shape": list(flat.shape), "dtype": _NAMES[flat.dtype], "data": base64.b64encode(raw).decode()}


def decode(about: Mapping[str, Any], where: str) -> torch.Tensor:
    try:
        dtype, shape = _DTYPES[about["dtype"]], [int(n) for n in about["shape"]]
        raw = bytearray(base64.b64decode(about["data"], validate=True))
        if not raw:
            return torch.empty(shape, dtype=dtype) if 0 in shape else torch.frombuffer(raw, dtype=dtype)
        return torch.frombuffer(raw, dtype=dtype).view(shape)
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        raise SapwoodError(f"{where}: expected a small buffer as text; got {str(error)[:80]}. Save it anew.") from None


def digest(tensor: torch.Tensor) -> str:
    flat = tensor.contiguous().view(-1)
    raw = flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)
    about = f"{tensor.dtype}{tuple(tensor.shape)}".encode()
    return hashlib.sha256(about + b"\0" + hashlib.sha256(raw.numpy().data).digest()).hexdigest()


def write(path: Path, stored: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file, whole or not at all.

    The library's own writer puts metadata in a random order; ours gives the same bytes every time, and
    streams tensors to disk without a copy.
    """
    names = sorted(stored, key=lambda n: (-stored[n].dtype.itemsize, n))  # wide ones first keeps all aligned
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
    start = 0
    for name in names:
        stop = start + stored[name].numel() * stored[name].element_size()
        header[name] = {"dtype": _NAMES[stored[name].dtype], "shape": list(stored[name].shape)}
        header[name]["data_offsets"] = [start, stop]
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER:
        raise SapwoodError(f"{path}: expected a header of at most {MAX_HEADER:,} bytes; got {len(text):,}.")
    with replacing(path) as temporary, temporary.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            flat = stored[name].detach().cpu().contiguous().view(-1)
            if flat.numel():
                file.write(flat.view(torch.uint8).numpy().data)


@dataclass(frozen=True)
class Reader:
    """A safetensors file whose header has been checked."""

    path: Path
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, torch.dtype]
    metadata: Mapping[str, str]
    file: Any

    def get(self, name: str, expected: str | None = None) -> torch.Tensor:
        """A tensor that lies in the mapped file; its digest is compared when one is given."""
        try:
            tensor: torch.Tensor = self.file.get_tensor(name)
        except (SafetensorError, OSError, ValueError, KeyError) as error:
            raise SapwoodError(f"{self.path}: {name!r} could not be read ({str(error)[:120]}). Save it anew.") from None
        if expected is not None and digest(tensor) != expected:
            raise SapwoodError(
                f"{self.path}: expected {name!r} with digest {expected[:12]}; its bytes give another one. "
                "The file was changed or damaged after it was written: fetch or save it again."
            )
        return tensor


def open_file(path: Path) -> Reader:
    """Check a header by itself before the library sees it: sizes, names, offsets."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER):
                raise _damaged(path, f"a header of at most {max(0, min(size - 8, MAX_HEADER)):,} bytes", f"{length:,}")
            raw = file.read(length)
    except OSError as error:
        raise SapwoodError(f"{path}: could not be read ({error.strerror}). Check the path.") from None
    header = _header(path, raw)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _damaged(path, "metadata of texts", type(metadata).__name__)
    shapes, dtypes, spans = {}, {}, []
    for name, entry in header.items():
        shape, dtype, (start, stop) = _entry(path, name, entry)
        wanted = int(np.prod([1, *shape], dtype=object)) * dtype.itemsize
        if stop - start != wanted or stop > size - 8 - length:
            raise _damaged(path, f"{wanted:,} bytes for {name[:80]!r}", f"{stop - start:,}, up to byte {stop:,}")
        shapes[name], dtypes[name] = shape, dtype
        spans.append((start, stop))
    spans.sort()
    ends = [0] + [stop for _, stop in spans]
    if any(start != end for (start, _), end in zip(spans, ends, strict=False)) or ends[-1] != size - 8 - length:
        raise _damaged(path, f"tensors that fill its {size:,} bytes", "gaps, overlaps, or a cut-off end")
    try:
        mapped = safe_open(path, framework="pt").__enter__()  # type: ignore[no-untyped-call]
    except (SafetensorError, OSError, ValueError) as error:
        raise _damaged(path, "a safetensors file", str(error)[:120]) from None
    return Reader(path, shapes, dtypes, metadata, mapped)


def _header(path: Path, raw: bytes) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) != len(pairs):
            raise _damaged(path, "each name once in the header", "one twice")
        return dict(pairs)

    try:
        header = json.loads(raw, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, "a safetensors header", f"{type(error).__name__} ({str(error)[:80]})") from None
    if not isinstance(header, dict):
        raise _damaged(path, "a safetensors header", type(header).__name__)
    return header


def _entry(path: Path, name: str, entry: Any) -> tuple[tuple[int, ...], torch.dtype, tuple[int, int]]:
    if not name or len(name) > 1000 or set(name) & set("/\\\0\n") or ".." in name:
        raise _damaged(path, "names of tensors", repr(name)[:80])
    try:
        shape, offsets = entry["shape"], entry["data_offsets"]
        dtype = _DTYPES[entry["dtype"]]
        good = isinstance(shape, list) and len(shape) <= 16 and len(offsets) == 2
        good = good and all(type(v) is int and 0 <= v < 2**48 for v in [*shape, *offsets])
    except (TypeError, KeyError):
        good = False
    if not good:
        raise _damaged(path, f"dtype, shape and offsets for {name[:80]!r}", repr(entry)[:80])
    return tuple(shape), dtype, (offsets[0], offsets[1])


def _damaged(path: Path, expected: str, got: str) -> SapwoodError:
    return SapwoodError(f"{path}: expected {expected}; got {got}. The file is damaged or cut off: save it again.")
