"""The CIFAR-10 benchmark as data: recipes, plans, what they decide, and whether what was measured still holds."""

from __future__ import annotations

import collections
import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import save_file

import sapwood as sw
from benchmarks.cifar import alike, by_heart, choosing, data, tables
from benchmarks.cifar.choosing import best_levels, decided, is_ready
from benchmarks.cifar.factors import NAMES, effects, read
from benchmarks.cifar.model import ResNet
from benchmarks.cifar.options import options
from benchmarks.cifar.plans import CHOICES
from benchmarks.cifar.recipes import ABLATION, FIRST, GROUPS, POINTS, all_epochs, names_of, recipe_of
from benchmarks.cifar.work import Place
from sapwood.masking.hold import Hold
from sapwood.scoring.weights import l1

pytestmark = [
    pytest.mark.usefixtures("on_the_cpu"),
    pytest.mark.filterwarnings("ignore:.* rounds take at least a step each"),  # of a few steps in all
]


def test_the_record_is_made_of_points() -> None:
    path = Path(__file__).parents[1] / "benchmarks" / "cifar" / "record.jobs"
    for line in path.read_text().splitlines():
        given = options().parse_args(line.split())
        assert set(given.point) <= set(POINTS) and given.point, line


def test_plans_of_experiments_ask_for_every_factor_alike() -> None:
    for way, choice in CHOICES.items():
        rows = [[int(level) for level in levels] for levels in choice.plan]
        assert {len(row) for row in rows} == {len(choice.factors)} and len({*map(tuple, rows)}) == len(rows), way
        for one, other in itertools.permutations(range(len(choice.factors)), 2):
            pairs = collections.Counter((row[one], row[other]) for row in rows)
            assert len(pairs) == 4 and len({*pairs.values()}) == 1, way
        gains = {name: float(2**place) for place, name in enumerate(choice.factors)}
        made = {levels: sum(g * int(x) for x, g in zip(levels, gains.values(), strict=True)) for levels in choice.plan}
        worth, error = choice.worth(made)
        assert worth == pytest.approx(gains) and (error < 1e-9 or (math.isnan(error) and len(gains) == 3)), way
        assert choice.at(choice.plan[0]) == replace(choice.start, **{n: p[0] for n, p in choice.factors.items()})


def test_a_plan_may_be_decided_by_cross_entropy(tmp_path: Path) -> None:
    place, choice = Place(Path("random"), tmp_path, tmp_path, kept=tmp_path), CHOICES["last"]
    for levels in choice.plan:
        less = sum(g * int(x) for x, g in zip(levels, (0.01, -0.02, 0.03, 0.0, -0.01), strict=True))
        event = {"event": "done", "base_digest": "b", "accuracy": 90.0 - int(levels[0]), "loss": 0.2 - less}
        (tmp_path / f"try-last-{levels}-validation-0.jsonl").write_text(json.dumps(event) + "\n")
    assert choice.by == "loss" and best_levels("last", place) == "10100"


def test_a_point_is_made_of_the_better_settings(tmp_path: Path) -> None:
    place = Place(Path("random"), tmp_path / "out", tmp_path / "runs", kept=tmp_path / "kept")
    point, choice, tried = POINTS["long-2.57-100"], CHOICES["long"], POINTS["try-half-00000"]
    place.kept.mkdir()
    held = replace(place, split="validation")
    for levels in choice.plan:
        assert best_levels("long", place) is None and not is_ready(tried, held)
        event = {"event": "done", "name": f"try-long-{levels}", "base_digest": "b", "accuracy": 90.0, "base": 93.0}
        event |= {"epochs": 80, "fewer_macs": 2.57, "sparsity": 0.0}
        event["accuracy"] += sum(g * int(x) for x, g in zip(levels, (-0.2, 0.1, 0.0, 0.3, -0.1), strict=True))
        (place.kept / f"try-long-{levels}-validation-0.jsonl").write_text(json.dumps(event) + "\n")
    assert best_levels("long", place) == "01010" and not is_ready(point, place)  # no base of its own
    assert "| allocate | uniform | global | +0.30 |" in tables.write(place.kept)
    with pytest.raises(SystemExit, match="zeros is not decided: --split validation --point zeros"):
        decided(POINTS["sparse-90-160"], place)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "base-validation.safetensors").touch()
    assert not is_ready(tried, held)  # it may be of a training that was stopped
    (place.kept / "base-validation-0.jsonl").write_text(json.dumps({"event": "done"}) + "\n")
    assert is_ready(tried, held) and is_ready(POINTS["base"], place)
    made = decided(point, place)
    assert (made.fewer, made.epochs, made.target) == (2.57, 100, 93.7)
    assert (made.lr, made.batch, made.mixup, made.allocate, made.clip) == (0.05, 128, 0.0, "global", 1.0)
    assert "01010 of lr, batch" in made.about and decided(POINTS["nm24"], place) == POINTS["nm24"]
    first = f"try-long-{choice.plan[0]}-validation-0.jsonl"
    (place.kept / first).write_text(json.dumps({**event, "base_digest": "c"}) + "\n")
    with pytest.raises(SystemExit, match="2 different bases"):
        best_levels("long", place)
    with pytest.raises(SystemExit, match="change one of these"):
        recipe_of("long-2.57-100", [], ["lr=0.1"])


def test_a_plan_with_a_small_network_says_what_each_setting_is_worth(tmp_path: Path) -> None:
    path, lines = tmp_path / "lines.jsonl", []
    for levels in CHOICES["tenth"].plan:
        first, second, _ = (int(level) for level in levels)  # lr and mixup
        figures = {"accuracy": 70 + 0.5 * first - second, "loss": 0.9 - 0.02 * first}
        lines += [json.dumps({"way": "tenth", "levels": levels, "seed": seed, **figures}) for seed in (0, 1)]
    path.write_text("\n".join(lines))
    told = list(by_heart.table(path))
    assert told[0] == "| tenth, 8 runs | accuracy | cross entropy |"
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in told[2:6]]
    assert [row[0] for row in rows] == ["lr 0.03, 0.08", "mixup 0.5, 1.0", "until 0.5, 0.25", "standard error"]
    assert [abs(float(row[1])) for row in rows] == [0.5, 1, 0, 0] and float(rows[1][1]) == -1
    assert [float(row[2]) for row in rows] == [-0.02, 0, 0, 0]
    assert not {"again", "where2.11", "oneshot"} & set(by_heart.PLANS) and {"last", "scout"} <= set(by_heart.PLANS)


def test_epochs_add_up_and_sizes_are_those_of_the_point(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [all_epochs(r) for r in POINTS.values() if r.way == "zeros"] == [90, 160, 230, 300]
    latest = {n: all_epochs(r) for n, r in POINTS.items() if r.way in ("tenth", "few", "fewest")}
    assert latest == {"few-90-120": 120, "tenth-90-200": 200, "few-95-150": 150, "fewest-98-220": 220}
    allowed = {n: 300 if r.sparsity else 40 if r.pattern == "2:4" else 200 for n, r in POINTS.items() if r.target}
    assert all(all_epochs(POINTS[n]) <= epochs for n, epochs in allowed.items())
    monkeypatch.setattr(choosing, "best_levels", lambda way, place: "01110")
    place = Place(Path("random"), Path("none"), Path("none"))
    ours, theirs = (decided(POINTS[n], place) for n in ("cut-2.57-20", "theirs-2.57-20-l1"))
    assert (ours.fewer, ours.channels, ours.rounds, ours.mend, ours.mixup) == (2.57, None, 6, 16, 0.5)
    assert (theirs.fewer, theirs.rounds, theirs.mend, theirs.mixup) == (2.57, 1, 0, 0.5)  # trained alike
    assert decided(POINTS["cut-4-20"], place).channels == 0.5


def test_every_point_is_a_recipe() -> None:
    assert {n for group in GROUPS.values() for n in group} <= set(POINTS)
    assert len(ABLATION) == 6 * 8 + 4 * 8
    name, changed = recipe_of("structured-2.57-100", ["stream"], ["lr=0.05", "distill=false", "rounds=3"])
    assert name == "structured-2.57-100_stream_lr-0.05_distill-false_rounds-3"
    assert not changed.inner and changed.lr == 0.05 and changed.distill is False and changed.rounds == 3
    with pytest.raises(SystemExit, match="expected one of"):
        names_of("structured-3")


def test_choices_are_compared_with_everything_else_alike() -> None:
    """Rewinding is worth two points, and one more with the score that is better by one; one run is missing."""
    worth = {"l1": 90.0, "random": 89.0}
    events = {
        f"ablation-2.57-{score}-global-{rate}-plain": [{"accuracy": base + 2 * (rate == "rewind") + more}]
        for score, base in worth.items()
        for rate in ("finetune", "rewind")
        for more in [1.0 if (score, rate) == ("l1", "rewind") else 0.0]
    }
    lines = list(tables.choices(events))
    assert "| random | l1 | -1.50 ± 0.50 | 2 | -2.00 | 1 |" in lines
    assert "| finetune | rewind | -2.50 ± 0.50 | 2 |  | 0 |" in lines and len(lines) == 5  # nothing else to compare
    del events["ablation-2.57-random-global-finetune-plain"]
    assert "| random | l1 | -2.00 | 1 | -2.00 | 1 |" in list(tables.choices(events))


def test_effects_of_a_plan() -> None:
    """Accuracy is 90 + 0.1 for the first choice high - 0.2 for the last; the kept figures give what is said of them."""
    rows = [[1 if bits >> k & 1 else -1 for k in range(7)] for bits in range(128)]
    text = "\n".join(f"{row} ({90 + 0.1 * (row[0] > 0) - 0.2 * (row[6] > 0):.2f}, 0.25)" for row in rows)
    worth, error = effects(*read(text))
    assert np.allclose(worth[:, 0], [0.1, 0, 0, 0, 0, 0, -0.2]) and np.allclose(worth[:, 1], 0)
    assert np.allclose(error, 0)
    kept = (Path(__file__).parents[1] / "benchmarks" / "results" / "cifar" / "first-base" / "factors.txt").read_text()
    worth, error = effects(*read(kept))
    said = {line.split()[0]: line.split()[1:] for line in kept.splitlines() if line.startswith(NAMES)}
    for name, found in zip(NAMES, worth, strict=True):
        assert np.allclose(found, [float(number) for number in said[name]], rtol=0, atol=(6e-4, 6e-6)), name
    assert "standard error 0.068 points and 0.00138" in kept and np.allclose(error, (0.068, 0.00138), rtol=0.01)


def test_the_record_runs_every_plan() -> None:
    path = Path(__file__).parents[1] / "benchmarks" / "cifar" / "record.jobs"
    asked = [options().parse_args(line.split()) for line in path.read_text().splitlines()]
    tried = {(p, given.one) for given in asked for p in given.point if given.split == "validation"}
    assert {(f"try-{way}-{levels}", 0) for way, choice in CHOICES.items() for levels in choice.plan} <= tried
    final = {(p, given.one or 0) for given in asked for p in given.point if given.split == "test"}
    points = [n for n, r in POINTS.items() if r.target and n not in FIRST]
    assert {(p, seed) for p in points for seed in range(3)} <= final


@pytest.mark.filterwarnings("ignore:.*is all zero now")
def test_what_the_library_computed_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same library ends alike; one whose steps differ does not; one without an option says so."""
    np.savez(tmp_path / data.ARRAYS, **data._noise())
    save_file(ResNet(1).state_dict(), tmp_path / data.WEIGHTS)
    monkeypatch.setattr(alike, "IMAGES", 192)
    monkeypatch.setattr(alike, "EPOCHS", 2)
    then, now = (alike.in_small("oneshot-90", tmp_path, tmp_path, blocks=1) for _ in range(2))
    assert then == now and len(then) == 64
    clear = Hold.clear_gradients
    monkeypatch.setattr(Hold, "clear_gradients", lambda self: None)  # as it was before clipping left zeros out
    assert alike.in_small("oneshot-90", tmp_path, tmp_path, blocks=1) != now
    monkeypatch.setattr(Hold, "clear_gradients", clear)

    def before(model: Any, example: Any, loader: Any, budget: Any, *, distill: bool = False, **more: Any) -> Any:
        if "regrow" in more:
            raise TypeError("regrow is not known")
        return prune_and_recover(model, example, loader, budget, teacher=model if distill else None, **more)

    prune_and_recover = sw.prune_and_recover
    monkeypatch.setattr(sw, "prune_and_recover", before)
    assert alike.in_small("oneshot-90", tmp_path, tmp_path, blocks=1) == now
    named = alike.in_small("ablation-2.57-lamp-global-rewind-plain", tmp_path, tmp_path, blocks=1)
    monkeypatch.setattr(alike, "NAMES", ("l1", "l2"))  # as it was before channels were ranked by that name
    assert alike.in_small("ablation-2.57-lamp-global-rewind-plain", tmp_path, tmp_path, blocks=1) == named
    by_l1 = alike.in_small("ablation-2.57-l1-global-rewind-plain", tmp_path, tmp_path, blocks=1)
    monkeypatch.setattr(alike, "lamp", l1)
    assert named != by_l1 == alike.in_small("ablation-2.57-lamp-global-rewind-plain", tmp_path, tmp_path, blocks=1)
    monkeypatch.setitem(POINTS, "oneshot-90", replace(POINTS["oneshot-90"], schedule="cubic", regrow=0.8))
    assert alike.in_small("oneshot-90", tmp_path, tmp_path, blocks=1) == "TypeError: regrow is not known"


def test_points_that_are_computed_as_before_are_told(tmp_path: Path) -> None:
    lines = [("a", "one", "one"), ("b", "one", "two"), ("c", "TypeError: regrow is not known", "two")]
    said = [{"point": p, "commit": "abc", "seeds": [0, 2], "then": then, "now": now} for p, then, now in lines]
    (tmp_path / "lines").write_text("".join(json.dumps(line) + "\n" for line in said))
    ends = [line.split(" | ")[-1] for line in alike.table(tmp_path / "lines").splitlines()[2:]]
    assert ends == ["yes |", "no |", "TypeError: regrow is not known |"]
