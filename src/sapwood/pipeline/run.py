"""``sapwood run``: train, prune, recover and measure as a recipe says, in a folder; stopped at any moment, it goes on.

After every epoch a checkpoint is replaced. What has been done since is done again on resuming, from the same
seeds, so the results are those of a run that was never stopped (but for latencies, which are measured).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import send_to_device
from safetensors.torch import load_file
from torch import nn

from sapwood.capture.isolation import undisturbed
from sapwood.capture.run import tensors_in
from sapwood.errors import SapwoodError, explain
from sapwood.masking.report import sparsity
from sapwood.measurement import count
from sapwood.measurement.counts import batch_of
from sapwood.measurement.model_forms import with_batch
from sapwood.pipeline.checkpoints import Checkpoint, fill, read_checkpoint, write_checkpoint
from sapwood.pipeline.data import Data, load_data
from sapwood.pipeline.details import DETAILS, LOOKS, details_of
from sapwood.pipeline.figures import batch_for, environment, measured, summary
from sapwood.pipeline.keeping import go_on
from sapwood.pipeline.log import Log, Report, alone
from sapwood.pipeline.models import named_model
from sapwood.pipeline.prune import make_plan
from sapwood.pipeline.recipe import PrunePart, Recipe, read_recipe
from sapwood.pipeline.shrink import EMPTY, Pruner, fading_phase, phases_of
from sapwood.pipeline.steps import Step
from sapwood.recovery.loaders import seed_all
from sapwood.recovery.loop import Loop
from sapwood.recovery.recover import require_batches
from sapwood.recovery.session import MARKS, Phase, Session, steps_for
from sapwood.storage.atomic import write_text
from sapwood.storage.bundle import save
from sapwood.storage.tensors import write
from sapwood.surgery.cut import cut
from sapwood.types import Budget, Plan

CALIBRATION = 8
RECIPE, EVENTS, RESULTS = "recipe.yaml", "events.jsonl", "results.json"


def start_run(recipe: Recipe, folder: Path, report: Report | None = None) -> dict[str, Any]:
    """Run a recipe in a new folder."""
    if folder.exists() and not folder.is_dir():
        raise explain("a folder", "a file", "Choose another with --out.", str(folder))
    if folder.exists() and any(folder.iterdir()):
        remedy = f"Choose another with --out, or go on with: sapwood run --resume {folder}"
        raise explain("a new or empty folder", "one with files in it", remedy, str(folder))
    write_text(folder / RECIPE, recipe.to_yaml())
    return _run(recipe, folder, report)


def resume_run(folder: Path, report: Report | None = None) -> dict[str, Any]:
    """Go on with a run that was stopped; a finished one gives its results again."""
    if not (folder / RECIPE).exists():
        raise explain(f"a run folder with {RECIPE}", "none", "Start one with: sapwood run RECIPE.yaml", str(folder))
    if (folder / RESULTS).exists():
        try:
            found: dict[str, Any] = json.loads((folder / RESULTS).read_text())
            return found
        except ValueError:
            raise explain("results in JSON", "a damaged file", "Remove it and resume.", str(folder / RESULTS)) from None
    return _run(read_recipe(folder / RECIPE), folder, report)


def _run(recipe: Recipe, folder: Path, report: Report | None) -> dict[str, Any]:
    with alone(folder), _repeatable(_device(recipe)):
        log = Log(folder / EVENTS, report)
        log({"event": "start", "recipe": recipe.name, "device": str(_device(recipe)), "pid": os.getpid()})
        data = load_data(recipe.data.name, recipe.data.batch, recipe.data.size, recipe.data.workers)
        require_batches(data.train)
        done = [_Seed(recipe, data, folder / f"seed-{seed}", seed, log).run() for seed in recipe.seeds]
        results = {
            "name": recipe.name,
            "seeds": [figures for figures, *_ in done],
            "summary": summary([figures for figures, *_ in done]),
        }
        log({"event": "measure"})
        _, dense, pruned, plan = done[-1]
        others = {seed: model for seed, (_, _, model, _) in zip(recipe.seeds, done, strict=True)}
        results["measured"] = measured(dense, others, data, folder / f"seed-{recipe.seeds[-1]}", _device(recipe))
        batch = batch_for(data, _device(recipe))
        details = details_of(dense, pruned, plan, recipe.score(), send_to_device(data.example, _device(recipe)), batch)
        with contextlib.suppress(SapwoodError):  # the page has less to show; the run goes on
            write_text(folder / DETAILS, json.dumps({"seed": recipe.seeds[-1], **details}))
        results["environment"] = environment(_device(recipe))
        log({"event": "done", "summary": results["summary"]})
        write_text(folder / RESULTS, json.dumps(results, indent=1))
        return results


class _Seed:
    """One seed's training, pruning and recovery."""

    def __init__(self, recipe: Recipe, data: Data, folder: Path, seed: int, log: Log) -> None:
        self.recipe, self.data, self.folder, self.seed = recipe, data, folder, seed
        self.log, self.checkpoint = log, folder / "checkpoint.safetensors"
        self.device = _device(recipe)

    def run(self) -> tuple[dict[str, Any], nn.Module, nn.Module, Plan]:
        """The figures, the dense model, the pruned one and the plan of its cut."""
        found = self._found()
        if found is not None:
            self.log({"event": "resume", "seed": self.seed, "stage": found.stage})
        if found is None or found.stage == "train":
            dense, figures, plan = self._train(found), self._dense_figures(), EMPTY
            found = None
        else:
            dense, figures, plan = self._dense(), dict(found.figures), found.plan
        model = self._start(dense, found)
        first = 0 if found is None else int(found.stage.partition("-")[2])
        for index in range(first, len(self.recipe.prune)):
            resumed = found if found is not None and found.position is not None and index == first else None
            model, plan, step = self._prune(index, model, plan, dense, figures, resumed)
            figures = {**figures, "steps": [*figures["steps"], step]}
            self._save(f"step-{index + 1}", model, plan, figures)
            self.log({"event": "recovered", "seed": self.seed, "step": index, **step["recovered"]})
        return figures, dense, self._keep(model, plan), plan

    def _found(self) -> Checkpoint | None:
        """The checkpoint, if it is one of this recipe."""
        try:
            found = read_checkpoint(self.checkpoint)
        except SapwoodError as error:
            raise SapwoodError(f"{str(error).partition(':')[0]}: damaged. Remove it; this seed starts anew.") from None
        if found is not None and found.recipe != self.recipe.digest():
            got = "another: recipe.yaml was changed, or Sapwood was"
            remedy = "Change it back, or start a new run with train.weights."
            raise explain("the recipe this run was begun with", got, remedy, str(self.folder.parent))
        return found

    def _train(self, found: Checkpoint | None) -> nn.Module:
        model = self._build()
        part = self.recipe.train
        if part.weights is not None:
            self._load(model, Path(part.weights))
        else:
            loop = Loop(model.to(self.device), self.data.train, self.recipe.training(self.seed), loss=self.data.loss)
            phases = [Phase(steps_for(part.epochs, loop))]
            session = Session(loop, phases, part.epochs, self._look("validation"), LOOKS, test=self._look("test"))
            self._go(session, "train", found, EMPTY, {})
            model = loop.finish()
        model.to(self.device)
        write(self.folder / "dense.safetensors", {n: t.cpu() for n, t in model.state_dict().items()}, {"format": "pt"})
        return model

    def _dense_figures(self) -> dict[str, Any]:
        dense = self._dense()
        known = {**self._scores(dense), **count(dense, send_to_device(self.data.example, self.device))}
        figures = {"seed": self.seed, "dense": known, "steps": []}
        self._save("step-0", dense, EMPTY, figures)
        self.log({"event": "trained", **figures})
        return figures

    def _start(self, dense: nn.Module, found: Checkpoint | None) -> nn.Module:
        """A copy of the dense model, cut and filled as the checkpoint says."""
        model = cut(dense, EMPTY if found is None else found.plan)
        if found is not None:
            fill(model, found)
        return model.to(self.device)

    def _prune(
        self,
        index: int,
        model: nn.Module,
        plan: Plan,
        dense: nn.Module,
        figures: Mapping[str, Any],
        resumed: Checkpoint | None,
    ) -> tuple[nn.Module, Plan, dict[str, Any]]:
        part, recover = self.recipe.prune[index], self.recipe.recover
        step = self._with_data(part.step())
        example = self.data.example
        if part.batch is not None:
            dtype = next((t.dtype for t in tensors_in(example) if t.is_floating_point()), torch.float32)
            example = with_batch(example, part.batch, torch.device("cpu"), dtype)
        step = _by_example(step, example)
        rebuilt = self._before(index, dense, resumed) if resumed is not None else model
        pruner = Pruner(example, plan, self._batches(part.mend) if part.mend else ())
        pruner.begin(step, rebuilt)
        placed = send_to_device(example, self.device)
        targets, fading = step.targets(rebuilt, placed), EMPTY
        if part.fade is not None and step.budget is not None:
            fading = make_plan(rebuilt, placed, step.budget, **step.options)
        taught = self.data.gives_classes if recover.distill is None else recover.distill
        loop = Loop(
            model,
            self.data.train,
            self.recipe.recovery(self.seed, index),
            loss=self.data.loss,
            teacher=cut(dense, EMPTY) if taught else None,
            temperature=recover.temperature,
            share=recover.share,
        )
        original = self.recipe.train.epochs
        total = steps_for(recover.fraction * original, loop, part.rounds)
        phases = phases_of(step, targets, pruner, total)
        if part.fade is not None:
            phases = [fading_phase(fading, pruner, total, part.fade)]
        session = Session(
            loop,
            phases,
            original,
            validate=lambda m: self.data.score(m, "validation"),
            test=lambda m: self.data.score(m, "test"),
            marks=MARKS,
        )
        if resumed is not None and resumed.position is not None and fading is not EMPTY:
            done, end = int(resumed.position["step"]), max(phases[0].prune)
            if 0 < done < end:
                loop.fade(fading, end, done)
        self._go(session, f"step-{index}", resumed, pruner, figures)
        model = loop.finish()
        return model, pruner.plan, self._step_figures(part, model, session, pruner.plan)

    def _with_data(self, step: Step) -> Step:
        """Scores that look at data get a few batches of the training data, always the same."""
        more: dict[str, Any] = {}
        if step.options.get("score") in ("wanda", "taylor"):
            more = {"calibration": self._batches(CALIBRATION), "loss": self.data.loss}
        if step.budget is not None and step.budget.kind == "latency":
            more["tell"] = lambda what, done, of: self.log.tell(
                event="planning", seed=self.seed, what=what, done=done, of=of
            )
        return replace(step, options={**step.options, **more})

    def _batches(self, many: int) -> list[Any]:
        seed_all(self.seed, self.data.train, getattr(self.data.train, "generator", None))
        return [send_to_device(b, self.device) for b in itertools.islice(self.data.train, many)]

    def _before(self, index: int, dense: nn.Module, resumed: Checkpoint) -> nn.Module:
        """The model as it was before this step began: budgets of rounds are in its terms."""
        if index == 0:
            return dense
        saved = read_checkpoint(self.folder / f"before-{index}.safetensors")
        if saved is None:
            raise explain(f"before-{index}.safetensors", "none", "Start the run anew.", str(self.folder))
        return self._start(dense, saved)

    def _go(
        self,
        session: Session,
        stage: str,
        found: Checkpoint | None,
        pruner: Pruner | Plan,
        figures: Mapping[str, Any],
    ) -> None:
        """Train to the end, with a checkpoint after each epoch."""
        loop = session.loop
        if found is not None and found.position is not None and stage == "train":
            fill(loop.plain, found)
        go_on(session, found)
        session.on_step = lambda step, total: self.log.tell(
            event="step", seed=self.seed, stage=stage, step=step, total=total
        )
        while True:
            points = len(session.curve)
            if not session.advance():
                return
            plan = pruner.plan if isinstance(pruner, Pruner) else pruner
            position = session.position()
            state = (loop.optimizer.optimizer, position, loop.hidden)
            self._write(self.checkpoint, stage, loop.plain, plan, figures, *state)
            for point in session.curve[points:]:
                self.log({"event": "point", "seed": self.seed, "stage": stage, **vars(point)})
            self.log({"event": "epoch", "seed": self.seed, "stage": stage, "epoch": session.number})

    def _step_figures(self, part: PrunePart, model: nn.Module, session: Session, plan: Plan) -> dict[str, Any]:
        zeros = sparsity(model)
        asked = {k: v for k, v in vars(part).items() if v is not None}
        first, last = session.pruned or session.curve[0], session.curve[-1]
        planned = {k: plan.achieved[k] for k in ("latency_ms", "dense_latency_ms") if k in plan.achieved}
        planned["as"] = next((n for n in reversed(plan.notes) if n.startswith("latency measured as")), "")
        return {
            "prune": asked,
            "after_pruning": {"validation": first.metric, "test": first.test},
            "recovered": {"validation": last.metric, "test": last.test},
            "distilled": session.loop.teacher is not None,
            "curve": [vars(p) for p in session.curve],
            "sparsity": zeros.total,
            **({"planned": planned} if part.latency is not None else {}),
            **count(model, send_to_device(self.data.example, self.device)),
        }

    def _keep(self, model: nn.Module, plan: Plan) -> nn.Module:
        """The result as a bundle, with a factory where the recipe names one of a library."""
        name = self.recipe.model.name
        known = name.partition(":")[0] in ("torchvision", "timm", "transformers", "hf")
        save(
            self.folder / "pruned",
            model.cpu(),
            plan,
            factory=name if known else None,
            arguments=self.recipe.model.arguments if known else None,
            example_inputs=self.data.example,
        )
        return model

    def _save(self, stage: str, model: nn.Module, plan: Plan, figures: Mapping[str, Any]) -> None:
        number = stage.partition("-")[2]
        if number != "0":
            self._write(self.folder / f"before-{number}.safetensors", stage, model, plan, figures)
        self._write(self.checkpoint, stage, model, plan, figures)

    def _write(self, path: Path, *what: Any) -> None:
        write_checkpoint(path, self.recipe.digest(), *what)

    def _scores(self, model: nn.Module) -> dict[str, float]:
        return {on: self.data.score(model, on) for on in ("validation", "test")}

    def _look(self, on: str) -> Callable[[nn.Module], float]:
        """How good a model is in the middle of its training, which goes on as if nobody had looked."""

        def look(model: nn.Module) -> float:
            with undisturbed():
                return self.data.score(model, on)

        return look

    def _build(self) -> nn.Module:
        torch.manual_seed(self.seed)
        return named_model(self.recipe.model.name, "model", arguments=self.recipe.model.arguments)

    def _dense(self) -> nn.Module:
        model = self._build()
        self._load(model, self.folder / "dense.safetensors")
        return model.to(self.device)

    def _load(self, model: nn.Module, path: Path) -> None:
        try:
            model.load_state_dict(load_file(path))
        except (OSError, RuntimeError, ValueError) as error:
            got = " ".join(str(error).split())[:200]
            remedy = "Check train.weights." if self.recipe.train.weights else "Start the run anew."
            raise explain("weights of the recipe's model", got, remedy, str(path)) from None


def _by_example(step: Step, example: Any) -> Step:
    """FLOPs of a recipe are of one example, as in its results; plans count all that the inputs hold."""
    if step.budget is None or step.budget.flops is None or step.budget.is_fraction:
        return step
    return replace(step, budget=Budget(flops=int(step.budget.flops) * batch_of(example)))


@contextlib.contextmanager
def _repeatable(device: torch.device) -> Iterator[None]:
    """On a GPU, kernels that add in a fixed order, so that a resumed run ends as one that was never stopped."""
    if device.type != "cuda":
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    try:
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(True, warn_only=True)
        yield
    finally:
        torch.backends.cudnn.benchmark = benchmark
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _device(recipe: Recipe) -> torch.device:
    wanted = recipe.device
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(wanted)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise explain("a CUDA device", "a machine without", "Set device: cpu.", "device")
    return device
