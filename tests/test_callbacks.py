"""Masks in other people's training loops: transformers' Trainer and Lightning, held or growing."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import runpy
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import sapwood as sw
from sapwood.recovery.gradual import Gradual, zeros_in
from tests.zoo.torchvision_models import import_torchvision

with contextlib.suppress(ImportError):
    import_torchvision()  # transformers and Lightning import it; its fake registrations must be skipped

HALF = sw.Budget(sparsity=0.5)
MOST = sw.Budget(sparsity=0.9)


# Gradual by itself


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 50), nn.ReLU(), nn.Linear(50, 10))


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(8, 20)).square().mean().backward()
    optimizer.step()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def test_cubic_follows_zhu_and_gupta() -> None:
    gradual = Gradual(MOST, "cubic", rounds=4, begin=0.2, end=0.6)
    assert gradual.sparsity_at(0) == gradual.sparsity_at(0.2) == gradual.sparsity_at(0.29) == 0
    for k, progress in enumerate((0.3, 0.4, 0.5, 0.6), start=1):  # round k comes at begin + k / rounds * (end - begin)
        assert gradual.sparsity_at(progress) == pytest.approx(0.9 * (1 - (1 - k / 4) ** 3))
    assert gradual.sparsity_at(0.49) == gradual.sparsity_at(0.4) == pytest.approx(0.9 * 0.875)
    assert gradual.sparsity_at(0.6) == gradual.sparsity_at(1) == 0.9  # exactly


def test_iterative_removes_the_same_share_of_what_remains() -> None:
    gradual = Gradual(MOST, "iterative", rounds=5, begin=0.0, end=1.0)
    kept = [1 - gradual.sparsity_at(k / 5) for k in range(6)]
    assert kept[0] == 1 and gradual.sparsity_at(1) == 0.9
    assert [b / a for a, b in itertools.pairwise(kept)] == pytest.approx([0.1 ** (1 / 5)] * 5)


def test_one_shot_masks_at_begin() -> None:
    gradual = Gradual(MOST, "one-shot", begin=0.7)
    assert [gradual.sparsity_at(p) for p in (0, 0.69, 0.7, 1)] == [0, 0, 0.9, 0.9]
    assert [Gradual(schedule="one-shot", pattern="1:4").sparsity_at(p) for p in (0, 1)] == [0.75, 0.75]


@pytest.mark.parametrize("schedule", ["one-shot", "iterative", "cubic"])
def test_sparsity_never_falls_and_ends_at_the_budget(schedule: str) -> None:
    for rounds in (1, 2, 3, 7, 10, 1000):
        gradual = Gradual(sw.Budget(sparsity=0.37), schedule, rounds=rounds, begin=0.1, end=0.8)
        values = [gradual.sparsity_at(i / 299) for i in range(300)]
        assert values == sorted(values) and values[0] == 0 and values[-1] == gradual.sparsity_at(0.8) == 0.37


@pytest.mark.parametrize("choices", [{}, {"scope": "local"}, {"scope": "row"}, {"score": "random"}, {"score": "lamp"}])
def test_each_round_keeps_the_zeros_and_adds_what_is_due(choices: dict[str, Any]) -> None:
    model = net()
    optimizer = adamw(model)
    gradual = Gradual(MOST, "cubic", rounds=3, **choices)
    weights = [model[0].weight, model[2].weight]
    gone = [torch.zeros_like(w, dtype=torch.bool) for w in weights]
    events = []
    for i in range(21):
        if gradual.advance(model, optimizer, i / 20):
            events.append(i)
            gone = [w.detach() == 0 for w in weights]
            assert zeros_in(model) == pytest.approx(1500 * gradual.sparsity_at(i / 20), abs=60)
        step(model, optimizer)
        assert all(bool((w[g] == 0).all()) for w, g in zip(weights, gone, strict=True))
    gradual.finish()
    assert events == [4, 7, 10] and sw.sparsity(model).zeros == 1350
    assert len(optimizer._optimizer_step_post_hooks) == 0
    step(model, optimizer)
    assert zeros_in(model) < 1350  # it has let go


def test_a_resumed_model_is_held_without_a_change() -> None:
    model = net()
    first = Gradual(MOST, "iterative", rounds=4, score="random")
    first.advance(model, adamw(model), 0.3)
    first.release()
    again = net()
    again.load_state_dict(model.state_dict())
    before = {n: t.clone() for n, t in again.state_dict().items()}
    resumed, optimizer = Gradual(MOST, "iterative", rounds=4, score="random"), adamw(again)
    assert not resumed.advance(again, optimizer, 0.3)
    assert all(torch.equal(t, before[n]) for n, t in again.state_dict().items())
    step(again, optimizer)
    assert zeros_in(again) == zeros_in(model) > 0
    assert resumed.advance(again, optimizer, 0.5) and sw.sparsity(again).zeros == 1350


def test_a_masked_part_is_held_before_masking_begins_and_masked_further() -> None:
    inner = sw.mask_(net(), HALF)
    whole = nn.Sequential(nn.Linear(20, 20), inner)
    optimizer, gradual = adamw(whole), Gradual(MOST, "one-shot", begin=0.5)
    assert not gradual.advance(whole, optimizer, 0.0)
    step(whole, optimizer)
    assert sw.sparsity(inner).zeros == 750
    assert gradual.advance(whole, optimizer, 0.5)
    step(whole, optimizer)
    assert sw.sparsity(whole).zeros == round(0.9 * 1900)


def test_two_of_four_at_once_and_scores_from_data_in_rounds() -> None:
    model = net()
    optimizer, gradual = adamw(model), Gradual(schedule="one-shot", pattern="2:4", begin=0.5)
    assert [gradual.advance(model, optimizer, p) for p in (0.0, 0.4, 0.5, 0.6)] == [False, False, True, False]
    step(model, optimizer)
    assert (model[0].weight.view(-1, 4) != 0).sum(1).eq(2).all() and model[2].weight.all()  # 50 is no multiple of 4
    model, batches = net(), [torch.randn(4, 20) for _ in range(2)]
    optimizer, gradual = adamw(model), Gradual(MOST, rounds=3, score="wanda", options={"calibration": batches})
    assert sum(gradual.advance(model, optimizer, p / 12) for p in range(13)) == 3
    assert sw.sparsity(model).zeros == 1350


def test_a_training_that_ends_early_says_so() -> None:
    model = net()
    gradual = Gradual(MOST, "cubic", rounds=4)
    gradual.advance(model, adamw(model), 0.3)
    with pytest.warns(UserWarning, match="2 of 4 rounds"):
        gradual.finish()


BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "no budget": (lambda: Gradual(), "expected a budget"),
    "channels": (lambda: Gradual(sw.Budget(channels=0.5)), "Budget\\(sparsity=0.9\\)"),
    "bare number": (lambda: Gradual(0.9), "Budget\\(sparsity=0.9\\)"),  # type: ignore[arg-type]
    "schedule": (lambda: Gradual(HALF, "linear"), "one-shot, iterative, cubic"),
    "rounds": (lambda: Gradual(HALF, rounds=0), "whole number"),
    "half a round": (lambda: Gradual(HALF, rounds=2.5), "whole number"),  # type: ignore[arg-type]
    "begin": (lambda: Gradual(HALF, begin=-0.1), "begin: expected a fraction"),
    "end": (lambda: Gradual(HALF, end=float("nan")), "end: expected a fraction"),
    "order": (lambda: Gradual(HALF, begin=0.5, end=0.5), "begin before end"),
    "pattern": (lambda: Gradual(HALF, pattern="2/4"), "2:4"),
    "nm in rounds": (lambda: Gradual(pattern="2:4"), "schedule='one-shot'"),
    "contradiction": (lambda: Gradual(MOST, "one-shot", pattern="2:4"), "sparsity=0.5"),
    "scope": (lambda: Gradual(HALF, scope="layer"), "global, local, row"),
    "score": (lambda: Gradual(HALF, score="l1"), "magnitude"),
    "option": (lambda: Gradual(HALF, options={"ignored": ("x",)}), "'ignored'"),
    "no data": (lambda: Gradual(HALF, score="wanda"), "calibration"),
    "used up": (lambda: Gradual(HALF, score="wanda", options={"calibration": iter([1])}), "a list or a data loader"),
    "progress": (lambda: Gradual(HALF).sparsity_at(float("nan")), "from 0 to 1"),
    "negative": (lambda: Gradual(HALF).advance(net(), None, -0.5), "from 0 to 1"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_explained(name: str) -> None:
    call, words = BAD[name]
    with pytest.raises(sw.SapwoodError, match=words):
        call()


@pytest.mark.parametrize(
    ("module", "missing", "remedy"),
    [
        ("huggingface", ("transformers",), r"pip install 'sapwood\[transformers\]'"),
        ("lightning", ("lightning", "lightning.pytorch", "pytorch_lightning"), r"pip install 'sapwood\[lightning\]'"),
    ],
)
def test_a_missing_library_is_named(
    monkeypatch: pytest.MonkeyPatch, module: str, missing: tuple[str, ...], remedy: str
) -> None:
    for name in missing:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, f"sapwood.recovery.{module}", raising=False)
    with pytest.raises(sw.SapwoodError, match=remedy):
        runpy.run_module(f"sapwood.recovery.{module}")


# transformers


class Trained:
    """transformers' Trainer on a small BERT that shall tell small first tokens from large ones."""

    def __init__(self, folder: Path) -> None:
        self.transformers = pytest.importorskip("transformers")
        pytest.importorskip("accelerate")
        self.callback = importlib.import_module("sapwood.recovery.huggingface").SapwoodCallback
        self.folder = folder
        tokens = torch.randint(0, 50, (128, 6))
        self.data = [{"input_ids": t, "labels": int(t[0] < 25)} for t in tokens]
        self.batch = {"input_ids": tokens, "labels": (tokens[:, 0] < 25).long()}

    def model(self, seed: int = 0) -> Any:
        torch.manual_seed(seed)
        sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 8}
        config = self.transformers.BertConfig(**sizes, num_hidden_layers=2, num_attention_heads=4)
        return self.transformers.BertForSequenceClassification(config)

    def trainer(self, model: Any, callback: Any, compute_metrics: Any = None, **arguments: Any) -> Any:
        defaults: dict[str, Any] = {
            "use_cpu": True, "report_to": [], "disable_tqdm": True, "logging_strategy": "no", "save_strategy": "no",
            "max_steps": 24, "per_device_train_batch_size": 16, "gradient_accumulation_steps": 2,
            "learning_rate": 5e-3, "weight_decay": 0.1, "seed": 1,
        }  # fmt: skip
        settings = self.transformers.TrainingArguments(str(self.folder), **defaults | arguments)
        given = {"callbacks": [callback], "compute_metrics": compute_metrics, "eval_dataset": self.data[:16]}
        return self.transformers.Trainer(model, settings, train_dataset=self.data, **given)

    def loss(self, model: Any) -> float:
        with torch.no_grad():
            return float(model.eval()(**self.batch).loss)


@pytest.fixture
def trained(tmp_path: Path) -> Iterator[Trained]:
    yield Trained(tmp_path)
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)  # other tests shall not see what Trainer set
    GradientState._reset_state()


@pytest.mark.parametrize("bf16", [False, True])
def test_trainer_holds_the_zeros(trained: Trained, bf16: bool) -> None:
    model = trained.model()
    names = list(model.state_dict())
    sw.mask_(model, HALF)
    zeros = {n: p.detach() == 0 for n, p in model.named_parameters() if n in sw.sparsity(model).layers}
    before = trained.loss(model)
    trainer = trained.trainer(model, trained.callback(), bf16=bf16)
    trainer.train()
    assert trainer.state.global_step == 24 and trainer.accelerator.mixed_precision == ("bf16" if bf16 else "no")
    assert all(torch.equal(p == 0, zeros[n]) for n, p in model.named_parameters() if n in zeros)
    assert list(model.state_dict()) == names
    assert trained.loss(model) < 0.5 * before
    assert not trainer.optimizer.optimizer._optimizer_step_post_hooks


@pytest.mark.parametrize("gradual", [False, True])
def test_trainer_clips_by_what_is_not_zero(trained: Trained, gradual: bool) -> None:
    """One step of SGD has the length that clipping allows, however many weights are zero."""
    model, given = trained.model(), (MOST,) if gradual else ()
    if not gradual:
        sw.mask_(model, MOST)
    callback = trained.callback(*given, **({"schedule": "one-shot"} if gradual else {}))
    before: dict[str, torch.Tensor] = {}

    class Spy(trained.transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            before.update({n: p.detach().clone() for n, p in kwargs["model"].named_parameters()})

    plain = {"optim": "sgd", "learning_rate": 1.0, "weight_decay": 0.0, "lr_scheduler_type": "constant"}
    trainer = trained.trainer(model, callback, max_steps=1, max_grad_norm=1e-3, **plain)
    trainer.add_callback(Spy())
    trainer.train()
    moved = sum(float((p.detach() - before[n]).square().sum()) for n, p in model.named_parameters()) ** 0.5
    assert moved == pytest.approx(1e-3, rel=1e-2) and sw.sparsity(model).total == pytest.approx(0.9, abs=1e-3)


def test_trainer_masks_gradually_and_goes_on_where_it_was(trained: Trained) -> None:
    def callback() -> Any:
        return trained.callback(sw.Budget(sparsity=0.8), schedule="cubic", rounds=4, ignore=("classifier",))

    model = trained.model()
    before, kept = trained.loss(model), model.classifier.weight.detach() != 0
    trained.trainer(model, callback(), save_strategy="steps", save_steps=8).train()
    weights = {n: p for n, p in sw.sparsity(model).layers.items() if "classifier" not in n}
    asked = round(0.8 * sum(w.weights for w in weights.values()))
    assert sum(w.zeros for w in weights.values()) == asked and bool(kept.all()) and model.classifier.weight.all()
    assert trained.loss(model) < 0.7 * before

    saved = trained.folder / "checkpoint-8"
    started: dict[str, torch.Tensor] = {}

    class Spy(trained.callback):  # type: ignore[misc, name-defined]
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            super().on_train_begin(*args, **kwargs)
            started.update({n: t.clone() for n, t in kwargs["model"].state_dict().items()})

    again = trained.model(seed=5)
    spy = Spy(sw.Budget(sparsity=0.8), schedule="cubic", rounds=4, ignore=("classifier",))
    trained.trainer(again, spy).train(resume_from_checkpoint=str(saved))
    from safetensors.torch import load_file

    file = load_file(saved / "model.safetensors")
    assert all(torch.equal(t, started[n]) for n, t in file.items())  # resuming changed nothing
    share = 0.8 * (1 - (1 - 2 / 4) ** 3)  # after 8 of 24 steps, two rounds of four that end at step 12
    assert sum(int((file[n] == 0).sum()) for n in weights) == round(share * sum(w.weights for w in weights.values()))
    assert all(torch.equal(t, model.state_dict()[n]) for n, t in again.state_dict().items())  # as if never stopped


def test_a_held_training_resumes_in_a_fresh_model(trained: Trained) -> None:
    model = sw.mask_(trained.model(), HALF)
    asked = sw.sparsity(model).zeros
    trained.trainer(model, trained.callback(), save_strategy="steps", save_steps=12).train()
    again = trained.model(seed=5)
    trained.trainer(again, trained.callback()).train(resume_from_checkpoint=str(trained.folder / "checkpoint-12"))
    assert sw.sparsity(again).zeros == asked
    assert all(torch.equal(t, model.state_dict()[n]) for n, t in again.state_dict().items())


def test_the_best_checkpoint_gets_the_zeros(trained: Trained) -> None:
    model, seen = trained.model(), []

    def ever_worse(_: Any) -> dict[str, float]:
        seen.append(zeros_in(model))
        return {"score": -float(len(seen))}

    chosen = {"save_strategy": "steps", "eval_strategy": "steps", "save_steps": 4, "eval_steps": 4, "max_steps": 12}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "score", "greater_is_better": True}
    callback = trained.callback(HALF, schedule="iterative", rounds=3)
    trainer = trained.trainer(model, callback, ever_worse, **chosen, **best)
    trainer.train()
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-4") and seen == sorted(seen) and seen[0] < seen[-1]
    layers = sw.sparsity(model)
    assert layers.zeros == round(0.5 * layers.weights)


def test_a_model_that_is_not_masked_is_refused_by_trainer(trained: Trained) -> None:
    with pytest.raises(sw.SapwoodError, match=r"Call sw\.mask first"):
        trained.trainer(trained.model(), trained.callback()).train()


# Lightning


class Fitted:
    """Lightning's Trainer on two clouds of points."""

    def __init__(self, package: str) -> None:
        self.pl = pytest.importorskip(package)
        self.callback = importlib.import_module("sapwood.recovery.lightning").SapwoodCallback
        points = torch.randn(128, 20)
        self.points, self.labels = points, (points[:, 0] + points[:, 1] > 0).long()

    def module(self, inner: nn.Module | None = None, optimizers: int = 1) -> Any:
        class Module(self.pl.LightningModule):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                super().__init__()
                self.net = net() if inner is None else inner
                self.automatic_optimization = optimizers == 1

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.net(x)

            def training_step(self, batch: Any, index: int) -> Any:
                loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
                if optimizers == 1:
                    return loss
                self.manual_backward(loss)
                for optimizer in self.optimizers():
                    optimizer.step()
                    optimizer.zero_grad()
                return None

            def configure_optimizers(self) -> Any:
                parts = [self.net[0], self.net[2]] if optimizers == 2 else [self]
                return [adamw(p) for p in parts]

        return Module()

    def fit(self, module: Any, *callbacks: Any, checkpoint: Path | None = None, **arguments: Any) -> Any:
        silent = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
        defaults = {"accelerator": "cpu", "max_epochs": 5, "accumulate_grad_batches": 2} | dict.fromkeys(silent, False)
        loader = DataLoader(TensorDataset(self.points, self.labels), 16)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the number of workers and such
            trainer = self.pl.Trainer(callbacks=list(callbacks), **defaults | arguments)
            trainer.fit(module, loader, ckpt_path=checkpoint)
        return trainer

    def loss(self, module: Any) -> float:
        with torch.no_grad():
            return float(nn.functional.cross_entropy(module(self.points), self.labels))

    def watch(self) -> tuple[Any, list[int]]:
        """A callback that counts the zeros after every batch, and its list."""
        counts: list[int] = []

        class Watch(self.pl.Callback):  # type: ignore[misc, name-defined]
            def on_train_batch_end(self, trainer: Any, pl_module: Any, *others: Any) -> None:
                counts.append(sw.sparsity(pl_module).zeros)

        return Watch(), counts


@pytest.fixture(params=["lightning.pytorch", "pytorch_lightning"])
def fitted(request: pytest.FixtureRequest) -> Fitted:
    return Fitted(request.param)


def test_lightning_holds_the_zeros_of_a_masked_part(fitted: Fitted) -> None:
    inner = sw.mask_(net(), HALF)
    zeros = inner[0].weight == 0
    module = fitted.module(inner)
    names, before = list(module.state_dict()), fitted.loss(module)
    watch, counts = fitted.watch()
    trainer = fitted.fit(module, watch, fitted.callback())
    assert trainer.global_step == 20 and set(counts) == {750}
    assert torch.equal(inner[0].weight == 0, zeros) and list(module.state_dict()) == names
    assert fitted.loss(module) < 0.7 * before and not trainer.optimizers[0]._optimizer_step_post_hooks


@pytest.mark.parametrize("who", ["trainer", "module", "by hand"])
def test_lightning_clips_by_what_is_not_zero(fitted: Fitted, who: str) -> None:
    module = fitted.module(sw.mask_(net(), MOST), optimizers=1 + (who == "by hand"))
    parts = [module.net[0], module.net[2]] if who == "by hand" else [module]
    module.configure_optimizers = lambda: [torch.optim.SGD(p.parameters(), lr=1.0) for p in parts]

    def clip(*_: Any, **__: Any) -> None:
        nn.utils.clip_grad_norm_(module.parameters(), 1e-3)

    if who == "module":
        module.configure_gradient_clipping = clip
    if who == "by hand":
        backward = module.manual_backward
        module.manual_backward = lambda loss: (backward(loss), clip())
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    more = {"gradient_clip_val": 1e-3} if who == "trainer" else {}
    steps = 2 if who == "by hand" else 1
    fitted.fit(module, fitted.callback(), max_steps=steps, accumulate_grad_batches=1, **more)
    moved = sum(float((p.detach() - before[n]).square().sum()) for n, p in module.named_parameters()) ** 0.5
    assert moved == pytest.approx(1e-3, rel=1e-2)


@pytest.mark.parametrize("schedule", ["iterative", "cubic"])
def test_lightning_masks_gradually(fitted: Fitted, schedule: str) -> None:
    module = fitted.module()
    watch, counts = fitted.watch()
    fitted.fit(module, fitted.callback(MOST, schedule=schedule, rounds=5), watch)
    gradual = Gradual(MOST, schedule, rounds=5)
    assert sorted(set(counts)) == [round(1500 * gradual.sparsity_at(k / 10)) for k in range(6)]
    assert counts == sorted(counts) and counts[-1] == sw.sparsity(module).zeros == 1350


def test_lightning_goes_on_where_it_was(fitted: Fitted, tmp_path: Path) -> None:
    whole, cut_short, resumed = fitted.module(), fitted.module(), fitted.module()
    cut_short.load_state_dict(whole.state_dict())
    choices = {"schedule": "iterative", "rounds": 5, "end": 0.8}
    fitted.fit(whole, fitted.callback(MOST, **choices))

    class Stop(fitted.pl.Callback):  # type: ignore[misc, name-defined]
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            trainer.should_stop = trainer.current_epoch == 1

    trainer = fitted.fit(cut_short, fitted.callback(MOST, **choices), Stop())
    trainer.save_checkpoint(tmp_path / "stopped.ckpt")
    assert 0 < sw.sparsity(cut_short).zeros < 1350
    watch, counts = fitted.watch()
    fitted.fit(resumed, fitted.callback(MOST, **choices), watch, checkpoint=tmp_path / "stopped.ckpt")
    assert counts[0] == sw.sparsity(cut_short).zeros and counts[-1] == 1350
    assert all(torch.equal(t, whole.state_dict()[n]) for n, t in resumed.state_dict().items())


def test_lightning_with_several_optimizers(fitted: Fitted) -> None:
    module = fitted.module(optimizers=2)
    watch, counts = fitted.watch()
    trainer = fitted.fit(module, fitted.callback(MOST, rounds=4, end=0.8), watch, accumulate_grad_batches=1)
    assert trainer.global_step == 80  # two for each of forty batches
    assert counts == sorted(counts) and counts.index(1350) == 31 and counts[-1] == 1350


def test_lightning_without_an_end_is_refused(fitted: Fitted) -> None:
    with pytest.raises(sw.SapwoodError, match="max_steps"):
        fitted.fit(fitted.module(), fitted.callback(MOST), max_epochs=-1)
    with pytest.raises(sw.SapwoodError, match=r"Call sw\.mask first"):
        fitted.fit(fitted.module(), fitted.callback())
