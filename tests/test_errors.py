"""Bad input: one clear error, and the model is as it was."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import sapwood as sw
from tests.helpers import build, same, snapshot

IMAGE = torch.randn(2, 3, 8, 8)
HALF = sw.Budget(channels=0.5)


class Raises(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("the dog ate it")


def chain() -> nn.Module:
    return build("plain_chain")[0]


def quantised() -> nn.Module:
    layer = nn.Linear(4, 4)
    model = nn.Sequential(layer)
    scale = torch.quantize_per_tensor(layer.weight.detach(), 0.1, 0, torch.qint8)
    model.register_buffer("packed", scale)
    return model


BAD: dict[str, tuple[Any, list[str]]] = {
    "no inputs": (lambda: sw.trace(chain(), None), ["example_inputs", "None", "torch.randn"]),
    "empty inputs": (lambda: sw.trace(chain(), ()), ["example_inputs", "()"]),
    "wrong shapes": (lambda: sw.trace(chain(), torch.randn(2, 5, 8, 8)), ["(2, 5, 8, 8)", "forward raised"]),
    "forward raises": (lambda: sw.trace(Raises(), torch.randn(2, 4)), ["the dog ate it", "Raises"]),
    "no parameters": (lambda: sw.trace(nn.ReLU(), IMAGE), ["parameters", "ReLU"]),
    "not a module": (lambda: sw.trace(lambda x: x, IMAGE), ["nn.Module", "function"]),
    "quantised": (lambda: sw.trace(quantised(), torch.randn(2, 4)), ["quantised", "Prune first"]),
    "scripted": (lambda: sw.trace(torch.jit.script(nn.Sequential(nn.Linear(4, 4))), torch.randn(2, 4)), ["scripted"]),
    "lazy": (lambda: sw.trace(nn.LazyLinear(3), torch.randn(2, 4)), ["lazy", "Run the model once"]),
    "budget of zero": (lambda: sw.Budget(channels=0), ["above 0", "channels=0"]),
    "negative budget": (lambda: sw.Budget(flops=-0.5), ["above 0", "-0.5"]),
    "budget above one": (lambda: sw.Budget(params=1.5), ["at most 1", "1.5"]),
    "budget of nan": (lambda: sw.Budget(params=float("nan")), ["fraction", "nan"]),
    "budget of text": (lambda: sw.Budget(params="half"), ["fraction", "half"]),  # type: ignore[arg-type]
    "two budgets": (lambda: sw.Budget(params=0.5, flops=0.5), ["exactly one", "params, flops"]),
    "no budget": (lambda: sw.Budget(), ["exactly one", "none"]),
    "budget as number": (lambda: sw.make_plan(chain(), IMAGE, 0.5), ["Budget", "0.5"]),  # type: ignore[arg-type]
    "unknown score": (lambda: sw.make_plan(chain(), IMAGE, HALF, score="l3"), ["l1, l2", "'l3'"]),
    "bad score function": (
        lambda: sw.make_plan(chain(), IMAGE, HALF, score=lambda w, d: w.sum()),
        ["score", "numbers for", "higher = keep"],
    ),
    "nan score": (
        lambda: sw.make_plan(chain(), IMAGE, HALF, score=lambda w, d: torch.full((w.shape[d],), float("nan"))),
        ["finite"],
    ),
    "share of nothing": (lambda: sw.make_plan(chain(), IMAGE, HALF, allocate={"0": 0}), ["0.001", "'0': 0", "0.8"]),
    "no shares": (lambda: sw.make_plan(chain(), IMAGE, HALF, allocate={}), ["names with numbers", "none"]),
    "shares as an array": (lambda: sw.make_plan(chain(), IMAGE, HALF, allocate=np.ones(2)), ["shares by name"]),
    "two shares": (lambda: sw.make_plan(chain(), IMAGE, HALF, allocate={"0": 2, "re:0": 3}), ["group 0", "2 by '0'"]),
    "share and ignore": (
        lambda: sw.make_plan(chain(), IMAGE, HALF, allocate={"0": 2}, ignore="0"),
        ["'0', which makes none that may be cut"],
    ),
    "share of no layer": (
        lambda: sw.make_plan(chain(), IMAGE, HALF, allocate={"x": 2}),
        ["allocate", "matches nothing"],
    ),
    "shares and a latency": (
        lambda: sw.make_plan(chain(), IMAGE, sw.Budget(latency=0.5), allocate={"0": 2}),
        ["no shares by name", "flops"],
    ),
    "unknown allocation": (lambda: sw.make_plan(chain(), IMAGE, HALF, allocate="fair"), ["uniform", "'fair'"]),
    "ignore matches nothing": (
        lambda: sw.make_plan(chain(), IMAGE, HALF, ignore=("0.wieght",)),
        ["'0.wieght'", "matches nothing", "0.weight"],
    ),
    "ignore is no expression": (lambda: sw.make_plan(chain(), IMAGE, HALF, ignore=("re:(",)), ["regular expression"]),
    "round to zero": (lambda: sw.make_plan(chain(), IMAGE, HALF, round_to=0), ["round_to", "at least 1"]),
    "budget out of reach": (
        lambda: sw.make_plan(chain(), IMAGE, sw.Budget(params=0.0001)),
        ["at least", "Frozen", "larger budget"],
    ),
    "plan of another model": (
        lambda: sw.cut(build("residual")[0], sw.make_plan(chain(), IMAGE, HALF)),
        ["'0.weight'", "another model"],
    ),
    "plan applied twice": (
        lambda: (lambda p: sw.cut(sw.cut(chain(), p), p))(sw.make_plan(chain(), IMAGE, HALF)),
        ["shape", "cut already"],
    ),
    "damaged plan": (
        lambda: sw.cut(
            chain(), sw.Plan(keep={"0.weight": {0: (0, 99)}}, attributes={}, shapes={"0.weight": (8, 3, 3, 3)})
        ),
        ["from 0 to 7", "damaged"],
    ),
    "plan with an unknown attribute": (
        lambda: sw.cut(chain(), sw.Plan(keep={}, attributes={"0.nothing": 3}, shapes={})),
        ["0.nothing", "another model"],
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_one_clear_error(name: str) -> None:
    call, words = BAD[name]
    with pytest.raises(sw.SapwoodError) as caught:
        call()
    for word in words:
        assert word in str(caught.value), str(caught.value)


@pytest.mark.parametrize(
    "break_it",
    [
        lambda m: sw.trace(m, torch.randn(2, 5, 8, 8)),
        lambda m: sw.make_plan(m, IMAGE, HALF, score="l3"),
        lambda m: sw.prune(m, IMAGE, sw.Budget(params=0.0001)),
    ],
)
def test_after_an_error_the_model_is_as_it_was(break_it: Any) -> None:
    model = chain().train()
    before = snapshot(model)
    attributes = {name: dict(vars(module)) for name, module in model.named_modules()}
    with pytest.raises(sw.SapwoodError):
        break_it(model)
    assert same(model, before) and model.training
    for name, module in model.named_modules():
        assert vars(module).keys() == attributes[name].keys()
        assert all(vars(module)[k] is v for k, v in attributes[name].items())
