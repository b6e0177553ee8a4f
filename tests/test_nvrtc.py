"""The CUDA kernels of sapwood through the compiler that users have, for the devices they have."""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from sapwood.recovery import narrow_kernels
from sapwood.sparse import cuda

KERNELS = (
    *(
        "sparse_linear<0, 1, 2, 1, 16, 2, 2>",
        "sparse_linear<1, 8, 4, 1, 24, 1, 2>",
        "sparse_linear<2, 4, 1, 2, 32, 1, 1>",
    ),
    *("sum_parts<0>", "unpack<2>"),
)
NARROW = (
    "narrow_product<0, 16, 16, 32, 32, 3, 3, 0, 16, 1, 8>",
    "narrow_product<1, 7, 64, 9, 9, 3, 3, 1, 4, 3, 8>",
    "narrow_weights<0, 64, 30, 8, 8, 3, 3, 8>",
    "narrow_weights<1, 7, 16, 32, 32, 1, 3, 8>",
    "narrow_sum<0>",
)


@pytest.fixture(scope="module")
def compiler() -> Any:
    """NVRTC of the same major version as in PyTorch's CUDA builds. What it opens itself is opened before it looks."""
    found = importlib.util.find_spec("nvidia")
    places = [Path(p) for p in (found.submodule_search_locations or [])] if found else []
    libraries = [p for place in places for p in place.glob("cu*/lib/libnvrtc.so.*")]
    if not libraries:
        pytest.skip("needs the package nvidia-cuda-nvrtc")
    for builtins in libraries[0].parent.glob("libnvrtc-builtins.so.*"):
        ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(libraries[0]))


@pytest.mark.parametrize(
    ("name", "target"),
    [
        *((k, t) for k in KERNELS for t in ("80", "90a", "120")),
        *((k, t) for k in NARROW for t in ("80", "90a")),
        *((f"sparse_tiles<{k}>", "90a") for k in ("0, 0", "0, 1", "0, 2", "1, 0", "1, 1", "1, 2")),
    ],
)
def test_kernels_compile(compiler: Any, name: str, target: str) -> None:
    compiled(compiler, name, f"sm_{target}")


@pytest.mark.parametrize("name", NARROW)
def test_nothing_is_loaded_before_others_have_been_waited_for(compiler: Any, name: str) -> None:
    """Loads of what is said never to change (.nc) may be moved to before that, so there are none."""
    text = compiled(compiler, name, "compute_90a")
    waits, loads = text.index("griddepcontrol.wait"), text.index("ld.global")
    assert waits < loads and "ld.global.nc" not in text


def compiled(compiler: Any, name: str, target: str) -> str:
    """PTX; nothing for the code of a device."""
    kind = name.partition("<")[0]
    if kind in cuda.FILES:
        files = [cuda.SOURCES / file for file in cuda.FILES[kind]]
    else:
        files = [*narrow_kernels.SHARED, narrow_kernels.SOURCES / narrow_kernels.FILES[kind]]
    text = "\n".join(file.read_text() for file in files)
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    assert compiler.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"kernel.cu", 0, None, None) == 0
    assert compiler.nvrtcAddNameExpression(program, name.encode()) == 0
    options = [f"--gpu-architecture={target}".encode(), b"--std=c++17"]
    failed = compiler.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    what = "ProgramLog" if failed or target.startswith("sm_") else "PTX"
    getattr(compiler, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    found = ctypes.create_string_buffer(size.value)
    getattr(compiler, f"nvrtcGet{what}")(program, found)
    compiler.nvrtcDestroyProgram(ctypes.byref(program))
    assert not failed, found.value.decode()
    return found.value.decode()
