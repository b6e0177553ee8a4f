"""The CIFAR-10 benchmark, on noise and a tiny network: it runs, skips what is done, and tells what came of it."""

from __future__ import annotations

import json
import math
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from benchmarks.cifar import choosing, data, status
from benchmarks.cifar.__main__ import main
from benchmarks.cifar.choosing import decided, is_ready
from benchmarks.cifar.data import Images, accuracy, load, loss, shrunk, unshrunk
from benchmarks.cifar.jobs import WAITS, held_up, listed
from benchmarks.cifar.kinds import Recipe
from benchmarks.cifar.mixing import Harder
from benchmarks.cifar.model import Another, Block, Both, ResNet
from benchmarks.cifar.options import options
from benchmarks.cifar.recipes import POINTS, all_epochs
from benchmarks.cifar.side_by_side import run_all
from benchmarks.cifar.tables import finished
from benchmarks.cifar.work import Place
from sapwood.recovery.regions import blocks_of

pytestmark = [
    pytest.mark.usefixtures("on_the_cpu"),
    pytest.mark.filterwarnings("ignore:.* rounds take at least a step each"),  # of a few steps in all
]


def words(folder: Path, *more: str) -> list[str]:
    small = ["--data", "random", "--blocks", "1", "--limit", "192", "--device", "cpu", "--split", "validation"]
    places = ["--out", str(folder / "out"), "--kept", str(folder / "kept"), "--runs", str(folder / "runs")]
    return [*small, *places, "--one", "0", *more]


@pytest.fixture(scope="module")
def base_of_all(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        patch.setitem(POINTS, "base", replace(POINTS["base"], epochs=2))
        assert main(words(folder, "--point", "base")) == 0
    return folder


@pytest.fixture
def based(base_of_all: Path, tmp_path: Path) -> Path:
    """A folder with a base that has been trained."""
    for part in ("out", "runs"):
        shutil.copytree(base_of_all / part, tmp_path / part)
    return tmp_path


@pytest.mark.filterwarnings("ignore:.*is all zero now")
def test_points_run_once(based: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quick, tmp_path = ("--set", "batch=64", "--epochs", "1"), based
    points = ["structured-4-100", "promise-half-40", "try-shape-01011", "try-cut-01011", "even-4-200"]
    points += ["try-sparse-000", "nm24"]
    assert main(words(tmp_path, "--point", *points, *quick)) == 0
    files = sorted((tmp_path / "out").glob("*.jsonl"))
    assert len(files) == 1 + len(points)
    ends = {f.name.partition("_")[0]: json.loads(f.read_text().splitlines()[-1]) for f in files}
    assert all(e["event"] == "done" and len(e["digest"]) == 64 for e in ends.values())
    assert 3.5 < ends["structured-4-100"]["fewer_macs"] < 4.5 and ends["try-sparse-000"]["sparsity"] == 0.9
    before = {f: f.read_bytes() for f in files}
    main(words(tmp_path, "--point", *points, *quick))
    assert {f: f.read_bytes() for f in files} == before  # what is done is not done again
    back, kept, unfinished = tmp_path / "back", tmp_path / "kept", tmp_path / "out" / "nm24-validation-1.jsonl"
    unfinished.write_text(json.dumps({"event": "step", "name": "nm24"}) + "\n")
    assert main(words(tmp_path, "--collect", str(back))) == 0
    assert (back / "results.tgz").exists()
    kept.mkdir()
    (kept / files[-1].name).write_text(json.dumps({"event": "stopped"}) + "\n")  # gives way to one that finished
    assert main(words(tmp_path, "--merge", str(back / "results.tgz"))) == 0
    merged = {f.name: f.read_bytes() for f in kept.iterdir()}
    assert merged.pop("base-validation.safetensors") == (tmp_path / "runs" / "base-validation.safetensors").read_bytes()
    assert merged == {f.name: data for f, data in before.items()}
    for file in files:
        file.unlink()
    main(words(tmp_path, "--point", *points, *quick))
    assert list((tmp_path / "out").glob("*.jsonl")) == [unfinished]  # nor what was done elsewhere
    capsys.readouterr()
    assert main(words(tmp_path, "--tables")) == 0
    table = capsys.readouterr().out
    assert all(p in table for p in points)
    assert "94.2" not in table  # what is asked for is asked of test data


def test_a_run_without_its_base_says_so(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="--point base comes first"):
        main(words(tmp_path, "--point", "structured-4-100"))


def test_a_session_that_is_over_stops(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words(tmp_path, "--point", "base", "--set", "batch=64", "--epochs", "1", "--deadline", "1")) == 0
    assert "stopped" in capsys.readouterr().out


def test_runs_of_different_kinds_side_by_side(based: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jobs, common = based / "jobs", words(based, "--set", "batch=64", "--epochs", "1")
    jobs.write_text("--point nm24\n\n--point promise-20 --variant plain --one 1\n--point half-40\n--point nm\n")
    more = ["--jobs", str(jobs), "--side-by-side", "1", "--back", str(based / "back")]
    assert main([*common, *more]) == 0
    assert (based / "back" / "results.tgz").exists()
    told = capsys.readouterr().out
    assert "2 processes to run" in told and "was not begun: --point nm: expected one of" in told
    assert len(list((based / "out").glob("*.jsonl"))) == 3
    before = {name for name, _, why in listed(jobs, words(based)) if not why}
    jobs.write_text("--point base --one 1\n" + jobs.read_text() + "--point shape-2.57-200\n--pint nm24\n")
    found = listed(jobs, words(based))
    after = [name for name, _, why in found if not why]
    assert before == set(after[1:]) and len(after) == 3 and after[0].startswith("point_base_one_1_")
    waiting = [name for name, _, why in found if why == WAITS]
    assert [name[: name.rindex("_")] for name in waiting] == ["point_half-40", "point_shape-2.57-200"]
    assert "unrecognized arguments: --pint nm24" in found[-1][2]


def test_a_look_tells_how_far_all_runs_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, runs = tmp_path / "out", tmp_path / "runs"
    out.mkdir()
    end = {"event": "done", "accuracy": 93.5, "fewer_macs": 4.0, "sparsity": 0.0, "seconds": 80.0}
    (out / "a-test-0.jsonl").write_text(json.dumps(end) + "\n")
    step = {"event": "step", "step": 2000, "total": 3900, "ms_per_step": 9.5, "time": "2026-11-18T09:20:01+00:00"}
    (out / "b-test-0.jsonl").write_text(json.dumps(step) + '\n{"event": "st')  # being written
    monkeypatch.setattr(status, "START", 0)
    with status.running(runs):
        assert status.is_running(runs) and not status.wait(0.01, lambda: not status.is_running(runs))
    assert main(words(tmp_path, "--look", "60", "--collect", str(tmp_path / "back"))) == 0  # does not wait a minute
    told = capsys.readouterr().out
    assert "a-test-0: 93.5 at 4.0 times fewer MACs" in told and "nothing runs any more" in told
    assert ".. b-test-0: step 2000 of 3900, 9.5 ms, 09:20:01" in told and (tmp_path / "back" / "results.tgz").exists()


def test_a_point_goes_on_from_another(based: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = replace(POINTS["try-zeros-000"], sparsity=0.5, epochs=3, batch=64)
    monkeypatch.setitem(POINTS, "first", first)
    monkeypatch.setitem(POINTS, "second", replace(first, sparsity=0.8, epochs=2, after="first"))
    place = Place(Path("random"), based / "out", based / "runs", split="validation", kept=based / "kept")
    assert is_ready(POINTS["first"], place) and not is_ready(POINTS["second"], place)
    assert main(words(based, "--point", "first", "second")) == 0
    assert is_ready(POINTS["second"], place) and not is_ready(POINTS["second"], place, seed=1)
    one, two = (finished(place.events(name, 0)) or {} for name in ("first", "second"))
    assert (one["sparsity"], two["sparsity"]) == (0.5, 0.8) and (one["epochs"], two["epochs"]) == (3, 5)
    assert one["base_digest"] == two["base_digest"] != one["digest"]  # both are judged by the base
    monkeypatch.setitem(POINTS, "third", replace(first, sparsity=0.8, epochs=2, taught="first"))
    assert is_ready(POINTS["third"], place) and not is_ready(POINTS["third"], place, seed=1)
    assert main(words(based, "--point", "third")) == 0
    three = finished(place.events("third", 0)) or {}
    assert three["epochs"] == 5 and three["base_digest"] == one["base_digest"]
    monkeypatch.setitem(POINTS, "plain", replace(first, sparsity=0.8, epochs=2))
    assert main(words(based, "--point", "plain")) == 0
    taught = [finished(place.events(name, 0)) or {} for name in ("plain", "third", "second")]
    assert len({run["digest"] for run in taught}) == 3  # another teacher, another start
    weights = load_file(place.end("first", 0))
    assert sum(int((w == 0).sum()) for n, w in weights.items() if w.dim() > 1) == pytest.approx(
        0.5 * sum(w.numel() for w in weights.values() if w.dim() > 1), abs=1
    )


def test_images_are_mixed_and_cut_out_until_they_calm_down() -> None:
    torch.manual_seed(0)
    bright = Images(torch.full((64, 3, 32, 32), 255, dtype=torch.uint8), torch.arange(64) % 10)
    for recipe in (Recipe(mixup=1.0, cutout=8, calm=0.25, batch=32), Recipe(cutmix=1.0, cutout=8, calm=0.25, batch=32)):
        images = Harder(bright, recipe)
        images.progress(74, 100)
        harder = list(images)
        images.progress(75, 100)
        plain = list(images)
        assert len(harder) == len(plain) == 2
        assert all((x == 0).any() and (y > 0).sum() > len(y) for x, y in harder)
        assert all((x > 0).all() and sorted(y.unique().tolist()) == [0, 1] for x, y in plain)
        kinds = {(x.shape, x.dtype, x.stride(), y.shape, y.dtype) for x, y in harder + plain}
        assert len(kinds) == 1  # a captured step takes both
    images = Harder(bright, replace(recipe, calm=0.0))
    images.progress(100, 100)
    assert any((x == 0).any() for x, _ in images)


def test_with_mixup_and_cutmix_each_batch_has_one_of_them() -> None:
    torch.manual_seed(0)
    labels = torch.arange(400) % 10
    images = Images((labels * 20).to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, 8, 8).contiguous(), labels)
    pure = {round(float(v), 4) for x, _ in Harder(images, Recipe(batch=40), 2) for v in x[:, 0].unique()}
    assert len(pure) == 10

    def pieced(recipe: Recipe) -> list[bool]:
        batches = [x for x, _ in Harder(images, recipe, 2)]
        return [all(round(float(v), 4) in pure for v in x[:, 0].unique()) for x in batches]

    assert not any(pieced(Recipe(batch=40, mixup=1.0))) and all(pieced(Recipe(batch=40, cutmix=1.0)))
    assert set(pieced(Recipe(batch=40, mixup=1.0, cutmix=1.0))) == {True, False}


def test_two_teachers_say_their_mean_and_are_compiled_block_by_block() -> None:
    x, one, another = torch.randn(2, 3, 32, 32), ResNet(2).eval(), Another(2).eval()
    both = Both(one, another)
    assert torch.equal(both(x), (one(x) + another(x)) / 2)
    assert len(blocks_of(both)) == 12 and {type(block) for block in blocks_of(both)} == {Block}


def test_a_point_waits_for_what_its_plan_chose(based: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(Path("random"), based / "out", based / "runs", kept=based / "kept", split="validation")
    chosen: list[str | None] = [None]
    monkeypatch.setattr(choosing, "best_levels", lambda way, place: chosen[0])
    point = POINTS["again-90-150"]
    assert not is_ready(point, place)
    chosen[0] = "001"
    assert is_ready(point, place) and all_epochs(decided(point, place)) == 150
    chosen[0] = "010"
    assert not is_ready(point, place) and all_epochs(decided(point, place)) == 250
    chosen[0] = "110"  # the same 100 epochs make both
    assert all_epochs(decided(point, place)) == 250
    monkeypatch.setitem(POINTS, "again-100", replace(POINTS["again-100"], epochs=1, batch=64))
    assert main(words(based, "--point", "again-100")) == 0
    dense = finished(place.events("again-100", 0)) or {}
    assert dense["fewer_macs"] == 1 and dense["sparsity"] == 0 and dense["digest"] != dense["base_digest"]
    assert is_ready(point, place) and not is_ready(point, place, seed=1)


def test_what_would_not_end_in_time_is_not_begun(based: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = words(based, "--set", "batch=64")
    (based / "jobs").write_text("--point try-long-00000 --epochs 60\n--point nm24 --epochs 1\n")
    more = ["--jobs", str(based / "jobs"), "--side-by-side", "1", "--minutes", "4", "--ms", "100"]
    assert main([*common, *more]) == 0  # of an hour and of a minute
    told = capsys.readouterr().out
    assert "1 processes to run" in told and "was not begun: it would not end in time" in told
    (based / "runs" / "try-long-00000_batch-64_epochs-60-validation-0.safetensors").touch()
    late = ["--point", "try-long-00000", "--epochs", "60", "--ms", "100", "--deadline", "0"]
    assert held_up(options().parse_args([*common, *late])) == ""  # what was begun is to be ended


def test_pixels_come_back() -> None:
    smooth = np.cumsum(np.random.default_rng(1).integers(-9, 10, (5, 32, 32, 3)), axis=1).astype(np.uint8)
    noise = np.random.default_rng(0).integers(0, 256, (7, 32, 32, 3), dtype=np.uint8)
    for images in (smooth, noise):
        assert np.array_equal(unshrunk(shrunk(images)), images)


def test_images_travel_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = data._noise()
    monkeypatch.setattr(data, "_decoded", lambda source: sent)
    (tmp_path / data.WEIGHTS).write_bytes(b"weights")
    data.pack(tmp_path, tmp_path / "out")
    assert len(list((tmp_path / "out").iterdir())) == data.PARTS
    data.join(tmp_path / "out")
    with np.load(tmp_path / "out" / data.ARRAYS) as arrived:
        assert sorted(arrived) == sorted(sent) and all(np.array_equal(arrived[k], sent[k]) for k in sent)
    assert (tmp_path / "out" / data.WEIGHTS).read_bytes() == b"weights"


def test_validation_images_are_held_out() -> None:
    device = torch.device("cpu")
    train, held = load(Path("random"), "validation", device)
    whole, _ = load(Path("random"), "test", device)
    assert len(train.y) + len(held.y) == len(whole.y)
    seen = {bytes(x.numpy().tobytes()) for x in train.x}
    assert not any(bytes(x.numpy().tobytes()) in seen for x in held.x)


def test_accuracy_is_in_percent() -> None:
    model = ResNet(1).train()
    with torch.no_grad():
        model.fc.weight.zero_()
        model.fc.bias.copy_(torch.eye(10)[3])
    images = Images(torch.zeros(8, 3, 32, 32, dtype=torch.uint8), torch.tensor([3] * 6 + [1] * 2))
    assert accuracy(model, images) == 75.0 and model.training
    with torch.no_grad():
        model.fc.bias.mul_(3.0)
    least = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25 / 9))  # of the right odds; 3 is near the best scale
    assert least <= loss(model, images) < 1.01 * least


def test_jobs_can_be_added_while_others_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def job(number: int) -> tuple[str, list[str]]:
        return f"job{number}", [sys.executable, "-c", f"print('here is {number}'); raise SystemExit({number} == 3)"]

    todo = [job(0), job(1)]

    def add() -> None:
        if len(todo) < 4:
            todo.append(job(len(todo)))

    assert run_all(lambda: todo, 1, tmp_path, {}, time.time() + 60, add) == 1  # the last one fails
    told = capsys.readouterr().out
    assert [f"job{k}: rc {int(k == 3)}" in told and f"here is {k}" in told for k in range(4)] == [True] * 4
    assert run_all(lambda: todo, 2, tmp_path, {}, time.time() - 1) == 0
    assert "not begun: job0, job1, job2, job3" in capsys.readouterr().out


def test_runs_that_others_wait_for_begin_beside_a_full_house(tmp_path: Path) -> None:
    """One job alone has the only place, and goes on only when the other, which is first, has begun."""
    there, code = tmp_path / "there", "import pathlib, sys, time; here = pathlib.Path(sys.argv[1]); "
    wait = code + "[time.sleep(0.1) for _ in range(200) if not here.exists()]; sys.exit(not here.exists())"
    alone = ("alone", [sys.executable, "-c", wait, str(there)])
    first = ("first", [sys.executable, "-c", code + "here.touch()", str(there), "--first"])
    assert run_all(lambda: [alone, first], 1, tmp_path, {}, time.time() + 60) == 0
