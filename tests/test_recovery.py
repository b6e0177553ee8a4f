"""Recovery: accuracy comes back, zeros stay, schedules do what their formulas say."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import sapwood as sw
from sapwood.recovery.distillation import distance
from sapwood.recovery.rates import Rate
from sapwood.recovery.schedules import Schedule
from sapwood.surgery.compose import compose
from tests.helpers import build, outputs, snapshot
from tests.nets import CASES


@pytest.fixture(autouse=True, scope="module")
def on_the_cpu() -> Iterator[None]:
    """Also where there is a GPU, which tests/test_gpu_training.py is for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        AcceleratorState._reset_state(reset_partial_state=True)
        yield
    AcceleratorState._reset_state(reset_partial_state=True)


def blobs(count: int = 256, batch: int = 32) -> tuple[DataLoader, torch.Tensor, torch.Tensor]:
    """Four classes of noisy stripes on 8 x 8 images."""
    generator = torch.Generator().manual_seed(5)
    y = torch.randint(0, 4, (count,), generator=generator)
    x = 0.7 * torch.randn(count, 1, 8, 8, generator=generator)
    for i, label in enumerate(y.tolist()):
        x[i, 0, 2 * label : 2 * label + 2] += 1.5
    return DataLoader(TensorDataset(x, y), batch, shuffle=True), x, y


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, stride=2, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 16, 4),
    )


def accuracy(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    model.eval()
    with torch.no_grad():
        return float((model(x).argmax(1) == y).float().mean())


@pytest.fixture(scope="module")
def trained() -> nn.Module:
    loader, x, y = blobs()
    model = net()
    sw.recover(model, loader, lr=0.05, epochs=6)
    assert accuracy(model, x, y) > 0.97
    return model


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
    rewind = Rate(warmup=0.1)
    assert [rewind.at(p) for p in (0, 0.05, 0.1, 0.55, 1.0)] == pytest.approx([0, 0.5, 1, 0.5, 0])
    assert Rate(anneal="cosine", warmup=0.0).at(0.5) == pytest.approx(0.5)
    assert Rate("finetune").at(0.0) == Rate("finetune").at(0.9) == 0.01


def test_the_last_mark_is_the_end(trained: nn.Module) -> None:
    loader, x, y = blobs()  # 8 steps an epoch, of which a fifth of 3 epochs takes 4.8
    done = sw.recover(copy.deepcopy(trained), loader, lr=0.01, original_epochs=3, validate=lambda m: accuracy(m, x, y))
    assert [round(8 * p.epochs) for p in done.curve] == [0, 2, 3, 5]


def test_schedules() -> None:
    assert Schedule().kept(0.1) == [0.1]
    assert Schedule("iterative", 3).kept(0.125) == pytest.approx([0.5, 0.25, 0.125])
    cubic = Schedule("cubic", 4).kept(0.2)
    assert cubic == pytest.approx([1 - 0.8 * (1 - (1 - t) ** 3) for t in (0.25, 0.5, 0.75, 1)]) and cubic[-1] == 0.2
    assert Schedule("cubic", 4).moments(80) == [[0, 10, 20, 30]]
    assert Schedule("iterative", 2).moments(80) == [[0], [0]]


@pytest.mark.parametrize("schedule", [("one-shot", 1), ("iterative", 3), ("cubic", 4)])
@pytest.mark.parametrize("budget", [sw.Budget(sparsity=0.9), sw.Budget(channels=0.5), sw.Budget(params=0.3)], ids=str)
def test_every_schedule_for_weights_and_for_channels(
    trained: nn.Module, schedule: tuple[str, int], budget: sw.Budget
) -> None:
    loader, x, y = blobs()
    before = snapshot(trained)
    done = sw.prune_and_recover(
        trained, x[:2], loader, budget, lr=0.05, schedule=schedule[0], rounds=schedule[1], original_epochs=15,
        validate=lambda m: accuracy(m, x, y), distill=budget.kind == "params",
    )  # fmt: skip
    assert all(torch.equal(t, before[n]) for n, t in trained.state_dict().items())
    assert done.metric is not None and done.metric > 0.9
    if budget.kind == "sparsity":
        total = sw.sparsity(done.model)
        assert total.zeros == round(0.9 * total.weights) and not done.plan.keep
    else:
        left = done.plan.achieved[budget.kind] / done.plan.achieved[f"dense_{budget.kind}"]
        assert getattr(budget, budget.kind) - 0.1 < left <= getattr(budget, budget.kind) + 1e-9
        again = sw.cut(trained, done.plan)  # one plan on the dense model, however many rounds there were
        assert [t.shape for t in again.state_dict().values()] == [t.shape for t in done.model.state_dict().values()]


def test_the_optimizer_follows_a_cut_between_rounds(trained: nn.Module) -> None:
    from sapwood.pipeline.shrink import Pruner, Step
    from sapwood.recovery.loop import Loop, Settings

    loader, x, _ = blobs()
    loop = Loop(copy.deepcopy(trained), loader, Settings(lr=0.05))
    for _ in loop.epoch(0, 0, 8):
        pass
    old = {n: loop.optimizer.optimizer.state[p]["momentum_buffer"] for n, p in loop.plain.named_parameters()}
    pruner = Pruner(x[:2])
    pruner.channels(loop, sw.Budget(channels=0.5), Step(sw.Budget(channels=0.5)))
    kept = pruner.plan.keep
    for name, parameter in loop.plain.named_parameters():
        expected = old[name]
        for dim, indices in kept.get(name, {}).items():
            expected = expected.index_select(dim, torch.tensor(indices))
        assert torch.equal(loop.optimizer.optimizer.state[parameter]["momentum_buffer"], expected)


@pytest.mark.parametrize("name", sorted(CASES))
def test_two_cuts_in_a_row_are_one_plan(name: str) -> None:
    model, inputs = build(name)
    first = sw.prune(model, inputs, sw.Budget(channels=0.8))
    second = sw.prune(first.model, inputs, sw.Budget(channels=0.7))
    both = sw.cut(model, compose(first.plan, second.plan))
    ours, theirs = both.state_dict(), second.model.state_dict()
    assert list(ours) == list(theirs)
    assert all(ours[n].shape == t.shape and torch.allclose(ours[n], t, rtol=1e-6) for n, t in theirs.items())
    for a, b in zip(outputs(both, inputs), outputs(second.model, inputs), strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)


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
