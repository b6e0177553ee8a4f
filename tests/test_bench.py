"""``sapwood bench``: what is counted, what is said, and the forms as a person measures them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn
from typer.testing import CliRunner

import sapwood.measurement.model_forms as model_forms
import sapwood.pipeline.bench as bench_module
from sapwood.capture.run import as_call
from sapwood.cli.main import app
from sapwood.errors import SapwoodError
from sapwood.masking import mask
from sapwood.measurement.clock import Timing
from sapwood.measurement.forms import (
    BLOCK,
    CUSPARSELT,
    CUTLASS,
    HALF_ONLY,
    Product,
    by_linear,
    by_product,
    cost,
    make_input,
    pack_forms,
    refusal,
    to_semi_structured,
)
from sapwood.measurement.machine import Ceilings
from sapwood.measurement.model_forms import dense_cost, sparse_cost, to_form, with_batch
from sapwood.measurement.points import (
    Bench,
    Candidate,
    Cost,
    Point,
    Row,
    copies_needed,
    each,
    measure_point,
    passes_needed,
    relative_error,
    told,
)
from sapwood.pipeline.bench import bench_matmul, bench_model
from sapwood.reporting.speed import (
    duration,
    note_words,
    row_words,
    skipped_words,
    speed_table,
    summary_words,
)
from sapwood.types import Budget

CPU = torch.device("cpu")
SMALL = Product(64, 32, CPU, torch.float32)
HALF = Product(64, 32, CPU, torch.bfloat16)
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")


@pytest.fixture(autouse=True)
def known_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring the machine takes seconds, and what it gives is not tested here."""
    monkeypatch.setattr(bench_module, "limits_of", lambda device, dtype: Ceilings(1e10, 1e11))


def run(*arguments: object) -> str:
    done = CliRunner().invoke(app, ["bench", *map(str, arguments), "--seconds", "0.02"])
    assert done.exception is None, done.exception
    return done.stdout


# What is counted.


def test_costs_in_closed_form() -> None:
    acts = 8 * (32 + 64) * 4
    assert cost("dense", SMALL, 8, 2048) == Cost(2 * 8 * 2048, 2048 * 4, acts)
    assert cost("zeros", SMALL, 8, 205) == cost("dense", SMALL, 8, 2048)
    assert cost("packed", SMALL, 8, 205).weight_bytes == 205 * 5 + 64 * 4
    assert cost("CSR", SMALL, 8, 205) == Cost(2 * 8 * 205, 205 * (4 + 4) + 65 * 4, acts)
    assert cost("BSR", SMALL, 8, 2 * 256) == Cost(2 * 8 * 512, 512 * 4 + 2 * 8 + 5 * 8, acts)
    assert cost("cut", SMALL, 8, 16 * 32) == Cost(2 * 8 * 512, 512 * 4, 8 * (32 + 16) * 4)
    half = cost(CUSPARSELT, HALF, 8, 1024)
    assert half == cost(CUTLASS, HALF, 8, 1024)
    assert half.flops == cost("dense", HALF, 8, 2048).flops / 2
    assert half.weight_bytes == 1024 * 2 + 1024 * 2 / 8  # two bits for each value kept
    assert half.moved_bytes == half.weight_bytes + acts / 2


def test_copies_fill_the_cache_twice() -> None:
    assert copies_needed([100.0, 10.0], None, 1e9) == 1  # a CPU
    assert copies_needed([400.0, 200.0], 100, 1e9) == 8
    assert copies_needed([400.0, 20.0], 100, 1e9) == math.ceil(200 / 20)
    assert copies_needed([400.0, 30.0], 100, 3 * 430.0) == 3  # as there is room
    assert copies_needed([400.0, 30.0], 100, 0.0) == 1
    assert copies_needed([400.0, 30.0], 100, 1e9, dense_ms=10.0) == 2
    assert copies_needed([1.0], 10**9, 1e12) == 64
    assert [passes_needed(n) for n in (1, 2, 8, 13, 64)] == [1, 16, 4, 3, 1]
    assert passes_needed(8, dense_ms=0.1) == 4 and passes_needed(8, dense_ms=1.0) == 1


def test_the_time_of_a_copy() -> None:
    one = each(Timing(8.0, 6.0, 10.0, 1.0, 20, 1.5, 1.4, 1.6, True), 2)
    assert (one.median_ms, one.low_ms, one.high_ms, one.spread_ms) == (4.0, 3.0, 5.0, 0.5)
    assert (one.speed, one.speed_low, one.speed_high) == (1.5, 1.4, 1.6)


def test_relative_error() -> None:
    a = torch.tensor([3.0, 4.0])
    assert relative_error([a], [a]) == 0 and relative_error([a * 1.1], [a]) == pytest.approx(0.1)
    assert relative_error([a], [a[:1]]) == math.inf and relative_error([], [a]) == math.inf
    assert relative_error([a * torch.nan], [a]) == math.inf


# The forms.


@pytest.mark.parametrize("sparsity", [0.5, 0.9])
def test_forms_hold_the_zeros_asked_for_and_compute_the_same(sparsity: float) -> None:
    forms, skipped = pack_forms(SMALL, sparsity)
    found = {f.form: f for f in forms}
    assert list(found) == ["dense", "zeros", "CSR", "BSR", "packed", "cut"]
    assert skipped == dict.fromkeys((CUTLASS, CUSPARSELT), "2:4 needs a CUDA device")
    gone, blocks = round(sparsity * 2048), 8 - round(sparsity * 8)
    assert found["zeros"].nonzeros == found["CSR"].nonzeros == 2048 - gone
    assert found["BSR"].nonzeros == blocks * BLOCK**2 == int(found["BSR"].reference.count_nonzero())
    assert found["BSR"].weights[0].values().shape == (blocks, BLOCK, BLOCK)
    assert found["CSR"].weights[0].col_indices().dtype == torch.int32
    assert len(found["cut"].reference) == 64 - round(sparsity * 64)
    for batch in (1, 5):
        x = make_input(SMALL, batch)
        for form in forms:
            form.at_least(2)
            candidate = form.candidate(SMALL, x, 2)
            for model in candidate.ways.values():
                assert relative_error([model(x)], candidate.expected()) < 1e-5


def test_both_products_agree() -> None:
    weight, x = torch.randn(8, 16), torch.randn(3, 16)
    for given in (x, x[:1]):
        assert torch.allclose(by_product(given, weight), by_linear(given, weight), atol=1e-5)


def test_why_there_is_no_form() -> None:
    forms, skipped = pack_forms(Product(20, 34, CPU, torch.float32), 0.99, wanted=("BSR", "cut", "zeros"))
    assert [f.form for f in forms] == ["dense", "zeros"]
    assert "multiples of 16" in skipped["BSR"] and "no row would be left" in skipped["cut"]
    cuda = torch.device("cuda")
    assert refusal(cuda, torch.float32) == "2:4 needs float16 or bfloat16"
    assert refusal(cuda, torch.float16, 0.9) == HALF_ONLY and not refusal(cuda, torch.bfloat16)
    with pytest.raises(SapwoodError, match="CUDA"):
        to_semi_structured(CUTLASS, torch.randn(64, 64))


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


class Broken(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no such kernel\nmore of it")


def candidate(name: str, *models: nn.Module) -> Candidate:
    x = torch.ones(2, 2)
    return Candidate(name, {str(i): m for i, m in enumerate(models)}, lambda: [x], Cost(1e6, 1e3, 0.0), 2)


def test_wrong_and_broken_forms_are_left_out_with_the_reason() -> None:
    x, good = torch.ones(2, 2), nn.Identity()
    given = [candidate("dense", good), candidate("a", Doubled()), candidate("b", Broken())]
    given += [candidate("c", Broken(), Doubled()), candidate("d", Broken(), good)]
    rows, skipped = measure_point(given, as_call(x), CPU, torch.float32, "eager", 0.02, Ceilings(1e9, 1e9))
    assert [r.form for r in rows] == ["dense", "d"] and rows[1].way == "1"
    assert "something else" in skipped["a"] and skipped["b"].endswith("RuntimeError: no such kernel")
    assert "by 0" in skipped["c"] and "by 1" in skipped["c"]
    assert rows[0].floor_ms == 1.0 and rows[0].reached == pytest.approx(1.0 / rows[0].timing.median_ms)
    assert rows[0].cold is None and rows[0].copies == 2
    with pytest.raises(RuntimeError):
        measure_point([candidate("dense", Broken())], as_call(x), CPU, torch.float32, "eager", 0.02)


def test_a_point_without_memory_is_skipped_and_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    real = bench_module.make_input

    def scarce(product: Product, batch: int) -> torch.Tensor:
        if batch == 7:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate ...")
        return real(product, batch)

    monkeypatch.setattr(bench_module, "make_input", scarce)
    found = bench_matmul(32, 32, (2, 7), (0.5,), "cpu", seconds=0.02)
    assert found.points[0].rows and not found.points[1].rows
    assert found.points[1].skipped == {"dense": "out of memory"}
    assert any("any form at batch 7" in line and "out of memory" in line for line in skipped_words(found))
    with pytest.raises(SapwoodError, match="out of memory"):
        bench_matmul(32, 32, (7,), (0.5,), "cpu", seconds=0.02)


def test_told_is_one_line() -> None:
    assert told(ValueError("\n a \n b")) == "torch raised ValueError: a"
    assert told(torch.cuda.OutOfMemoryError("x")) == "out of memory"


# The forms of a model.


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 4))


def test_sparse_models_compute_the_same_and_cost_less() -> None:
    masked, x = mask(net(), Budget(sparsity=0.9), scope="local").eval(), torch.randn(3, 5, 16)
    made = to_form("CSR", masked)
    assert set(made.ways) == {"product", "linear"} and not made.notes
    for model in made.ways.values():
        assert relative_error([model(x)], [masked(x)]) < 1e-5
    dense = dense_cost(masked, as_call(x))
    weights, kept = 16 * 32 + 32 * 16 + 16 * 4, sum(made.nonzeros.values())
    assert kept == weights - round(0.9 * weights) and dense.flops == 2 * 15 * weights
    less = sparse_cost("CSR", masked, as_call(x), dense, made.nonzeros)
    assert less.flops == 2 * 15 * kept and less.activation_bytes == dense.activation_bytes
    assert dense.activation_bytes == 15 * (16 + 32 + 32 + 16 + 16 + 4) * 4  # in and out of every product
    assert less.weight_bytes == kept * 8 + (33 + 17 + 5) * 4 + (32 + 16 + 4) * 4
    half = sparse_cost(CUTLASS, masked, as_call(x), dense, {"0": 256})
    assert half.weight_bytes == dense.weight_bytes - 256 * 4 + 64 and half.flops == dense.flops - 2 * 15 * 256


def test_2_4_in_layers_that_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def as_it_is(form: str, weight: torch.Tensor) -> torch.Tensor:
        if len(weight) < 16:
            raise RuntimeError("the shape is not supported")
        return weight

    monkeypatch.setattr(model_forms, "to_semi_structured", as_it_is)
    masked, x = mask(net(), pattern="2:4").eval(), torch.randn(3, 5, 16)
    made = to_form(CUTLASS, masked)
    assert made.nonzeros == {"0": 256, "2": 256} and list(made.ways) == ["linear"]
    assert made.notes[1] == "1 of 3 linear layers stay dense: torch raised RuntimeError: the shape is not supported"
    assert relative_error([made.ways["linear"](x)], [masked(x)]) < 1e-5


def test_batches_of_inputs() -> None:
    given = (torch.randn(2, 3), torch.tensor([[4], [5]]), torch.tensor(1.0)), {"again": torch.randn(7, 2)}
    (a, b, c), kwargs = with_batch(given, 5, CPU, torch.bfloat16)
    assert a.shape == (5, 3) and a.dtype == torch.bfloat16 and len({float(v) for v in a.flatten()}) > 5
    assert b.flatten().tolist() == [4, 5, 4, 5, 4] and b.dtype == torch.int64
    assert c.shape == () and kwargs["again"].shape == (7, 2)


def test_a_model_by_its_forms_is_not_changed() -> None:
    model = net().train()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    found = bench_model(model, torch.randn(2, 16), (1, 4), (0.5,), device="cpu", seconds=0.02)
    assert model.training and all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert [[r.form for r in p.rows] for p in found.points] == [["dense", "zeros", "CSR", "packed", "cut"]] * 2
    assert found.points[0].skipped[CUTLASS] == "2:4 needs a CUDA device"
    assert found.points[0].rows[-1].cost.flops < found.points[0].rows[0].cost.flops
    assert "half of the channels removed" in row_words(found.points[0].rows[-1], 0.5, found)


def test_a_model_of_convolutions_has_no_csr() -> None:
    def classify(classes: int) -> Point:
        body = (nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.Flatten())
        model = nn.Sequential(*body, nn.Linear(16 * 16, classes))
        return bench_model(model, torch.randn(1, 3, 8, 8), (2,), (0.9,), device="cpu", seconds=0.02).points[0]

    few, more = classify(1), classify(8)
    assert "linear layers hold 9% of the weights; convolutions" in few.skipped["CSR"]
    found = next(r for r in more.rows if r.form == "CSR")
    assert found.notes == ("43% of the weights are in this form",)


# What is said.


def timing(low: float, speed: float, high: float) -> Timing:
    return Timing(1.0, 0.99, 1.01, 0.01, 20, speed, low, high, True)


def row(form: str, low: float, speed: float, high: float, **more: Any) -> Row:
    cold = more.pop("cold", None)
    return Row(form, "linear", timing(low, speed, high), Cost(1, 1, 1), 0.5, 0.0, "eager", 1, cold, **more)


def fabricated(points: list[Point], **what: Any) -> Bench:
    about = {"kind": "matmul", "rows": 64, "cols": 32, **what}
    return Bench(about, "cpu", "float32", "eager", 1.0, tuple(points), {"device": "a machine"}, None)


def points_of(form: str, speeds: dict[int, tuple[float, float, float]], sparsity: float = 0.9) -> Bench:
    dense = row("dense", 1.0, 1.0, 1.0)
    return fabricated([Point(b, sparsity, (dense, row(form, *s))) for b, s in speeds.items()])


FASTER, SLOWER, SAME, NOISY = (1.33, 1.34, 1.35), (0.11, 0.115, 0.12), (0.99, 1.0, 1.01), (0.7, 1.0, 1.3)


@pytest.mark.parametrize(
    ("form", "sparsity", "speed", "words"),
    [
        ("CSR", 0.9, SLOWER, "zeros do not pay here: 90% sparse CSR is 8.70 times slower than dense"),
        ("packed", 0.9, FASTER, "90% sparse packed pays: 1.34 times as fast as dense"),
        ("CSR", 0.99, FASTER, "99% sparse CSR pays: 1.34 times as fast as dense"),
        ("zeros", 0.9, SAME, "zeros do not pay here: 90% zeros in dense storage are no faster than dense"),
        (CUSPARSELT, 0.5, FASTER, "2:4 (cuSPARSELt) pays: 1.34 times as fast as dense"),
        (CUSPARSELT, 0.5, SLOWER, "2:4 (cuSPARSELt) does not pay here: 8.70 times slower than dense"),
        ("cut", 0.5, FASTER, "half of the rows removed: 1.34 times as fast as dense"),
        ("cut", 0.9, FASTER, "90% of the rows removed: 1.34 times as fast as dense"),
        ("BSR", 0.5, NOISY, "50% sparse BSR: too noisy to decide: between 0.70 and 1.30 times the speed of dense"),
    ],
)
def test_verdicts(form: str, sparsity: float, speed: tuple[float, float, float], words: str) -> None:
    found = points_of(form, {1: speed}, sparsity)
    assert row_words(found.points[0].rows[1], sparsity, found) == words
    assert row_words(found.points[0].rows[0], sparsity, found) == "what the others are compared with"


@pytest.mark.parametrize(
    ("form", "speeds", "words"),
    [
        (CUSPARSELT, {1: SLOWER, 16: SLOWER, 256: FASTER}, "2:4 (cuSPARSELt) pays from batch 256: 1.34 times as fast."),
        ("CSR", {1: FASTER, 16: FASTER, 256: SLOWER}, "90% sparse CSR pays up to batch 16: 1.34 times as fast."),
        ("CSR", {1: SLOWER, 16: FASTER, 256: SLOWER}, "90% sparse CSR pays at batch 16: 1.34 times as fast."),
        ("CSR", {1: FASTER, 16: FASTER}, "90% sparse CSR pays at every batch size: 1.34 times as fast."),
        (
            "CSR",
            {1: SLOWER, 2: SAME},
            "90% sparse CSR never pays here: at best 1.00 times the speed of dense, at batch 2.",
        ),
        ("zeros", {1: SAME, 16: SAME}, "90% zeros in dense storage change nothing."),
        ("cut", {8: FASTER}, "90% of the rows removed: 1.34 times as fast, at batch 8."),
        ("CSR", {1: NOISY, 2: NOISY}, "90% sparse CSR: this machine is too noisy to decide."),
        (
            "CSR",
            {1: SLOWER, 2: NOISY},
            "90% sparse CSR does not pay at batch 1: at best 0.12 times the speed of dense. "
            "Too noisy to decide at batch 2.",
        ),
        (
            "CSR",
            {1: FASTER, 2: NOISY},
            "90% sparse CSR pays up to batch 1: 1.34 times as fast. Too noisy to decide at batch 2.",
        ),
    ],
)
def test_summaries(form: str, speeds: dict[int, tuple[float, float, float]], words: str) -> None:
    assert summary_words(points_of(form, speeds)) == [words]


def test_a_cut_model_is_summed_up_once() -> None:
    rows = (row("dense", 1.0, 1.0, 1.0), row("cut", *FASTER))
    found = fabricated([Point(1, s, rows) for s in (0.5, 0.9)], kind="model", model="m", channels=0.25)
    assert summary_words(found) == ["75% of the channels removed: 1.34 times as fast, at batch 1."]


def test_skips_and_notes_are_told_once() -> None:
    rows = (row("dense", 1.0, 1.0, 1.0, cold=False), row("BSR", *FASTER, notes=("blocks",), cold=True))
    found = fabricated([Point(b, 0.5, rows, {"CSR": "no kernel"}) for b in (1, 2)])
    assert skipped_words(found) == ["No result for CSR: no kernel."]
    assert note_words(found)[0] == "Note: BSR: blocks." and "between runs: dense." in note_words(found)[1]
    console = Console(width=160, record=True, quiet=True)
    console.print(speed_table(found))


def test_durations() -> None:
    told_ = {0.0000005: "0.5 ns", 0.0412: "41.2 us", 12.9: "12.9 ms", 64689.0: "64.7 s"}
    assert {ms: duration(ms) for ms in told_} == told_


# As a person runs it.


def test_matmul_for_a_machine_and_into_a_file(tmp_path: Path) -> None:
    path = tmp_path / "found" / "bench.json"
    arguments = ("--matmul", "64x32", "--batch", "1,8", "--sparsity", "0.5,0.9", "--device", "cpu", "-o", path)
    found = json.loads(run(*arguments, "--json"))
    assert json.loads(path.read_text()) == found and path.with_suffix(".html").exists()
    assert found["what"] == {"kind": "matmul", "rows": 64, "cols": 32}
    assert found["dtype"] == "float32" and found["backend"] == "eager" and found["machine"]["kind"] == "cpu"
    assert [(p["batch"], p["sparsity"]) for p in found["points"]] == [(1, 0.5), (8, 0.5), (1, 0.9), (8, 0.9)]
    for point in found["points"]:
        assert [r["form"] for r in point["rows"]] == ["dense", "zeros", "CSR", "BSR", "packed", "cut"]
        assert set(point["skipped"]) == {CUTLASS, CUSPARSELT}
        for line in point["rows"]:
            assert line["verdict"] and line["error"] < 1e-3 and line["reached"] > 0 and line["cold"] is None
            assert line["timing"]["speed_low"] <= line["timing"]["speed"] <= line["timing"]["speed_high"]
    assert len(found["summary"]) == 10


def test_what_was_measured_is_shown_where_no_page_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs").write_text("no folder")
    monkeypatch.setenv("SAPWOOD_RUNS", str(tmp_path / "runs"))
    text = run("--matmul", "64x32", "--batch", 1, "--sparsity", 0.9, "--device", "cpu")
    assert "what the others are compared with" in text and "A page" not in text


def test_matmul_in_words() -> None:
    text = run("--matmul", "64x32", "--batch", 4, "--sparsity", 0.9, "--device", "cpu", "--dtype", "bfloat16")
    for words in ("64x32 weights, bfloat16, eager", "reached", "what the others are compared with", "90% of the rows"):
        assert words in text
    assert "No result for CSR" in text or "90% sparse CSR" in text  # as this torch has a kernel for it or not
    assert "No result for 2:4 (CUTLASS): 2:4 needs a CUDA device." in text


def test_a_model_for_a_machine() -> None:
    options = ("--input", "2x16", "--batch", 2, "--sparsity", 0.9, "--channels", 0.25, "--device", "cpu", "--json")
    found = json.loads(run("tests.test_bench:net", *options))
    assert found["what"]["channels"] == 0.25 and found["what"]["inputs"] == [[2, 16]]
    assert {r["form"] for r in found["points"][0]["rows"]} == {"dense", "zeros", "CSR", "packed", "cut"}
    assert any("75% of the channels removed" in line for line in found["summary"])


BAD = {
    "neither": ((), "neither"),
    "both": (("tests.test_bench:net", "--matmul", "64x64"), "both"),
    "a shape without columns": (("--matmul", "64"), "ROWSxCOLS"),
    "three sizes": (("--matmul", "64x64x64"), "ROWSxCOLS"),
    "words for a shape": (("--matmul", "axb"), "ROWSxCOLS"),
    "a small shape": (("--matmul", "8x64"), "at least 16"),
    "no batch": (("--matmul", "64x64", "--batch", "0"), "--batch"),
    "a batch below zero": (("--matmul", "64x64", "--batch", "-1"), "--batch"),
    "words for batches": (("--matmul", "64x64", "--batch", "1,,2"), "--batch"),
    "all zeros": (("--matmul", "64x64", "--sparsity", "1"), "--sparsity"),
    "no zeros": (("--matmul", "64x64", "--sparsity", "0,0.5"), "--sparsity"),
    "percents": (("--matmul", "64x64", "--sparsity", "90"), "--sparsity"),
    "words for sparsities": (("--matmul", "64x64", "--sparsity", "half"), "--sparsity"),
    "nan": (("--matmul", "64x64", "--sparsity", "nan"), "--sparsity"),
    "an unknown device": (("--matmul", "64x64", "--device", "tpu"), "--device"),
    "an unknown dtype": (("--matmul", "64x64", "--device", "cpu", "--dtype", "int8"), "--dtype"),
    "a backend of models": (("--matmul", "64x64", "--device", "cpu", "--backend", "compile"), "--backend"),
    "a graph on a CPU": (("--matmul", "64x64", "--device", "cpu", "--backend", "graph"), "--backend"),
    "inputs of a product": (("--matmul", "64x64", "--input", "1x3"), "--matmul alone"),
    "all channels": (("tests.test_bench:net", "--input", "1x16", "--device", "cpu", "--channels", "1"), "--channels"),
    "inputs that do not fit": (("tests.test_bench:net", "--input", "1x3", "--device", "cpu"), "a forward on 1x3"),
    "weights too large": (("--matmul", "9999999x9999999", "--device", "cpu"), "fit into memory"),
    "a page for the result": (("--matmul", "64x64", "-o", "bench.html"), "a file for JSON"),
    "no such model": (("tests.test_bench:nothing", "--input", "1x3", "--device", "cpu"), "MODEL"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_clear_error(name: str) -> None:
    arguments, words = BAD[name]
    done = CliRunner().invoke(app, ["bench", *arguments, "--seconds", "0.02"])
    assert isinstance(done.exception, SapwoodError) and words in str(done.exception)


def test_time_must_be_given() -> None:
    with pytest.raises(SapwoodError, match="--seconds"):
        bench_matmul(64, 64, (1,), (0.5,), "cpu", seconds=0.0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_gpu_that_is_not_there() -> None:
    done = CliRunner().invoke(app, ["bench", "--matmul", "64x64", "--device", "cuda"])
    assert isinstance(done.exception, SapwoodError) and "no GPU" in str(done.exception)


# On a GPU.


@GPU
@pytest.mark.gpu
def test_products_on_a_gpu() -> None:
    found = bench_matmul(512, 256, (1, 32), (0.5, 0.9), "cuda", seconds=0.05)
    assert found.backend == "graph" and found.dtype == "bfloat16"
    for point in found.points:
        names = {r.form for r in point.rows}
        assert {"dense", "zeros", "cut"} <= names
        assert all(r.error < 3e-2 for r in point.rows)
        assert len({r.copies for r in point.rows}) == 1
        wanted = {"CSR", "BSR", *((CUTLASS, CUSPARSELT) if point.sparsity == 0.5 else ())}
        assert wanted <= names | set(point.skipped)  # there, or with a reason
    assert found.points[0].rows[0].copies > 1 and found.points[0].rows[0].cold is not None


@GPU
@pytest.mark.gpu
def test_a_model_on_a_gpu() -> None:
    model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128))
    found = bench_model(model, torch.randn(1, 128), (8,), (0.5,), device="cuda", seconds=0.05)
    point = found.points[0]
    assert {"dense", "zeros", "cut"} <= {r.form for r in point.rows}
    assert {"CSR", CUTLASS, CUSPARSELT} <= {r.form for r in point.rows} | set(point.skipped)
    assert all(r.error < 3e-2 for r in point.rows)
    assert all(p.device.type == "cpu" for p in model.parameters())


@GPU
@pytest.mark.gpu
def test_weights_of_2_4_by_cusparselt() -> None:
    found = bench_matmul(256, 256, (64,), (0.5,), "cuda", "float16", seconds=0.05, forms=("dense", CUSPARSELT))
    told_ = found.points[0].skipped.get(CUSPARSELT)
    assert told_ or found.points[0].rows[1].error < 1e-2
