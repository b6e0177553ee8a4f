"""CUDA kernels compiled for the CPU, by emulator.hpp: what the tests of kernels share."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch


def emulated(text: str, names: Sequence[str], at: Path) -> Any:
    """Kernels in one library: ``run(number, grid, cluster, threads, bytes, arguments)``."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    calls = "\n".join(f"case {n}: {name}({_arguments(name, text)}); break;" for n, name in enumerate(names))
    text += f"""
static void **given;
static int chosen;
template <class T> static T arg(int i) {{ return *static_cast<T *>(given[i]); }}
static void call() {{ switch (chosen) {{ {calls} }} }}
extern "C" void run(int which, int across, int down, int cluster_across, int cluster_down, int threads, int bytes,
                    void **arguments, long *counts) {{
    chosen = which, given = arguments, fetched = cycles = 0;
    run_grid(across, down, Place{{(unsigned)cluster_across, (unsigned)cluster_down, 1}}, threads, bytes, call);
    counts[0] = fetched, counts[1] = cycles;
}}"""
    (at / "kernels.cpp").write_text(f'#include "{Path(__file__).parent / "emulator.hpp"}"\n{text}')
    command = ["g++", "-std=c++17", "-O1", "-w", "-fPIC", "-shared", "kernels.cpp", "-o", "kernels.so"]
    done = subprocess.run(command, cwd=at, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:3000]
    return ctypes.CDLL(str(at / "kernels.so"))


def _arguments(name: str, text: str) -> str:
    """Each as its own type, from the kernel's signature."""
    found = re.search(rf"\b{name.partition('<')[0]}\(([^)]*)\)\s*{{", text)
    assert found is not None
    types = [" ".join(part.split()[:-1]) + "*" * part.split()[-1].count("*") for part in found[1].split(",")]
    return ", ".join(f"arg<{kind}>({n})" for n, kind in enumerate(types))


class Emulated:
    """In place of ``nvrtc.Kernel``."""

    counts = (ctypes.c_long * 2)()

    def __init__(self, library: Any, names: Sequence[str], name: str) -> None:
        self.library, self.number = library, names.index(name)

    def clusters(self, cluster: tuple[int, int], threads: int, shared: int) -> int:
        return 8 // (cluster[0] * cluster[1])

    def __call__(
        self, grid: tuple[int, int], threads: int, shared: int, arguments: Any, cluster: tuple[int, int] = (1, 1)
    ) -> None:
        held = [_as_c(a) for a in arguments]
        pointers = (ctypes.c_void_p * len(held))(*[ctypes.addressof(a) for a in held])
        self.library.run(self.number, *grid, *cluster, threads, shared, pointers, self.counts)


def _as_c(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return ctypes.c_void_p(value.data_ptr())
    return ctypes.c_void_p(0) if value is None else ctypes.c_int(value) if isinstance(value, int) else value
