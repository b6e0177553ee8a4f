"""The same on a CUDA device, where operators and kernels differ."""

from __future__ import annotations

import pytest
import torch
from torch.utils import _pytree as pytree

import sapwood as sw
from tests.helpers import build, halve, outputs, size
from tests.nets import CASES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]

# These make tensors on the CPU in their forward, whatever device they are on.
CPU_ONLY = {
    "write_channels_into_new_tensor",
    "rotary_attention",
    "lstm_cell_by_hand",
    "unknown_operator",
    "writes_by_index",
}


def on_cuda(name: str) -> tuple[torch.nn.Module, object]:
    model, inputs = build(name)
    return model.cuda(), pytree.tree_map_only(torch.Tensor, torch.Tensor.cuda, inputs)


@pytest.mark.parametrize("name", [n for n in CASES if n not in CPU_ONLY])
def test_every_hazard_on_cuda(name: str) -> None:
    model, inputs = on_cuda(name)
    wanted = [t.shape for t in outputs(model, inputs)]
    done = halve(model, inputs)
    assert done.check.passed and done.check.max_error < 1e-4
    assert [t.shape for t in outputs(done.model, inputs)] == wanted
    assert not done.plan.notes
    assert all(p.is_cuda for p in done.model.parameters())
    if name != "recurrent":  # cuDNN's recurrent layers are frozen
        assert size(done.model) < 0.9 * size(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["plain_chain", "transformer_from_projection", "grouped_query_attention"])
def test_half_precision_on_cuda(name: str, dtype: torch.dtype) -> None:
    model, inputs = on_cuda(name)
    done = halve(model.to(dtype), pytree.tree_map_only(torch.Tensor, lambda t: t.to(dtype), inputs))
    assert done.check.passed and all(p.dtype == dtype for p in done.model.parameters())


def test_the_users_precision_settings_are_restored() -> None:
    model, inputs = on_cuda("plain_chain")
    torch.set_float32_matmul_precision("high")
    halve(model, inputs)
    assert torch.get_float32_matmul_precision() == "high"
    assert torch.backends.cudnn.allow_tf32


def test_optimizer_state_follows_on_cuda() -> None:
    model, inputs = on_cuda("plain_chain")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    model.train()(inputs).square().mean().backward()
    optimizer.step()
    plan = sw.make_plan(model, inputs, sw.Budget(channels=0.5))
    small = sw.cut(model, plan)
    new = sw.cut_optimizer(optimizer, model, small, plan)
    small.train()(inputs).square().mean().backward()
    new.step()
    assert new.state[small[0].weight]["exp_avg"].shape == small[0].weight.shape
