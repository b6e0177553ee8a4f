"""The clock, the backends, comparisons, and deployed forms: what they compute and say, never how long it took."""

from __future__ import annotations

import math
import pickle
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import sapwood as sw
from sapwood.measurement import clock, count, machine, points, take_turns
from sapwood.measurement.attention import without_copies
from sapwood.measurement.backends import available, prepare
from sapwood.measurement.clock import Timing, interval
from sapwood.measurement.deployment import deploy
from sapwood.measurement.machine import Ceilings
from sapwood.measurement.measure import told as error_of
from sapwood.measurement.measure import verdict
from sapwood.measurement.packing import is_two_of_four
from sapwood.measurement.roofline import roofline_ms
from tests.helpers import build, outputs, same, snapshot


def small() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 5))


IMAGE = torch.randn(2, 3, 4, 4)


# -- the clock ------------------------------------------------------------------------------


def test_a_process_that_measures_alone_does_not_wait_for_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A device has several names, and others wait until the first to hold it lets go."""
    fcntl = pytest.importorskip("fcntl")
    monkeypatch.setenv("SAPWOOD_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="one"))
    events: list[str] = []

    def nested() -> None:
        with clock.alone(torch.device("cuda")):
            with clock.alone(torch.device("cuda:0")):
                events.append("in")
            with (tmp_path / "measuring-one.lock").open("w") as other, pytest.raises(BlockingIOError):
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            events.append("held")

    thread = threading.Thread(target=nested, daemon=True)
    thread.start()
    thread.join(20)
    assert events == ["in", "held"]
    with (tmp_path / "measuring-one.lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_the_interval_covers_the_true_median() -> None:
    dice = np.random.default_rng(0)
    hits = 0
    for _ in range(1000):
        _, low, high = interval(dice.exponential(size=25).tolist())
        hits += low <= np.log(2) <= high
    assert 930 <= hits <= 990


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Timing]]:
    """Calls whose durations are written down."""

    def run(seconds: float = 5.0, **durations: Callable[[int], float]) -> dict[str, Timing]:
        rounds = dict.fromkeys(durations, 0)

        def sample(call: Any, repeats: int, device: Any, lead: int = 0) -> float:
            rounds[call()] += 1
            return durations[call()](rounds[call()])

        monkeypatch.setattr(clock, "_sample", sample)
        return take_turns({name: lambda name=name: name for name in durations}, seconds, warm_up=1)

    return run


def test_a_steady_clock_stops_early(scripted: Callable[..., dict[str, Timing]]) -> None:
    times = scripted(a=lambda _: 4.0, b=lambda _: 2.0)
    assert times["a"].rounds == 15 and times["b"].settled
    assert times["b"].speed == times["b"].speed_low == times["b"].speed_high == 2.0


def test_what_slows_a_whole_round_down_does_not_count(scripted: Callable[..., dict[str, Timing]]) -> None:
    times = scripted(0.0, a=lambda n: 4.0 * (1 + n * 5 % 17), b=lambda n: 2.0 * (1 + n * 5 % 17))
    assert not times["a"].settled and times["a"].rounds == 15
    assert times["b"].speed_low == times["b"].speed_high == 2.0


def test_short_calls_are_timed_several_at_a_time() -> None:
    ran = []
    take_turns({"a": lambda: ran.append(1)}, seconds=0.01, least=5)
    assert len(ran) > 50


def timing(low: float, middle: float, high: float) -> Timing:
    return Timing(1.0, 1.0, 1.0, 0.0, 15, middle, low, high, True)


@pytest.mark.parametrize(
    ("times", "says"),
    [
        (timing(1.9, 2.0, 2.1), "2.00 times as fast as dense"),
        (timing(0.11, 0.115, 0.12), "8.70 times slower than dense"),
        (timing(0.99, 1.0, 1.01), "no faster than dense"),
        (timing(0.7, 1.0, 1.5), "too noisy to decide: between 0.70 and 1.50 times the speed of dense"),
        (timing(3.0, 4.0, 5.0), "4.00 times as fast as dense"),
    ],
)
def test_verdicts(times: Timing, says: str) -> None:
    assert verdict(times) == says


@pytest.mark.parametrize(
    "name", ["plain_chain", "grouped_convolution", "transformer_encoder", "transposed_convolution"]
)
def test_flops_of_operators_add_up_to_the_counters(name: str) -> None:
    model, inputs = build(name)
    seen = sw.trace(model, inputs)
    ceiling = Ceilings(bytes_per_s=math.inf, flops_per_s=1000.0)
    assert roofline_ms(seen.calls, seen.dense, ceiling) == pytest.approx(seen.flops)
    assert roofline_ms(seen.calls, seen.dense, Ceilings(1.0, math.inf)) > 0


def test_the_roofline_is_the_larger_of_two_times() -> None:
    ceiling = Ceilings(bytes_per_s=1e9, flops_per_s=1e12)
    assert ceiling.floor_ms(1e9, 1e3) == pytest.approx(1.0)
    assert ceiling.floor_ms(1e3, 1e6) == pytest.approx(1.0)


# -- backends -------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", "compile", "onnxruntime", "openvino"])
def test_every_backend_computes_the_same(backend: str) -> None:
    if backend not in available(torch.device("cpu")):
        pytest.skip(f"{backend} cannot run here")
    model = small().eval()
    runner = prepare(model, IMAGE, backend)
    other = torch.randn_like(IMAGE)
    (found,) = [runner.run(other)] if backend in ("eager", "compile") else runner.run(other)
    assert runner.backend == backend and not runner.notes
    torch.testing.assert_close(found, outputs(model, other)[0], rtol=1e-4, atol=1e-5)


def test_measure_tells_what_it_measured_and_changes_nothing() -> None:
    model = small().train()
    model[2].eval()
    before, state, inputs = snapshot(model), torch.get_rng_state(), IMAGE.clone()
    found = sw.measure(model, IMAGE, seconds=0.05)
    assert same(model, before) and torch.equal(state, torch.get_rng_state()) and torch.equal(IMAGE, inputs)
    assert model.training and not model[2].training
    assert (found.backend, found.batch, found.dtype, found.layout) == ("eager", 2, "float32", "contiguous")
    assert found.machine["threads"] == torch.get_num_threads() and found.machine["device"]
    assert found.timing.low_ms <= found.median_ms <= found.timing.high_ms
    assert found.examples_per_s == pytest.approx(2000 / found.median_ms)
    assert found.peak_bytes is None or found.peak_bytes > 1e6


def test_a_model_that_cannot_be_compiled_runs_eagerly_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch, "compile", refuse)
    found = sw.measure(small(), IMAGE, "compile", seconds=0.05)
    assert found.backend == "eager" and "compile failed" in found.notes[0] and "no compiler" in found.notes[0]


def test_a_variant_that_does_not_run_is_left_out_with_the_reason() -> None:
    found = sw.compare(small(), {"same": small(), "broken": nn.Linear(7, 7)}, IMAGE, seconds=0.05)
    assert [row.name for row in found.rows] == ["dense", "same"]
    assert "it raised RuntimeError" in found.skipped["broken"]
    assert found.verdict("broken").startswith("no result")
    assert found["same"].speed > 0 and found.to_dict()["rows"][1]["verdict"] == found.verdict("same")
    with pytest.raises(sw.SapwoodError, match="one of dense, same, broken"):
        found["other"]


@pytest.mark.parametrize(
    ("call", "parts"),
    [
        (lambda: sw.measure(small(), IMAGE, "graph"), ["backend='graph'", "a model on a CUDA device", "cpu"]),
        (lambda: sw.measure(small(), IMAGE, "fast"), ["expected one of eager", "'fast'"]),
        (lambda: sw.measure(small(), torch.randn(2, 4, 4, 4)), ["it raised RuntimeError", "(2, 4, 4, 4)"]),
        (lambda: sw.measure("model", IMAGE), ["a torch.nn.Module", "str"]),
        (lambda: sw.compare(small(), {"dense": small()}, IMAGE), ["names other than 'dense'"]),
        (lambda: sw.compare(small(), [small()], IMAGE), ["as a dict", "list"]),
        (lambda: sw.measure(small(), IMAGE, seconds=float("nan")), ["seconds above 0", "nan"]),
        (lambda: sw.measure(small().to("meta"), IMAGE.to("meta")), ["weights with values", "meta"]),
        (lambda: sw.deploy(small(), torch.randn(2, 4)), ["it raised", "(2, 4)"]),
        (lambda: sw.deploy(small(), IMAGE, seconds=0.05).load_state_dict({}), ["Load first, then deploy"]),
        (lambda: pickle.dumps(sw.deploy(small(), IMAGE, "eager", seconds=0.05)), ["deploy where it runs"]),
        (lambda: sw.deploy(small(), IMAGE, "fast"), ["auto or one of", "'fast'"]),
        (lambda: sw.deploy(small(), IMAGE, "graph"), ["runs by 'graph'", "CUDA"]),
        (lambda: sw.deploy("model", IMAGE), ["a torch.nn.Module"]),
    ],
)
def test_bad_input_is_told(call: Callable[[], Any], parts: list[str]) -> None:
    with pytest.raises(sw.SapwoodError) as caught:
        call()
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_counts_have_closed_forms() -> None:
    counted = count(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), torch.randn(5, 8))
    macs = 8 * 16 + 16 * 4
    assert (counted["macs"], counted["flops"]) == (macs, 2 * macs)
    assert counted["weight_bytes"] == 4 * counted["params"] == 4 * (macs + 20)
    assert counted["activation_bytes"] == 4 * (16 + 16 + 4)


# -- deploy ---------------------------------------------------------------------------------


class Many(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = small()

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> dict[str, Any]:
        made = self.body(x)
        return {"logits": made, "parts": (made[:, :2], made[:, 2:] * (1.0 if scale is None else scale))}


@pytest.mark.parametrize("backend", ["eager", "onnxruntime", "compile"])
def test_deployed_models_give_what_the_model_gives(backend: str) -> None:
    if backend not in available(torch.device("cpu")):
        pytest.skip(f"{backend} cannot run here")
    model = Many().train()
    before, inputs = snapshot(model), {"x": IMAGE, "scale": torch.tensor(3.0)}
    made = deploy(model, inputs, backend, seconds=0.05)
    assert same(model, before) and model.training
    assert made.form.endswith(backend) and made.error < 1e-4 and "1 batch norms folded" in made.notes
    for x in (torch.randn_like(IMAGE), torch.randn(3, 3, 4, 4)):  # the second has another batch size
        found = made(x=x, scale=torch.tensor(2.0))
        wanted = outputs(model, {"x": x, "scale": torch.tensor(2.0)})
        got = [found["logits"], *found["parts"]]
        for a, b in zip(got, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_deploy_chooses_among_forms_and_keeps_the_others_to_look_at() -> None:
    made = deploy(small(), IMAGE, seconds=0.05)
    names = {form.name for form in made.forms}
    assert {"as given", "folded, eager", "channels_last, eager"} <= names and made.form in names
    assert made.speed > 0
    found = sw.compare(small(), {"deployed": made}, IMAGE, seconds=0.05)
    assert [row.name for row in found.rows] == ["dense", "deployed"]


def test_a_form_whose_output_is_off_is_not_deployed(monkeypatch: pytest.MonkeyPatch) -> None:
    from sapwood.measurement import deployment as module

    def wrong(model: nn.Module, inputs: Any) -> tuple[nn.Module, list[str]]:
        return nn.Sequential(model, nn.Hardtanh(-0.01, 0.01)), []

    monkeypatch.setattr(module, "fold_batch_norms", wrong)
    made = deploy(small(), IMAGE, seconds=0.05)
    assert made.form == "as given" or made.form.startswith("plain, ")
    wrong_ones = [f for f in made.forms if f.name.startswith(("folded", "channels_last"))]
    assert wrong_ones and all("its output is off" in form.reason for form in wrong_ones)


class Counting(nn.Module):
    """Changes a buffer and its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.layer(x.add_(1)) + self.calls


def test_what_a_forward_changes_is_never_the_users() -> None:
    model, x = Counting(), torch.zeros(2, 4)
    sw.measure(model, x, seconds=0.02)
    sw.compare(model, {"other": Counting()}, x, seconds=0.02)
    made = deploy(model, x, seconds=0.02)
    assert float(model.calls) == 0 and float(x.abs().max()) == 0
    assert made.form == "as given" and "its forward changes calls" in made.notes[0]
    wanted = model.layer(torch.ones(2, 4)) + 1
    torch.testing.assert_close(made(torch.zeros(2, 4)), wanted)  # as if it had never run


class Asking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) if x.sum().item() > 0 else -self.body(x)


def test_what_cannot_be_folded_is_deployed_otherwise() -> None:
    hooked = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    hooked[1].register_forward_hook(lambda module, args, out: out - 3)
    transposed = nn.Sequential(nn.ConvTranspose2d(3, 3, 3, groups=3), nn.BatchNorm2d(3))
    for model in (Asking(), hooked, transposed):
        made = deploy(model, IMAGE, "eager", seconds=0.02)
        torch.testing.assert_close(made(IMAGE), outputs(model, IMAGE)[0], rtol=1e-4, atol=1e-5)


def test_a_deployed_model_stays_in_evaluation_mode() -> None:
    made = deploy(nn.Sequential(nn.Linear(4, 4), nn.Dropout()), torch.randn(2, 4), "eager", seconds=0.02)
    x = torch.randn(3, 4)
    assert not made.train().training and torch.equal(made(x), made(x))


def test_two_of_four_is_recognised() -> None:
    assert is_two_of_four(torch.tensor([[1.0, 0, 2, 0, 0, 0, 0, 3]]))
    assert not is_two_of_four(torch.tensor([[1.0, 1, 2, 0]]))
    assert not is_two_of_four(torch.ones(2, 6)) and not is_two_of_four(torch.ones(4))


def test_flops_of_a_model_that_hands_a_parameter_to_a_module() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token, self.inner = nn.Parameter(torch.randn(1, 8)), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.inner(self.token.expand(len(x), -1)) + x
            return out

    assert count(Net(), torch.randn(2, 4))["macs"] == 8 * 4


# -- attention without copies -----------------------------------------------------------------


class Attends(nn.Module):
    def __init__(self, heads: int, **settings: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(heads * 8, heads, batch_first=True, **settings)

    def forward(self, x: torch.Tensor, **asked: Any) -> Any:
        return self.attention(x, x, x, **asked)


@pytest.mark.parametrize("heads", [4, 3])
@pytest.mark.parametrize("settings", [{}, {"bias": False}, {"add_bias_kv": True}, {"add_zero_attn": True}])
@pytest.mark.parametrize(
    "asked",
    [
        {"need_weights": False},
        {},
        {"need_weights": False, "attn_mask": torch.eye(5, dtype=torch.bool)},
        {"need_weights": False, "key_padding_mask": torch.tensor([[False, False, False, True, True]] * 2)},
    ],
    ids=["itself", "weights wanted", "mask", "padding"],
)
def test_lean_attention_gives_what_torch_gives(heads: int, settings: dict[str, Any], asked: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Attends(heads, **settings).double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(2, 5, heads * 8, dtype=torch.float64)
    lean, changed = without_copies(model)
    assert changed == 1 and type(model.attention) is nn.MultiheadAttention
    assert lean.attention.in_proj_weight.data_ptr() == model.attention.in_proj_weight.data_ptr()
    with torch.no_grad():
        wanted, got = model(x, **asked), lean(x, **asked)
    torch.testing.assert_close(got[0], wanted[0])
    assert (got[1] is None) == (wanted[1] is None) == (asked.get("need_weights") is False)


def test_lean_attention_copies_nothing() -> None:
    x = torch.randn(2, 5, 24)
    lean = without_copies(Attends(3).eval())[0]
    graph = torch.export.export(lean, (x,), {"need_weights": False}, strict=False).module().graph
    called = [str(n.target) for n in graph.nodes if n.op == "call_function"]
    assert "aten.scaled_dot_product_attention.default" in called
    assert not [name for name in called if "clone" in name or "contiguous" in name]
    plain = torch.nn.Linear(2, 2)
    assert without_copies(plain) == (plain, 0)


def test_other_programs_on_the_processors_are_told() -> None:
    quiet = machine.Others()
    others = machine.Others()
    others.busy = (others.busy or 0.0) - 10.0  # as if ten seconds of work had been done by somebody else
    time.sleep(0.6)
    (note,) = others.note(torch.device("cpu"))
    assert note.startswith("other programs took 100% of the processors meanwhile")
    assert others.note(torch.device("meta")) == ()
    quiet.busy = None  # where it cannot be known
    assert quiet.note(torch.device("cpu")) == ()


def test_words_for_too_little_memory() -> None:
    for words in ("DefaultCPUAllocator: can't allocate memory: you tried ...", "not enough memory: you tried ..."):
        assert points.told(RuntimeError(words)) == "out of memory"
        told = str(error_of(RuntimeError(words), ((torch.zeros(2, 3),), {})))
        assert "too little for inputs of shapes [(2, 3)]" in told and "Use a smaller batch" in told


def test_dtype_and_layout_are_those_of_the_weights() -> None:
    words = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 4)).to(torch.bfloat16).eval()
    found = sw.measure(words, torch.zeros(1, 3, dtype=torch.int64), seconds=0.05)
    assert (found.dtype, found.layout) == ("bfloat16", "contiguous")
    images = nn.Conv2d(3, 8, 3).eval().to(memory_format=torch.channels_last)
    assert sw.measure(images, torch.zeros(1, 3, 8, 8), seconds=0.05).layout == "channels_last"
