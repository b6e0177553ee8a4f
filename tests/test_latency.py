"""Latency budgets with a clock that is written down: tables, knapsack, prediction, correction, staircase."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import sapwood as sw
from sapwood.capture.operators import OpCall
from sapwood.measurement import tables
from sapwood.measurement.clock import Timing
from sapwood.measurement.steps import preferred_steps
from sapwood.measurement.tables import OperatorTimes
from sapwood.pipeline import latency, quickly, rounding, staircase
from sapwood.pipeline.predict import Near, Prediction
from sapwood.planning.counts import Steps, steps_for
from sapwood.planning.draft import score_kept, weights_of
from sapwood.planning.knapsack import Knapsack, choose, quickest
from tests.helpers import build

CPU = torch.device("cpu")
X = torch.randn(2, 3, 8, 8)


def chain(width: int = 64) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * width, 10),
    )


# -- the knapsack ---------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_the_knapsack_is_as_good_as_trying_everything(seed: int) -> None:
    dice = np.random.default_rng(seed)
    sizes = [int(n) for n in dice.integers(1, 5, size=4)]
    values = [np.sort(dice.random(n)) for n in sizes]
    alone = [np.sort(dice.random(n)) for n in sizes]
    pairs = {(u, u + 1): dice.random((sizes[u], sizes[u + 1])) for u in range(3)}
    problem = Knapsack(values, alone, pairs, 0.1)
    everything = list(itertools.product(*(range(n) for n in sizes)))
    times = [problem.time_of(c) for c in everything]
    for limit in np.quantile(times, [0.0, 0.3, 0.7, 1.0]):
        best = max(problem.score_of(c) for c, t in zip(everything, times, strict=True) if t <= limit + 1e-9)
        found = choose(problem, float(limit) + 1e-6)
        assert found is not None and problem.time_of(found) <= limit + 1e-5
        assert problem.score_of(found) >= best * 0.998 - 1e-9
    assert choose(problem, min(times) - 0.01) is None
    assert problem.time_of(quickest(problem)) == pytest.approx(min(times), rel=0.003)


def test_a_channel_of_a_residual_stream_counts_for_every_weight_it_has_a_part_in() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 8)
            self.ups, self.downs = [nn.ModuleList(nn.Linear(*s) for _ in range(3)) for s in ((8, 16), (16, 8))]
            self.last = nn.Linear(8, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for up, down in zip(self.ups, self.downs, strict=True):
                x = x + down(up(x).relu())
            return self.last(x)

    seen = sw.trace(Net(), torch.randn(2, 4))
    counts = dict(zip([g.width for g in seen.groups], weights_of(seen), strict=False))
    assert counts == {8: 8, 16: 2}
    scores = [np.ones(g.width) for g in seen.groups]
    half = {g.name: tuple(range(4)) for g in seen.groups if g.width == 8}
    assert score_kept(seen, scores, half) == pytest.approx(1 - 4 * 8 / (8 * 8 + 3 * 16 * 2))


# -- tables ---------------------------------------------------------------------------------


def test_operators_are_measured_once_and_kept_on_disk(own_cache: Path) -> None:
    seen = sw.trace(chain(8), X)
    calls = [c for c in seen.calls if c.name in tables.TIMED]
    assert [c.name for c in calls] == ["aten::convolution"] * 3 + ["aten::addmm"]
    first = OperatorTimes(CPU, "eager")
    found = [first.time_of(c, seen.dense) for c in calls]
    assert first.measured == 3 and min(found) > 0  # two of the convolutions are alike
    assert [first.time_of(c, seen.dense) for c in calls] == found and first.measured == 3
    first.save()
    again = OperatorTimes(CPU, "eager")
    assert [again.time_of(c, seen.dense) for c in calls] == found and again.measured == 0
    assert OperatorTimes(CPU, "compile").path != again.path
    narrow = [4] * len(seen.dense)
    assert again.key(calls[1], narrow) != again.key(calls[1], seen.dense)
    assert "2x4x8x8" in again.key(calls[1], narrow)


@pytest.mark.parametrize(
    "text", ["", "{", "[" * 100000, '{"about": 1}', '{"about": {}, "times_ms": {"a": "b"}}', "[]", "\0"]
)
def test_a_damaged_cache_is_measured_anew(own_cache: Path, text: str) -> None:
    times = OperatorTimes(CPU, "eager")
    times.path.parent.mkdir(parents=True, exist_ok=True)
    times.path.write_text(text)
    seen = sw.trace(chain(8), X)
    fresh = OperatorTimes(CPU, "eager")
    assert fresh.time_of(seen.calls[0], seen.dense) > 0 and fresh.measured == 1
    fresh.save()
    assert len(json.loads(fresh.path.read_text())["times_ms"]) == 1


def test_a_cache_that_cannot_be_written_only_costs_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SAPWOOD_CACHE", str(tmp_path / "file" / "below"))
    times, seen = OperatorTimes(CPU, "eager"), sw.trace(chain(8), X)
    assert times.time_of(seen.calls[0], seen.dense) > 0
    times.save()


def test_a_convolution_is_timed_with_the_activation_that_the_model_has(own_cache: Path) -> None:
    def usual(*layers: nn.Module) -> str:
        seen = sw.trace(nn.Sequential(nn.Conv2d(3, 8, 3), *layers, nn.Conv2d(8, 8, 3)), X)
        return tables.usual_activation(seen.calls)

    assert usual(nn.ReLU6()) == usual(nn.ReLU6(inplace=True), nn.ReLU6()) == "relu6"
    assert usual(nn.SiLU()) == "silu" and usual(nn.Hardswish(inplace=True)) == "hardswish"
    assert usual(nn.Hardtanh()) == usual(nn.GELU()) == usual() == usual(nn.ReLU(), nn.ReLU(), nn.SiLU()) == "relu"


def test_what_is_done_with_a_convolution_has_times_of_its_own(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "triton_works", lambda device: True)
    monkeypatch.setattr(tables, "describe", lambda device: {})
    seen = sw.trace(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, groups=8)), X)
    keys = {}
    for device in ("cpu", "cuda"):
        for after in ("relu", "relu6"):
            times = OperatorTimes(torch.device(device), "graph", channels_last=True, after=after, use_disk=False)
            keys[device, after] = [times.key(call, seen.dense) for call in seen.calls if call.name in tables.TIMED]
    assert keys["cpu", "relu"] == keys["cpu", "relu6"]
    assert keys["cuda", "relu"][0] == keys["cpu", "relu"][0]
    assert len({*keys["cuda", "relu"], *keys["cuda", "relu6"], *keys["cpu", "relu"]}) == 5


class Formula:
    """Times that follow from sizes: multiply-accumulates, in blocks of ``step`` channels."""

    def __init__(self, step: int = 1, device: torch.device = CPU) -> None:
        self.step, self.device, self.measured = step, device, 0

    def time_of(self, call: OpCall, kept: Sequence[int]) -> float:
        args = dict(call.args)
        if call.name == "aten::convolution":
            (o, i, kh, kw), (n, _, h, w) = args["weight"].shape(kept), args["input"].shape(kept)
            return self.up(o) * self.up(i) * kh * kw * n * h * w / 1e6
        sizes = args["mat2"].shape(kept)
        return self.up(sizes[0]) * self.up(sizes[1]) / 1e6

    def up(self, size: int) -> int:
        return -(-size // self.step) * self.step

    def together(self, calls: Iterable[OpCall]) -> None:
        pass

    def save(self) -> None:
        pass


@pytest.mark.parametrize(("step", "liked"), [(1, (8, 8)), (8, (8, 8)), (16, (16, 16)), (32, (32, 16)), (64, (64, 16))])
def test_the_step_a_device_likes_is_found(step: int, liked: tuple[int, int]) -> None:
    assert preferred_steps(Formula(step), "convolution", torch.float32) == liked  # type: ignore[arg-type]


def test_widths_that_are_slower_are_never_used() -> None:
    class Cliff(Formula):
        def time_of(self, call: OpCall, kept: Sequence[int]) -> float:
            width = dict(call.args)["input"].shape(kept)[1]
            return super().time_of(call, kept) * (2.0 if width % 16 else 1.0)

    assert preferred_steps(Cliff(), "convolution", torch.float32) == (16, 16)  # type: ignore[arg-type]


def test_narrow_layers_may_like_smaller_steps_than_wide_ones() -> None:
    class Mild(Formula):
        def time_of(self, call: OpCall, kept: Sequence[int]) -> float:
            width = dict(call.args)["input"].shape(kept)[1]
            return super().time_of(call, kept) * (1.2 if width % 32 and width > 32 else 1.0)

    assert preferred_steps(Mild(), "convolution", torch.float32) == (32, 8)  # type: ignore[arg-type]
    assert preferred_steps(Mild(16), "convolution", torch.float32) == (32, 16)  # type: ignore[arg-type]


def test_narrow_layers_take_smaller_steps() -> None:
    steps = Steps(64, 8)
    assert [steps.step(n) for n in (8, 32, 64, 96, 128, 256, 2048)] == [8, 8, 16, 16, 32, 64, 64]
    assert steps_for(steps, [1, 4], [256, 64]).tolist() == [64.0, 16.0]


# -- prediction and correction --------------------------------------------------------------


def predicted(model: nn.Module, dense_ms: float) -> Prediction:
    seen = sw.trace(model, X)
    scores = [np.ones(g.width) for g in seen.groups]
    steps = steps_for(8, [1] * len(scores), seen.dense)
    made = Prediction(seen, scores, Formula(), steps, np.zeros(len(scores), dtype=bool))  # type: ignore[arg-type]
    made.fill(dense_ms, lambda *_: None)
    return made


def test_the_prediction_is_the_dense_time_for_the_dense_model() -> None:
    made = predicted(chain(), 50.0)
    whole = [len(options) - 1 for options in made.choices]
    assert made.counts(whole) == made.trace.dense == [64, 64, 64]
    assert made.problem.time_of(whole) == pytest.approx(50.0)


def test_the_prediction_follows_the_operators() -> None:
    model, formula = chain(), Formula()
    made = predicted(model, 50.0)
    for choice in itertools.product(*(range(len(options)) for options in made.choices)):
        kept = made.counts(choice)
        timed = sum(formula.time_of(c, kept) for c in made.trace.calls if c.name in tables.TIMED)
        rest = made.problem.time_of(choice) - timed
        assert 0 < rest < 50  # what is shared out by bytes
        if choice == tuple(made.fastest()):
            assert kept == [8, 8, 8]


class Clock:
    """Latency of a deployed model from the widths of its convolutions, in blocks, with a part that stays."""

    def __init__(self, fixed: float = 0.0, noise: float = 0.0, block: int = 1) -> None:
        self.fixed, self.noise, self.block, self.asked = fixed, noise, block, 0

    def ms(self, model: nn.Module) -> float:
        convs = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
        return self.fixed + sum(self.blocks(m.in_channels) * self.blocks(m.out_channels) for m in convs) / 640

    def blocks(self, size: int) -> int:
        return -(-size // self.block) * self.block

    def __call__(self, calls: dict[str, Any], *_: Any, **__: Any) -> dict[str, Timing]:
        self.asked += 1
        found = {name: self.ms(call) for name, call in calls.items()}
        first, n = next(iter(found.values())), self.noise
        return {
            name: Timing(
                t, t * (1 - n), t * (1 + n), 0.0, 15, first / t, first / t * (1 - n), first / t * (1 + n), True
            )
            for name, t in found.items()
        }


@pytest.fixture
def by_formula(monkeypatch: pytest.MonkeyPatch) -> Callable[[Clock], Clock]:
    """Planning with a clock and operator times that are written down; nothing is timed."""

    class Form(nn.Module):
        form, backend, notes = "folded, eager", "eager", ()

        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.plain = model

        def runner_for(self, inputs: Any) -> Any:
            return type("Runner", (), {"call": self.plain})

    def use(clock: Clock) -> Clock:
        monkeypatch.setattr(latency, "deploy", lambda model, *_, **__: Form(model))
        monkeypatch.setattr(latency, "take_turns", clock)
        monkeypatch.setattr(latency, "OperatorTimes", lambda *_, **__: Formula())
        monkeypatch.setattr("sapwood.pipeline.rounding.preferred_steps", lambda *_: (8, 8))
        monkeypatch.setattr(latency.time, "sleep", lambda _: None)
        return clock

    return use


class Stream(nn.Module):
    """One wide stream that every block reads and writes: its width moves the latency in large steps."""

    def __init__(self, width: int = 64, inner: int = 64, blocks: int = 6) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(nn.Conv2d(width, inner, 3, padding=1) for _ in range(blocks))
        self.up = nn.ModuleList(nn.Conv2d(inner, width, 3, padding=1) for _ in range(blocks))
        self.head = nn.Linear(width, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for down, up in zip(self.down, self.up, strict=True):
            x = x + up(torch.relu(down(x)))
        out: torch.Tensor = self.head(x.mean((2, 3)))
        return out


def test_choices_near_a_plan() -> None:
    model = Stream()
    seen = sw.trace(model, X)
    dense = seen.dense
    stream = next(i for i, g in enumerate(seen.groups) if "stem" in g.name)

    def made(near: Near | None) -> Prediction:
        steps, whole = steps_for(8, [1] * len(dense), dense), np.zeros(len(dense), dtype=bool)
        scores = [np.ones(g.width) for g in seen.groups]
        made = Prediction(seen, scores, Formula(), steps, whole, near=near)  # type: ignore[arg-type]
        made.fill(100.0, lambda *_: None)
        return made

    anywhere, half = made(None), [n // 2 for n in dense]
    choice = anywhere.choice_of(half)
    assert choice is not None and anywhere.counts(choice) == half
    step = 100 * 8 / 64 / 2  # of half the dense time at half the width
    (bulky,) = anywhere.bulky(half, 0.5 * step)
    assert stream in anywhere.units[bulky].groups
    assert anywhere.bulky(half, 2 * step) == [] and anywhere.bulky([7] * len(half), step) == []

    held = made(Near(half, [bulky]))
    assert [len(c) for c in held.choices] == [1 if u == bulky else 8 for u in range(len(held.units))]
    assert held.problem.time_of(held.choice_of(half) or []) == pytest.approx(anywhere.problem.time_of(choice))
    above = made(Near(half, upwards=True))
    assert above.choice_of(half) == [0] * len(above.units)
    assert all((c >= 32).all() for options in above.choices for c in options)


@pytest.mark.parametrize("share", [0.9, 0.7, 0.5, 0.35, 0.2])
def test_latency_budgets_are_met_within_three_percent(by_formula: Callable[[Clock], Clock], share: float) -> None:
    clock, model = by_formula(Clock(fixed=0.5)), chain(128)
    done = sw.prune(model, X, sw.Budget(latency=share))
    assert done.check.passed
    left = clock.ms(done.model) / clock.ms(model)
    assert share * 0.97 <= left <= share * 1.03
    assert done.plan.achieved["latency_ms"] == clock.ms(done.model)
    assert done.plan.achieved["dense_latency_ms"] == clock.ms(model)
    assert done.plan.budget["latency"] == share and "measured" in done.plan.notes[-1]
    assert clock.asked <= 1 + latency.TRIES


@pytest.mark.parametrize("share", [0.7, 0.5, 0.2])
def test_where_steps_are_coarse_the_budget_is_kept_and_the_gap_told(
    by_formula: Callable[[Clock], Clock], share: float
) -> None:
    clock, model = by_formula(Clock(block=32)), chain(128)
    plan = sw.make_plan(model, X, sw.Budget(latency=share))
    left = clock.ms(sw.cut(model, plan)) / clock.ms(model) / share
    assert left <= 1.03
    assert left >= 0.97 or "below the budget" in plan.notes[-2]


def test_an_absolute_time_is_met(by_formula: Callable[[Clock], Clock]) -> None:
    clock, model = by_formula(Clock()), chain(128)
    plan = sw.make_plan(model, X, sw.Budget(latency="20ms"))
    assert 19.4 <= clock.ms(sw.cut(model, plan)) <= 20.6


def test_a_budget_that_needs_nothing_cuts_nothing(by_formula: Callable[[Clock], Clock]) -> None:
    clock, model = by_formula(Clock()), chain()
    assert not sw.make_plan(model, X, sw.Budget(latency="1s")).groups
    assert not sw.make_plan(model, X, sw.Budget(latency=1.0)).groups
    assert clock.asked


def test_what_cannot_be_reached_is_told_with_the_best(by_formula: Callable[[Clock], Clock]) -> None:
    by_formula(Clock(fixed=10.0))
    with pytest.raises(
        sw.SapwoodError, match=r"Budget\(latency=0.1\).*the best found is 10(\.\d)? ms, 4\d% of the dense"
    ):
        sw.make_plan(chain(), X, sw.Budget(latency=0.1))


@pytest.mark.parametrize(
    ("kind", "step", "share"),
    [
        *[("chain", 8, share) for share in (0.8, 0.5, 0.3)],
        *[("chain", 64, share) for share in (0.7, 0.6, 0.3)],
        *[("stream", 64, share) for share in (0.8, 0.7, 0.6, 0.5, 0.4, 0.3)],
    ],
)
def test_what_takes_long_to_make_ready_is_guessed_at_first(
    by_formula: Callable[[Clock], Clock], monkeypatch: pytest.MonkeyPatch, kind: str, step: int, share: float
) -> None:
    """The quick form has other times: half as long again, and a part that no cut makes shorter.

    Where a width moves the latency in large steps, plans that were only guessed at say where to look next.
    """
    clock, made = by_formula(Clock(fixed=0.5)), list[str]()
    model: nn.Module = Stream(256, 64).eval() if kind == "stream" else chain(128)
    monkeypatch.setattr("sapwood.pipeline.rounding.preferred_steps", lambda *_: (step, 8))

    class Form(nn.Module):
        form = "folded, eager"

        def __init__(self, plain: nn.Module, way: str) -> None:
            super().__init__()
            self.plain, self.backend = plain, "eager" if way == "auto" else way
            made.append(self.backend)

        def runner_for(self, inputs: Any) -> Any:
            return type("Runner", (), {"call": (self.plain, self.backend)})

    ms = clock.ms
    clock.ms = lambda call: ms(call[0]) * 1.5 + 4 if call[1] == "graph" else ms(call[0])  # type: ignore[method-assign]
    monkeypatch.setattr(latency, "QUICK", {("cpu", "eager"): "graph"})
    for module in (latency, quickly):
        monkeypatch.setattr(module, "deploy", lambda model, _, way="auto", **__: Form(model, way))
        monkeypatch.setattr(module, "take_turns", clock)
    plan = sw.make_plan(model, X, sw.Budget(latency=share))
    left = ms(sw.cut(model, plan)) / ms(model)
    assert share * 0.97 <= left <= share * 1.03
    assert plan.achieved["latency_ms"] == ms(sw.cut(model, plan))  # measured, not guessed
    assert 1 < made.count("eager") < made.count("graph")


def test_narrower_layers_are_tried_where_all_plans_are_too_slow(by_formula: Callable[[Clock], Clock]) -> None:
    clock, model = by_formula(Clock()), chain(512)
    plan = sw.make_plan(model, X, sw.Budget(latency=0.012))
    assert min(len(kept) for kept in plan.groups.values()) < 512 * latency.FLOOR
    assert 0.97 <= clock.ms(sw.cut(model, plan)) / clock.ms(model) / 0.012 <= 1.03


def test_the_narrowest_is_tried_before_it_is_said_that_nothing_will_do(
    by_formula: Callable[[Clock], Clock], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However far predictions are off: here they hold the wide models for fast and the narrow ones for slow."""
    clock, model = by_formula(Clock()), chain(128)
    widest = lambda self: [len(c) - 2 for c in self.choices]  # noqa: E731
    monkeypatch.setattr(latency.Prediction, "best", lambda self, limit: self.counts(widest(self)))
    monkeypatch.setattr(latency.Prediction, "fastest", widest)
    plan = sw.make_plan(model, X, sw.Budget(latency=0.3))
    assert clock.ms(sw.cut(model, plan)) <= 0.3 * clock.ms(model)
    assert any("below the budget" in note for note in plan.notes)


def test_a_noisy_machine_gives_no_plan(by_formula: Callable[[Clock], Clock]) -> None:
    clock = by_formula(Clock(noise=0.2))
    with pytest.raises(sw.SapwoodError, match="too noisy to decide"):
        sw.make_plan(chain(), X, sw.Budget(latency=0.5))
    assert clock.asked == 3


def test_ignored_layers_and_steps_are_kept(by_formula: Callable[[Clock], Clock]) -> None:
    by_formula(Clock())
    plan = sw.make_plan(chain(128), X, sw.Budget(latency=0.7), ignore=("2",), round_to=32)
    assert len(plan.groups) and "2" not in plan.groups
    assert all(len(kept) % 32 == 0 for kept in plan.groups.values())


def test_a_latency_plan_keeps_the_most_score(by_formula: Callable[[Clock], Clock]) -> None:
    clock, model = by_formula(Clock()), chain(128)
    even = sw.make_plan(model, X, sw.Budget(channels=0.5), allocate="uniform", round_to=8)
    share = clock.ms(sw.cut(model, even)) / clock.ms(model)
    ours = sw.make_plan(model, X, sw.Budget(latency=share))
    assert clock.ms(sw.cut(model, ours)) <= 1.03 * share * clock.ms(model)
    assert ours.achieved["score_kept"] > even.achieved["score_kept"]


def test_a_model_without_groups_is_told(by_formula: Callable[[Clock], Clock]) -> None:
    by_formula(Clock(fixed=1.0))
    with pytest.raises(sw.SapwoodError, match="the best found is 1 ms, 100%"):
        sw.make_plan(nn.Linear(4, 4), torch.randn(1, 4), sw.Budget(latency=0.5))
    with pytest.raises(sw.SapwoodError, match="of which nothing can be cut"):
        staircase.staircase(nn.Linear(4, 4), torch.randn(1, 4), "eager", seconds=0.01)


def test_names_to_ignore_may_come_one_by_one(by_formula: Callable[[Clock], Clock]) -> None:
    by_formula(Clock())
    plan = sw.make_plan(chain(128), X, sw.Budget(latency=0.5), ignore=(n for n in ["0"]))
    assert plan.groups and "0" not in plan.groups
    with pytest.raises(sw.SapwoodError, match="names of modules or parameters; got 5"):
        sw.make_plan(chain(), X, sw.Budget(channels=0.5), ignore=5)  # type: ignore[arg-type]


def test_times_that_are_no_times_are_not_believed(own_cache: Path) -> None:
    times, seen = OperatorTimes(CPU, "eager"), sw.trace(chain(8), X)
    times.time_of(seen.calls[0], seen.dense)
    times.save()
    text = json.loads(times.path.read_text())
    text["times_ms"] = dict.fromkeys(text["times_ms"], float("inf"))
    times.path.write_text(json.dumps(text))
    again = OperatorTimes(CPU, "eager")
    assert again.time_of(seen.calls[0], seen.dense) < 1000 and again.measured == 1


def test_progress_is_told(by_formula: Callable[[Clock], Clock]) -> None:
    by_formula(Clock())
    told: list[tuple[str, int, int]] = []
    sw.make_plan(chain(), X, sw.Budget(latency=0.5), tell=lambda *what: told.append(what))
    assert {"timing operators", "measuring cut models"} <= {what for what, _, _ in told}
    assert all(0 <= done <= of for _, done, of in told)


@pytest.mark.parametrize("name", ["plain_chain", "transformer_encoder", "grouped_convolution", "layer_norm"])
def test_predictions_are_made_for_any_model(name: str) -> None:
    """Tied groups, norms, attention: every choice fits together, and wider is never predicted to be faster by much."""
    model, inputs = build(name)
    seen = sw.trace(model, inputs)
    times = OperatorTimes(CPU, "eager")
    scores = [np.ones(g.width) for g in seen.groups]
    steps = steps_for(None, [1] * len(scores), seen.dense)
    made = Prediction(seen, scores, times, steps, np.zeros(len(scores), dtype=bool), levels=3)
    made.fill(1.0, lambda *_: None)
    found = choose(made.problem, float("inf"))
    assert found is not None and made.counts(found) == seen.dense
    for form, _ in seen.constraints:
        assert form.value(made.counts(made.fastest())) == 0


@pytest.mark.parametrize(
    ("value", "limit"), [(0.5, 5.0), ("3.5ms", 3.5), ("800us", 0.8), ("0.2 s", 200.0), (" 1ms ", 1.0), (1, 10.0)]
)
def test_latency_budgets_are_read(value: Any, limit: float) -> None:
    budget = sw.Budget(latency=value)
    assert budget.kind == "latency" and budget.limit_ms(10.0) == pytest.approx(limit)


@pytest.mark.parametrize("value", [0, -1, 1.5, "fast", "3.5", "0ms", "ms", True, "-1ms", float("nan"), [1]])
def test_bad_latency_budgets_are_refused(value: Any) -> None:
    with pytest.raises(sw.SapwoodError, match="a fraction above 0 and at most 1, or a time"):
        sw.Budget(latency=value)


def test_round_to_auto_takes_the_measured_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounding, "preferred_steps", lambda *_: (32, 8))
    plan = sw.make_plan(chain(128), X, sw.Budget(channels=0.6), allocate="uniform", round_to="auto")
    assert {len(kept) for kept in plan.groups.values()} == {64} and plan.budget["round_to"] == "auto (32)"
    with pytest.raises(sw.SapwoodError, match="at least 1, or 'auto'"):
        sw.make_plan(chain(), X, sw.Budget(channels=0.5), round_to="automatic")


# -- the staircase --------------------------------------------------------------------------


def test_cliffs_are_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    class Odd(Clock):
        def ms(self, model: nn.Module) -> float:
            widths = [m.out_channels for m in model.modules() if isinstance(m, nn.Conv2d)]
            return sum(widths) * (2.0 if widths[0] % 8 else 1.0)

    class Form:
        form, backend, notes = "folded, eager", "eager", ()

        def __init__(self, model: nn.Module) -> None:
            self.model = model

        def runner_for(self, inputs: Any) -> Any:
            return type("Runner", (), {"call": self.model})

    monkeypatch.setattr(staircase, "deploy", lambda model, *_, **__: Form(model))
    monkeypatch.setattr(staircase, "take_turns", Odd())
    found = staircase.staircase(chain(64), X, shares=(0.75, 0.7, 0.5))
    assert [round(s.channels, 2) for s in found.stairs] == [1.0, 0.75, 0.69, 0.5]
    assert [s.cliff for s in found.stairs] == ["", "", "slower than 75% of the channels", ""]
    assert found.stairs[-1].timing.speed == 2.0
    with pytest.raises(sw.SapwoodError, match="shares of the channels"):
        staircase.staircase(chain(), X, shares=(1.5,))
