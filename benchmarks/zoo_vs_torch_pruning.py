"""Halve the channels of every model of the zoo with sapwood and with Torch-Pruning; write what came of each.

    python -m benchmarks.zoo_vs_torch_pruning [--section torchvision|timm|transformers] [--only TEXT] [--out FILE]
                                              [--limit SECONDS] [--threads N] [--jobs N] [--failed FILE]

Needs ``pip install torch-pruning``. Each model is built, cut and run in a process of its own, once per tool, so that
a hang or a crash costs one line. Both tools get the same weights, the same inputs, L1 scores and one ratio for every
layer. The dense model has run once before the clock starts, so that neither tool pays for torch's own first call.
Seconds are those of the CPU, on one thread: what else the machine does is on nobody's clock.

The clock covers what each tool does by itself between a dense model with example inputs and a pruned model: sapwood
traces, plans and cuts a copy, Torch-Pruning traces, builds its groups and cuts in place. What sapwood then spends on
the proof, two more forwards that compare the cut model with a masked one, Torch-Pruning has no counterpart for: it is
told apart ("with the check", the whole of ``sw.prune``). Torch-Pruning is told what its own examples tell it by hand:
every parameter takes part in the graph, which layers make the outputs, how many heads attention has, which results to
follow. What its examples mend by hand after the cut (sizes that attention keeps as plain numbers) is mended here as
well. None of this is on its clock.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import copy
import csv
import datetime
import gc
import importlib
import multiprocessing
import os
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, fields
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.modules.conv import _ConvNd

import sapwood as sw
from sapwood.capture.run import as_call, results_in
from tests.zoo.harness import randomise
from tests.zoo.torchvision_models import Entry, import_torchvision

pipeline = importlib.import_module("sapwood.pipeline.prune")
SECTIONS = ("torchvision", "timm", "transformers")
LAYERS = (nn.Linear, _ConvNd)
QUERIES = {"qkv": 3, "qkv_proj": 3, "query": 1, "q_proj": 1}
"""The layer that makes the queries of an attention, by name, and how many of q, k and v it makes."""
KEYS = ("key", "value", "k_proj", "v_proj")
Shapes = list[tuple[int, ...]]


@dataclass
class Side:
    """What one tool made of one model."""

    status: str = "raised"
    """runs, does not run (the cut model raises), raised (the tool did), timed out or crashed."""
    shapes_kept: bool = False
    check: str = "-"
    """sapwood: exact, approximate or failed. Torch-Pruning has no check: "-", or NaN where outputs are not numbers."""
    left: float = 1.0
    """Fraction of the parameters left; above 1 where weights that were shared no longer are."""
    seconds: float = 0.0
    unchecked: float = 0.0
    """Of these, the seconds outside the check: what both tools do."""
    note: str = ""

    @property
    def runs(self) -> bool:
        return self.status == "runs"

    @property
    def managed(self) -> bool:
        """The cut model runs and its outputs have the shapes they had."""
        return self.runs and self.shapes_kept

    @property
    def passed(self) -> bool:
        return self.managed and self.check in ("exact", "approximate")

    @property
    def idle(self) -> bool:
        """It gave back a model and removed nothing."""
        return self.runs and self.left == 1.0


@dataclass
class Row:
    """One line of the CSV file."""

    section: str
    model: str
    params: int = 0
    no_grad: int = 0
    """Parameters (tensors) that do not require gradients in the model as built."""
    ours: Side = field(default_factory=Side)
    theirs: Side = field(default_factory=Side)

    def as_dict(self) -> dict[str, Any]:
        flat = {k: v for k, v in asdict(self).items() if not isinstance(v, dict)}
        for who in ("ours", "theirs"):
            flat |= {f"{who}_{k}": v for k, v in asdict(getattr(self, who)).items()}
        return {k: round(v, 4) if isinstance(v, float) else v for k, v in flat.items()}


# -- the two tools ----------------------------------------------------------------------------


def ours(model: nn.Module, inputs: Any, side: Side) -> nn.Module:
    checking = Stopwatch(pipeline, "check_seen")
    start = time.process_time()
    done = sw.prune(model, inputs, sw.Budget(channels=0.5), score="l1", allocate="uniform")
    side.seconds = time.process_time() - start
    side.unchecked = side.seconds - checking.stop()
    side.check, side.note = done.check.status, f"max error {done.check.max_error:.0e}"
    asked = {n: p.requires_grad for n, p in model.named_parameters()}
    if asked != {n: p.requires_grad for n, p in done.model.named_parameters()}:
        side.note += "; requires_grad changed"
    return done.model


class Stopwatch:
    """Seconds spent in one function of a module, until it is stopped."""

    def __init__(self, module: Any, name: str) -> None:
        self.module, self.name, self.function, self.seconds = module, name, getattr(module, name), 0.0
        setattr(module, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        start = time.process_time()
        try:
            return self.function(*args, **kwargs)
        finally:
            self.seconds += time.process_time() - start

    def stop(self) -> float:
        setattr(self.module, self.name, self.function)
        return self.seconds


def theirs(model: nn.Module, inputs: Any, side: Side) -> nn.Module:
    import torch_pruning as tp

    args, kwargs = as_call(inputs)
    model.requires_grad_(True)  # it follows gradients; its examples do the same
    settings, heads = more_settings(model), heads_of(model)
    ends = output_layers(model, inputs)
    start = time.process_time()
    pruner = tp.pruner.MagnitudePruner(
        model,
        kwargs or list(args),
        importance=tp.importance.MagnitudeImportance(p=1),
        pruning_ratio=0.5,
        ignored_layers=ends,
        num_heads=heads,
        output_transform=lambda out: [t for t in results_in(model, out) if t.grad_fn is not None],
        **settings,
    )
    pruner.step()
    side.seconds = side.unchecked = time.process_time() - start
    side.note = f"{len(ends)} layers ignored, {len(heads)} with heads"
    mend(model, heads)
    return model


def output_layers(model: nn.Module, inputs: Any) -> list[nn.Module]:
    """The layers whose channels are channels of an output, which must keep them.

    Found by going back from each output, through whatever has no layer of its own, to the first layers on the way.
    """
    made: dict[Any, nn.Module] = {}

    def remember(layer: nn.Module, _: Any, result: torch.Tensor) -> None:
        made[result.grad_fn] = layer

    hooks = [m.register_forward_hook(remember) for m in model.modules() if isinstance(m, LAYERS)]
    args, kwargs = as_call(inputs)
    ahead = [t.grad_fn for t in results_in(model, model.eval()(*args, **kwargs)) if t.grad_fn is not None]
    for hook in hooks:
        hook.remove()
    seen, found = set(ahead), {}
    while ahead:
        node = ahead.pop()
        if node in made:
            found[made[node]] = True
            continue
        new = {n for n, _ in node.next_functions if n is not None} - seen
        seen |= new
        ahead.extend(new)
    return list(found)


def heads_of(model: nn.Module) -> dict[nn.Module, int]:
    """How many heads each layer that makes queries, keys or values has, for Torch-Pruning's ``num_heads``."""
    found: dict[nn.Module, int] = {}
    for module in model.modules():
        config = getattr(module, "config", getattr(model, "config", None))
        number = next((n for n in _numbers(module, config) if isinstance(n, int)), None)
        if number is not None and not isinstance(module, nn.MultiheadAttention):
            fewer = getattr(config, "num_key_value_heads", None) or number
            layers = {n: getattr(module, n, None) for n in (*QUERIES, *KEYS)}
            found |= {m: fewer if n in KEYS else number for n, m in layers.items() if isinstance(m, LAYERS)}
    return found


def _numbers(module: nn.Module, config: Any) -> Iterable[Any]:
    return (getattr(x, n, None) for x in (module, config) for n in ("num_heads", "num_attention_heads"))


def more_settings(model: nn.Module) -> dict[str, Any]:
    """What its examples for torchvision and for language models give besides ``num_heads``.

    torch's own attention counts as a layer with groups: given as heads, the width of the model would stay whole.
    Whole heads where attention turns the queries by position, in pairs of channels that a narrower head would break.
    """
    groups = {m: m.num_heads for m in model.modules() if isinstance(m, nn.MultiheadAttention)}
    groups |= {m.gate_up_proj: 2 for m in model.modules() if isinstance(getattr(m, "gate_up_proj", None), nn.Linear)}
    found: dict[str, Any] = {"out_channel_groups": groups}  # always given: its default is one dict for all calls
    turned = any("rotary" in type(m).__name__.lower() for m in model.modules())
    if turned or getattr(getattr(model, "config", None), "num_key_value_heads", None) is not None:
        found |= {"prune_num_heads": True, "prune_head_dims": False, "head_pruning_ratio": 0.5}
    return found


def mend(model: nn.Module, heads: dict[nn.Module, int]) -> None:
    """Set the sizes that are kept as plain numbers, as Torch-Pruning's examples do after a cut."""
    for module in model.modules():
        for name, parts in QUERIES.items():
            layer = getattr(module, name, None)
            if not isinstance(layer, LAYERS) or layer not in heads:
                continue
            width, number = layer.weight.shape[0] // parts, heads[layer]
            sizes = dict.fromkeys(("num_heads", "num_attention_heads"), number)
            sizes |= dict.fromkeys(("head_dim", "attention_head_size"), width // number)
            sizes |= dict.fromkeys(("all_head_size", "attn_dim", "embed_dim", "hidden_size"), width)
            sizes["num_key_value_groups"] = number // heads.get(getattr(module, "k_proj", layer), number)
            for attribute, value in sizes.items():
                if isinstance(getattr(module, attribute, None), int):
                    setattr(module, attribute, value)
    if isinstance(getattr(model, "conv_proj", None), nn.Conv2d) and hasattr(model, "hidden_dim"):
        model.hidden_dim = model.conv_proj.out_channels  # torchvision's ViT
    if isinstance(getattr(model, "lm_head", None), nn.Linear) and hasattr(model, "config"):
        model.config.hidden_size = model.lm_head.in_features


# -- one model in a process of its own ------------------------------------------------------


def work(entry: Entry, tool: Callable[[nn.Module, Any, Side], nn.Module], threads: int, report: Connection) -> None:
    """The child: build, say so, cut, run, and send what was seen."""
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    warnings.simplefilter("ignore")
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    if tool is theirs and "timm" in sys.modules:
        sys.modules["timm"].layers.set_fused_attn(False)  # as its example for timm has it
    model, inputs = randomise(entry.build()).eval(), entry.inputs()
    params = sum(p.numel() for p in model.parameters())
    shapes, numbers = outputs(copy.deepcopy(model), inputs)
    report.send((params, sum(not p.requires_grad for p in model.parameters())))
    side = Side()
    try:
        small = tool(model, inputs, side)
        side.status = "does not run"
        side.left = sum(p.numel() for p in small.parameters()) / params
        found, still = outputs(small.eval(), inputs)
        side.status, side.shapes_kept = "runs", found == shapes
        if numbers and not still:
            side.check = "NaN"
        if not side.shapes_kept:
            side.note = f"{shapes} became {found}"[:200]
    except Exception as error:  # a run of the zoo reports, it does not stop
        side.note = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
    report.send(side)


def outputs(model: nn.Module, inputs: Any) -> tuple[Shapes, bool]:
    """The shapes of the outputs, and whether all of them are numbers."""
    args, kwargs = as_call(inputs)
    with torch.no_grad():
        found = list(results_in(model, model(*args, **kwargs)))
    return [tuple(t.shape) for t in found], not any(t.isnan().any() for t in found)


def attempt(entry: Entry, tool: Any, options: argparse.Namespace) -> tuple[Side, tuple[int, int]]:
    """Run the child; the limit counts from when the model is built, which may take as long again."""
    here, there = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=work, args=(entry, tool, options.threads, there))
    child.start()
    there.close()
    about, side = (0, 0), Side("timed out", seconds=options.limit)
    try:
        if here.poll(options.limit):
            about = here.recv()
            side = here.recv() if here.poll(options.limit) else side
    except EOFError:
        side = Side("crashed")
    child.kill()
    child.join()
    if side.status == "crashed":
        side.note = f"exit code {child.exitcode}"
    return side, about


def warm_up() -> None:
    """Pay once, before the children are made, for what either tool loads on its first call."""
    torch.set_num_threads(1)  # threads do not survive in a child
    for tool in (ours, theirs):
        tool(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), torch.randn(2, 8), Side())
    gc.collect()
    gc.freeze()  # what the libraries hold is not searched for garbage on anybody's clock


# -- what to run, and what to say ---------------------------------------------------------------


def entries(section: str, only: str) -> list[Entry]:
    import_torchvision()
    if section != "torchvision":
        importlib.import_module(section)  # once, here, rather than in every child
    found = importlib.import_module(f"tests.zoo.{section}_models").everything()
    return [e for e in found if only in e.name]


def write(path: Path, rows: list[Row], options: argparse.Namespace) -> None:
    from importlib.metadata import version

    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        file.write(
            f"# {datetime.date.today().isoformat()}, torch {torch.__version__}, Python {platform.python_version()}, "
            f"{options.threads} CPU threads, {options.jobs} models at a time, sapwood {sw.__version__}, "
            f"Torch-Pruning {version('torch-pruning')}, "
            f"limit {options.limit:g} s, python -m benchmarks.zoo_vs_torch_pruning"
            f"{' (failures of an earlier run not tried again)' if options.failed else ''}\n"
        )
        table = csv.DictWriter(file, fieldnames=list(rows[0].as_dict()))
        table.writeheader()
        table.writerows(r.as_dict() for r in rows)


def earlier(path: Path) -> dict[str, Side]:
    """The models that Torch-Pruning did not manage in an earlier run, and what came of them."""
    found = {}
    lines = [text for text in path.read_text().splitlines() if not text.startswith("#")]
    for row in csv.DictReader(lines):
        text = {f.name: row[f"theirs_{f.name}"] for f in fields(Side)}
        numbers = {n: float(text[n]) for n in ("left", "seconds", "unchecked")}
        kept = text["shapes_kept"] == "True"
        if text["status"] == "runs":
            continue
        found[row["model"]] = Side(text["status"], kept, text["check"], **numbers, note=text["note"])
    return found


def line(row: Row) -> str:
    def told(side: Side) -> str:
        shapes = "" if side.shapes_kept or not side.runs else ", shapes changed"
        figures = f" {side.check}, {side.left:.0%} left, {side.seconds:.1f} s" if side.runs else f": {side.note[:100]}"
        return f"{side.status}{shapes}{figures}"

    return f"{row.model:48} ours {told(row.ours):38} theirs {told(row.theirs)}"


def summaries(rows: list[Row]) -> list[Table]:
    """Per section and in all, one table for each tool and one for the models that both manage."""
    sections = [s for s in SECTIONS if any(r.section == s for r in rows)]
    parts = {s: [r for r in rows if r.section == s] for s in sections} | {"all": rows}
    made = [
        ("sapwood", _table(parts, lambda rs: _ours([r.ours for r in rs]))),
        ("Torch-Pruning", _table(parts, lambda rs: _theirs([r.theirs for r in rs]))),
        ("models that both manage (run, shapes kept)", _table(parts, _both)),
    ]
    for title, table in made:
        table.title, table.title_justify = title, "left"
    return [table for _, table in made]


def _ours(sides: list[Side]) -> dict[str, str]:
    told = _counts(sides, ("does not run", "timed out", "raised", "crashed"))
    told["check passed"] = str(sum(s.passed for s in sides))
    managed = [s for s in sides if s.managed]
    return told | _medians(managed) | _checked(managed)


def _theirs(sides: list[Side]) -> dict[str, str]:
    told = _counts(sides, ("does not run", "timed out", "raised", "crashed"))
    told["NaN"] = str(sum(s.check == "NaN" for s in sides))
    return told | _medians([s for s in sides if s.managed])


def _counts(sides: list[Side], failures: tuple[str, ...]) -> dict[str, str]:
    told = {"models": len(sides), "runs": sum(s.runs for s in sides), "shapes kept": sum(s.managed for s in sides)}
    told |= {f: sum(s.status == f for s in sides) for f in failures}
    told["removed nothing"] = sum(s.idle for s in sides)
    return {k: str(v) for k, v in told.items()}


def _medians(sides: list[Side], who: str = "") -> dict[str, str]:
    left, seconds = [s.left for s in sides], [s.unchecked for s in sides]
    return {
        f"{who}params left, median": f"{statistics.median(left):.1%}" if left else "-",
        f"{who}seconds, median": f"{statistics.median(seconds):.2f}" if seconds else "-",
    }


def _checked(sides: list[Side], who: str = "") -> dict[str, str]:
    median = f"{statistics.median(s.seconds for s in sides):.2f}" if sides else "-"
    return {f"{who}with the check": median}


def _both(rows: list[Row]) -> dict[str, str]:
    common = [r for r in rows if r.ours.managed and r.theirs.managed]
    ours, theirs = [r.ours for r in common], [r.theirs for r in common]
    told = {"models": str(len(common))} | _medians(ours, "ours: ") | _checked(ours, "ours: ")
    told |= _medians(theirs, "theirs: ")
    told["ours quicker on"] = str(sum(a.unchecked < b.seconds for a, b in zip(ours, theirs, strict=True)))
    told["with the check"] = str(sum(a.seconds < b.seconds for a, b in zip(ours, theirs, strict=True)))
    return told


def _table(parts: dict[str, list[Row]], tell: Callable[[list[Row]], dict[str, str]]) -> Table:
    table = Table("section")
    told = {name: tell(rows) for name, rows in parts.items()}
    for column in told["all"]:
        table.add_column(column, justify="right")
    for name, values in told.items():
        table.add_row(name, *values.values())
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--section", choices=SECTIONS, help="run this section only")
    parser.add_argument("--only", default="", help="run the models whose name contains this")
    parser.add_argument("--out", default="benchmarks/results/zoo_vs_torch_pruning.csv")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds that a tool has for a model")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--failed", default="", help="do not wait again for what Torch-Pruning failed at in this file")
    parser.add_argument("--jobs", type=int, default=1, help="models at the same time")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    console = Console(width=200, highlight=False)
    sections = [options.section] if options.section else SECTIONS
    wanted = [(section, entry) for section in sections for entry in entries(section, options.only)]
    if not wanted:
        console.print("no model has such a name")
        return 1
    warm_up()
    found: dict[int, Row] = {}
    known = earlier(Path(options.failed)) if options.failed else {}

    def compare(number: int) -> int:
        section, entry = wanted[number]
        row = Row(section, entry.name)
        row.ours, (row.params, row.no_grad) = attempt(entry, ours, options)
        row.theirs = known.get(entry.name) or attempt(entry, theirs, options)[0]
        found[number] = row
        return number

    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        for done in concurrent.futures.as_completed([pool.submit(compare, n) for n in range(len(wanted))]):
            console.print(line(found[done.result()]), soft_wrap=True, markup=False)
            rows = [found[n] for n in sorted(found)]
            write(Path(options.out), rows, options)  # after each, so that a run that is stopped leaves what it had
    for table in summaries(rows):
        console.print(table)
    console.print(f"{sum(r.no_grad > 0 for r in rows)} models have parameters that do not require gradients")
    return 0 if all(r.ours.passed for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
