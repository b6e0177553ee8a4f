"""Convolutions of few channels by our kernels: what is taken, and that it is the same function."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from sapwood.recovery import narrow

triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")


@triton
def test_the_kernels_in_the_interpreter() -> None:
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-m", "tests.narrow_worker"], env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "all right" in done.stdout, done.stdout[-2000:] + done.stderr[-4000:]


COMPILE = """
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from sapwood.recovery import narrow_kernels as kernels

for capability, most in ((80, 163 * 1024), (90, 227 * 1024)):
    for channels, made, wide in ((16, 16, 3), (7, 16, 3), (64, 33, 3), (64, 64, 3), (40, 64, 3), (64, 64, 9)):
        for kernel in (kernels._product, kernels._weights):
            per = kernels._per(channels, wide, summed=kernel is kernels._weights)
            sizes = dict(HEIGHT=32, WIDTH=32, HIGH=3, WIDE=wide, C=channels, MADE=made, M=kernels.TILE, PER=per)
            sizes |= dict(N=kernels._power(made), K=kernels._power(per * channels), BACK=True, CHUNK=1024)
            names = kernel.arg_names
            kinds = {n: "constexpr" if n in sizes else "i32" if n == "pixels" else "*bf16" for n in names}
            kinds |= {"parts": "*fp32"} if "parts" in names else {}
            fixed = {(names.index(n),): v for n, v in sizes.items() if n in names}
            whole = {(names.index(n),): [["tt.divisibility", 16]] for n, k in kinds.items() if k[0] == "*"}
            source = ASTSource(kernel, kinds, fixed, whole)
            done = compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4, "num_stages": 3})
            assert done.metadata.shared <= most, (capability, channels, made, wide, done.metadata.shared)
print("all right")
"""


@triton
def test_the_kernels_compile_for_gpus_that_are_not_here() -> None:
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True)
    assert done.returncode == 0 and "all right" in done.stdout, done.stderr[-4000:]


@pytest.mark.parametrize(
    ("layer", "taken"),
    [
        (nn.Conv2d(16, 16, 3, padding=1), True),
        (nn.Conv2d(3, 64, 3, padding="same"), True),
        (nn.Conv2d(16, 16, (1, 3), padding=(0, 1)), True),
        (nn.Conv2d(16, 16, 3), False),
        (nn.Conv2d(16, 16, 3, padding=1, stride=2), False),
        (nn.Conv2d(16, 16, 3, padding=2, dilation=2), False),
        (nn.Conv2d(16, 16, 3, padding=1, groups=2), False),
        (nn.Conv2d(16, 16, 3, padding=1, padding_mode="reflect"), False),
        (nn.Conv2d(16, 65, 3, padding=1), False),
        (nn.Conv2d(16, 16, 1), False),
        (nn.Conv2d(16, 16, 5, padding=2), False),
        (nn.Conv2d(16, 16, 4, padding=2), False),
        (nn.ConvTranspose2d(16, 16, 3, padding=1), False),
    ],
)
def test_what_is_tried(layer: nn.Module, taken: bool) -> None:
    assert narrow.is_narrow(layer) is taken


@pytest.mark.parametrize("devices", [(), ("cuda",)])
def test_on_a_cpu_nothing_changes(devices: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(narrow, "DEVICES", devices)
    layer = nn.Conv2d(4, 4, 3, padding=1)
    found = narrow.NarrowConvolutions(layer)
    assert found.looked is not bool(devices)
    with found.look():
        layer(torch.randn(1, 4, 5, 5))
    assert found.looked and found.chosen == {} and not layer._forward_pre_hooks
    assert found.seen == ({layer: {None}} if devices else {})


def test_a_step_that_fails_leaves_no_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(narrow, "DEVICES", ("cuda",))
    layer = nn.Conv2d(4, 4, 3, padding=1)
    found = narrow.NarrowConvolutions(layer)
    with pytest.raises(RuntimeError), found.look():
        layer(torch.randn(1, 5, 5, 5))
    assert not layer._forward_pre_hooks and not found.looked
