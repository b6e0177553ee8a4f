"""CUDA kernels from source: compiled when first used, kept on disk, launched on the stream of the caller.

NVRTC comes with PyTorch, so that no compiler is needed on the machine.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from sapwood.cache import cache_folder
from sapwood.errors import SapwoodError

_MAX_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_STATIC_LIMIT = 48 * 1024
_CLUSTER = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
_START_EARLY = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


EARLY = True
"""Whether kernels for compute capability 9.0 and later start before those before them have ended."""


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 16))


class _Launch(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


@functools.cache
def _attributes(early: bool, cluster: tuple[int, int]) -> tuple[Any, int]:
    """Of a launch, and how many."""
    wanted: list[tuple[int, tuple[int, ...]]] = [(_START_EARLY, (1,))] * early
    wanted += [(_CLUSTER, (*cluster, 1))] * (cluster != (1, 1))
    return (_Attribute * 2)(*[_Attribute(which, 0, (ctypes.c_int * 16)(*v)) for which, v in wanted]), len(wanted)


class Kernel:
    """A function on a device."""

    def __init__(self, handle: ctypes.c_void_p, device: int) -> None:
        self.handle, self.device, self.shared = handle, device, _STATIC_LIMIT
        self.may_start_early = torch.cuda.get_device_capability(device) >= (9, 0)
        self.lock = threading.Lock()
        self.known_clusters: dict[tuple[tuple[int, int], int, int], int] = {}

    def __call__(
        self,
        grid: tuple[int, int],
        threads: int,
        shared: int,
        arguments: Sequence[Any],
        cluster: tuple[int, int] = (1, 1),
    ) -> None:
        """``arguments``: tensors, None for a null pointer, and integers of 32 bits or ``ctypes`` numbers. ``cluster``:
        how many blocks can see one another's shared memory."""
        held = [_as_c(a) for a in arguments]
        pointers = (ctypes.c_void_p * len(held))(*[ctypes.addressof(a) for a in held])
        with torch.cuda.device(self.device):
            how = self._how(grid, threads, shared, cluster)
            _done(_driver().cuLaunchKernelEx(ctypes.byref(how), self.handle, pointers, None))

    def clusters(self, cluster: tuple[int, int], threads: int, shared: int) -> int:
        """How many run at once; 0 where the device has none."""
        key = cluster, threads, shared
        if key not in self.known_clusters:
            with torch.cuda.device(self.device):
                how, found = self._how(cluster, threads, shared, cluster), ctypes.c_int()
                failed = _driver().cuOccupancyMaxActiveClusters(ctypes.byref(found), self.handle, ctypes.byref(how))
            self.known_clusters[key] = 0 if failed else found.value
        return self.known_clusters[key]

    def _how(self, grid: tuple[int, int], threads: int, shared: int, cluster: tuple[int, int]) -> _Launch:
        with self.lock:
            if shared > self.shared:
                _done(_driver().cuFuncSetAttribute(self.handle, _MAX_SHARED, shared))
                self.shared = shared
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        sizes = (ctypes.c_uint * 3)(*grid, 1), (ctypes.c_uint * 3)(threads, 1, 1)
        return _Launch(*sizes, shared, stream, *_attributes(EARLY and self.may_start_early, cluster))


def _as_c(value: Any) -> Any:
    if value is None:
        return ctypes.c_void_p(0)
    if isinstance(value, torch.Tensor):
        return ctypes.c_void_p(value.data_ptr())
    return ctypes.c_int(value) if isinstance(value, int) else value


@functools.cache
def kernel(sources: tuple[Path, ...], name: str, device: int) -> Kernel:
    """``name`` may be an instance of a template, such as ``sum<0>``; the sources are read as one."""
    major, minor = torch.cuda.get_device_capability(device)
    text = "\n".join(source.read_text() for source in sources)
    key = hashlib.sha256(f"{text}|{name}|{major}.{minor}|{torch.version.cuda}".encode()).hexdigest()[:24]
    at = cache_folder() / "kernels" / f"{key}.cubin"
    with torch.cuda.device(device):
        torch.cuda.synchronize()  # there must be a context to load it into
        try:
            entry, _, binary = at.read_bytes().partition(b"\n")
        except OSError:
            from torch.cuda import _utils

            target = f"{major}{minor}" + "a" * (major == 9)  # all that the device has
            binary, mangled = _utils._nvrtc_compile(text, name, target, nvcc_options=["--std=c++17"])
            entry = mangled.encode()
            _keep(at, entry + b"\n" + binary)
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        _done(_driver().cuModuleLoadData(ctypes.byref(module), binary))
        _done(_driver().cuModuleGetFunction(ctypes.byref(function), module, entry))
        return Kernel(function, device)


def _keep(at: Path, content: bytes) -> None:
    """For the next process; where it cannot be written, each process compiles for itself."""
    part = at.with_suffix(f".{os.getpid()}.part")
    try:
        at.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(content)
        part.replace(at)
    except OSError:
        pass


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")


def _done(code: int) -> None:
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        raise SapwoodError(f"a CUDA kernel of sapwood: {text.value.decode() if text.value else f'error {code}'}")
