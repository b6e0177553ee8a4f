"""Recovery: accuracy comes back, zeros stay, schedules do what their formulas say."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import sapwood as sw
from sapwood.pipeline import keeping
from sapwood.recovery import TensorLoader, refit_, refresh_norms_
from sapwood.recovery import loop as loop_module
from sapwood.recovery.distillation import distance
from sapwood.recovery.graphs import GraphedStep, _copied
from sapwood.recovery.layout import align_gradients, align_state, aligned
from sapwood.recovery.rates import Rate
from sapwood.recovery.schedules import Schedule
from sapwood.surgery.compose import compose
from tests.helpers import build, outputs, snapshot
from tests.nets import CASES

pytestmark = pytest.mark.usefixtures("on_the_cpu")


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
    assert Rate(anneal="none", warmup=0.0).at(0.9) == 1.0
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
    assert Schedule("cubic", 4, until=0.25).moments(80) == [[0, 5, 10, 15]]
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


class Chain(nn.Module):
    """Layers of four widths; with ``joined`` a layer, registered first, that reads two others side by side."""

    def __init__(self, joined: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.joined = nn.Conv2d(80, 16, 1) if joined else nn.Identity()
        for number, (before, after) in enumerate(itertools.pairwise((1, 16, 32, 48, 64))):
            self.add_module(f"layer{number}", nn.Conv2d(before, after, 3, padding=1))
        self.head = nn.Linear(16 if joined else 64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = [x]
        for number in range(4):
            made.append(torch.relu(self.get_submodule(f"layer{number}")(made[-1])))
        seen = torch.relu(self.joined(torch.cat([made[1], made[4]], 1))) if "weight" in dir(self.joined) else made[4]
        return self.head(seen.mean((2, 3)))  # type: ignore[no-any-return]


def widths(model: nn.Module) -> dict[str, int]:
    return {n: m.out_channels for n, m in model.named_modules() if isinstance(m, nn.Conv2d)}


@pytest.mark.parametrize("rounds", [2, 6])
@pytest.mark.parametrize("left", [0.5, 0.2])
@pytest.mark.parametrize("ignore", [(), ("layer2",), ("layer2", "layer3")], ids=str)
@pytest.mark.parametrize("joined", [False, True])
def test_many_rounds_end_where_one_does(rounds: int, left: float, ignore: tuple[str, ...], joined: bool) -> None:
    """The same share of every layer of the dense model, not of what earlier rounds, each rounded down, have left."""
    loader, x, _ = blobs(64)
    given: dict[str, Any] = {"lr": 0.01, "epochs": 3, "options": {"allocate": "uniform", "ignore": ignore}}
    model, budget = Chain(joined), sw.Budget(channels=left)
    once = sw.prune_and_recover(model, x[:2], loader, budget, **given)
    often = sw.prune_and_recover(model, x[:2], loader, budget, schedule="cubic", rounds=rounds, until=1.0, **given)
    assert widths(often.model) == widths(once.model)
    assert widths(once.model)["layer1"] == int(left * 32) and often.plan.budget["allocate"] == "uniform"
    assert not [note for note in often.plan.notes if "channels stay" in note]


@pytest.mark.parametrize("rounds", [1, 3])
def test_a_later_step_shares_out_what_it_finds(rounds: int) -> None:
    """Not what there was before an earlier one, which had cut one layer more than the others."""
    from sapwood.pipeline.shrink import Pruner, Step
    from sapwood.recovery.loop import Loop, Settings

    loader, x, _ = blobs(64)
    first = sw.prune(Chain(), x[:2], sw.Budget(channels=0.7), allocate={"layer2": 0.4})
    found = widths(first.model)
    step = Step(sw.Budget(channels=0.5), schedule=Schedule("cubic", rounds), options={"allocate": "uniform"})
    pruner = Pruner(x[:2], first.plan, before=first.model)
    loop = Loop(first.model, loader, Settings(lr=0.01))
    for budget in step.targets(first.model, x[:2]):
        pruner.channels(loop, budget, step)
    assert widths(loop.plain) == {name: width // 2 for name, width in found.items()}
    assert widths(sw.cut(Chain(), pruner.plan)) == widths(loop.plain)  # one plan for both steps


def test_rounds_share_flops_out_alike() -> None:
    loader, x, _ = blobs(64)
    given: dict[str, Any] = {"lr": 0.01, "epochs": 3, "options": {"allocate": "uniform"}}
    model, budget = Chain(), sw.Budget(flops=0.3)
    once = sw.prune_and_recover(model, x[:2], loader, budget, **given)
    often = sw.prune_and_recover(model, x[:2], loader, budget, schedule="cubic", rounds=6, until=1.0, **given)
    first, second = widths(once.model), widths(often.model)
    assert all(abs(first[n] - second[n]) <= 2 for n in first) and once.plan.achieved["flops"] > 0.29 * flops(once)
    assert 0.28 * flops(often) < often.plan.achieved["flops"] <= 0.3 * flops(often)


def flops(done: sw.Shrunk) -> float:
    return float(done.plan.achieved["dense_flops"])


def test_what_was_pruned_is_pruned_further_and_taught_by_the_dense_model(trained: nn.Module) -> None:
    loader, x, y = blobs()
    given: dict[str, Any] = {"lr": 0.05, "epochs": 2, "schedule": "cubic", "rounds": 5}
    first = sw.prune_and_recover(trained, x[:2], loader, sw.Budget(sparsity=0.8), **given).model
    gone = {n: p == 0 for n, p in first.named_parameters()}
    rows: list[dict[str, torch.Tensor]] = []
    for teacher in (None, trained, first):
        more = {} if teacher is None else {"teacher": teacher, "share": 1.0}
        done = sw.prune_and_recover(first, x[:2], loader, sw.Budget(sparsity=0.9), **given, **more)
        total = sw.sparsity(done.model)
        assert total.zeros == round(0.9 * total.weights)
        assert not any(p[gone[n]].any() for n, p in done.model.named_parameters())  # what was zero stays so
        rows.append({n: t.clone() for n, t in done.model.state_dict().items()})
    own = sw.prune_and_recover(first, x[:2], loader, sw.Budget(sparsity=0.9), **given, distill=True, share=1.0)
    same = [all(torch.equal(t, row[n]) for n, t in own.model.state_dict().items()) for row in rows]
    assert same == [False, False, True]  # three different ways to learn; its own teacher is what distill=True means
    assert accuracy(own.model, x, y) > 0.9


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


def test_channels_fade_out_before_they_are_cut(trained: nn.Module) -> None:
    loader, x, y = blobs()
    looked: list[float] = []

    def look(model: nn.Module) -> float:
        looked.append(accuracy(model, x, y))
        return looked[-1]

    done = sw.prune_and_recover(
        trained, x[:2], loader, sw.Budget(channels=0.5), lr=0.02, fade=0.5, epochs=4, validate=look, distill=True,
        warmup=0.0, anneal="none", marks=(),
    )  # fmt: skip
    assert sum(m.out_channels for m in done.model if isinstance(m, nn.Conv2d)) == 24
    assert done.pruned is not None and done.pruned.epochs == 2.0 and done.pruned.metric == looked[0] > 0.9
    assert done.metric is not None and done.metric > 0.95


def test_what_has_faded_is_zero(trained: nn.Module) -> None:
    from sapwood.recovery.loop import Loop, Settings

    loader, x, _ = blobs()
    plan = sw.make_plan(trained, x[:2], sw.Budget(channels=0.5))
    loop = Loop(copy.deepcopy(trained), loader, Settings(lr=0.02))
    loop.fade(plan, 5)
    for number, _ in enumerate(loop.epoch(0, 0, 5)):
        small = sw.cut(loop.plain, plan).eval()
        off = (small(x[:8]) - loop.plain.eval()(x[:8])).abs().max()
        assert (off < 1e-5) == (number == 4)  # the cut changes nothing any more


def test_fading_is_for_channels_that_are_cut_once(trained: nn.Module) -> None:
    loader, x, _ = blobs()
    for options in ({"budget": sw.Budget(sparsity=0.5)}, {"budget": sw.Budget(channels=0.5), "fade": 1.5}):
        with pytest.raises(sw.SapwoodError, match="fade"):
            sw.prune_and_recover(trained, x[:2], loader, lr=0.02, epochs=1, **{"fade": 0.5, **options})


def twins() -> nn.Sequential:
    """The upper half of the channels is twice the lower half: nothing is lost with it."""
    model = net(3).eval()
    with torch.no_grad():
        model[0].weight[8:] = model[0].weight[:8]
        model[1].weight[8:] = 2 * model[1].weight[:8]
        model[1].bias[:8] = torch.linspace(-0.2, 0.5, 8)
        model[1].bias[8:] = 2 * model[1].bias[:8]
    return model  # type: ignore[return-value]


def test_what_reads_a_removed_channel_learns_it_from_the_others() -> None:
    model, (_, x, _) = twins(), blobs()
    half = {"0.weight": {0: tuple(range(8))}, "3.weight": {1: tuple(range(8))}}
    half |= {f"1.{n}": {0: tuple(range(8))} for n in ("weight", "bias", "running_mean", "running_var")}
    attributes = {"0.out_channels": 8, "1.num_features": 8, "3.in_channels": 8}
    plan = sw.Plan(half, attributes, {n: tuple(t.shape) for n, t in model.state_dict().items() if n in half})
    small = sw.cut(model, plan)
    before = (small(x) - model(x)).abs().mean()
    kept = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        after = (refit_(small, model, plan, [x[:128], x[128:]])(x) - model(x)).abs().mean()
    assert after < 0.02 * before
    assert all(torch.equal(t, kept[n]) for n, t in model.state_dict().items()) and not model.training
    with pytest.raises(sw.SapwoodError, match="at least one batch"):
        refit_(small, model, plan, [])


def test_norms_are_taken_anew() -> None:
    model, (_, x, _) = net(), blobs()
    model.eval()
    refresh_norms_(model, [x[:128], x[128:]])
    inner = model[0](x)
    assert torch.allclose(model[1].running_mean, inner.mean((0, 2, 3)), atol=1e-5)
    assert torch.allclose(model[1].running_var, inner.var((0, 2, 3)), rtol=0.05)
    assert not model.training and model[1].momentum == 0.1


def test_a_mended_cut_starts_higher(trained: nn.Module) -> None:
    loader, x, y = blobs()
    given = {"lr": 0.001, "epochs": 1, "validate": lambda m: -nn.functional.cross_entropy(m.eval()(x), y).item()}
    budget = sw.Budget(channels=0.25)
    plain = sw.prune_and_recover(trained, x[:2], loader, budget, **given)
    mended = sw.prune_and_recover(trained, x[:2], loader, budget, mend=[(x, y)], **given)
    assert plain.pruned is not None and mended.pruned is not None
    assert (mended.pruned.metric or -9) > (plain.pruned.metric or 0) + 0.05


@pytest.mark.parametrize(
    "what",
    [
        {"budget": sw.Budget(channels=0.5), "fade": 0.6},
        {"budget": sw.Budget(params=0.5), "schedule": "cubic", "rounds": 3},
        {"budget": sw.Budget(sparsity=0.8), "schedule": "cubic", "rounds": 3},
    ],
    ids=str,
)
def test_a_killed_recovery_goes_on(
    trained: nn.Module, what: dict[str, Any], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeping, "APART", 0.0)
    loader, x, _ = blobs()
    given = {"lr": 0.02, "epochs": 4, "distill": True, **what}
    whole = sw.prune_and_recover(trained, x[:2], loader, **given)
    path = tmp_path / "there" / "checkpoint.safetensors"

    class KilledError(Exception):
        pass

    def kill(step: int, total: int) -> None:
        if step == 19:
            raise KilledError

    with pytest.raises(KilledError):
        sw.prune_and_recover(trained, x[:2], loader, checkpoint=path, on_step=kill, **given)
    assert path.exists()
    for other in ({"lr": 0.01}, {"options": {"score": "random"}}, {"optimizer": "adamw"}):
        with pytest.raises(sw.SapwoodError, match="other arguments"):
            sw.prune_and_recover(trained, x[:2], loader, checkpoint=path, **{**given, **other})
    again = sw.prune_and_recover(trained, x[:2], loader, checkpoint=path, **given)
    assert not path.exists()
    for a, b in zip(whole.model.state_dict().values(), again.model.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    assert whole.plan.keep == again.plan.keep and whole.curve == again.curve


def test_what_is_told_of_a_call_is_the_same_in_every_process() -> None:
    given = {"score": distance, "ignore": ("fc", 3), "calibration": [torch.zeros(2)], "rate": Rate(), "none": None}
    wanted = [
        ("calibration", ["torch.Tensor"]),
        ("ignore", ["fc", 3]),
        ("none", None),
        ("rate", "sapwood.recovery.rates.Rate"),
        ("score", "sapwood.recovery.distillation.distance"),
    ]
    assert keeping.told(given) == wanted


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
