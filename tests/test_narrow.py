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

for capability in (80, 90):
    for channels, made, per in ((16, 16, 1), (7, 16, 3), (64, 33, 1)):
        sizes = dict(HEIGHT=32, WIDTH=32, HIGH=3, WIDE=3, C=channels, MADE=made, M=128, PER=per)
        sizes |= dict(N=kernels._power(made), K=kernels._power(per * channels), BACK=True, CHUNK=1024)
        for kernel in (kernels._product, kernels._weights):
            names = kernel.arg_names
            kinds = {n: "constexpr" if n in sizes else "i32" if n == "pixels" else "*bf16" for n in names}
            kinds |= {"parts": "*fp32"} if "parts" in names else {}
            fixed = {(names.index(n),): v for n, v in sizes.items() if n in names}
            made_of = compile(ASTSource(kernel, kinds, fixed), target=GPUTarget("cuda", capability, 32))
            assert len(made_of.asm["cubin"]) > 1000
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


def test_on_a_cpu_and_where_a_look_fails_nothing_changes() -> None:
    layer = nn.Conv2d(4, 4, 3, padding=1)
    for call in (lambda: layer(torch.randn(1, 4, 5, 5)), lambda: layer("no image")):
        found = narrow.NarrowConvolutions(layer)
        found.look(call)
        assert found.chosen == {} and found.looked and not layer._forward_pre_hooks
