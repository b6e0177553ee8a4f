"""Recovery: accuracy comes back, zeros stay, whatever the switches."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import sapwood as sw
from sapwood.recovery import TensorLoader
from sapwood.recovery import loop as loop_module
from sapwood.recovery.distillation import distance
from sapwood.recovery.graphs import GraphedStep, _copied
from sapwood.recovery.layout import align_gradients, align_state, aligned
from sapwood.recovery.rates import Rate
from tests.helpers import snapshot
from tests.stripes import accuracy, blobs, net, trained_net

pytestmark = pytest.mark.usefixtures("on_the_cpu")


@pytest.fixture(scope="module")
def trained() -> nn.Module:
    return trained_net()


@pytest.mark.parametrize(
    "switches",
    [
        {},
        {"rate": "finetune", "optimizer": "adamw", "lr": 0.05},
        {"anneal": "cosine", "accumulate": 2, "clip": 1.0},
        {"mixed_precision": "bf16", "channels_last": True},
        {"optimizer": lambda groups, lr: torch.optim.RMSprop(groups, lr=lr / 10)},
    ],
)
def test_accuracy_comes_back_and_zeros_stay(trained: nn.Module, switches: dict[str, Any]) -> None:
    loader, x, y = blobs()
    masked = sw.mask(trained, sw.Budget(sparsity=0.97))
    zeros = {n: t == 0 for n, t in masked.state_dict().items() if t.dim() > 1}
    before = accuracy(masked, x, y)
    done = sw.recover(
        masked, loader, **{"lr": 0.05, **switches}, original_epochs=10, validate=lambda m: accuracy(m, x, y)
    )
    assert done.model is masked and done.metric == accuracy(masked, x, y)
    assert done.metric > max(before, 0.9)
    assert [round(p.share, 3) for p in done.curve] == [0, 0.05, 0.1, 0.2] and done.curve[0].metric == before
    assert all(bool((masked.state_dict()[n][z] == 0).all()) for n, z in zeros.items())
    assert sw.sparsity(masked).zeros == sum(int(z.sum()) for z in zeros.values())
    assert not masked._forward_hooks


def test_compiled_recovery(trained: nn.Module) -> None:
    loader, _, _ = blobs(64)
    masked = sw.mask(trained, sw.Budget(sparsity=0.9))
    done = sw.recover(masked, loader, lr=0.05, epochs=1, compile=True)
    assert done.model is masked and list(masked.state_dict()) == list(trained.state_dict())
    assert sw.sparsity(masked).total == pytest.approx(0.9, abs=1e-3)


def test_nothing_is_left_on_the_model(trained: nn.Module) -> None:
    loader, x, _ = blobs()
    model = copy.deepcopy(trained).eval()
    sw.recover(model, loader, lr=0.05, epochs=0.5, mixed_precision="bf16")
    assert "forward" not in vars(model) and not any("accelerate" in k for k in vars(model))
    model.eval()
    fresh = net().eval()
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(model(x), fresh(x)) and loader.sampler.generator is None


def test_zeros_without_a_note_are_held(trained: nn.Module) -> None:
    loader, _, _ = blobs()
    model = net()
    model.load_state_dict(sw.mask(trained, sw.Budget(sparsity=0.9)).state_dict())
    nn.init.zeros_(model[7].weight)  # all zero: not masked, only not trained yet
    zeros = [int((model[i].weight == 0).sum()) for i in (0, 3)]
    sw.recover(model, loader, lr=0.05, epochs=1)
    assert [int((model[i].weight == 0).sum()) for i in (0, 3)] == zeros and model[7].weight.any()


@pytest.mark.parametrize("make", [list, lambda b: DataLoader(b, batch_size=None)])
def test_the_last_batches_of_an_epoch_make_a_step(trained: nn.Module, make: Any) -> None:
    loader, _, _ = blobs(160)
    batches = list(loader)
    seen = []

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        seen.append(len(batch[0]))
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    done = sw.recover(copy.deepcopy(trained), make(batches), lr=0.01, epochs=2, accumulate=2, loss=loss)
    assert len(seen) == 10 and done.curve[-1].epochs == 2


def test_accumulating_equals_one_large_batch() -> None:
    x, y = torch.randn(24, 6), torch.randint(0, 3, (24,))
    whole, parts = nn.Linear(6, 3), nn.Linear(6, 3)
    parts.load_state_dict(whole.state_dict())
    sw.recover(whole, [(x, y)] * 3, lr=0.1, epochs=1)
    sw.recover(
        parts, [(a, b) for _ in range(3) for a, b in zip(x.chunk(4), y.chunk(4))], lr=0.1, epochs=1, accumulate=4
    )
    assert torch.allclose(whole.weight, parts.weight, atol=1e-6)


def test_the_teacher_keeps_its_mode(trained: nn.Module) -> None:
    loader, _, _ = blobs(64)
    teacher = copy.deepcopy(trained).train()
    sw.recover(copy.deepcopy(trained), loader, lr=0.01, epochs=1, teacher=teacher)
    assert teacher.training


def test_the_same_seed_gives_the_same_weights(trained: nn.Module) -> None:
    def run(seed: int) -> dict[str, torch.Tensor]:
        loader, _, _ = blobs()
        model = sw.mask(trained, sw.Budget(sparsity=0.9))
        sw.recover(model, loader, lr=0.05, epochs=1.5, seed=seed)
        return snapshot(model)

    first, again, other = run(1), run(1), run(2)
    assert all(torch.equal(first[n], again[n]) for n in first)
    assert any(not torch.equal(first[n], other[n]) for n in first)


def test_distillation_follows_the_teacher(trained: nn.Module) -> None:
    _, x, y = blobs()
    wrong = DataLoader(TensorDataset(x, torch.zeros_like(y)), 32, shuffle=True)  # labels that teach nothing
    student = sw.mask(trained, sw.Budget(sparsity=0.9))
    before = snapshot(trained)
    sw.recover(student, wrong, lr=0.05, epochs=3, teacher=trained, share=1.0)
    assert accuracy(student, x, y) > 0.9
    assert all(torch.equal(t, before[n]) for n, t in trained.state_dict().items())


def test_distance_is_zero_between_equals_and_scales_with_temperature() -> None:
    a, b = torch.randn(5, 7), torch.randn(5, 7)
    assert distance(a, a, 3.0) == pytest.approx(0, abs=1e-6)
    p, q = (b / 2).softmax(1), (a / 2).softmax(1)
    assert distance(a, b, 2.0) == pytest.approx(float((p * (p / q).log()).sum() / 5 * 4), rel=1e-5)


def test_rates() -> None:
    assert Rate(anneal="none", warmup=0.0).at(0.9) == 1.0
    rewind = Rate(warmup=0.1)
    assert [rewind.at(p) for p in (0, 0.05, 0.1, 0.55, 1.0)] == pytest.approx([0, 0.5, 1, 0.5, 0])
    assert Rate(anneal="cosine", warmup=0.0).at(0.5) == pytest.approx(0.5)
    assert Rate("finetune").at(0.0) == Rate("finetune").at(0.9) == 0.01


def test_the_last_mark_is_the_end(trained: nn.Module) -> None:
    loader, x, y = blobs()  # 8 steps an epoch, of which a fifth of 3 epochs takes 4.8
    done = sw.recover(copy.deepcopy(trained), loader, lr=0.01, original_epochs=3, validate=lambda m: accuracy(m, x, y))
    assert [round(8 * p.epochs) for p in done.curve] == [0, 2, 3, 5]


@pytest.mark.parametrize("sparsity", [0.5, 0.95])
def test_clipping_leaves_the_length_of_a_step_to_what_is_not_zero(sparsity: float) -> None:
    loader, _, _ = blobs(32)
    model = sw.mask(net(), sw.Budget(sparsity=sparsity))
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    sw.recover(
        model, loader, lr=1.0, epochs=1, clip=1e-3, anneal="none", warmup=0.0, weight_decay=0.0,
        optimizer=lambda groups, lr: torch.optim.SGD(groups, lr=lr),
    )  # fmt: skip
    moved = sum(float((p.detach() - before[n]).square().sum()) for n, p in model.named_parameters()) ** 0.5
    assert moved == pytest.approx(1e-3, rel=1e-2)  # one step, of exactly the length that is allowed


def loose() -> tuple[nn.Module, Any]:
    return net(), blobs(32)[0]


def shrunk(model: nn.Module, loader: Any, *args: Any, **options: Any) -> sw.Shrunk:
    return sw.prune_and_recover(model, torch.randn(1, 1, 8, 8), loader, *args, lr=1, epochs=1, **options)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda m, d: sw.recover(m, d, lr=0.1), "original_epochs"),
        (lambda m, d: sw.recover(m, d, lr=0.1, epochs=1, original_epochs=1), "original_epochs"),
        (lambda m, d: sw.recover(m, [], lr=0.1, epochs=1), "empty data loader"),
        (lambda m, d: sw.recover(m, iter([1]), lr=0.1, epochs=1), "length"),
        (lambda m, d: sw.recover(m, d, lr=-1, epochs=1), "learning rate above 0"),
        (lambda m, d: sw.recover(m, d, lr=0.1, epochs=1, rate="high"), "rewind, finetune"),
        (lambda m, d: sw.recover(m, d, lr=0.1, epochs=1, optimizer="lion"), "sgd, adamw"),
        (lambda m, d: sw.recover(m, d, lr=0.1, epochs=1, optimizer=lambda g, lr: None), "a torch optimizer"),
        (lambda m, d: sw.recover(m, d, lr=1, epochs=1, optimizer=lambda g, lr: torch.optim.LBFGS(g[0]["params"])),
         "gradients alone; got LBFGS"),
        (lambda m, d: sw.recover(m, d, lr=0.1, epochs=1, mixed_precision="int8"), "bf16"),
        (lambda m, d: sw.recover(m, [{"x": 1}], lr=0.1, epochs=1), "labels|unexpected keyword"),
        (lambda m, d: sw.recover(3, d, lr=0.1, epochs=1), "torch.nn.Module"),
        (lambda m, d: sw.recover(m, d, lr=0.1, epochs="3"), "number of epochs"),
        (lambda m, d: sw.recover(m, d, lr=0.1, epochs=1, clip=0), "a norm above 0"),
        (lambda m, d: sw.recover(m, d, lr=0.1, epochs=1, loss=lambda m, b: None), "one number with a gradient"),
        (lambda m, d: sw.recover(m.to("meta"), d, lr=0.1, epochs=1), "meta device"),
        (lambda m, d: sw.recover(m, d, lr=0.1, epochs=1, teacher=nn.Flatten()), "same shape"),
        (lambda m, d: sw.recover(m.requires_grad_(False), d, lr=0.1, epochs=1), "require gradients"),
        (
            lambda m, d: shrunk(m, d, pattern="2:4", schedule="cubic", rounds=3),
            "one-shot",
        ),
        (lambda m, d: shrunk(m, d), "a budget"),
        (
            lambda m, d: shrunk(m, d, sw.Budget(sparsity=0.5), rounds=3),
            "iterative",
        ),
    ],
)  # fmt: skip
def test_bad_input_is_explained(call: Any, words: str) -> None:
    with pytest.raises((sw.SapwoodError, TypeError), match=words):
        call(*loose())


def test_a_batch_of_nan_does_not_hide(trained: nn.Module) -> None:
    x, y = torch.full((8, 1, 8, 8), math.nan), torch.zeros(8, dtype=torch.long)
    done = sw.recover(copy.deepcopy(trained), [(x, y)], lr=0.05, epochs=1)
    assert done.curve[-1].loss is not None and math.isnan(done.curve[-1].loss)


def test_images_on_the_device() -> None:
    images = torch.arange(2 * 3 * 4 * 5, dtype=torch.uint8).view(2, 3, 4, 5)
    labels = torch.tensor([7, 8])
    (x, y), = TensorLoader(images, labels, 4, shuffle=False)  # fmt: skip
    assert torch.equal(x * 255, images.float()) and torch.equal(y, labels)
    (x, _), = TensorLoader(images.float(), labels, 4, mean=(1, 2, 3), std=(2, 2, 2), shuffle=False)  # fmt: skip
    assert torch.equal(x, (images.float() - torch.tensor([1, 2, 3]).view(1, 3, 1, 1)) / 2)
    many, numbers = torch.rand(50, 1, 8, 8), torch.arange(50)
    loader = TensorLoader(many, numbers, 16, pad=2, flip=True, cutout=3)
    torch.manual_seed(3)
    first = list(loader)
    torch.manual_seed(3)
    assert all(torch.equal(a, b) for p, q in zip(first, loader, strict=True) for a, b in zip(p, q, strict=True))
    assert [len(y) for _, y in first] == [16, 16, 16, 2] and len(loader) == 4
    assert sorted(torch.cat([y for _, y in first]).tolist()) == list(range(50))
    assert len(list(TensorLoader(many, numbers, 16, drop_last=True))) == 3
    shifted = {tuple(a.flatten().tolist()) for a in _shifts(many[0])}
    for x, y in TensorLoader(many, numbers, 16, pad=1, flip=True):
        for image, number in zip(x, y, strict=True):
            if number == 0:
                assert tuple(image.flatten().tolist()) in shifted
    doubled = TensorLoader(many, numbers, 25, transform=lambda x, y: (2 * x, y), shuffle=False)
    assert torch.equal(torch.cat([x for x, _ in doubled]), 2 * many)
    with pytest.raises(sw.SapwoodError, match="on one device"):
        TensorLoader(many, numbers[:3])


def _shifts(image: torch.Tensor) -> Iterator[torch.Tensor]:
    wide = nn.functional.pad(image[None], (1, 1, 1, 1), mode="reflect")[0]
    for i in range(3):
        for j in range(3):
            yield wide[:, i : i + 8, j : j + 8]
            yield wide[:, i : i + 8, j : j + 8].flip(-1)


def test_strides_are_made_to_agree() -> None:
    weight = nn.Parameter(torch.randn(8, 4, 1, 1))
    odd = torch.randn(8, 4, 1, 1).as_strided((8, 4, 1, 1), (4, 1, 4, 4))
    same = aligned(odd, weight)
    assert same.stride() == weight.stride() and same.data_ptr() == odd.data_ptr() and torch.equal(same, odd)
    last = torch.randn(8, 4, 3, 3).contiguous(memory_format=torch.channels_last)
    kernel = nn.Parameter(torch.randn(8, 4, 3, 3))
    moved = aligned(last, kernel)
    assert moved.stride() == kernel.stride() and torch.equal(moved, last)
    optimizer = torch.optim.SGD([weight, kernel], lr=0.1, momentum=0.9, fused=True)
    weight.grad, kernel.grad = torch.ones_like(weight), torch.ones_like(kernel)
    optimizer.step()
    optimizer.state[kernel]["momentum_buffer"] = last
    kernel.grad = None
    kernel.grad = torch.ones_like(kernel)
    align_gradients(optimizer)
    align_state(optimizer)
    assert optimizer.state[kernel]["momentum_buffer"].stride() == kernel.stride()


def test_a_graph_without_a_gpu_is_left_out(trained: nn.Module) -> None:
    loader, _, _ = blobs()
    results = []
    for switches in ({}, {"graph": True, "fused": True}):
        model = copy.deepcopy(trained)
        if switches:
            with pytest.warns(UserWarning, match="graph=True needs one CUDA device"):
                sw.recover(model, loader, lr=0.02, epochs=1, **switches)
        else:
            sw.recover(model, loader, lr=0.02, epochs=1)
        results.append(model.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(results[0].values(), results[1].values(), strict=True))
    with pytest.raises(sw.SapwoodError, match="graph"):
        sw.recover(trained, loader, lr=0.02, epochs=1, graph=True, accumulate=2)


class PlainGraph(GraphedStep):
    """Stands in for a CUDA graph: to replay is to take the step again, on the inputs that were captured."""

    captures = 0

    def _eager(self, batch: Any) -> torch.Tensor:
        return self.step(batch)

    def _capture(self, batch: Any) -> bool:
        PlainGraph.captures += 1
        self._inputs, self._graph = _copied(batch), self  # type: ignore[assignment]
        self._loss = torch.zeros(())
        return True

    def replay(self) -> None:
        self._loss = self.step(self._inputs)


@pytest.mark.parametrize(
    ("what", "captures"),
    [
        ({"budget": sw.Budget(channels=0.5), "fade": 0.5}, 2),
        ({"budget": sw.Budget(params=0.5), "schedule": "cubic", "rounds": 2}, 2),
        ({"budget": sw.Budget(sparsity=0.8), "schedule": "cubic", "rounds": 2}, 1),  # more zeros need no new capture
        ({"pattern": "2:4"}, 1),
    ],
    ids=str,
)
def test_a_replayed_step_sees_rates_zeros_and_fading(
    trained: nn.Module, what: dict[str, Any], captures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader, x, _ = blobs(240)  # the last batch is smaller
    given = {"lr": 0.02, "epochs": 4, "distill": True, "warmup": 0.2, **what}
    given["optimizer"] = lambda g, lr: torch.optim.SGD(g, lr, momentum=0.9, fused=True)
    plain = sw.prune_and_recover(trained, x[:2], loader, **given)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(loop_module, "graphed", lambda step, optimizer, device, _: PlainGraph(step, optimizer, device))
    monkeypatch.setattr(PlainGraph, "captures", 0)
    replayed = sw.prune_and_recover(trained, x[:2], loader, graph=True, **given)
    assert PlainGraph.captures == captures
    assert [p.loss for p in plain.curve if p.loss] == pytest.approx(
        [p.loss for p in replayed.curve if p.loss], rel=1e-4
    )
    for a, b in zip(plain.model.state_dict().values(), replayed.model.state_dict().values(), strict=True):
        assert a.shape == b.shape and torch.allclose(a, b, rtol=1e-3, atol=1e-5)
