"""Tensors in safetensors files: mostly-zero ones as bitmap and values, each with a digest.

Read after a strict look at the header, straight from the mapped file; nothing is allocated until a
tensor's shape is known to be the one the model wants.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import mmap
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sapwood.errors import SapwoodError, explain
from sapwood.storage.atomic import replacing

MAX_HEADER = 64 * 2**20
BITMAP, GAPS, VALUES = "#bitmap", "#gaps", "#values"
_CHUNK, _STEP = 2**17, 2**15
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
    """A tensor as it is stored, and how to unfold it (None when it is stored as it is).

    Where the values lie is told by a bitmap, or by the gaps between them when those take less room.
    """
    flat = tensor.detach().to("cpu").contiguous()
    if flat.numel() < 64 or flat.dtype not in _NAMES or flat.is_complex() or flat.dtype == torch.bool:
        return {name: flat}, None
    bits = flat.view(-1).view(_BITS[flat.element_size()])
    there = (bits != 0).numpy()  # by bits: -0.0 is a value
    places = np.flatnonzero(there)
    stepped = _with_stops(places)
    width, size = flat.element_size(), flat.numel()
    costs = {BITMAP: size / 8 + len(places) * width, GAPS: len(stepped) * (1 + width)}
    how = min(costs, key=lambda k: costs[k])
    if costs[how] > 0.9 * size * width:
        return {name: flat}, None
    if how == BITMAP:
        where = torch.from_numpy(np.packbits(there, bitorder="little"))
    else:
        where, places = torch.from_numpy(np.diff(stepped, prepend=-1).astype(np.uint8)), stepped
    values = flat.view(-1)[torch.from_numpy(places)]
    about = {"shape": list(flat.shape), "dtype": _NAMES[flat.dtype], "by": how[1:]}
    return {name + how: where, name + VALUES: values}, about


def _with_stops(places: np.ndarray) -> np.ndarray:
    """Places at most 255 apart: where a gap is wider, zeros in between are stored, too."""
    gaps = np.diff(places, prepend=-1)
    extra = (gaps - 1) // 255
    if not extra.any():
        return places
    copies = np.repeat(np.arange(len(places)), extra + 1)
    first = np.cumsum(extra + 1) - (extra + 1)
    back = (extra[copies] - (np.arange(len(copies)) - first[copies])) * 255
    stops: np.ndarray = places[copies] - back
    return stops


def unpack_into(result: torch.Tensor, where: torch.Tensor, values: torch.Tensor, by: str, place: str) -> None:
    """Fill a tensor from its values and where they lie, bit for bit."""
    if where.dtype != torch.uint8 or where.dim() != 1 or values.dim() != 1 or values.dtype != result.dtype:
        raise SapwoodError(f"{place}: expected bytes and values; got {where.dtype}, {values.dtype}. Save it anew.")
    kind = _BITS[values.element_size()]
    dense, given = result.view(-1).view(kind).numpy(), values.view(kind).numpy()
    if by == BITMAP[1:]:
        _from_bitmap(dense, where.numpy(), given, place)
    elif by == GAPS[1:]:
        _from_gaps(dense, where.numpy(), given, place)
    else:
        raise SapwoodError(f"{place}: expected a bitmap or gaps; got {by[:40]!r}. Use a newer Sapwood.")


def _from_bitmap(dense: np.ndarray, bits: np.ndarray, given: np.ndarray, place: str) -> None:
    if len(bits) != (len(dense) + 7) // 8:
        need = (len(dense) + 7) // 8
        raise SapwoodError(f"{place}: expected a bitmap of {need} bytes; got {len(bits)}. Save it anew.")
    taken = 0
    for start in range(0, len(dense), _CHUNK):  # small pieces stay in the cache
        piece = dense[start : start + _CHUNK]
        there = np.unpackbits(bits[start // 8 : (start + len(piece) + 7) // 8], count=len(piece), bitorder="little")
        places = np.flatnonzero(there.view(bool))
        if taken + len(places) > len(given):
            raise _miscounted(place, len(given))
        piece[:] = 0
        piece[places] = given[taken : taken + len(places)]
        taken += len(places)
    if taken != len(given):
        raise _miscounted(place, len(given))


def _from_gaps(dense: np.ndarray, gaps: np.ndarray, given: np.ndarray, place: str) -> None:
    if len(gaps) != len(given) or not gaps.all():
        raise _miscounted(place, len(given))
    at = -1  # the last place that is filled
    room = np.empty(min(_STEP, len(gaps)), dtype=np.intp)  # once: new memory costs more than what is done with it
    for start in range(0, len(gaps), _STEP):  # what is cleared is still in the cache when it is filled
        piece = gaps[start : start + _STEP]
        places = room[: len(piece)]
        places[:] = piece
        places[0] += at
        np.cumsum(places, out=places)
        last = int(places[-1])
        if last >= len(dense):
            raise _miscounted(place, len(given))
        dense[at + 1 : last + 1] = 0
        dense[places] = given[start : start + _STEP]
        at = last
    dense[at + 1 :] = 0


def _miscounted(place: str, got: int) -> SapwoodError:
    return SapwoodError(f"{place}: expected as many values as it has places; got {got}. Save it anew.")


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
    """checksum:sha256 of a tensor's dtype, shape and bytes; the checksum is what every load compares."""
    about, raw = _bytes(tensor)
    return f"{checksum(tensor)}:{hashlib.sha256(about + hashlib.sha256(raw).digest()).hexdigest()}"


def checksum(tensor: torch.Tensor) -> str:
    about, raw = _bytes(tensor)
    return f"{zlib.crc32(raw, zlib.crc32(about)):08x}"


def _bytes(tensor: torch.Tensor) -> tuple[bytes, Any]:
    flat = tensor.contiguous().view(-1)
    raw = flat.view(torch.uint8).numpy().data if flat.numel() else b""
    return f"{tensor.dtype}{tuple(tensor.shape)}\0".encode(), raw


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
    starts: Mapping[str, int]
    mapped: mmap.mmap

    def get(self, name: str) -> torch.Tensor:
        """A tensor that lies in the mapped file; what is written to it stays in memory."""
        shape, dtype = self.shapes[name], self.dtypes[name]
        count = math.prod(shape)
        if not count:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self.mapped, dtype=dtype, count=count, offset=self.starts[name]).view(shape)


def require_digest(tensor: torch.Tensor, expected: str, where: str, full: bool = False) -> None:
    """Compare the checksum, which is quick and finds any damage; ``full`` compares the SHA-256 as well."""
    if (digest(tensor) if full else checksum(tensor)) != (expected if full else expected.partition(":")[0]):
        raise SapwoodError(
            f"{where}: expected the digest {expected[:12]}; its bytes give another one. "
            "The file was changed or damaged after it was written: fetch or save it again."
        )


def open_file(path: Path) -> Reader:
    """Map a file after a strict look at its header: sizes, names, offsets."""
    if path.is_dir():
        raise explain("a .safetensors file", "a folder", "Name the file in it.", str(path))
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length % 2**32 == 0x04034B50:
                got = "a zip file, as torch.save writes it"
                raise explain("safetensors", got, "Save it with safetensors.torch.save_file.", str(path))
            if size < 8 or length > min(size - 8, MAX_HEADER):
                raise _damaged(path, f"a header of at most {max(0, min(size - 8, MAX_HEADER)):,} bytes", f"{length:,}")
            raw = file.read(length)
            mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise SapwoodError(f"{path}: could not be read ({error.strerror}). Check the path.") from None
    except ValueError as error:  # it has become shorter just now
        raise _damaged(path, f"{size:,} bytes", str(error)) from None
    header = _header(path, raw)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _damaged(path, "metadata of texts", type(metadata).__name__)
    shapes, dtypes, starts, spans = {}, {}, {}, []
    for name, entry in header.items():
        shape, dtype, (start, stop) = _entry(path, name, entry)
        wanted = math.prod(shape) * dtype.itemsize
        if stop - start != wanted or stop > size - 8 - length:
            raise _damaged(path, f"{wanted:,} bytes for {name[:80]!r}", f"{stop - start:,}, up to byte {stop:,}")
        shapes[name], dtypes[name], starts[name] = shape, dtype, 8 + length + start
        spans.append((start, stop))
    spans.sort()
    ends = [0] + [stop for _, stop in spans]
    if any(start != end for (start, _), end in zip(spans, ends, strict=False)) or ends[-1] != size - 8 - length:
        raise _damaged(path, f"tensors that fill its {size:,} bytes", "gaps, overlaps, or a cut-off end")
    return Reader(path, shapes, dtypes, metadata, starts, mapped)


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
        good = good and (0 not in shape or math.prod(v or 1 for v in shape) < 2**48)
    except (TypeError, KeyError):
        good = False
    if not good:
        raise _damaged(path, f"dtype, shape and offsets for {name[:80]!r}", repr(entry)[:80])
    return tuple(shape), dtype, (offsets[0], offsets[1])


def _damaged(path: Path, expected: str, got: str) -> SapwoodError:
    return SapwoodError(f"{path}: expected {expected}; got {got}. The file is damaged or cut off: save it again.")
