"""Kernels for narrow convolutions, in Triton's interpreter (TRITON_INTERPRET=1) on a CPU; run by test_narrow.py."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from sapwood.recovery import narrow, narrow_kernels
from sapwood.recovery.regions import Compiled

SHAPES = [
    (2, 16, 16, 8, 8, 3, 3), (3, 7, 5, 6, 9, 3, 3), (1, 16, 7, 5, 5, 3, 3), (2, 3, 16, 8, 8, 3, 3),
    (1, 4, 4, 6, 6, 1, 3), (1, 1, 1, 1, 1, 3, 3), (2, 33, 40, 4, 4, 3, 3), (9, 2, 2, 7, 5, 3, 1),
]  # fmt: skip


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, 7, 3, padding=1, bias=False)
        self.second = nn.Conv2d(7, width, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.relu(self.first(x)))


def half(*shape: int) -> torch.Tensor:
    return torch.randn(shape).half().contiguous(memory_format=torch.channels_last)


def near(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    same = got.shape == wanted.shape and got.dtype == wanted.dtype
    return same and bool((got.float() - wanted.float()).norm() <= 0.002 * wanted.float().norm())


def products() -> None:
    for images, c, o, height, width, high, wide in SHAPES:
        x, weight = half(images, c, height, width).requires_grad_(), half(o, c, high, wide).requires_grad_()
        wanted = F.conv2d(x, weight, padding=(high // 2, wide // 2))
        grad = torch.randn_like(wanted)
        wanted.backward(grad)
        assert x.grad is not None and weight.grad is not None
        assert near(narrow_kernels.product(x.detach(), weight.detach(), False), wanted.detach())
        assert near(narrow_kernels.product(grad, weight.detach(), True), x.grad)
        assert near(narrow_kernels.weights(x.detach(), grad, weight.detach()), weight.grad)


def models(compiled: bool) -> None:
    """Whatever part is ours: gradients as before, nothing left on the model; blocks that are alike compile once."""
    narrow.DEVICES = ("cpu",)
    for ours in ((True, True, True), (False, True, False), (True, False, True)):
        narrow._KNOWN.clear()
        narrow.tried = lambda *kind: ours  # noqa: B023
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *(Block(8) for _ in range(3))).half()
        x = half(2, 3, 6, 6)
        model(x).sum().backward()
        wanted = {n: p.grad for n, p in model.named_parameters()}
        found = narrow.NarrowConvolutions(model)
        before = torch.get_rng_state()
        with found.look():
            model(x)
        assert len(found.chosen) == 1 + 3 * 2 and found.looked and torch.equal(before, torch.get_rng_state())
        blocks = Compiled(model)
        model.zero_grad(set_to_none=True)
        torch._dynamo.utils.counters.clear()
        with found.on():
            if compiled:
                with blocks.on():
                    model(x).sum().backward()
                assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
            else:
                model(x).sum().backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None and wanted[name] is not None
            assert (parameter.grad - wanted[name]).norm() <= 0.02 * wanted[name].norm(), name
        with found.on():
            assert torch.equal(model(x[:1]), model(x[:1].clone())) and model(x[:0]).shape[0] == 0  # other sizes
            (slope,) = torch.autograd.grad(model(x.requires_grad_()).sum(), x, create_graph=True)
            slope.float().pow(2).sum().backward()  # gradients of gradients
        assert not any("_conv_forward" in vars(m) for m in model.modules())


def mixed() -> None:
    """A layer that gets inputs of two kinds is left alone."""
    layer = nn.Conv2d(4, 4, 3, padding=1).half()
    found = narrow.NarrowConvolutions(layer)
    with found.look():
        layer(half(2, 4, 5, 5))
        layer(half(2, 4, 5, 5)[0])
    assert found.looked and found.chosen == {}


if __name__ == "__main__":
    products()
    models(compiled=False)
    models(compiled=True)
    mixed()
    print("all right")
