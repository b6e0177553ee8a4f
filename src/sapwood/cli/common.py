"""What the verbs share: the model a user names, shapes, budgets, checkpoints; printing results and remarks."""

from __future__ import annotations

import contextlib
import datetime
import difflib
import itertools
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch import nn

from sapwood.capture.run import Inputs, as_call
from sapwood.capture.skeleton import named_tensors, unwrap
from sapwood.errors import SapwoodError, explain
from sapwood.measurement.counts import batch_of
from sapwood.measurement.measure import out_of_memory
from sapwood.measurement.model_forms import placed, with_batch
from sapwood.measurement.points import chosen_device, chosen_dtype
from sapwood.pipeline.models import named_model, nearest
from sapwood.reporting.page import write_page
from sapwood.storage import factories
from sapwood.storage.bundle import KEY, Bundle
from sapwood.storage.examples import make_inputs
from sapwood.storage.loading import load, load_
from sapwood.storage.tensors import open_file
from sapwood.types import Budget, Tell

VISION = ("torchvision", "timm")
BUDGETS = ("channels", "params", "flops", "latency")


@dataclass(frozen=True)
class Subject:
    """The model a user means, what to feed it, and what a bundle would say about where it came from."""

    model: nn.Module
    inputs: Inputs
    about: Mapping[str, Any]
    fresh: bool
    """Whether the weights are freshly initialised ones, from no file."""


def subject(name: str, shapes: list[str] | None, dense: str | None = None, empty: bool = False) -> Subject:
    """A model by name, or a bundle by path; ``dense`` names the model of a bundle that does not name its own.

    ``empty`` allows transformers models without values, which may be too large to hold.
    """
    torch.manual_seed(0)  # fresh weights are the same in every run
    if not is_path(name):
        model = named_model(name, "MODEL", empty)
        made = described(model, name)
        return Subject(model, _inputs(name, shapes, None, made, model), made, fresh=True)
    record = Bundle(name).record
    if dense is None and "factory" not in record.model:
        got = f"one of {str(record.model.get('class', 'an unknown class'))[:80]}"
        raise explain("a bundle that names its factory", got, "Pass --model package.module:factory.", name)
    model = load(name) if dense is None else load_(name, named_model(dense))
    inputs = _inputs(name, shapes, record.inputs, record.model, model)
    about = {"class": str(record.model.get("class", ""))} if record.keep else record.model
    return Subject(model, inputs, about, fresh=False)


def is_path(name: str) -> bool:
    """Whether a text means a file or a folder, there or not."""
    if name.partition(":")[0] in (*factories.LIBRARIES, "hf"):
        return False
    return Path(name).exists() or name.endswith(".safetensors") or "/" in name


def described(model: nn.Module, name: str) -> dict[str, Any]:
    """What a bundle says about a model built by name; only libraries' factories are remembered."""
    known = name.partition(":")[0] in VISION
    return factories.describe(model, name if known else None, None)


def _inputs(name: str, shapes: list[str] | None, remembered: Any, about: Mapping[str, Any], model: nn.Module) -> Inputs:
    if shapes:
        return as_call(tuple(parse_shape(s) for s in shapes))
    if remembered is not None:
        return make_inputs(remembered)
    if str(about.get("factory", "")).partition(":")[0] in VISION:
        told: Any = getattr(model, "default_cfg", None) or {}  # timm knows the size a model was made for
        shape = [1, *(told.get("input_size") or (3, 224, 224))]
        remark(f"no --input was given, {'x'.join(map(str, shape))} is assumed.")
        return as_call(torch.randn(shape))
    raise explain("example inputs", "none", "Pass --input 1x3x224x224, or 1x16:int64 for token numbers.", name)


def parse_shape(text: str) -> torch.Tensor:
    """``1x3x224x224``, or ``1x16:int64`` for token numbers."""
    found = re.fullmatch(r"(\d{1,9}(?:x\d{1,9})*)(?::(\w+))?", text)
    dtype = getattr(torch, found[2] or "float32", None) if found else None
    if found is not None and isinstance(dtype, torch.dtype):
        shape = [int(n) for n in found[1].split("x")]
        with contextlib.suppress(RuntimeError):  # too large, or a dtype that nothing is drawn from
            return torch.randn(shape, dtype=dtype) if dtype.is_floating_point else torch.ones(shape, dtype=dtype)
    raise explain("a shape such as 1x3x224x224 or 1x16:int64", repr(text), "Mend it.", "--input")


def parse_budget(text: str, kinds: tuple[str, ...] = BUDGETS) -> Budget:
    """``flops=0.5`` keeps half of the FLOPs; a number above 1 is a count; ``latency=3.5ms`` is a time."""
    kind, _, value = (part.strip() for part in text.partition("="))
    if kind not in kinds:
        remedy = "Use sapwood mask for zeros." if kind == "sparsity" else nearest(kind, kinds)
        raise explain(f"one of {', '.join(kinds)}", repr(kind), remedy, "--budget")
    try:
        number = float(value)
    except ValueError:
        if kind == "latency":
            return Budget(latency=value)
        raise explain(f"a number after {kind}=", repr(value), f"For example {kind}=0.5.", "--budget") from None
    return Budget(**{kind: int(number) if number > 1 and number.is_integer() else number})


def parse_fractions(text: str, option: str) -> list[float]:
    """``0.5,0.9``, each once."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 < number < 1 for number in found):
        raise explain("fractions above 0 and below 1 such as 0.5,0.9", repr(text), "Mend it.", option)
    return list(dict.fromkeys(found))


def parse_rounding(text: str | None) -> int | str | None:
    """A whole number, or auto."""
    if text is None or text == "auto":
        return text
    if not re.fullmatch(r"[1-9]\d{0,5}", text):
        raise explain("a whole number of at least 1, or auto", repr(text), "For example 8.", "--round-to")
    return int(text)


def parse_shares(texts: Sequence[str] | None, allocate: str | None) -> str | dict[str, float]:
    """How a cut is shared out: a name, or layer1=0.8 and the like."""
    if not texts:
        return "global" if allocate is None else allocate
    if allocate is not None:
        raise explain("--allocate or --share", "both", "Shares by name stand for themselves; leave one out.", "--share")
    shares = {}
    for text in texts:
        name, _, number = text.rpartition("=")
        if not name or name in shares or not re.fullmatch(r"\d*\.?\d+", number):
            got = repr(text) + (", the second for this name" if name in shares else "")
            raise explain("a name and a number, once for each name", got, "For example --share layer1=0.8.", "--share")
        shares[name] = float(number)
    return shares


def on_device(meant: Subject, device: str | None, dtype: str | None, batch: int | None = None) -> Subject:
    """The same on the device and in the dtype asked for, for a batch of another size if one is given."""
    where = chosen_device(device)
    number = chosen_dtype(dtype, where)
    if batch is not None and batch < 1:
        raise explain("a batch of at least 1", str(batch), "For example 64.", "--batch")
    size = batch or batch_of(meant.inputs)
    try:
        inputs = with_batch(meant.inputs, size, where, number)
    except Exception as error:
        if not out_of_memory(error):
            raise
        raise explain("a batch that fits into memory", f"{size}", "Use a smaller one.", "--batch") from error
    return Subject(placed(meant.model, where, number), inputs, meant.about, meant.fresh)


@contextlib.contextmanager
def following(quiet: bool) -> Iterator[Tell]:
    """A bar on stderr that follows what is told, where somebody looks."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    hidden = quiet or not sys.stderr.isatty()
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), disable=hidden) as bars:
        task = bars.add_task("starting", total=None)

        def tell(what: str, done: int, of: int) -> None:
            bars.update(task, description=what, completed=done, total=of)

        yield tell


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint in memory of their own: a safetensors file, or a bundle that is not cut."""
    if path.is_dir() or KEY in (reader := open_file(path)).metadata:
        opened = Bundle(path)
        if opened.record.keep:
            raise explain("a dense checkpoint", "a cut one", "Pass the file it was cut from.", str(path))
        return opened.tensors()
    return {name: reader.get(name).clone() for name in reader.shapes}


def fill(model: nn.Module, path: Path) -> nn.Module:
    """Give a model the tensors of a dense checkpoint, in its dtypes; tied weights may go by any of their names."""
    inner, loaded = unwrap(model), read_tensors(path)
    everything = inner.state_dict(keep_vars=True)
    remedy = "The checkpoint is another model's."
    used = set()
    for first, tensor in named_tensors(inner).items():
        names = [n for n, t in everything.items() if t is tensor]
        stored = next((n for n in (first, *names) if n in loaded), None)
        if stored is None and names:
            near = difflib.get_close_matches(first, loaded, n=1)
            got = f"none; the nearest is {near[0]!r}" if near else "none"
            raise explain(f"a tensor {first!r}", got, remedy, str(path))
        if stored is not None:
            if loaded[stored].shape != tensor.shape:
                got = str(tuple(loaded[stored].shape))
                raise explain(f"{first!r} of shape {tuple(tensor.shape)}", got, remedy, str(path))
            tensor.data = loaded[stored]
            used.update(names)
    extra = sorted(set(loaded) - used)
    if extra:
        raise explain(f"only the tensors of {type(inner).__name__}", f"also {extra[:3]}", remedy, str(path))
    return model


def require_apart(source: Path, out: Path) -> None:
    """A bundle written into a folder tidies up old weights there: the source must not lie among them."""
    if out.suffix != ".safetensors" and source.is_file() and source.resolve().parent == out.resolve():
        raise explain("another folder than that of the input", str(out), "Name a .safetensors file.", "--out")


@contextlib.contextmanager
def working(text: str) -> Iterator[None]:
    """Say what is being done while it lasts; what goes wrong is told on one line, whatever a model's code said."""
    with Console(stderr=True).status(text):
        try:
            yield
        except SapwoodError as error:
            raise SapwoodError(" ".join(str(error).split())) from error


def show(result: Mapping[str, Any], as_json: bool, *parts: RenderableType) -> None:
    """One result, for a machine or for a person."""
    if as_json:
        print(json.dumps(result, default=str))
        return
    console = Console()
    if not console.is_terminal:
        console = Console(width=max(console.width, 160))  # files and pipes have room
    for part in parts:
        console.print(part, highlight=False, markup=False, soft_wrap=isinstance(part, str))


def remark(text: str) -> None:
    print(f"sapwood: note: {text}", file=sys.stderr)


def size_of(path: Path) -> int:
    return sum(f.stat().st_size for f in path.rglob("*") if f.is_file()) if path.is_dir() else path.stat().st_size


def new_folder(name: str) -> Path:
    """A folder for results, named by what and when: in runs, or where SAPWOOD_RUNS says."""
    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    first = Path(os.environ.get("SAPWOOD_RUNS") or "runs") / f"{name}-{now}"
    others = (first.with_name(f"{first.name}-{n}") for n in itertools.count(2))
    return next(f for f in itertools.chain((first,), others) if not f.exists())


@contextlib.contextmanager
def harmless() -> Iterator[None]:
    """What cannot be written is told; what was measured is shown all the same."""
    try:
        yield
    except SapwoodError as error:
        remark(str(error))


def page_beside(path: Path, *sources: Path) -> Path | None:
    """Write the page about results that are there; what goes wrong with it is told and takes nothing with it."""
    try:
        write_page(path, sources)
        return path
    except Exception as error:
        remark(f"the page could not be written: {' '.join(str(error).split())[:300]}")
        return None
