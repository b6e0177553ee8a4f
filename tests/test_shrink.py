"""``prune_and_recover``: schedules follow their formulas; rounds, fading and mending lose little, a kill nothing."""

from __future__ import annotations

import copy
import itertools
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import sapwood as sw
from sapwood.pipeline import keeping
from sapwood.recovery import refit_, refresh_norms_
from sapwood.recovery.distillation import distance
from sapwood.recovery.rates import Rate
from sapwood.recovery.schedules import Schedule
from sapwood.surgery.compose import compose
from tests.helpers import build, outputs, snapshot
from tests.nets import CASES
from tests.stripes import accuracy, blobs, net, trained_net

pytestmark = pytest.mark.usefixtures("on_the_cpu")


@pytest.fixture(scope="module")
def trained() -> nn.Module:
    return trained_net()


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
        seen = (
            torch.relu(self.joined(torch.cat([made[1], made[4]], 1))) if isinstance(self.joined, nn.Conv2d) else made[4]
        )
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


@pytest.mark.parametrize("score", ["l1", "l2", "lamp"])
@pytest.mark.parametrize("loud", [False, True])
@pytest.mark.parametrize("budget", [sw.Budget(channels=0.3), sw.Budget(flops=0.3)], ids=["channels", "flops"])
def test_one_ranking_in_rounds_is_that_of_the_first(budget: sw.Budget, loud: bool, score: str) -> None:
    """Weights that do not move are cut nearly alike in one round and in six, not again and again the same layers; also
    where a layer has a few channels far above its others."""
    loader, x, _ = blobs(64)
    model = Chain()
    if loud:
        with torch.no_grad():
            model.get_parameter("layer2.weight")[:6] *= 30
    given: dict[str, Any] = {"lr": 1e-12, "epochs": 3, "options": {"score": score}}
    once = sw.prune_and_recover(model, x[:2], loader, budget, **given)
    often = sw.prune_and_recover(model, x[:2], loader, budget, schedule="cubic", rounds=6, until=1.0, **given)
    assert widths(often.model) == pytest.approx(widths(once.model), abs=5)
    assert often.plan.budget["allocate"] == "global"


@pytest.mark.parametrize("shares", [{"layer1": 0.5, "layer3": 1.3}, {"re:.*": 2}, {"layer0": 0.01}], ids=str)
@pytest.mark.parametrize("budget", [sw.Budget(channels=0.4), sw.Budget(flops=0.3)], ids=["channels", "flops"])
def test_rounds_keep_to_shares_by_name(shares: dict[str, float], budget: sw.Budget) -> None:
    """Of what there was at first; also where a layer is down to its last channel long before the others are done."""
    loader, x, _ = blobs(64)
    given: dict[str, Any] = {"lr": 0.01, "epochs": 3, "options": {"allocate": shares}}
    once = sw.prune_and_recover(Chain(), x[:2], loader, budget, **given)
    often = sw.prune_and_recover(Chain(), x[:2], loader, budget, schedule="cubic", rounds=6, until=1.0, **given)
    assert widths(often.model) == pytest.approx(widths(once.model), abs=2)
    assert often.plan.budget["allocate"] == shares
    asked = getattr(budget, budget.kind)
    for done in (once, often):
        trace = sw.trace(done.model, x[:2])
        left = trace.costs.evaluate(budget.kind, trace.dense) / done.plan.achieved[f"dense_{budget.kind}"]
        assert asked - 0.03 <= left <= asked


@pytest.mark.parametrize("rounds", [1, 3])
def test_a_later_step_shares_out_what_it_finds(rounds: int) -> None:
    """Not what there was before an earlier one, which had cut one layer more than the others."""
    from sapwood.pipeline.shrink import Pruner
    from sapwood.pipeline.steps import Step
    from sapwood.recovery.loop import Loop, Settings

    loader, x, _ = blobs(64)
    first = sw.prune(Chain(), x[:2], sw.Budget(channels=0.7), allocate={"layer2": 0.4})
    found = widths(first.model)
    step = Step(sw.Budget(channels=0.5), schedule=Schedule("cubic", rounds), options={"allocate": "uniform"})
    pruner = Pruner(x[:2], first.plan)
    pruner.begin(step, first.model)
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


def test_more_rounds_than_steps_are_told(trained: nn.Module) -> None:
    loader, x, _ = blobs()
    steps: list[int] = []
    given: dict[str, Any] = {"lr": 0.05, "epochs": 2 / len(loader), "on_step": lambda step, total: steps.append(total)}
    with pytest.warns(UserWarning, match=r"5 rounds .*: 5 steps instead of 2 .* choose fewer rounds") as told:
        sw.prune_and_recover(trained, x[:2], loader, sw.Budget(sparsity=0.8), schedule="cubic", rounds=5, **given)
    assert len(told) == 1 and told[0].filename == __file__ and steps == [5] * 5
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sw.prune_and_recover(trained, x[:2], loader, sw.Budget(sparsity=0.8), schedule="cubic", rounds=2, **given)


def test_the_optimizer_follows_a_cut_between_rounds(trained: nn.Module) -> None:
    from sapwood.pipeline.shrink import Pruner
    from sapwood.pipeline.steps import Step
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
        {"budget": sw.Budget(sparsity=0.8), "schedule": "cubic", "rounds": 3, "regrow": 0.9, "clip": 1.0},
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
