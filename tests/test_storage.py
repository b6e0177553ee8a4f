"""Bundles: what is saved comes back, bit for bit, whatever the model."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

import sapwood as sw
from sapwood.storage import factories, ranges
from sapwood.storage.bundle import Bundle
from sapwood.storage.replay import cut_file
from sapwood.storage.tensors import pack, unpack_into
from tests.helpers import build, halve, outputs, same, snapshot
from tests.nets import CASES

GOLDEN = Path(__file__).parent / "data" / "golden-v1"


def saved(name: str, path: Path, **options: object) -> tuple[nn.Module, sw.Pruned, object]:
    model, inputs = build(name)
    done = halve(model, inputs)
    sw.save(path, done.model, done.plan, check=done.check, **options)
    return model, done, inputs


def equal_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()


@pytest.mark.parametrize("name", CASES)
def test_every_hazard_comes_back(name: str, tmp_path: Path) -> None:
    _, done, inputs = saved(name, tmp_path / "bundle")
    fresh = CASES[name][0]()
    before = snapshot(fresh)
    small = sw.load(tmp_path / "bundle", fresh)
    assert same(small, snapshot(done.model)) and same(fresh, before)
    assert small.training == fresh.training
    for a, b in zip(outputs(small, inputs), outputs(done.model, inputs), strict=True):
        assert torch.equal(a, b)
    assert [p.requires_grad for p in small.parameters()] == [p.requires_grad for p in done.model.parameters()]


@pytest.mark.parametrize("name", CASES)
def test_loading_in_place_gives_the_same(name: str, tmp_path: Path) -> None:
    _, done, inputs = saved(name, tmp_path / "bundle")
    fresh = CASES[name][0]()
    parameters = [id(p) for p in fresh.parameters()]
    assert sw.load_(tmp_path / "bundle", fresh) is fresh
    assert same(fresh, snapshot(done.model)) and [id(p) for p in fresh.parameters()] == parameters
    for a, b in zip(outputs(fresh, inputs), outputs(done.model, inputs), strict=True):
        assert torch.equal(a, b)


def test_loading_in_place_fills_the_memory_that_is_there(tmp_path: Path) -> None:
    model = nn.Linear(64, 64)
    plan = sw.make_plan(model, torch.randn(1, 64), sw.Budget(channels=1.0))
    sw.save(tmp_path / "bundle", model, plan)
    fresh = nn.Linear(64, 64)
    before, place = fresh.weight.detach().clone(), fresh.weight.data_ptr()
    file = tmp_path / "bundle" / "model.safetensors"
    good = file.read_bytes()
    file.write_bytes(good[:-5] + bytes([good[-5] ^ 1]) + good[-4:])
    with pytest.raises(sw.SapwoodError, match="digest"):
        sw.load_(tmp_path / "bundle", fresh)
    assert torch.equal(fresh.weight, before)  # refused before anything was filled
    file.write_bytes(good)
    sw.load_(tmp_path / "bundle", fresh)
    assert fresh.weight.data_ptr() == place and torch.equal(fresh.weight, model.weight)


def test_one_file_is_enough(tmp_path: Path) -> None:
    _, done, _ = saved("plain_chain", tmp_path / "model.safetensors")
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]
    assert same(sw.load(tmp_path / "model.safetensors", CASES["plain_chain"][0]()), snapshot(done.model))


def test_shards(tmp_path: Path) -> None:
    _, done, _ = saved("transformer_from_projection", tmp_path, shard_bytes=4000)
    shards = list(tmp_path.glob("model-*-of-*.safetensors"))
    assert len(shards) > 2 and all(s.stat().st_size < 8000 for s in shards)
    fresh = CASES["transformer_from_projection"][0]()
    assert same(sw.load(tmp_path, fresh), snapshot(done.model))
    sw.save(tmp_path, done.model, done.plan)  # back to one file: the shards go
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.safetensors", "plan.json"]
    sw.save(tmp_path, done.model, done.plan, shard_bytes=4000)
    assert not (tmp_path / "model.safetensors").exists()
    assert same(sw.load(tmp_path, fresh), snapshot(done.model))


def test_names_stay_and_own_loading_code_works(tmp_path: Path) -> None:
    model, done, _ = saved("plain_chain", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert set(tensors) == set(model.state_dict())
    other = sw.cut(model, done.plan)
    other.load_state_dict(tensors)
    assert same(other, snapshot(done.model))


def test_a_model_on_the_meta_device_is_filled(tmp_path: Path) -> None:
    _, done, inputs = saved("rotary_attention", tmp_path)
    with torch.device("meta"):
        fresh = CASES["rotary_attention"][0]()
    small = sw.load(tmp_path, fresh)
    assert not any(t.is_meta for t in [*small.parameters(), *small.buffers()])
    assert torch.equal(outputs(small, inputs)[0], outputs(done.model, inputs)[0])


def test_buffers_outside_the_state_dict(tmp_path: Path) -> None:
    def make() -> nn.Module:
        model = CASES["buffer_beside_weights"][0]()
        blur = model.blur
        del model.blur
        model.register_buffer("blur", blur, persistent=False)
        return model

    model, inputs = make(), torch.randn(2, 3, 8, 8)
    done = halve(model, inputs)
    sw.save(tmp_path, done.model, done.plan)
    assert "blur" not in load_file(tmp_path / "model.safetensors")
    again = make()
    again.blur.copy_(model.blur)
    assert torch.equal(outputs(sw.load(tmp_path, again), inputs)[0], outputs(done.model, inputs)[0])
    with torch.device("meta"):
        empty = make()
    assert torch.equal(outputs(sw.load(tmp_path, empty), inputs)[0], outputs(done.model, inputs)[0])


def test_a_large_cut_buffer_outside_the_state_dict_comes_back(tmp_path: Path) -> None:
    class WithTable(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 64), nn.Linear(64, 4)
            self.register_buffer("table", torch.randn(1024, 64), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.first(x) + self.table[:3])

    model, x = WithTable(), torch.randn(3, 8)
    done = sw.prune(model, x, sw.Budget(channels=0.5))
    assert done.model.table.shape == (1024, 32)
    sw.save(tmp_path / "bundle", done.model, done.plan)
    again = sw.load(tmp_path / "bundle", model)
    assert torch.equal(again(x), done.model(x))


def test_saving_into_a_folder_leaves_other_files_alone(tmp_path: Path) -> None:
    saved("plain_chain", tmp_path, shard_bytes=200)
    assert list(tmp_path.glob("model-*-of-*.safetensors"))
    (tmp_path / "model_dense.safetensors").write_bytes(b"mine")
    saved("plain_chain", tmp_path)
    assert (tmp_path / "model_dense.safetensors").read_bytes() == b"mine"
    assert not list(tmp_path.glob("model-*-of-*.safetensors"))


def test_tied_weights_come_back_tied(tmp_path: Path) -> None:
    saved("tied_weights", tmp_path)
    small = sw.load(tmp_path, CASES["tied_weights"][0]())
    assert small.out.weight is small.embed.weight


def test_fine_tuned_weights_come_back(tmp_path: Path) -> None:
    _, done, _ = saved("plain_chain", tmp_path)
    with torch.no_grad():
        for parameter in done.model.parameters():
            parameter.add_(torch.randn_like(parameter))
    sw.save(tmp_path, done.model, done.plan)
    assert same(sw.load(tmp_path, CASES["plain_chain"][0]()), snapshot(done.model))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_dtypes_come_back(dtype: torch.dtype, tmp_path: Path) -> None:
    model, inputs = build("plain_chain")
    done = halve(model.to(dtype), inputs.to(dtype))
    sw.save(tmp_path, done.model, done.plan)
    small = sw.load(tmp_path, CASES["plain_chain"][0]())
    assert same(small, snapshot(done.model)) and small[0].weight.dtype == dtype


def test_a_sparse_model_is_stored_small_and_exact(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 256, bias=False))
    with torch.no_grad():
        for layer in (model[0], model[2]):
            layer.weight[torch.rand_like(layer.weight) < 0.9] = 0
            layer.weight[0, :4] = -0.0
    plan = sw.make_plan(model, torch.randn(2, 512), sw.Budget(channels=1.0))
    sw.save(tmp_path / "sparse", model, plan)
    save_file(model.state_dict(), tmp_path / "dense.safetensors")
    ratio = (tmp_path / "sparse" / "model.safetensors").stat().st_size / (tmp_path / "dense.safetensors").stat().st_size
    assert ratio <= 0.17
    small = sw.load(tmp_path / "sparse", nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 256, bias=False)))
    for name, tensor in model.state_dict().items():
        assert equal_bits(small.state_dict()[name], tensor)


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 5000),
    st.sampled_from([0.0, 0.3, 0.5, 0.9, 0.99, 0.999, 1.0]),
    st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int64]),
    st.integers(0, 2**31),
)
def test_packing_is_exact(size: int, zeros: float, dtype: torch.dtype, seed: int) -> None:
    make = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 256, (size * dtype.itemsize,), dtype=torch.uint8, generator=make)  # nan, inf, -0.0 and all
    tensor = bits.view(dtype).clone() if size else torch.zeros(0, dtype=dtype)
    tensor[torch.rand(size, generator=make) < zeros] = 0
    parts, how = pack("x", tensor)
    back = parts["x"] if how is None else torch.ones_like(tensor)
    if how is not None:
        unpack_into(back, parts[f"x#{how['by']}"], parts["x#values"], how["by"], "x")
    raw = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    assert back.dtype == dtype and torch.equal(back.view(raw), tensor.view(raw))


@pytest.mark.parametrize("zeros", [0.5, 0.9])
def test_large_tensors_are_unpacked_in_pieces(zeros: float) -> None:
    tensor = torch.randn(6_000_001)
    tensor[torch.rand_like(tensor) < zeros] = 0
    parts, how = pack("x", tensor)
    assert how is not None and how["by"] == ("gaps" if zeros > 0.8 else "bitmap")
    where, values, back = parts[f"x#{how['by']}"], parts["x#values"], torch.ones_like(tensor)
    unpack_into(back, where, values, how["by"], "x")
    assert equal_bits(back, tensor)
    with pytest.raises(sw.SapwoodError, match="as many values"):
        unpack_into(back, where, values[:-1], how["by"], "x")
    with pytest.raises(sw.SapwoodError, match=r"as many values|a bitmap of"):
        unpack_into(back[:-1000], where, values, how["by"], "x")  # the values go on after its end


@given(st.sets(st.integers(0, 400), min_size=1))
def test_ranges_round_trip(indices: set[int]) -> None:
    wanted = tuple(sorted(indices))
    text = ranges.fold(wanted)
    assert ranges.unfold(text, 401, "x") == wanted and ranges.count(text, 401, "x") == len(wanted)
    assert len(text) <= len(",".join(map(str, wanted)))


@pytest.mark.parametrize(
    "name", ["plain_chain", "transformer_from_projection", "tied_weights", "single_head_attention"]
)
def test_a_dense_file_and_a_plan_give_the_same_bytes(name: str, tmp_path: Path) -> None:
    model, _, _ = saved(name, tmp_path / "bundle")
    tensors = {n: t for n, t in model.state_dict().items() if n != "out.weight" or name != "tied_weights"}
    save_file({n: t.contiguous() for n, t in tensors.items()}, tmp_path / "dense.safetensors")
    cut_file(tmp_path / "bundle" / "plan.json", tmp_path / "dense.safetensors", tmp_path / "cut.safetensors")
    wanted = (tmp_path / "bundle" / "model.safetensors").read_bytes()
    assert (tmp_path / "cut.safetensors").read_bytes() == wanted
    cut_file(tmp_path / "bundle" / "plan.json", tmp_path / "dense.safetensors", tmp_path / "again")
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == wanted
    assert (tmp_path / "again" / "plan.json").read_bytes() == (tmp_path / "bundle" / "plan.json").read_bytes()


def test_saving_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    _, done, _ = saved("transformer_from_projection", tmp_path / "a")
    sw.save(tmp_path / "b", done.model, done.plan, check=done.check)
    for name in ("model.safetensors", "plan.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_the_plan_comes_back(tmp_path: Path) -> None:
    _, done, _ = saved("single_head_attention", tmp_path)
    plan = Bundle(tmp_path).record.plan()
    assert plan.keep == done.plan.keep and plan.attributes == done.plan.attributes
    assert plan.scales == done.plan.scales and plan.groups == done.plan.groups
    body = json.loads((tmp_path / "plan.json").read_text())
    assert body["check"]["status"] == "exact" and body["budget"]["score"] == "l1"
    assert body["versions"].keys() == {"sapwood", "torch"} and body["digests"]


def test_a_factory_builds_the_model_by_itself(tmp_path: Path) -> None:
    zoo = pytest.importorskip("tests.zoo.torchvision_models")
    pytest.importorskip("PIL")
    models = zoo.import_torchvision().models
    model, inputs = models.get_model("squeezenet1_1", num_classes=7), torch.randn(1, 3, 64, 64)
    done = halve(model, inputs)
    sw.save(tmp_path, done.model, done.plan, factory="torchvision:squeezenet1_1", arguments={"num_classes": 7})
    assert same(sw.load(tmp_path), snapshot(done.model))


@pytest.mark.parametrize("factory", ["os:system", "builtins:eval", "torchvision", "timm:../x", "transformers:os"])
def test_factories_are_only_those_of_known_libraries(factory: str) -> None:
    with pytest.raises(sw.SapwoodError, match="factory"):
        factories.build({"factory": factory})


def test_old_bundles_stay_readable() -> None:
    """Written by version 1 of the format; whatever comes later must go on reading it."""
    expected = load_file(GOLDEN / "expected.safetensors")
    torch.manual_seed(1)
    small = sw.load(GOLDEN / "bundle", CASES["transformer_from_projection"][0]())
    torch.testing.assert_close(outputs(small, expected["input"])[0], expected["output"])
    sparse = sw.load(GOLDEN / "sparse.safetensors", nn.Linear(64, 32))
    assert torch.equal(sparse.weight, expected["sparse"]) and float((sparse.weight == 0).float().mean()) > 0.8


def test_loading_does_not_depend_on_the_file_afterwards(tmp_path: Path) -> None:
    _, done, _ = saved("plain_chain", tmp_path)
    small = sw.load(tmp_path, CASES["plain_chain"][0]())
    weights = tmp_path / "model.safetensors"
    raw = np.frombuffer(weights.read_bytes(), dtype=np.uint8).copy()
    raw[len(raw) // 2 :] = 0
    weights.write_bytes(raw.tobytes())
    assert same(small, snapshot(done.model))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the memory of this process from /proc")
def test_loading_on_the_meta_device_holds_one_copy(tmp_path: Path) -> None:
    model = nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(6)])  # 100 MB
    plan = sw.make_plan(model, torch.randn(1, 2048), sw.Budget(channels=1.0))
    sw.save(tmp_path, model, plan)
    with torch.device("meta"):
        empty = nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(6)])
    stop, peak = threading.Event(), [0]

    def own_memory() -> int:
        return int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0]) * 1024

    def watch() -> None:
        while not stop.is_set():
            peak[0] = max(peak[0], own_memory())

    before = own_memory()
    watcher = threading.Thread(target=watch)
    watcher.start()
    small = sw.load(tmp_path, empty)
    stop.set()
    watcher.join()
    assert same(small, snapshot(model))
    assert peak[0] - before < 1.3 * 6 * 2048 * 2048 * 4
