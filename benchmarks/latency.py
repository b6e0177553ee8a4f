"""What a cut gains on this device, in deployed form, and how near latency budgets come.

    python -m benchmarks.latency --part half|plans|equal|sweep|peers [--models a,b] [--batch 64] [--backend auto]
                                 [--device cuda] [--dtype bfloat16] [--out FILE]

half   half of the channels removed (uniform, round_to="auto"), dense and cut each in its best deployed form
plans  latency budgets of 70%, 50% and 35%; also measured at batch 1
equal  at the latency of uniform and of FLOP-budget plans: the score that a latency plan keeps
sweep  10% to 90% of the channels removed: plain plan, round_to="auto", and latency budgets
peers  Torch-Pruning anew, with as many channels as the plans and cuts that the file has

Dense and cut take turns in one run. Torch-Pruning at the same channel ratio is a column with ``--peer``, where the
package ``torch_pruning`` can be imported. Results are merged into the JSON file, by part, model and batch.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import datetime
import functools
import json
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import sapwood as sw
from sapwood.measurement import count, take_turns
from sapwood.measurement.clock import alone
from sapwood.measurement.deployment import Deployed, deploy
from sapwood.measurement.machine import ceilings, describe
from sapwood.measurement.roofline import roofline_ms
from sapwood.pipeline.latency import LatencyPlanner
from sapwood.pipeline.rounding import preferred

OTHERS = {"uniform": {"channels": 0.6}, "flops": {"flops": 0.5}}
ZOO = ("resnet50", "vgg16", "mobilenet_v2", "vit_b_16", "swin_t")


def library() -> Any:
    try:
        from tests.zoo.torchvision_models import import_torchvision

        return import_torchvision().models
    except ImportError:
        from torchvision import models

        return models


@contextlib.contextmanager
def within(seconds: int) -> Iterator[None]:
    """An error where it takes longer."""

    def late(*_: object) -> None:
        raise TimeoutError(f"not done within {seconds} s")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


class Bench:
    def __init__(self, options: argparse.Namespace) -> None:
        self.o = options
        self.device = torch.device(options.device)
        self.dtype = getattr(torch, options.dtype)
        self.results: dict[str, Any] = {}
        self.path = Path(options.out)
        if self.path.exists():
            self.results = json.loads(self.path.read_text())
        self.console = Console(width=160)
        self.known: dict[Any, Any] = {}
        self.no_peer: dict[str, str] = {}
        self.stages: dict[str, float] = {}
        self.stage = ("", 0.0)

    def model(self, name: str) -> nn.Module:
        torch.manual_seed(0)
        model = getattr(library(), name)().eval()
        head = getattr(model, "heads", None)
        if head is not None:  # torchvision starts the head of a ViT at zero, which would hide any error
            nn.init.normal_(head[-1].weight, std=0.02)
        model = model.to(self.device, self.dtype)
        return model.to(memory_format=torch.channels_last) if self.device.type == "cuda" else model

    def inputs(self, batch: int) -> torch.Tensor:
        x = torch.randn(batch, 3, 224, 224, device=self.device, dtype=self.dtype)
        return x.contiguous(memory_format=torch.channels_last) if self.device.type == "cuda" else x

    def dense(self, name: str, batch: int) -> tuple[nn.Module, torch.Tensor, Deployed]:
        """A model, a batch and its deployed form, made once for all parts of a run."""
        if (name, batch) not in self.known:
            self.known = {k: v for k, v in self.known.items() if k[0] == name}  # one model at a time
            model, x = self.model(name), self.inputs(batch)
            with alone(self.device):
                self.known[name, batch] = model, x, self.deployed(model, x)
        found: tuple[nn.Module, torch.Tensor, Deployed] = self.known[name, batch]
        return found

    def deployed(self, model: nn.Module, x: torch.Tensor, backend: str | None = None) -> Deployed:
        return deploy(model, x, backend or self.o.backend, seconds=self.o.seconds)

    def turns(self, forms: dict[str, Deployed], x: torch.Tensor) -> dict[str, Any]:
        calls = {n: f.runner_for(((x,), {})).call for n, f in forms.items()}
        with torch.no_grad():
            times = take_turns(calls, 2 * self.o.seconds, device=self.device, lead=1)
        return {
            n: {
                "ms": t.median_ms,
                "low_ms": t.low_ms,
                "high_ms": t.high_ms,
                "speed": t.speed,
                "speed_interval": [t.speed_low, t.speed_high],
                "form": forms[n].form,
                "notes": forms[n].notes,
                "error": forms[n].error,
            }
            for n, t in times.items()
        }

    def keep(self, part: str, key: str, found: dict[str, Any], started: float) -> None:
        about = {"date": datetime.date.today().isoformat(), "sapwood": sw.__version__, **describe(self.device)}
        about |= {"dtype": self.o.dtype, "backend": self.o.backend, "took_s": round(time.time() - started, 1)}
        self.results.setdefault(part, {})[key] = {"about": about, **found}
        self.write()

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.results, indent=1, default=str) + "\n")

    def tell(self, what: str, _done: int, _of: int) -> None:
        """Seconds of each stage of a plan; an empty one ends the last."""
        before, since = self.stage
        if before != what:
            if before:
                self.stages[before] = round(self.stages.get(before, 0.0) + time.time() - since, 2)
            self.stage = (what, time.time())

    def peer(self, model: nn.Module, kept: float, name: str) -> nn.Module | str:
        """The same channel ratio by Torch-Pruning, or why there is none."""
        if name in self.no_peer:
            return self.no_peer[name]
        try:
            with within(60):
                return self.peer_made(model, kept, name)
        except ImportError:
            return "not installed"
        except TimeoutError as error:
            self.no_peer[name] = str(error)
            return str(error)
        except Exception as error:
            return f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"

    def peer_made(self, model: nn.Module, kept: float, name: str) -> nn.Module:
        import torch_pruning as tp

        own = copy.deepcopy(model).float().cpu()
        heads = [m for m in own.modules() if isinstance(m, nn.Linear) and m.out_features == 1000]
        settings: dict[str, Any] = {}
        if name == "vit_b_16":
            # as its own example has it: given as heads, the width of the model would stay whole
            heads_of = {m: m.num_heads for m in own.modules() if isinstance(m, nn.MultiheadAttention)}
            settings["out_channel_groups"] = heads_of
            settings["unwrapped_parameters"] = [(own.class_token, 2), (own.encoder.pos_embedding, 2)]
        pruner = tp.pruner.MagnitudePruner(
            own,
            torch.randn(1, 3, 224, 224),
            importance=tp.importance.MagnitudeImportance(p=1),
            pruning_ratio=1 - kept,
            ignored_layers=heads,
            **settings,
        )
        pruner.step()
        if name == "vit_b_16":  # a size that its users mend by hand
            own.hidden_dim = own.conv_proj.out_channels
        own(torch.randn(1, 3, 224, 224))
        own = own.eval().to(self.device, self.dtype)
        return own.to(memory_format=torch.channels_last) if self.device.type == "cuda" else own

    # -- parts ------------------------------------------------------------------------------

    def half(self, name: str, batch: int) -> None:
        started = time.time()
        model, x, dense = self.dense(name, batch)
        done = sw.prune(
            model, x[:1], sw.Budget(channels=0.5), allocate="uniform", round_to="auto", backend=self.o.backend
        )
        variants: dict[str, nn.Module] = {"dense": model, "half": done.model}
        peer = self.peer(model, 0.5, name)
        if isinstance(peer, nn.Module):
            variants["torch_pruning"] = peer
        forms = {n: dense if n == "dense" else self.deployed(m, x) for n, m in variants.items()}
        found = self.turns(forms, x)
        ceiling = ceilings(self.device, self.dtype)
        for variant, made in variants.items():
            counted, seen = count(made, x[:1]), sw.trace(made, x)
            floor = roofline_ms(seen.calls, seen.dense, ceiling)
            found[variant] |= {
                **counted,
                "floor_ms": floor,
                "of_roofline": floor / found[variant]["ms"],
                "forms": {f.name: f.timing.median_ms if f.timing else f.reason for f in forms[variant].forms},
            }
        saved = found["dense"]["flops"] / found["half"]["flops"]
        found["flops_saved"] = saved
        found["became_speed"] = found["half"]["speed"] / saved
        found["peer"] = peer if isinstance(peer, str) else "measured"
        found["plan"] = {
            "check": done.check.status,
            "achieved": dict(done.plan.achieved),
            "budget": dict(done.plan.budget),
        }
        found["ceilings"] = {"bytes_per_s": ceiling.bytes_per_s, "flops_per_s": ceiling.flops_per_s}
        self.keep("half", f"{name}, batch {batch}", found, started)
        speeds = {n: round(found[n]["speed"], 3) for n in variants}
        self.console.print(f"half {name} batch {batch}: {speeds}, {found['half']['ms']:.3f} ms, peer {found['peer']}")

    def plans(self, name: str, batch: int) -> None:
        (model, x, dense), one = self.dense(name, batch), self.inputs(1)
        dense_one = self.deployed(model, one) if self.o.one else None
        for share in map(float, self.o.shares.split(",")):
            started, self.stages = time.time(), {}
            found: dict[str, Any]
            try:
                planner = self.planner(model, x, share, dense)
                plan = planner.plan_until(planner.runs)
            except sw.SapwoodError as error:
                tries = [t.share(planner.budget) for t in planner.tried]
                self.console.print(f"plans {name} {share}: {error} {tries}")
                found = {"failed": str(error), "tries": tries}
                self.keep("plans", f"{name}, batch {batch}, {share}", found, started)
                continue
            self.tell("", 0, 0)
            took, left = time.time() - started, plan.achieved
            kept = left["channels"] / left["dense_channels"]
            found = {"plan_s": took, "stages_s": self.stages, "channels_kept": kept, "achieved": dict(left)}
            found["tries"] = [t.share(planner.budget) for t in planner.tried]
            found["latency"] = 1 / left["speed"]  # of dense, which took turns with it
            if dense_one is not None:
                ones = {"dense": dense_one, "cut": self.deployed(sw.cut(model, plan), one, dense_one.backend)}
                found["batch 1"] = self.turns(ones, one)
            peer = self.peer(model, kept, name) if self.o.peer else "not asked for"
            if isinstance(peer, nn.Module):
                forms = {"dense": dense, "torch_pruning": self.deployed(peer, x, planner.way)}
                found["torch_pruning"] = self.turns(forms, x)["torch_pruning"]
            found["peer"] = peer if isinstance(peer, str) else "measured"
            found["score_kept"] = plan.achieved["score_kept"]
            self.keep("plans", f"{name}, batch {batch}, {share}", found, started)
            self.console.print(
                f"plans {name} {share}: measured {found['latency']:.3f} ({found['latency'] / share - 1:+.1%}), "
                f"plan took {took:.0f} s {self.stages}, tries {[round(t, 3) for t in found['tries']]}, {plan.notes}"
            )

    def planner(self, model: nn.Module, x: torch.Tensor, share: float, dense: Deployed) -> LatencyPlanner:
        """As ``make_plan`` has it, but the dense model is deployed once for all budgets."""
        call = ((x,), {})
        options = {
            "allocate": "global",
            "ignore": (),
            "round_to": preferred(model, call, self.o.backend),
            "score_name": "l1",
        }
        budget = sw.Budget(latency=share)
        return LatencyPlanner(model, call, budget, "l1", options, self.tell, self.o.backend, known=dense)

    def equal(self, name: str, batch: int) -> None:
        model, x, dense = self.dense(name, batch)
        for other in (o for o in OTHERS if o in self.o.others.split(",")):
            started = time.time()
            plan = self.other_plan(model, x, other)
            forms = {"dense": dense, other: self.deployed(sw.cut(model, plan), x, dense.backend)}
            share = plan.achieved["channels"] / plan.achieved["dense_channels"]
            peer = self.peer(model, share, name) if self.o.peer else "not asked for"
            if isinstance(peer, nn.Module):
                forms["torch_pruning"] = self.deployed(peer, x, dense.backend)
            found: dict[str, Any] = self.turns(forms, x)
            found |= {"channels_kept": share, "peer": peer if isinstance(peer, str) else "measured"}
            planner = self.planner(model, x, min(1.0, 1 / found[other]["speed"]), dense)
            ours = planner.plan_until(planner.runs)  # which took turns with the dense model
            kept = ("latency_ms", "dense_latency_ms", "speed", "speed_interval")
            found["latency"] = {k: ours.achieved[k] for k in kept}
            found |= {"score_other": plan.achieved["score_kept"], "score_latency": ours.achieved["score_kept"]}
            self.keep("equal", f"{name}, batch {batch}, {other}", found, started)
            self.console.print(
                f"equal {name}: {other} {1 / found[other]['speed']:.3f} keeps {found['score_other']:.3f}, latency plan "
                f"{1 / found['latency']['speed']:.3f} keeps {found['score_latency']:.3f}"
            )

    def other_plan(self, model: nn.Module, x: torch.Tensor, other: str) -> sw.Plan:
        allocate = "uniform" if other == "uniform" else "global"
        budget = sw.Budget(**OTHERS[other])
        return sw.make_plan(model, x[:1], budget, allocate=allocate, round_to="auto", backend=self.o.backend)

    def peers(self, name: str, batch: int) -> None:
        (model, x, dense), today = self.dense(name, batch), datetime.date.today().isoformat()
        rows = {**self.results.get("plans", {}), **self.results.get("equal", {})}
        for key, row in rows.items():
            if not key.startswith(f"{name}, batch {batch},") or "channels_kept" not in row:
                continue
            peer = self.peer(model, row["channels_kept"], name)
            if isinstance(peer, nn.Module):
                with alone(self.device):
                    forms = {"dense": dense, "torch_pruning": self.deployed(peer, x, dense.backend)}
                    row["torch_pruning"] = {**self.turns(forms, x)["torch_pruning"], "date": today}
            row["peer"] = peer if isinstance(peer, str) else "measured"
            self.console.print(f"peers {key}: {row.get('torch_pruning', {}).get('speed')}, {row['peer']}")
            self.write()

    def sweep(self, name: str, batch: int) -> None:
        """Every cut in the same form, so that a curve is a curve. Known ones are measured anew only if asked."""
        started = time.time()
        model, x, dense = self.dense(name, batch)
        backend, key = dense.backend, f"{name}, batch {batch}"
        before = self.results.get("sweep", {}).get(key, {})
        before = before if before.get("form") == dense.form else {}
        rows: dict[str, dict[str, Any]] = before.get("speed", {})
        intervals: dict[str, dict[str, Any]] = before.get("intervals", {})
        too_low = ""  # what is said below the best reachable latency
        for tenth in map(int, self.o.tenths.split(",")):
            left, known = 1 - tenth / 10, rows.get(f"{tenth * 10}%", {})
            told = known.get("latency", "")
            too_low = told if isinstance(told, str) and told else too_low
            if known and not self.o.again:
                continue
            makers: dict[str, Callable[[], nn.Module]] = {
                "plain": lambda left=left: self.cut_to(model, x, left, None),
                "auto": lambda left=left: self.cut_to(model, x, left, "auto"),
            }
            if not too_low:
                makers["latency"] = lambda left=left: self.fast(model, x, left, dense)
            if self.o.peer:
                makers["torch_pruning"] = lambda left=left: self.need(self.peer(model, left, name))
            makers = {kind: make for kind, make in makers.items() if kind in self.o.kinds.split(",")}
            row = {"latency": too_low} if too_low else {}
            made = self.tried(makers, row)
            too_low = row["latency"] if "can be reached" in row.get("latency", "") else too_low
            with alone(self.device):  # other processes may plan meanwhile, and do nothing else on the device
                ready = {kind: functools.partial(self.deployed, cut, x, backend) for kind, cut in made.items()}
                times = self.turns({"dense": dense} | self.tried(ready, row), x)
            share, cuts = f"{tenth * 10}%", {n: t for n, t in times.items() if n != "dense"}
            rows[share] = known | row | {n: t["speed"] for n, t in cuts.items()}
            intervals[share] = intervals.get(share, {}) | {n: t["speed_interval"] for n, t in cuts.items()}
            self.console.print(f"sweep {name} {share} removed: {rows[share]}")
            self.keep("sweep", key, {"form": dense.form, "speed": rows, "intervals": intervals}, started)

    def tried(self, makers: Mapping[str, Callable[[], Any]], why_not: dict[str, str]) -> dict[str, Any]:
        """What could be made; why not, in words, for the others."""
        made = {}
        for kind, make in makers.items():
            try:
                made[kind] = make()
            except Exception as error:
                why_not[kind] = " ".join(str(error).split())[:150]
        return made

    def fast(self, model: nn.Module, x: torch.Tensor, share: float, dense: Deployed) -> nn.Module:
        planner = self.planner(model, x, share, dense)
        return sw.cut(model, planner.plan_until(planner.runs))

    def cut_to(self, model: nn.Module, x: torch.Tensor, left: float, round_to: Any) -> nn.Module:
        budget, backend = sw.Budget(channels=left), self.o.backend
        plan = sw.make_plan(model, x[:1], budget, allocate="uniform", round_to=round_to, backend=backend)
        return sw.cut(model, plan)

    def need(self, made: nn.Module | str) -> nn.Module:
        if isinstance(made, str):
            raise RuntimeError(made)
        return made


def show(path: Path) -> None:
    """The tables that the README quotes."""
    results, console = json.loads(path.read_text()), Console(width=160)
    for part, rows in results.items():
        table = Table(title=part, title_justify="left")
        table.add_column("what")
        table.add_column("result")
        for key, row in rows.items():
            told = {
                k: v
                for k, v in row.items()
                if k in ("latency", "became_speed", "score_other", "score_latency", "speed")
            }
            for variant in ("half", "torch_pruning"):
                if isinstance(row.get(variant), dict):
                    told[variant] = round(row[variant]["speed"], 3)
            table.add_row(key, str(told))
        console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", default="half")
    parser.add_argument("--models", default=",".join(ZOO))
    parser.add_argument("--batch", default="64")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16" if torch.cuda.is_available() else "float32")
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--shares", default="0.7,0.5,0.35", help="plans: the budgets")
    parser.add_argument("--tenths", default="1,2,3,4,5,6,7,8,9", help="sweep: how many of the channels to remove")
    parser.add_argument("--kinds", default="plain,auto,latency,torch_pruning", help="sweep: which cuts")
    parser.add_argument("--again", action="store_true", help="sweep: also what the file has already")
    parser.add_argument("--others", default="uniform,flops", help="equal: against which plans")
    parser.add_argument("--peer", action="store_true", help="also Torch-Pruning at the same channel ratio")
    parser.add_argument("--one", action="store_true", help="plans: also at batch 1")
    parser.add_argument("--out", default="benchmarks/results/latency.json")
    options = parser.parse_args()
    bench = Bench(options)
    for name in options.models.split(","):
        for batch in options.batch.split(","):
            for part in options.part.split(","):
                try:
                    getattr(bench, part)(name, int(batch))
                except Exception as error:
                    bench.console.print(f"{part} {name} batch {batch} failed: {type(error).__name__}: {error}"[:600])
    show(bench.path)


if __name__ == "__main__":
    main()
