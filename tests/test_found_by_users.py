"""What people trying things out ran into: one small case each."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sapwood as sw
from sapwood.storage.examples import describe_inputs, make_inputs

X = torch.randn(2, 8)
DATA = [(X, torch.tensor([0, 1]))] * 4


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def test_a_model_that_keeps_the_handle_of_a_hook() -> None:
    """As Hugging Face models with gradient checkpointing do."""
    model, calls = net(), []
    model.handle = model[0].register_forward_hook(lambda *_: calls.append(1))
    small = sw.prune(model, X, sw.Budget(channels=0.5)).model
    again = copy.deepcopy(small)
    calls.clear()
    again(X)
    assert calls == [1]
    small.handle.remove()
    assert not small[0]._forward_hooks and again[0]._forward_hooks and model[0]._forward_hooks


@pytest.mark.parametrize(
    ("model", "shape", "names"),
    [
        (nn.Sequential(nn.utils.spectral_norm(nn.ConvTranspose2d(3, 16, 3)), nn.ReLU(), nn.Conv2d(16, 4, 3)),
         (2, 3, 9, 9), ("out_channels", "in_channels")),
        (nn.Sequential(nn.utils.spectral_norm(nn.Linear(8, 16)), nn.ReLU(), nn.Linear(16, 4)),
         (2, 8), ("out_features", "in_features")),
    ],
    ids=["convolution", "linear"],
)  # fmt: skip
def test_spectral_norm_of_old(model: nn.Sequential, shape: tuple[int, ...], names: tuple[str, str]) -> None:
    small = sw.prune(model, torch.randn(shape), sw.Budget(channels=0.5)).model
    assert getattr(small[0], names[0]) == getattr(small[2], names[1]) == 8


def test_a_budget_that_removes_too_little_says_so() -> None:
    assert sw.make_plan(net(), X, sw.Budget(channels=0.5)).notes == ()
    (note,) = sw.make_plan(net(), X, sw.Budget(channels=0.5), ignore="0").notes
    assert note.startswith("100% of the channels stay, not 50%")
    (note,) = sw.make_plan(net(), X, sw.Budget(channels=0.5), round_to=1000).notes
    assert "round_to, 1000" in note


def test_rounds_keep_the_product_of_their_scores() -> None:
    done = sw.prune_and_recover(
        net(), X, DATA, sw.Budget(channels=0.5), schedule="cubic", rounds=3, lr=1e-6, epochs=3, weight_decay=0.0
    )
    once = sw.make_plan(net(), X, sw.Budget(channels=0.5)).achieved
    assert done.plan.achieved["channels"] == once["channels"] == 8
    assert done.plan.achieved["score_kept"] == pytest.approx(once["score_kept"], rel=0.02)


@pytest.mark.parametrize("wrong", [4, X, iter(DATA), "all"])
def test_batches_to_mend_with_are_a_list(wrong: Any) -> None:
    with pytest.raises(sw.SapwoodError, match="mend: expected a list of batches"):
        sw.prune_and_recover(net(), X, DATA, sw.Budget(channels=0.5), lr=0.1, epochs=1, mend=wrong)


def test_validation_that_returns_nothing_and_losses_that_are_no_numbers() -> None:
    with pytest.raises(sw.SapwoodError, match="validate: expected a number"):
        sw.recover(net(), DATA, lr=0.1, epochs=1, validate=lambda m: None)  # type: ignore[arg-type, return-value]
    with pytest.warns(UserWarning, match="the model does not train. Lower lr"):
        sw.recover(net(), DATA, lr=1e30, epochs=3)


def test_nested_inputs_are_remembered() -> None:
    given = {"a": {"x": torch.randn(2, 3)}, "b": [(torch.ones(4), 2)], "c": ()}
    _, made = make_inputs(describe_inputs(given))
    assert made["a"]["x"].shape == (2, 3) and made["c"] == ()
    ((tensor, number),) = made["b"]
    assert tensor.shape == (4,) and number == 2


def test_one_name_may_stand_for_itself() -> None:
    assert sw.sparsity(sw.mask(net(), sw.Budget(sparsity=0.5), ignore="0")).layers["0.weight"].zeros == 0


def test_channels_that_no_batch_norm_follows_are_told_of() -> None:
    (note,) = sw.make_plan(net(), X, sw.Budget(channels=0.5), score="bn_scale").notes
    assert note == "no batch norm follows 1 of 1 groups: l1 ranks their channels"


def test_words_of_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from sapwood.cli.main import main

    (tmp_path / "plan.json").write_text("{}")
    for words, told in (
        (["export", "nowhere", "--to", "foo"], "export: expected one of onnx, pt2, safetensors; got 'foo'"),
        (["plan", "sapwood.pipeline.models:SmallCNN", "--input", "1x1x8x8", "--budget", "channels=0.5",
          "-o", str(tmp_path / "plan.json")], ""),
        (["cut", str(tmp_path), "--plan", str(tmp_path / "plan.json"), "-o", str(tmp_path / "out")],
         "expected a .safetensors file; got a folder. Name the file in it."),
    ):  # fmt: skip
        monkeypatch.setattr(sys, "argv", ["sapwood", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        assert bool(ended.value.code) is bool(told) and told in " ".join(capsys.readouterr().err.split())
