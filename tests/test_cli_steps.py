"""inspect, plan and mask as a person runs them, with the cut that follows."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import sapwood as sw
from sapwood.cli.common import fill
from sapwood.cli.main import main
from sapwood.cli.mask import bare
from sapwood.masking.targets import maskable
from sapwood.planning.draft import build_plan
from sapwood.reporting.inspection import savings, short
from tests.helpers import build, size
from tests.zoo.torchvision_models import import_torchvision

ROOT = Path(__file__).parent.parent
NET, SHAPE = "tests.nets:residual", ("--input", "2x3x8x8")
PLAIN = ["-m", "sapwood.cli.main"]
LENIENT = [  # torchvision's operators may not fit the installed torch; its models do
    "-c",
    "from tests.zoo.torchvision_models import import_torchvision; import_torchvision()\n"
    "from sapwood.cli.main import main; main()",
]


def sapwood(*arguments: object, start: list[str] = PLAIN) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *start, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)


def told(*arguments: object) -> Any:
    """What a verb says to a machine."""
    done = sapwood(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense checkpoint, and a bundle of a masked model that remembers its inputs."""
    made = tmp_path_factory.mktemp("steps")
    torch.manual_seed(0)
    model, inputs = build("residual")
    save_file(model.state_dict(), made / "dense.safetensors")
    sw.save(made / "bundle", sw.mask(model, sw.Budget(sparsity=0.9)), example_inputs=inputs)
    return made


def dense_model(folder: Path) -> torch.nn.Module:
    return fill(build("residual")[0], folder / "dense.safetensors")


def test_inspect_tells_groups_savings_and_frozen() -> None:
    found = told("inspect", NET, *SHAPE)
    assert found["inputs"] == [[2, 3, 8, 8]] and found["totals"]["params"] == size(build("residual")[0])
    stem = next(g for g in found["groups"] if g["name"] == "stem")
    assert stem["channels"] == 8 and ["a.weight", 1] in stem["sites"] and stem["removal"] == "exact"
    assert stem["half"]["kept"] == 4 and stem["half"]["params_saved"] == 4 * stem["params_per_channel"]
    assert stem["half"]["flops_saved_share"] == stem["half"]["flops_saved"] / found["totals"]["flops"]
    assert any("output" in f["reason"] and ["head.fc.weight", 0] in f["sites"] for f in found["frozen"])


def test_inspect_a_masked_bundle_in_words(folder: Path) -> None:
    done = sapwood("inspect", folder / "bundle", "--model", NET)
    assert done.returncode == 0, done.stderr
    for words in ("half saves", "Channels that stay", "Zeros", "90.0%", "parameters", "2x3x8x8"):
        assert words in done.stdout


@pytest.mark.parametrize(
    "name", ["residual", "dense_concatenation", "grouped_convolution", "transformer_from_projection"]
)
def test_savings_are_those_of_a_real_cut(name: str) -> None:
    model, inputs = build(name)
    trace = sw.trace(model, inputs)
    widths = {g.name: g.width for g in trace.groups}
    for saving in savings(trace):
        halved = {saving.group.name: saving.kept} | {n: widths[n] // 2 for n in saving.along}
        plan = build_plan(trace, {n: tuple(range(k)) for n, k in halved.items()})
        small = sw.cut(model, plan)
        assert saving.params == size(model) - size(small) > 0
        assert saving.flops == trace.flops - sw.trace(small, inputs).flops


def test_numbers_for_people() -> None:
    numbers = {0: "0", 999: "999", 1000: "1K", 11_689_512: "11.7M", 999_600: "1M", 10**19: "1e+04P"}
    assert {n: short(n) for n in numbers} == numbers


def test_plan_then_cut_gives_the_bytes_of_saving_the_cut_model(folder: Path) -> None:
    dense, path = folder / "dense.safetensors", folder / "plan.json"
    options = ("--allocate", "uniform", "--ignore", "a", "--round-to", 2, "--weights", dense, "--out", path)
    found = told("plan", NET, "--budget", "flops=0.6", *SHAPE, *options)
    assert found["achieved"]["flops"] <= 0.6 * found["achieved"]["dense_flops"]
    assert found["groups"]["a"] == {"channels": 12, "kept": 12} and found["groups"]["stem"]["kept"] % 2 == 0
    cut = told("cut", dense, "--plan", path)

    model, inputs = dense_model(folder), torch.randn(2, 3, 8, 8)
    plan = sw.make_plan(model, inputs, sw.Budget(flops=0.6), allocate="uniform", ignore=("a",), round_to=2)
    saved = sw.save(folder / "saved.safetensors", sw.cut(model, plan), plan, example_inputs=inputs)
    assert Path(cut["path"]).read_bytes() == saved.read_bytes()


def test_plan_shares_a_cut_out_by_name(folder: Path) -> None:
    words = ("plan", NET, "--budget", "flops=0.6", *SHAPE, "--weights", folder / "dense.safetensors")
    shares = {"a": 0.5, "stem": 0.8}
    found = told(*words, *(w for name, x in shares.items() for w in ("--share", f"{name}={x}")), "--out", folder / "p")
    plan = sw.make_plan(dense_model(folder), torch.randn(2, 3, 8, 8), sw.Budget(flops=0.6), allocate=shares)
    assert {n: g["kept"] for n, g in found["groups"].items() if n in plan.groups} == {
        n: len(kept) for n, kept in plan.groups.items()
    }
    assert found["budget"]["allocate"] == shares
    for wrong, what in (("a", "a name and a number"), ("=2", "a name and a number"), ("a=0", "0.001")):
        done = sapwood(*words, "--share", wrong)
        assert done.returncode and what in done.stderr
    assert "the second for this name" in sapwood(*words, "--share", "a=2", "--share", "a=3").stderr
    both = sapwood(*words, "--share", "a=2", "--allocate", "uniform")
    assert both.returncode and "expected --allocate or --share" in both.stderr


def test_plan_in_words_replaces_the_old_file_and_says_what_is_scored(folder: Path) -> None:
    path = folder / "again.json"
    path.write_text("old")
    done = sapwood("plan", NET, "--budget", "params=1000", *SHAPE, "--out", path)
    assert done.returncode == 0, done.stderr
    assert "no --weights" in done.stderr and "What the plan leaves" in done.stdout and f"--plan {path}" in done.stdout
    assert json.loads(path.read_text())["budget"]["params"] == 1000
    assert not list(folder.glob(".again*"))


def test_mask_without_a_model_chooses_by_name(folder: Path) -> None:
    dense, out = folder / "dense.safetensors", folder / "masked.safetensors"
    out.write_text("old")
    done = sapwood("mask", dense, "--sparsity", 0.8, "--ignore", "head", "--out", out)
    assert done.returncode == 0, done.stderr
    assert "by name and shape" in done.stdout and "total" in done.stdout and "80.0%" in done.stdout
    assert f"{dense.stat().st_size:,} bytes" in done.stdout and f"{out.stat().st_size:,} bytes" in done.stdout
    loaded = sw.load(out, build("residual")[0])
    wanted = sw.mask(dense_model(folder), sw.Budget(sparsity=0.8), ignore=("head",))
    for name, tensor in wanted.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)


def test_mask_with_a_model_writes_what_save_does(folder: Path) -> None:
    out = folder / "two_of_four.safetensors"
    found = told("mask", folder / "dense.safetensors", "--pattern", "2:4", "--model", NET, "--out", out)
    assert found["sparsity"] == 0.5 and "by the model" in found["chosen"]
    assert set(found["layers"]) == {"a.weight", "b.weight", "head.fc.weight"}  # the stem reads 3 channels
    assert found["bytes_before"] == (folder / "dense.safetensors").stat().st_size
    wanted = sw.save(folder / "by_hand.safetensors", sw.mask(dense_model(folder), pattern="2:4"))
    assert out.read_bytes() == wanted.read_bytes()


def test_mask_a_bundle_again(folder: Path) -> None:
    found = told("mask", folder / "bundle", "--sparsity", 0.95, "--out", folder / "more")
    assert found["sparsity"] == pytest.approx(0.95, abs=1e-3)
    loaded = sw.load(folder / "more", build("residual")[0])
    assert sw.sparsity(loaded).total == pytest.approx(0.95, abs=1e-3)
    assert json.loads((folder / "more" / "plan.json").read_text())["inputs"] is not None


def test_a_bare_checkpoint_spares_embeddings_unless_asked() -> None:
    names = ["embed.weight", "wte.weight", "a.0.weight", "a.0.bias_proj", "embed_proj", "a.norm.scale"]
    held = bare({n: torch.randn(4, 4) for n in names} | {"a.count": torch.tensor(3)})
    assert set(held.state_dict()) == {*names, "a.count"}
    assert set(maskable(held, ignore=("embed_proj",))) == {"a.0.weight", "a.0.bias_proj"}
    assert "embed.weight" in maskable(held, include=("embed",))
    with pytest.raises(sw.SapwoodError, match="Pass --model"):
        bare({"a.forward.weight": torch.randn(2, 2)})


def test_a_checkpoint_may_name_tied_weights_either_way(tmp_path: Path) -> None:
    model, other = build("tied_weights")[0], build("tied_weights")[0]
    state = {n: t.clone().half() for n, t in model.state_dict().items() if n != "embed.weight"}
    save_file(state, tmp_path / "dense.safetensors")
    fill(other, tmp_path / "dense.safetensors")
    assert other.embed.weight is other.out.weight and other.embed.weight.dtype == torch.float16
    assert torch.equal(other.embed.weight, model.embed.weight.half())
    save_file({**state, "more": torch.ones(1)}, tmp_path / "dense.safetensors")
    with pytest.raises(sw.SapwoodError, match="also"):
        fill(other, tmp_path / "dense.safetensors")


MISTAKES = {
    "inspect tests.nets:residul": "tests.nets:residual",
    "inspect tests.nets:residual --input 2x5x8x8": "3 channels",
    "plan tests.nets:residual --budget flop=0.5": "Did you mean flops?",
    "mask {f}/dense.safetensors --pattern 2;4": "2:4",
    "mask {f}/none.safetensors --sparsity 0.5": "could not be read",
}
MORE = {
    "inspect tests.nets:residual": "--input",
    "inspect tests.nets:residual --input 2x3x8x8:int46": "1x16:int64",
    "inspect tests.nets:conv": "without arguments",
    "inspect tests.nets:math": "without arguments",
    "inspect no.such:thing": "No module named",
    "inspect resnet18": "torchvision:resnet18",
    "inspect nowhere.safetensors": "a bundle",
    "inspect {f}/bundle": "Pass --model",
    "plan tests.nets:residual --budget sparsity=0.5": "sapwood mask",
    "plan tests.nets:residual --budget flops=half": "flops=0.5",
    "plan tests.nets:residual --budget flops=0.5 --input 2x3x8x8 --weights {f}/none.safetensors": "could not be read",
    "plan tests.nets:plain_chain --budget flops=0.5 --input 2x3x8x8 --weights {f}/dense.safetensors": "0.weight",
    "plan tests.nets:residual --budget flops=0.5 --input 2x3x8x8 --ignore stm": "Did you mean stem",
    "mask {f}/dense.safetensors": "--sparsity 0.9",
    "mask {f}/dense.safetensors --sparsity 0.5 --score wanda": "in Python",
    "mask {f}/dense.safetensors --sparsity 0.5 --out {f}": "another folder",
    "cut {f}/dense.safetensors --plan {f}/bundle/plan.json --out {f}": "another folder",
    "inspect torchvision:resnet19": "torchvision:resnet18",
    "inspect timm:resnet19": "timm:resnet18",
    "inspect hf:BertModl --input 1x16:int64": "hf:BertModel",
    "inspect hf:AutoModel --input 1x16:int64": "by its class",
}
LIBRARIES = {"torchvision": "torchvision", "timm": "timm", "hf": "transformers"}


def require_one_line(code: int | None, out: str, err: str, words: str) -> None:
    lines = [line for line in err.strip().splitlines() if not line.startswith("sapwood: note:")]
    assert code == 2, err
    assert words in err and len(lines) == 1 and lines[0].startswith("sapwood: ") and not out


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_one_line_and_code_2(case: str, folder: Path) -> None:
    done = sapwood(*case.replace("{f}", str(folder)).split())
    require_one_line(done.returncode, done.stdout, done.stderr, MISTAKES[case])


@pytest.mark.parametrize("case", MORE)
def test_more_mistakes(
    case: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same in this process, to save the imports."""
    library = LIBRARIES.get(case.split()[1].partition(":")[0])
    if library is not None:
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"{library} is not installed")
        with contextlib.suppress(ImportError):
            import_torchvision()
    monkeypatch.setattr(sys, "argv", ["sapwood", *case.replace("{f}", str(folder)).split()])
    with pytest.raises(SystemExit) as ended:
        main()
    require_one_line(ended.value.code, *capsys.readouterr(), MORE[case])
    assert set(load_file(folder / "dense.safetensors")) == set(build("residual")[0].state_dict())


@pytest.mark.skipif(importlib.util.find_spec("torchvision") is None, reason="torchvision is not installed")
def test_vision_models_need_no_shape() -> None:
    done = sapwood("inspect", "torchvision:resnet18", "--json", start=LENIENT)
    assert done.returncode == 0 and "1x3x224x224 is assumed" in done.stderr, done.stderr
    found = json.loads(done.stdout)
    assert found["totals"]["params"] == 11_689_512 and found["groups"][0]["name"] == "conv1"
