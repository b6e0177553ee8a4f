"""Masks and recovery on a GPU: the same zeros as on the CPU, held through training with every switch."""

from __future__ import annotations

import copy
import os
import socket
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import sapwood as sw
from sapwood.masking.targets import maskable
from sapwood.pipeline.recipe import read_recipe
from sapwood.pipeline.run import resume_run, start_run
from sapwood.recovery import TensorLoader, narrow, refit_, refresh_norms_
from sapwood.recovery.graphs import GraphedStep
from sapwood.recovery.loop import Loop, Settings
from tests.test_regions import Stage

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(4, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(64 * 64, 4),
    )  # fmt: skip


class Pair(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(self.conv(x)))


def repeating() -> nn.Module:
    """Of blocks, which are compiled; hooks do not reach a network that is compiled as a whole."""
    torch.manual_seed(0)
    blocks = [Pair(16) for _ in range(3)]
    return nn.Sequential(nn.Conv2d(4, 16, 3, padding=1), *blocks, nn.Flatten(), nn.Linear(16 * 64, 4))


def stripes(count: int = 256) -> tuple[DataLoader, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    y = torch.randint(0, 4, (count,), generator=generator)
    x = 0.7 * torch.randn(count, 4, 8, 8, generator=generator)
    for i, label in enumerate(y.tolist()):
        x[i, :, 2 * label : 2 * label + 2] += 1.5
    return DataLoader(TensorDataset(x, y), 32, shuffle=True), x, y


def accuracy(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    device = next(model.parameters()).device
    model.eval()
    with torch.no_grad():
        return float((model(x.to(device)).argmax(1).cpu() == y).float().mean())


@pytest.mark.parametrize(
    "options",
    [
        {"budget": sw.Budget(sparsity=0.9)},
        {"budget": sw.Budget(sparsity=0.9), "scope": "local"},
        {"budget": sw.Budget(sparsity=0.5), "scope": "row"},
        {"budget": sw.Budget(sparsity=0.5), "score": "random"},
        {"budget": sw.Budget(sparsity=0.5), "pattern": "block:8x8"},
        {"pattern": "2:4"},
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_zeros_as_on_the_cpu(options: dict[str, Any], dtype: torch.dtype) -> None:
    here, there = sw.mask(net().to(dtype), **options), sw.mask(net().to(dtype).cuda(), **options)
    for a, b in zip(here.state_dict().values(), there.state_dict().values(), strict=True):
        assert torch.equal(a == 0, (b == 0).cpu())


@pytest.mark.parametrize(
    "switches",
    [
        {},
        {"mixed_precision": "bf16", "channels_last": True},
        {"mixed_precision": "fp16"},
        {"accumulate": 2, "optimizer": "adamw", "lr": 0.003},
        {"compile": True},
        {"graph": True},
        {"graph": True, "mixed_precision": "bf16", "channels_last": True, "clip": 1.0},
        {"graph": True, "optimizer": "adamw", "lr": 0.003},
        {"graph": True, "mixed_precision": "bf16", "channels_last": True, "compile": True},
    ],
    ids=str,
)
def test_recovery_on_the_gpu(switches: dict[str, Any]) -> None:
    loader, x, y = stripes()
    model = net()
    sw.recover(model, loader, lr=0.02, epochs=4)
    masked = sw.mask(model, sw.Budget(sparsity=0.95))
    zeros = sw.sparsity(masked).zeros
    done = sw.recover(masked, loader, **{"lr": 0.02, **switches}, epochs=3, validate=lambda m: accuracy(m, x, y))
    assert done.metric is not None and done.metric > 0.9
    assert next(done.model.parameters()).is_cuda and sw.sparsity(done.model).zeros == zeros
    assert list(done.model.state_dict()) == list(net().state_dict())


@pytest.mark.parametrize("graph", [False, True])
def test_compiled_blocks_train_on_the_gpu(graph: bool) -> None:
    """As uncompiled ones do, with a teacher, validation in between, and blocks of two widths."""
    loader, x, y = stripes()
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Flatten(), nn.Linear(256, 16), Stage(16, 3), nn.Linear(16, 12), Stage(12, 2))
    dense.append(nn.Linear(12, 4))
    sw.recover(dense, loader, lr=0.02, epochs=6)
    more: dict[str, Any] = {"lr": 0.02, "epochs": 3, "mixed_precision": "bf16", "graph": graph, "teacher": dense}
    more["validate"] = lambda m: accuracy(m, x, y)
    found = [
        sw.recover(sw.mask(dense, sw.Budget(sparsity=0.8)), loader, compile=compiled, **more)
        for compiled in (False, True)
    ]
    plain, compiled = (done.metric for done in found)
    assert plain is not None and compiled is not None and compiled > 0.9 and abs(compiled - plain) < 0.05
    assert not any(m._compiled_call_impl for m in [*found[1].model.modules(), *dense.modules()])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("images", "c", "o", "height", "width", "high", "wide"),
    [(64, 16, 16, 32, 32, 3, 3), (3, 7, 5, 6, 9, 3, 3), (5, 3, 64, 17, 16, 3, 3), (2, 33, 40, 4, 4, 3, 3),
     (1, 1, 1, 1, 1, 3, 3), (40, 48, 64, 32, 32, 1, 3), (40, 64, 64, 32, 32, 3, 3)],
)  # fmt: skip
def test_narrow_convolutions_are_the_same_function(
    images: int, c: int, o: int, height: int, width: int, high: int, wide: int, dtype: torch.dtype
) -> None:
    assert narrow._kernels_load()
    torch.manual_seed(0)
    x = torch.randn(images, c, height, width, device="cuda").to(dtype, memory_format=torch.channels_last)
    weight = torch.randn(o, c, high, wide, device="cuda").to(dtype, memory_format=torch.channels_last)
    results = []
    for ours in (narrow.NONE, (1, 1, 1), (2, 2, 2)):
        own = [t.clone().requires_grad_() for t in (x, weight)]
        out = narrow.Narrow.apply(*own, ours)
        out.backward(torch.ones_like(out).cumsum(1) / o)
        results.append((out, *(t.grad for t in own)))
    for found in results[1:]:
        for wanted, got in zip(results[0], found, strict=True):
            assert got.shape == wanted.shape and got.dtype == dtype
            assert (got.float() - wanted.float()).norm() <= 0.01 * wanted.float().norm()
    again = torch.ops.sapwood.narrow_weights(x, out.detach(), weight, 1)
    assert torch.equal(again, torch.ops.sapwood.narrow_weights(x, out.detach(), weight, 1))


@pytest.mark.parametrize("compiled", [False, True])
def test_training_with_narrow_convolutions(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured step with our kernels ends where one with cuDNN's does; the model is left as it was."""
    loader, x, y = stripes()
    ends = []
    for ours in (narrow.NONE, (1, 2, 1)):
        tries: list[Any] = []
        monkeypatch.setattr(narrow, "_KNOWN", {})
        monkeypatch.setattr(narrow, "DEVICES", ("cuda",))
        monkeypatch.setattr(narrow, "tried", lambda *kind, ours=ours, tries=tries: tries.append(kind) or ours)
        fast = {"mixed_precision": "bf16", "channels_last": True, "fused": True, "graph": True, "compile": compiled}
        taught = {"teacher": repeating(), "share": 0.5}  # it knows nothing: labels must be heard beside it
        model = sw.recover(repeating(), loader, lr=0.05, epochs=4, **taught, **fast).model
        assert len(tries) == 2 and not any("_conv_forward" in vars(m) for m in model.modules())
        assert accuracy(model, x, y) > 0.9
        ends.append(model.state_dict()["0.weight"])
    torch.testing.assert_close(*ends, rtol=0.1, atol=0.02)


def test_narrow_kernels_are_tried_beside_a_loader_with_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trying captures graphs; threads that pin memory meanwhile must not fail by it."""
    monkeypatch.setattr(narrow, "DEVICES", ("cuda",))
    monkeypatch.setattr(narrow, "_KNOWN", {})
    loader = DataLoader(stripes()[0].dataset, 32, shuffle=True, num_workers=2, pin_memory=True, drop_last=True)
    before = torch.cuda.get_rng_state()
    kinds = [(torch.device("cuda", 0), torch.bfloat16, (64, 16, 32, 32), (16, 16, 3, 3))]
    narrow.compiled_ahead(kinds)
    assert all(len(narrow.tried(*kind)) == 3 for kind in kinds) and torch.equal(before, torch.cuda.get_rng_state())
    fast = {"mixed_precision": "bf16", "channels_last": True, "fused": True, "graph": True}
    sw.recover(net(), loader, lr=0.05, epochs=2, **fast)
    assert len(narrow._KNOWN) == 2


def test_a_model_may_be_moved_after_hold() -> None:
    model = sw.mask(net(), sw.Budget(sparsity=0.8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    held = sw.hold(model, optimizer)
    model.cuda()
    model(torch.randn(2, 4, 8, 8, device="cuda")).sum().backward()
    optimizer.step()
    assert sw.sparsity(model).zeros == held.zeros


@pytest.mark.parametrize("budget", [sw.Budget(channels=0.5), sw.Budget(sparsity=0.9)], ids=str)
@pytest.mark.parametrize("schedule", [("iterative", 2), ("cubic", 3)])
def test_schedules_on_the_gpu(budget: sw.Budget, schedule: tuple[str, int]) -> None:
    loader, x, y = stripes()
    model = net()
    sw.recover(model, loader, lr=0.02, epochs=4)
    done = sw.prune_and_recover(
        model, x[:2].cuda(), loader, budget, lr=0.02, schedule=schedule[0], rounds=schedule[1], epochs=4,
        distill=True, validate=lambda m: accuracy(m, x, y),
    )  # fmt: skip
    assert done.metric is not None and done.metric > 0.9


@pytest.mark.parametrize("prune", [{"channels": 0.5, "schedule": "iterative", "rounds": 2}, {"sparsity": 0.9}], ids=str)
def test_a_recipe_on_the_gpu_is_taught_in_a_graph_and_goes_on(prune: dict[str, Any], tmp_path: Path) -> None:
    body = {"model": "sapwood.pipeline.models:SmallCNN", "data": {"name": "digits", "batch": 64}, "prune": [prune]}
    body |= {"train": {"epochs": 6, "lr": 0.1}, "device": "cuda"}
    body["recover"] = {"fraction": 0.5, "graph": True, "mixed_precision": "bf16"}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(body))
    seen = []

    def stop(event: dict[str, Any]) -> None:
        seen.append((event["event"], event.get("stage")))
        if event["event"] == "epoch" and seen.count(("epoch", "step-0")) == 1 and event["stage"] == "step-0":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start_run(read_recipe(tmp_path / "recipe.yaml"), tmp_path / "run", stop)
    done = resume_run(tmp_path / "run")["seeds"][0]["steps"][0]
    assert done["distilled"] and done["recovered"]["test"] > 0.9


SHARDED = """
import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
import sapwood as sw
from tests.test_gpu_training import net, stripes
plugin = FullyShardedDataParallelPlugin(fsdp_version=VERSION, use_orig_params=True if VERSION == 1 else None)
accelerator = Accelerator(fsdp_plugin=plugin)
model = sw.mask(net(), sw.Budget(sparsity=0.8))
before = {n: (t == 0) for n, t in model.state_dict().items() if t.dim() > 1}
done = sw.recover(model, stripes()[0], lr=0.02, epochs=2, accelerator=accelerator)
state = accelerator.get_state_dict(accelerator._models[0])
assert str(accelerator.distributed_type).endswith("FSDP"), accelerator.distributed_type
for name, zeros in before.items():
    assert bool((state[name].cpu()[zeros] == 0).all()), name
    assert int((state[name] == 0).sum()) == int(zeros.sum()), name
print("HELD")
"""


@pytest.mark.parametrize("version", [1, 2])
def test_zeros_are_held_in_a_model_that_accelerate_shards(version: int, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    root = Path(__file__).parents[1]
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    path = os.pathsep.join([str(root), str(root / "src"), os.environ.get("PYTHONPATH", "")])
    code = SHARDED.replace("VERSION", str(version))
    env = {**os.environ, **ranks, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300)
    assert "HELD" in done.stdout, done.stderr[-3000:]


def slim() -> nn.Module:
    """With a 1x1 kernel, whose gradient cuDNN describes otherwise under channels_last."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(4, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 1, bias=False),
        nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, 4),
    )  # fmt: skip


def losses(graph: bool, given: dict[str, Any], sparse: bool = False) -> tuple[list[float], nn.Module, bool]:
    """The loss of every step, the model, and whether a graph was at work."""
    _, x, y = stripes(272)
    model = slim()
    if sparse:
        model = sw.mask(model, sw.Budget(sparsity=0.7))
    loader = TensorLoader(x.cuda(), y.cuda(), 32, pad=1)  # 9 batches, the last one smaller
    teacher = slim() if given.get("teacher") else None
    settings = Settings(lr=0.02, graph=graph, fused=True, **{k: v for k, v in given.items() if k != "teacher"})
    loop = Loop(model, loader, settings, teacher=teacher)
    found, captured = [], False
    for number in range(3):
        for event in loop.epoch(number, len(found), 27):
            found += [float(v) for v in event["losses"]]
            captured = captured or (loop.graphed is not None and loop.graphed.captured)
    return found, loop.finish(), captured


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"teacher": True},
        {"clip": 0.5, "weight_decay": 0.01},
        {"optimizer": "adamw"},
        {"mixed_precision": "bf16", "channels_last": True, "teacher": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("sparse", [False, True])
def test_a_graph_trains_as_the_steps_do(given: dict[str, Any], sparse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # the two may choose different kernels
    eager, one, without = losses(False, given, sparse)
    replayed, two, captured = losses(True, given, sparse)
    assert captured and not without and len(eager) == len(replayed) == 27
    close = {"rtol": 5e-2, "atol": 5e-2} if "mixed_precision" in given else {"rtol": 5e-3, "atol": 1e-3}
    assert torch.allclose(torch.tensor(eager), torch.tensor(replayed), **close)
    for a, b in zip(one.state_dict().values(), two.state_dict().values(), strict=True):
        assert a.shape == b.shape
        if sparse and a.dim() > 1:
            assert torch.equal(a == 0, b == 0)
    assert one[1].num_batches_tracked == two[1].num_batches_tracked == 27  # captured steps ran, captures did not


def test_more_zeros_without_a_new_capture() -> None:
    _, x, y = stripes()
    loop = Loop(
        sw.mask(slim(), sw.Budget(sparsity=0.3)), TensorLoader(x.cuda(), y.cuda(), 32), Settings(0.02, graph=True)
    )
    for _ in loop.epoch(0, 0, 16):
        pass
    graph = loop.graphed
    assert graph is not None and graph.captured
    sw.mask_(loop.plain, sw.Budget(sparsity=0.8))
    zeros = sw.sparsity(loop.plain).zeros
    loop.rehold()
    for _ in loop.epoch(1, 8, 16):
        pass
    assert loop.graphed is graph and graph.captured and sw.sparsity(loop.finish()).zeros == zeros


def regrown(graph: bool) -> tuple[list[float], Loop]:
    """Six masks while training goes on, the last ones at the same sparsity."""
    _, x, y = stripes()
    settings = Settings(0.02, graph=graph, clip=0.5)
    loop = Loop(slim(), TensorLoader(x.cuda(), y.cuda(), 32, shuffle=False), settings)
    found = []
    for number, share in enumerate((0.3, 0.5, 0.7, 0.8, 0.8, 0.8)):
        loop.remask(lambda: sw.mask_(loop.plain, sw.Budget(sparsity=share)), maskable(loop.plain))  # noqa: B023
        found += [float(event["losses"][-1]) for event in loop.epoch(number, 8 * number, 48)]
        assert sw.sparsity(loop.plain).total == pytest.approx(share, abs=1e-3)
    return found, loop


def test_zeros_that_come_back_are_captured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    eager, one = regrown(False)
    replayed, two = regrown(True)
    assert two.graphed is not None and two.graphed.captured and two.graphed._calls == 48
    assert torch.allclose(torch.tensor(eager), torch.tensor(replayed), rtol=5e-3, atol=1e-3)
    for name, hidden in one.hidden.items():
        assert float(hidden.abs().sum()) > 0
        assert torch.allclose(hidden, two.hidden[name], rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(
    "what",
    [
        {"budget": sw.Budget(channels=0.5), "fade": 0.5},
        {"budget": sw.Budget(channels=0.5), "schedule": "cubic", "rounds": 3},
        {"budget": sw.Budget(sparsity=0.8), "schedule": "cubic", "rounds": 4},
        {"budget": sw.Budget(sparsity=0.8), "schedule": "cubic", "rounds": 4, "regrow": 0.9, "clip": 1.0},
        {"pattern": "2:4"},
    ],
    ids=str,
)
def test_schedules_under_a_graph(what: dict[str, Any]) -> None:
    loader, x, y = stripes()
    model = net()
    sw.recover(model, loader, lr=0.02, epochs=4)
    fast = {"graph": True, "mixed_precision": "bf16", "channels_last": True}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*graph=True.*")
        done = sw.prune_and_recover(
            model, x[:2].cuda(), TensorLoader(x.cuda(), y.cuda(), 32), lr=0.02, epochs=6, distill=True,
            mend=[(x.cuda(), y.cuda())], validate=lambda m: accuracy(m, x, y), **what, **fast,
        )  # fmt: skip
    assert done.metric is not None and done.metric > 0.9


def test_a_step_that_looks_at_values_goes_on_without_a_graph() -> None:
    _, x, y = stripes()

    def looking(model: nn.Module, batch: Any) -> torch.Tensor:
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        return loss * 2 if loss.item() > 100 else loss

    with pytest.warns(UserWarning, match="cannot be captured"):
        done = sw.recover(
            slim(), TensorLoader(x.cuda(), y.cuda(), 32), lr=0.02, epochs=4, graph=True, loss=looking,
            validate=lambda m: accuracy(m, x, y),
        )  # fmt: skip
    assert done.metric is not None and done.metric > 0.5


def test_an_optimizer_that_cannot_be_captured_is_refused() -> None:
    loader, _, _ = stripes()
    with pytest.raises(sw.SapwoodError, match="can be captured"):
        sw.recover(slim(), loader, lr=0.1, epochs=1, graph=True, optimizer=lambda g, lr: torch.optim.RMSprop(g, lr))


def test_mending_on_the_gpu_is_what_it_is_on_the_cpu() -> None:
    _, x, y = stripes()
    model = net().eval()
    plan = sw.make_plan(model, x[:2], sw.Budget(channels=0.5))
    here = refresh_norms_(refit_(sw.cut(model, plan), model, plan, [(x, y)]), [(x, y)])
    there = copy.deepcopy(model).cuda()
    moved = refresh_norms_(refit_(sw.cut(there, plan), there, plan, [(x, y)]), [(x, y)])
    for a, b in zip(here.state_dict().values(), moved.state_dict().values(), strict=True):
        assert torch.allclose(a.float(), b.cpu().float(), rtol=1e-2, atol=1e-3)


def test_replaying_is_faster_than_launching() -> None:
    _, x, y = stripes(2048)
    layers = [
        m for _ in range(20) for m in (nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
    ]
    took = {}
    for graph in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(4, 16, 1), *copy.deepcopy(layers), nn.Flatten(), nn.Linear(1024, 4))
        loader, times = TensorLoader(x.cuda(), y.cuda(), 32), []

        def note(step: int, total: int, times: list[float] = times) -> None:
            if step % 64 == 0:
                torch.cuda.synchronize()
                times.append(time.perf_counter())

        sw.recover(model, loader, lr=0.01, epochs=3, graph=graph, mixed_precision="bf16", on_step=note)
        took[graph] = times[-1] - times[-2]
    assert took[True] < 0.7 * took[False]


def test_a_graph_is_dropped_with_its_loop() -> None:
    _, x, y = stripes()
    loop = Loop(slim(), TensorLoader(x.cuda(), y.cuda(), 32), Settings(0.02, graph=True))
    assert isinstance(loop.graphed, GraphedStep)
    for _ in loop.epoch(0, 0, 8):
        pass
    assert loop.finish()[0].weight.grad is None and loop.graphed is None
