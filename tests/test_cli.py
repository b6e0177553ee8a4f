"""The command line as a person runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import sapwood as sw
from sapwood.storage.export import export
from tests.helpers import build, halve, outputs

ROOT = Path(__file__).parent.parent


def sapwood(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sapwood.cli.main", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    torch.manual_seed(0)
    model, inputs = build("plain_chain")
    done = halve(model, inputs)
    sw.save(folder / "bundle", done.model, done.plan, check=done.check, example_inputs=inputs)
    save_file(model.state_dict(), folder / "dense.safetensors")
    return folder


def test_cut_gives_the_saved_bytes(bundle: Path) -> None:
    done = sapwood("cut", bundle / "dense.safetensors", "--plan", bundle / "bundle" / "plan.json", "--json")
    assert done.returncode == 0, done.stderr
    path = Path(json.loads(done.stdout)["path"])
    assert path.read_bytes() == (bundle / "bundle" / "model.safetensors").read_bytes()


def test_export_to_onnx_with_folding(bundle: Path) -> None:
    done = sapwood("export", bundle / "bundle", "--to", "onnx", "--model", "tests.nets:plain_chain", "--fold", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["dynamic_batch"] and result["max_error"] < 1e-4 and result["folded"] == ["1"]
    import onnx

    props = {p.key: p.value for p in onnx.load(result["path"]).metadata_props}
    assert json.loads(props["sapwood"])["achieved"]["params"] < json.loads(props["sapwood"])["achieved"]["dense_params"]


def test_export_in_words(bundle: Path) -> None:
    out = bundle / "plain.safetensors"
    done = sapwood("export", bundle / "bundle", "--to", "safetensors", "--model", "tests.nets:plain_chain", "-o", out)
    assert done.returncode == 0 and "Wrote" in done.stdout and "equal to the eager" in done.stdout
    assert load_file(out)["0.weight"].shape[0] == 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["export", "nowhere", "--to", "onnx"], "a bundle"),
        (["export", "{b}", "--to", "onnx"], "names its factory"),
        (["export", "{b}", "--to", "gif", "--model", "tests.nets:plain_chain"], "onnx, pt2, safetensors"),
        (["export", "{b}", "--to", "onnx", "--model", "tests.nets:nothing"], "nothing"),
        (["export", "{b}", "--to", "onnx", "--model", "tests.nets:residual"], "0.weight"),
        (["export", "{b}", "--to", "onnx", "--model", "tests.nets:plain_chain", "--input", "axb"], "1x3x224x224"),
        (["cut", "nowhere.safetensors", "--plan", "{b}/plan.json"], "could not be read"),
        (["cut", "{b}/model.safetensors", "--plan", "{b}/plan.json"], "another model"),
    ],
)
def test_user_errors_are_one_line_and_code_2(arguments: list[str], words: str, bundle: Path) -> None:
    done = sapwood(*[a.replace("{b}", str(bundle / "bundle")) for a in arguments])
    assert done.returncode == 2, done.stderr
    assert words in done.stderr and len(done.stderr.strip().splitlines()) == 1 and "Traceback" not in done.stderr


def test_help_and_version() -> None:
    assert "export" in sapwood("--help").stdout
    assert sapwood("--version").stdout.strip() == sw.__version__


@pytest.mark.parametrize("name", ["plain_chain", "transformer_from_projection", "dict_output", "tied_weights"])
@pytest.mark.parametrize("kind", ["onnx", "pt2"])
def test_exports_equal_the_eager_model(name: str, kind: str, tmp_path: Path) -> None:
    model, inputs = build(name)
    done = halve(model, inputs)
    done.model.train()
    made = export(done.model, inputs, tmp_path / f"m.{kind}", kind, fold=name == "plain_chain")
    assert made.max_error < 1e-4 and made.dynamic_batch and done.model.training
    assert made.folded == (("1",) if name == "plain_chain" else ())


def test_folding_leaves_norms_whose_input_is_used_elsewhere(tmp_path: Path) -> None:
    class Both(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = torch.nn.Conv2d(3, 4, 1), torch.nn.BatchNorm2d(4)
            self.again, self.last = torch.nn.Conv2d(4, 4, 1), torch.nn.BatchNorm2d(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.conv(x)
            return self.last(self.again(self.norm(x) + x))

    model, inputs = Both(), torch.randn(2, 3, 4, 4)
    made = export(model, inputs, tmp_path / "m.pt2", "pt2", fold=True)
    assert made.folded == ("last",)


def test_a_failed_export_leaves_the_old_file(tmp_path: Path) -> None:
    class Branches(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(x) if x.sum() > 0 else x

    (tmp_path / "m.pt2").write_text("old")
    with pytest.raises(sw.SapwoodError, match="to export to pt2"):
        export(Branches(), torch.randn(2, 4), tmp_path / "m.pt2", "pt2")
    assert (tmp_path / "m.pt2").read_text() == "old"
    assert outputs(Branches(), torch.randn(2, 4))
