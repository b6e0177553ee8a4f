"""Every hazard: no net raises, none changes its output shapes, none fails the check."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.helpers import build, halve, outputs, same, size, snapshot
from tests.nets import CASES, Pool, conv

# Nets where something must stay whole: at most this fraction of the parameters is left.
LEFT = {
    "transformer_encoder": 0.80,  # its width is the input's, so the heads cannot go
    "dataclass_output": 0.65,  # the hidden state is an output
    "data_dependent_control_flow": 0.65,  # one branch is never taken
    "size_as_factor": 0.80,
    "unknown_operator": 0.65,
    "slice_by_literal": 0.60,
    "spatial_attention_by_max": 0.55,
}
APPROXIMATE = {
    "group_norm",
    "layer_norm",
    "rms_norm_by_hand",
    "weight_standardisation",
    "weights_standardised_by_batch_norm",
    "transformer_from_projection",
    "transformer_decoder",
    "cross_attention_widths",
    "weight_norm_parametrised",
    "weight_norm_old",
    "dict_output",
    "softmax_over_channels",
    "statistics_over_channels",
    "spatial_attention_by_max",
}


@pytest.mark.parametrize("name", CASES)
def test_half_of_the_channels_go_and_the_check_passes(name: str) -> None:
    model, inputs = build(name)
    before, wanted = snapshot(model), [t.shape for t in outputs(model, inputs)]
    done = halve(model, inputs)
    assert done.check.max_error < 1e-4
    assert done.check.status == ("approximate" if name in APPROXIMATE else "exact")
    assert [t.shape for t in outputs(done.model, inputs)] == wanted
    assert list(done.model.state_dict()) == list(before)
    assert size(done.model) / size(model) <= LEFT.get(name, 0.52)
    assert not done.plan.notes, "a group had to be left whole: the trace should have known"
    assert same(model, before)


def test_attention_loses_heads_and_rewrites_their_number() -> None:
    model, inputs = build("attention_by_hand")
    small = halve(model, inputs).model
    assert (small.heads, small.head_dim) == (2, 6)
    assert small.qkv.weight.shape == (36, 16)


def test_grouped_query_attention_keeps_the_ratio_of_heads() -> None:
    model, inputs = build("grouped_query_attention")
    small = halve(model, inputs).model
    assert small.q.weight.shape == (16, 16) and small.kv.weight.shape == (16, 16)


@pytest.mark.parametrize(("groups", "left", "shape"), [(2, 2, (16, 8, 3, 3)), (8, 4, (16, 4, 3, 3))])
def test_the_longer_side_of_a_grouped_convolution_is_cut(groups: int, left: int, shape: tuple[int, ...]) -> None:
    """Two groups of sixteen are few to choose from, and whole ones would leave half of the work, not a quarter."""
    torch.manual_seed(0)
    model = nn.Sequential(conv(3, 32), conv(32, 32, groups=groups), nn.ReLU(), conv(32, 8, 1), Pool(8))
    done = halve(model, torch.randn(2, 3, 8, 8))
    assert done.model[1].groups == left and tuple(done.model[1].weight.shape) == shape
    assert done.check.status == "exact" and not done.plan.notes


def test_torch_attention_keeps_its_own_invariants() -> None:
    model, inputs = build("transformer_from_projection")
    attention = halve(model, inputs).model.encoder.layers[0].self_attn
    assert (attention.embed_dim, attention.num_heads, attention.head_dim) == (12, 3, 4)
    assert attention.in_proj_weight.shape == (36, 12)


def test_head_width_is_made_up_for_in_the_queries() -> None:
    model, inputs = build("single_head_attention")
    done = halve(model, inputs)
    assert done.model.q.weight.shape == (8, 16)
    kept = list(done.plan.keep["q.weight"][0])
    torch.testing.assert_close(done.model.q.weight, model.q.weight[kept] * 0.5**0.5)
    torch.testing.assert_close(done.model.k.weight, model.k.weight[kept])


def test_only_the_queries_of_a_fused_layer_are_rescaled() -> None:
    model, inputs = build("multi_query_attention")
    done = halve(model, inputs)
    assert (done.model.heads, done.model.head_dim) == (4, 4)
    (scale,) = done.plan.scales["qkv.weight"]
    assert scale.positions == tuple(range(32))


def test_channels_go_rather_than_branches_of_a_softmax() -> None:
    model, inputs = build("split_attention")
    small = halve(model, inputs).model
    assert small.radix == 2 and small.b.weight.shape == (12, 3, 3, 3) and small.head.in_features == 6


def test_recurrent_layers_lose_hidden_width() -> None:
    model, inputs = build("recurrent_in_layers")
    small = halve(model, inputs).model
    assert (small.gru.hidden_size, small.rnn.input_size, small.rnn.hidden_size) == (4, 8, 4)
    assert small.gru.weight_ih_l1_reverse.shape == (12, 8)
    small.train()(inputs).sum().backward()
    assert small.gru.weight_hh_l0.grad is not None


def test_tied_weights_stay_tied() -> None:
    model, inputs = build("tied_weights")
    small = halve(model, inputs).model
    assert small.out.weight is small.embed.weight
    assert small.embed.weight.shape == (20, 8)


def test_parameters_that_share_memory_go_on_sharing_it() -> None:
    model, inputs = build("one_encoder_used_twice")
    small = halve(model, inputs).model
    assert small.encoder[0].weight.shape == (12, 16)


def test_auxiliary_heads_still_train() -> None:
    model, inputs = build("auxiliary_head_in_training")
    small = halve(model, inputs).model
    out, aux = small.train()(inputs)
    (out.sum() + aux.sum()).backward()
    assert small.aux.weight.grad is not None


def test_buffers_follow_their_channels() -> None:
    model, inputs = build("buffer_beside_weights")
    small = halve(model, inputs).model
    assert small.blur.shape == (4, 1, 3, 3) and small.gain.shape == (4, 1, 1) and small.width == 4


def test_parametrisations_survive() -> None:
    model, inputs = build("weight_norm_parametrised")
    small = halve(model, inputs).model
    assert small[2].weight.shape == (6, 4, 3, 3)
    assert small[2].parametrizations.weight.original0.shape == (6, 1, 1, 1)
    small(inputs).sum().backward()
    assert small[2].parametrizations.weight.original1.grad is not None


@pytest.mark.parametrize("name", ["plain_chain", "transformer_from_projection", "weight_norm_old"])
def test_a_cut_model_trains(name: str) -> None:
    model, inputs = build(name)
    small = halve(model, inputs).model.train()
    optimizer = torch.optim.SGD(small.parameters(), lr=0.1)
    loss = small(inputs).square().mean()
    loss.backward()
    optimizer.step()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in small.parameters())
