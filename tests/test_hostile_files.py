"""Bad files are refused with what is wrong and where; the reader survives anything."""

from __future__ import annotations

import json
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sapwood as sw
from sapwood.storage.bundle import Bundle
from sapwood.storage.examples import make_inputs
from sapwood.storage.record import read_record
from sapwood.storage.replay import cut_file, read_plan
from sapwood.storage.tensors import open_file
from tests.helpers import build, halve, same, snapshot
from tests.nets import CASES


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    model, inputs = build("plain_chain")
    done = halve(model, inputs)
    sw.save(tmp_path / "bundle", done.model, done.plan, check=done.check)
    return tmp_path / "bundle"


def fresh() -> nn.Module:
    return CASES["plain_chain"][0]()


def weights(bundle: Path) -> Path:
    return bundle / "model.safetensors"


def parts(path: Path) -> tuple[dict[str, Any], bytes]:
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def assemble(path: Path, header: dict[str, Any] | bytes, data: bytes, length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)


def with_record(bundle: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the plan inside the weights file."""
    header, data = parts(weights(bundle))
    body = json.loads(header["__metadata__"]["sapwood"])
    changed = change(body)
    header["__metadata__"]["sapwood"] = changed if isinstance(changed, str) else json.dumps(body)
    assemble(weights(bundle), header, data)


def truncate(bundle: Path) -> None:
    weights(bundle).write_bytes(weights(bundle).read_bytes()[:-7])


def truncate_header(bundle: Path) -> None:
    weights(bundle).write_bytes(weights(bundle).read_bytes()[:50])


def empty(bundle: Path) -> None:
    weights(bundle).write_bytes(b"")


def flip_a_bit(bundle: Path) -> None:
    raw = bytearray(weights(bundle).read_bytes())
    raw[-5] ^= 4
    weights(bundle).write_bytes(raw)


def huge_header(bundle: Path) -> None:
    raw = bytearray(weights(bundle).read_bytes())
    raw[:8] = (2**62).to_bytes(8, "little")
    weights(bundle).write_bytes(raw)


def duplicate_names(bundle: Path) -> None:
    header, data = parts(weights(bundle))
    name = next(n for n in header if n != "__metadata__")
    text = json.dumps(header)[:-1] + f', "{name}": {json.dumps(header[name])}}}'
    assemble(weights(bundle), text.encode(), data)


def traversal(bundle: Path) -> None:
    header, data = parts(weights(bundle))
    header["../../evil"] = header.pop("0.weight")
    assemble(weights(bundle), header, data)


def overlap(bundle: Path) -> None:
    header, data = parts(weights(bundle))
    header["0.weight"]["data_offsets"] = header["3.weight"]["data_offsets"]
    header["0.weight"]["shape"] = header["3.weight"]["shape"]
    assemble(weights(bundle), header, data)


def overflowing_shape(bundle: Path) -> None:
    header, data = parts(weights(bundle))
    header["0.weight"]["shape"] = [2**40, 2**40]
    assemble(weights(bundle), header, data)


def overflowing_shape_of_nothing(bundle: Path) -> None:
    header, data = parts(weights(bundle))
    header["0.empty"] = {"dtype": "F32", "shape": [2**47, 2**47, 0], "data_offsets": [0, 0]}
    assemble(weights(bundle), header, data)


def nested_header(bundle: Path) -> None:
    assemble(weights(bundle), b"[" * 100_000, b"")


def extra_bytes(bundle: Path) -> None:
    weights(bundle).write_bytes(weights(bundle).read_bytes() + b"more")


def no_plan(bundle: Path) -> None:
    header, data = parts(weights(bundle))
    del header["__metadata__"]["sapwood"]
    assemble(weights(bundle), header, data)


def json_bomb(body: dict[str, Any]) -> str:
    return "[" * 50_000 + "]" * 50_000


def set_key(*path: Any) -> Callable[[dict[str, Any]], None]:
    *keys, last, value = path

    def change(body: dict[str, Any]) -> None:
        for key in keys:
            body = body[key]
        body[last] = value

    return change


FILES: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated": (truncate, "cut off|damaged"),
    "truncated header": (truncate_header, "header of at most"),
    "empty": (empty, "header"),
    "bit flipped": (flip_a_bit, "digest"),
    "huge header": (huge_header, "header of at most"),
    "duplicate names": (duplicate_names, "once"),
    "path traversal": (traversal, "evil"),
    "overlapping tensors": (overlap, "overlaps"),
    "overflowing shape": (overflowing_shape, "bytes for '0.weight'"),
    "overflowing shape of nothing": (overflowing_shape_of_nothing, "offsets for '0.empty'"),
    "nested header": (nested_header, "header"),
    "bytes at the end": (extra_bytes, "fill its"),
    "no plan": (no_plan, "metadata"),
}
RECORDS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "wrong format": (set_key("format", "zip"), "not a Sapwood plan"),
    "wrong version": (set_key("version", 99), "version 1"),
    "shape does not fit": (set_key("shapes", "0.bias", "after", [9]), "0.bias"),
    "another dense shape": (set_key("shapes", "5.fc.bias", "before", [9]), "5.fc.bias"),
    "index out of range": (set_key("keep", "0.weight", "0", "0-99"), "below 8"),
    "indices out of order": (set_key("keep", "0.weight", "0", "3,1"), "growing"),
    "a huge range": (set_key("keep", "0.weight", "0", "0-99999999999"), "below 8"),
    "not indices": (set_key("keep", "0.weight", "0", "zero"), "indices"),
    "unknown dimension": (set_key("keep", "0.weight", "7", "0"), "dimension"),
    "unknown parameter": (set_key("keep", "9.weight", {"0": "0"}), "9.weight"),
    "no such table": (set_key("keep", [1, 2]), "table"),
    "an attribute of text": (set_key("attributes", "0.forward", "lambda: 1"), "an int"),
    "an attribute path": (set_key("attributes", "../x", 1), "name"),
    "a dunder attribute": (set_key("attributes", "0.__class__", 1), "name"),
    "an attribute that is no size": (set_key("attributes", "0.padding_mode", 1), "a size"),
    "a broken digest": (set_key("digests", "0.weight", "00"), "digest"),
    "a missing digest": (set_key("digests", {}), "exactly"),
    "an infinite factor": (
        set_key("scales", "0.weight", [{"dim": 0, "positions": "0", "factor": 1e999}]),
        "finite|JSON",
    ),
    "a json bomb": (json_bomb, "nesting"),
    "not json": (lambda body: "{", "JSON"),
    "a list": (lambda body: "[]", "object"),
    "a long number": (lambda body: '{"format": ' + "9" * 5000 + "}", "JSON"),
}


def refused(bundle: Path, words: str) -> None:
    model = fresh()
    before = snapshot(model)
    with pytest.raises(sw.SapwoodError, match=words):
        sw.load(bundle, model)
    assert same(model, before)


@pytest.mark.parametrize("name", FILES)
def test_damaged_files_are_refused(name: str, bundle: Path) -> None:
    damage, words = FILES[name]
    damage(bundle)
    refused(bundle, words)


@pytest.mark.parametrize("name", RECORDS)
def test_damaged_plans_are_refused(name: str, bundle: Path) -> None:
    change, words = RECORDS[name]
    with_record(bundle, change)
    refused(bundle, words)


def test_another_model_is_refused(bundle: Path) -> None:
    with pytest.raises(sw.SapwoodError, match=r"0\.weight"):
        sw.load(bundle, CASES["residual"][0]())
    wider = nn.Sequential(*fresh(), nn.Linear(4, 4))
    with pytest.raises(sw.SapwoodError, match=r"also .*6\.weight"):
        sw.load(bundle, wider)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(sw.SapwoodError, match="a bundle"):
        sw.load(tmp_path / "none", fresh())
    with pytest.raises(sw.SapwoodError, match="could not be read"):
        read_plan(tmp_path / "none.json")


def test_a_plan_for_another_file_is_refused(bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(sw.SapwoodError, match="another model"):
        cut_file(bundle / "plan.json", weights(bundle), tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists()


def test_shards_may_not_point_elsewhere(tmp_path: Path) -> None:
    model, inputs = build("plain_chain")
    done = halve(model, inputs)
    sw.save(tmp_path, done.model, done.plan, shard_bytes=500)
    index = tmp_path / "model.safetensors.index.json"
    body = json.loads(index.read_text())
    body["weight_map"]["0.weight"] = "../../etc/model.safetensors"
    index.write_text(json.dumps(body))
    refused(tmp_path, "hostile")


def test_a_model_of_meta_weights_is_not_saved(tmp_path: Path) -> None:
    model, inputs = build("plain_chain")
    done = halve(model, inputs)
    with pytest.raises(sw.SapwoodError, match="meta"):
        sw.save(tmp_path, done.model.to("meta"), done.plan)


def test_the_wrong_plan_is_not_saved(tmp_path: Path) -> None:
    model, inputs = build("plain_chain")
    done = halve(model, inputs)
    with pytest.raises(sw.SapwoodError, match="of shape"):
        sw.save(tmp_path, model, done.plan)
    assert not list(tmp_path.iterdir())


def mutate(raw: bytes, rng: random.Random) -> bytes:
    """A few random edits: flips, cuts, repeats, insertions of awkward bytes."""
    data = bytearray(raw)
    for _ in range(rng.choice((1, 1, 2, 5))):
        kind, place = rng.randrange(6), rng.randrange(len(data) + 1)
        if kind == 0 and place < len(data):
            data[place] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del data[place : place + rng.choice((1, 2, 8, 100))]
        elif kind == 2:
            data[place:place] = data[place : place + rng.choice((1, 8, 64))]
        elif kind == 3:
            data[place:place] = rng.choice((b"[", b"{", b'"', b"-", b"9" * 30, b"\xff\xfe", b"null", b"1e999", b"NaN"))
        elif kind == 4 and place + 8 <= len(data):
            data[place : place + 8] = rng.choice((0, 1, 2**31, 2**63 - 1, 2**64 - 1)).to_bytes(8, "little")
        elif kind == 5:
            data[place:] = data[place:][: rng.randrange(1, 50)]
    return bytes(data)


def survives(call: Callable[[], Any]) -> None:
    message = "it was fine, after all"
    try:
        call()
    except sw.SapwoodError as error:
        message = str(error)
    assert 10 < len(message) < 2000


def small_bundle(folder: Path) -> Path:
    layer = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 64))
    with torch.no_grad():
        layer[1].weight.mul_(torch.rand_like(layer[1].weight) < 0.1)
    done = sw.prune(layer, torch.randn(2, 6), sw.Budget(channels=0.5))
    return sw.save(folder / "model.safetensors", done.model, done.plan)


def test_fuzzed_plans(tmp_path: Path) -> None:
    raw = json.loads(parts(small_bundle(tmp_path))[0]["__metadata__"]["sapwood"])
    text = json.dumps(raw).encode()
    rng = random.Random(0)
    for _ in range(70_000):
        broken = mutate(text, rng)
        survives(lambda broken=broken: read_record(broken, "fuzz").plan())


def test_fuzzed_files(tmp_path: Path) -> None:
    raw = small_bundle(tmp_path).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    rng, path = random.Random(1), tmp_path / "fuzz.safetensors"

    def attempt() -> None:
        opened = Bundle(path)
        for name in opened.record.after:
            opened.tensor(name)

    for number in range(30_000):
        # edits all over, edits of the header alone (its length mended), edits of the data
        if number % 3 == 0:
            broken = mutate(raw, rng)
        elif number % 3 == 1:
            header = mutate(raw[8 : 8 + length], rng)
            broken = len(header).to_bytes(8, "little") + header + raw[8 + length :]
        else:
            broken = raw[: 8 + length] + mutate(raw[8 + length :], rng)
        path.write_bytes(broken)
        survives(attempt)


def test_reading_never_takes_much_more_than_the_file(tmp_path: Path) -> None:
    path = small_bundle(tmp_path)
    raw, rng = path.read_bytes(), random.Random(2)
    survives(lambda: Bundle(path))  # imports and caches, once
    tracemalloc.start()
    try:
        for _ in range(1_500):
            broken = mutate(raw, rng)
            path.write_bytes(broken)
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            survives(lambda: open_file(path))
            survives(lambda: Bundle(path))
            peak = tracemalloc.get_traced_memory()[1] - before
            assert peak <= 4 * len(broken) + 2**16, f"{peak:,} bytes for a file of {len(broken):,}"
    finally:
        tracemalloc.stop()


def test_a_full_check_compares_the_sha256(bundle: Path) -> None:
    assert sw.load(bundle, fresh(), verify="full")

    def forge(body: dict[str, Any]) -> None:
        quick, _, strong = body["digests"]["0.weight"].partition(":")
        body["digests"]["0.weight"] = f"{quick}:{strong[::-1]}"

    with_record(bundle, forge)
    sw.load(bundle, fresh())
    with pytest.raises(sw.SapwoodError, match="digest"):
        sw.load(bundle, fresh(), verify="full")


@pytest.mark.parametrize(
    "inputs", [1, {}, {"args": [{"tensor": {"shape": [2**40], "dtype": "float32"}}], "kwargs": {}}, {"args": [7]}]
)
def test_hostile_input_specs(inputs: Any) -> None:
    with pytest.raises(sw.SapwoodError, match="shapes and dtypes"):
        make_inputs(inputs)
