"""One run: a recipe, a seed, a device. Events go to a file of JSON lines; a run that is done is not done again."""

from __future__ import annotations

import datetime
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

import sapwood as sw
from benchmarks.cifar import peer, scores
from benchmarks.cifar.data import MEAN, STD, WEIGHTS, accuracy, load, loss
from benchmarks.cifar.kinds import Recipe
from benchmarks.cifar.mixing import Harder
from benchmarks.cifar.model import STREAM, Another, Both, ResNet, base, digest, stages
from benchmarks.cifar.recipes import POINTS, all_epochs
from benchmarks.cifar.tables import finished
from sapwood.measurement import count
from sapwood.measurement.machine import describe
from sapwood.recovery import TensorLoader, refit_, refresh_norms_

KEPT = Path("benchmarks/results/cifar")
"""Finished runs, in the repository; where a run writes is another folder, that git ignores."""
MARKS = (0.0, 0.05, 0.1, 0.2, 0.5, 1.0)


class TimeUpError(Exception):
    """The session is over; the checkpoint says where to go on."""


@dataclass(frozen=True)
class Place:
    """Where things are and how long they may take."""

    data: Path
    results: Path
    runs: Path
    split: str = "test"
    deadline: float = float("inf")
    compile: bool = False
    graph: bool = True
    limit: int = 0
    blocks: int = 9
    device: str = "auto"
    kept: Path = KEPT

    def events(self, name: str, seed: int) -> Path:
        return self.results / f"{name}-{self.split}-{seed}.jsonl"

    def checkpoint(self, name: str, seed: int) -> Path:
        return self.runs / f"{name}-{self.split}-{seed}.safetensors"

    def end(self, name: str, seed: int) -> Path:
        """The weights with which a run ended that others go on from."""
        return self.runs / "ends" / f"{name}-{self.split}-{seed}.safetensors"

    @property
    def base(self) -> Path:
        """Test figures start from the shared weights, choices from a base that has not seen the validation images."""
        if self.split == "test":
            return self.data / WEIGHTS
        own = self.runs / f"base-{self.split}.safetensors"
        return own if own.exists() else self.kept / own.name


def done(place: Place, name: str, seed: int) -> dict[str, Any] | None:
    """The last event of a run that is through, here or among those that are kept."""
    path = place.events(name, seed)
    return finished(path) or finished(place.kept / path.name)


class Run:
    def __init__(self, name: str, recipe: Recipe, seed: int, place: Place) -> None:
        self.name, self.recipe, self.seed, self.place = name, recipe, seed, place
        kind = place.device if place.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
        self.device = torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
        self.train, self.held = load(place.data, place.split, self.device, place.limit)
        self.began, self.stepped = time.monotonic(), 0.0
        self.steps = 0

    def __call__(self) -> dict[str, Any]:
        resumed = self.place.checkpoint(self.name, self.seed).exists()
        self.tell("resume" if resumed else "start", recipe=self.recipe.told(), **environment(self.device))
        if self.recipe.only == "drop":
            figures = self.drop()
        elif self.recipe.only == "train":
            figures = self.train_base()
        elif self.recipe.peer:
            figures = self.run_peer()
        else:
            figures = self.prune()
        return self.tell("done", seconds=round(time.monotonic() - self.began, 1), **self.speed(), **figures)

    def prune(self) -> dict[str, Any]:
        r, dense = self.recipe, self.dense()
        start = self.weights(self.place.end(r.after, self.seed)) if r.after else dense
        teacher = Both(dense, self.weights(self.place.end(r.taught, self.seed), Another)) if r.taught else dense
        found = sw.prune_and_recover(
            start, self.example, self.loader(), self.budget(),
            pattern=r.pattern, schedule=r.schedule, rounds=r.rounds, until=r.until, fade=r.fade,
            regrow=r.regrow, mend=self.batches(r.mend), teacher=teacher if r.distill else None,
            temperature=r.temperature, share=r.share,
            options=self.options(dense), checkpoint=self.place.checkpoint(self.name, self.seed), **self.training(),
        )  # fmt: skip
        if any(self.name in other.needed for other in POINTS.values()):
            self.keep(found.model, self.place.end(self.name, self.seed))
        return self.figures(found.model, dense, [vars(p) for p in found.curve], found.pruned and vars(found.pruned))

    def run_peer(self) -> dict[str, Any]:
        r, dense, model = self.recipe, self.dense(), self.dense()
        before = 0.0
        pruner = peer.make_pruner(model, self.example, r.peer)
        if r.peer == "sparse":
            before = r.epochs * peer.SPARSE_SHARE
            more = {**self.training(), "epochs": before, "anneal": "none", "lr": r.lr / 10, "graph": False}
            sw.recover(model, self.loader(), **more | {"optimizer": peer.regularized(pruner, model)})
            self.tell("regularized", accuracy=self.look(model))
        model = peer.shrunk(model, self.example, r.peer, float(r.fewer or 1), pruner)
        after = self.look(model)
        more = {**self.training(), "epochs": r.epochs - before}
        more |= {"teacher": dense if r.distill else None, "temperature": r.temperature, "share": r.share}
        found = sw.recover(model, self.loader(), **more)
        return self.figures(found.model, dense, [vars(p) for p in found.curve], {"metric": after})

    def train_base(self) -> dict[str, Any]:
        torch.manual_seed(self.seed)
        model = ResNet(self.place.blocks).to(self.device)
        whole, place = sw.Budget(channels=1.0), self.place
        place.runs.mkdir(parents=True, exist_ok=True)
        kept_at = place.checkpoint(self.name, self.seed)  # what is pruned is nothing, but it can be stopped
        found = sw.prune_and_recover(model, self.example, self.loader(), whole, checkpoint=kept_at, **self.training())
        self.keep(found.model, place.runs / f"{self.name}-{place.split}.safetensors")  # the base, or a variant of it
        return self.figures(found.model, found.model, [vars(p) for p in found.curve], None)

    def drop(self) -> dict[str, Any]:
        """What is left right after pruning: as it is, with norms taken anew, refitted, and by many small cuts."""
        dense, batches = self.dense(), self.batches(max(1, self.recipe.mend))
        budget = self.budget() or sw.Budget(channels=0.5)
        cut = sw.prune(dense, self.example, budget, **self.options(dense))
        found = {"dense": self.look(dense), "as it is": self.look(cut.model)}
        found["norms taken anew"] = self.look(refresh_norms_(sw.cut(dense, cut.plan), batches))
        mended = refresh_norms_(refit_(sw.cut(dense, cut.plan), dense, cut.plan, batches), batches)
        found["refitted, norms taken anew"] = self.look(mended)
        epochs = self.recipe.epochs
        gentle = {**self.training(), "schedule": "cubic", "rounds": 8, "until": 1.0, "epochs": epochs, "lr": 0.01}
        gentle |= {"anneal": "none", "distill": True, "mend": batches, "options": self.options(dense)}
        gentle["validate"] = self.look
        eased = sw.prune_and_recover(dense, self.example, self.loader(), budget, **gentle)
        assert eased.pruned is not None and eased.pruned.metric is not None
        within = "half an epoch" if epochs == 0.5 else f"{epochs:g} epochs"
        found[f"the last of 8 small cuts, refitted, within {within}"] = eased.pruned.metric
        return {"drop": found, **self.size(cut.model, dense)}

    # what it is made of

    def dense(self) -> nn.Module:
        if not self.place.base.exists():
            raise SystemExit(f"{self.place.base} is not there: python -m benchmarks.cifar --point base comes first")
        return self.weights(self.place.base)

    def weights(self, path: Path, kind: type[ResNet] = ResNet) -> nn.Module:
        if not path.exists():
            needed = " ".join(sorted(self.recipe.needed))
            raise SystemExit(f"{path} is not there: python -m benchmarks.cifar --point {needed} comes first")
        return base(path, self.place.blocks, kind).to(self.device)

    def keep(self, model: nn.Module, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        new = self.place.runs / f"{path.stem}.new"  # not beside it, where others may be collecting
        save_file({n: t.cpu().contiguous() for n, t in model.state_dict().items()}, new)
        new.replace(path)  # others wait for it: never half of it

    @property
    def example(self) -> torch.Tensor:
        return torch.zeros(2, 3, 32, 32, device=self.device)

    def budget(self) -> sw.Budget | None:
        r = self.recipe
        if r.fewer or r.channels:
            return sw.Budget(channels=r.channels) if r.channels else sw.Budget(flops=1 / (r.fewer or 1))
        return sw.Budget(sparsity=r.sparsity) if r.sparsity else None

    def options(self, dense: nn.Module) -> dict[str, Any]:
        r = self.recipe
        if r.fewer or r.channels:
            score: Any = r.score
            if r.score == "taylor":
                score = scores.taylor(dense, self.batches(8))
            allocate: Any = r.allocate
            if r.late:
                allocate = {name: 2 ** (r.late * stage) for stage, name in enumerate(stages(self.place.blocks))}
            if r.last != 1:
                allocate = {f"layers.{3 * self.place.blocks - 1}.conv1": r.last}
            return {"score": score, "allocate": allocate, "ignore": STREAM if r.inner else ()}
        if r.pattern != "unstructured":
            return {"score": r.score, "ignore": ("fc",)}
        more = {"calibration": self.batches(8)} if r.score == "taylor" else {}
        return {"score": r.score, "scope": "global" if r.allocate == "global" else "local", **more}

    def loader(self) -> Harder:
        self.images = Harder(self.train, self.recipe)
        return self.images

    def batches(self, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        torch.manual_seed(7)
        batch = min(500, len(self.train.y))
        loader = TensorLoader(self.train.x, self.train.y, batch, pad=4, flip=True, mean=MEAN, std=STD)
        return [pair for pair, _ in zip(loader, range(count), strict=False)]

    def training(self) -> dict[str, Any]:
        """All that ``recover`` takes, in the same precision everywhere; on a GPU with its other switches for speed."""
        r, place = self.recipe, self.place
        fast: dict[str, Any] = {"mixed_precision": "bf16", "channels_last": True}
        if self.device.type == "cuda":
            alike = r.allocate == "uniform" and r.peer in ("", "l1")  # else each block is of a kind of its own
            compile = place.compile and (alike or not (r.fewer or r.channels))
            fast |= {"fused": True, "graph": place.graph, "compile": compile}
        if r.decay_all:
            fast["optimizer"] = self.optimizer
        validate = None if place.split == "test" else self.look
        return {
            "lr": r.lr, "epochs": r.epochs, "fraction": 1.0, "rate": r.rate, "anneal": r.anneal, "warmup": r.warmup,
            "weight_decay": r.weight_decay, "clip": r.clip or None, "seed": self.seed, "marks": MARKS,
            "validate": validate, "on_step": self.on_step, **fast,
        }  # fmt: skip

    def optimizer(self, groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
        """As ``recover`` makes it, with weight decay on all."""
        everything = [{**g, "weight_decay": self.recipe.weight_decay} for g in groups]
        fused = self.device.type == "cuda"
        return torch.optim.SGD(everything, lr=lr, momentum=0.9, nesterov=True, fused=fused)

    # what is told

    def on_step(self, step: int, total: int) -> None:
        now = time.monotonic()
        self.steps += 1
        self.images.progress(step, total)
        if self.steps == 200:  # set up by now
            self.stepped = now
        if self.steps % 2000 == 0:
            self.tell("step", step=step, total=total, **self.speed())
        if time.time() > self.place.deadline:
            self.tell("stopped", step=step, total=total, **self.speed())
            raise TimeUpError

    def speed(self) -> dict[str, float]:
        if self.steps <= 200:
            return {}
        return {"ms_per_step": round(1000 * (time.monotonic() - self.stepped) / (self.steps - 200), 3)}

    def look(self, model: nn.Module) -> float:
        return accuracy(model, self.held)

    def size(self, model: nn.Module, dense: nn.Module) -> dict[str, Any]:
        flops = [float(count(m.eval(), self.example)["flops"]) for m in (dense, model)]
        zeros = sw.sparsity(model)
        return {
            "fewer_macs": round(flops[0] / flops[1], 4),
            "parameters": sum(p.numel() for p in model.parameters()),
            "sparsity": round(zeros.total, 5),
        }

    def figures(self, model: nn.Module, dense: nn.Module, curve: list[Any], pruned: Any) -> dict[str, Any]:
        model = model.eval()
        return {
            "accuracy": round(self.look(model), 3), "loss": round(loss(model, self.held), 5),
            "base": round(self.look(dense.eval()), 3), "base_digest": digest(dense)[:16],
            "epochs": all_epochs(self.recipe), "digest": digest(model), "curve": curve, "pruned": pruned,
            **self.size(model, dense),
        }  # fmt: skip

    def tell(self, event: str, **more: Any) -> dict[str, Any]:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        line = {"time": now, "event": event, "name": self.name, "seed": self.seed, "split": self.place.split, **more}
        path = self.place.events(self.name, self.seed)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        return line


def environment(device: torch.device) -> dict[str, Any]:
    return {**describe(device), "sapwood": sw.__version__}
