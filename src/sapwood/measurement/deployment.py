"""``deploy``: the form of a model that is fastest on this device, of those that compute the same thing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from sapwood.capture.isolation import copied, full_precision, undisturbed
from sapwood.capture.run import Inputs, as_call, tensors_in
from sapwood.capture.skeleton import rebuild, require_plain
from sapwood.errors import SapwoodError, explain
from sapwood.measurement.attention import without_copies
from sapwood.measurement.backends import BACKENDS, Runner, available, device_of, prepare
from sapwood.measurement.clock import Timing, take_turns
from sapwood.measurement.convolutions import HALF
from sapwood.measurement.measure import own_copy, require_seconds, told
from sapwood.measurement.packing import pack_two_of_four, pack_zeros
from sapwood.measurement.padding import worth_while
from sapwood.measurement.rewrite import PRODUCTS, rewrite
from sapwood.storage.fold import fold_batch_norms
from sapwood.surgery.check import relative_error

SPARSE = ("eager", "graph", "compile")  # what runs the packed layers
SAME = {"cpu": 1e-4, "cuda": 5e-3}  # float32 may run as TF32 on a GPU


@dataclass(frozen=True)
class Form:
    """One form that was tried: how long it takes, how far its output is off, or why it was left out."""

    name: str
    timing: Timing | None
    error: float
    prepare_seconds: float
    notes: tuple[str, ...] = ()
    reason: str = ""


class Deployed(nn.Module):
    """A model in its fastest form. Call it like the model; inputs of other shapes run in the plain form.

    ``form`` names the form, ``forms`` are all that were tried, ``error`` is how far its output is off.
    """

    def __init__(self, plain: nn.Module, inputs: Inputs, runner: Runner, form: Form, forms: tuple[Form, ...]) -> None:
        super().__init__()
        self.plain = plain
        self._runner, self._shapes = runner, _signature(inputs)
        self.form, self.error, self.notes = form.name, form.error, form.notes
        self.forms = forms
        self.eval()

    @property
    def backend(self) -> str:
        """What runs it."""
        return self._runner.backend

    @property
    def speed(self) -> float:
        """Against the model as it was given."""
        return next(f.timing.speed for f in self.forms if f.name == self.form and f.timing is not None)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if _signature((args, kwargs)) != self._shapes:
            with torch.no_grad():
                return self.plain(*args, **kwargs)
        args, kwargs = pytree.tree_map_only(torch.Tensor, _resolved, (args, kwargs))
        return self._runner.run(*args, **kwargs)

    def train(self, mode: bool = True) -> Deployed:
        """A deployed model stays in evaluation mode."""
        return super().train(False)

    def load_state_dict(self, *_: Any, **__: Any) -> Any:
        raise explain("a model to load weights into", "a deployed one", "Load first, then deploy.", "Deployed")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise explain("a model to save or copy", "a deployed one", "Keep the model; deploy where it runs.", "Deployed")

    def runner_for(self, inputs: Inputs) -> Runner:
        """What is timed: the form itself, on the inputs it was made for."""
        if _signature(inputs) != self._shapes:
            raise explain(f"inputs of {self._shapes[0]}", f"{_signature(inputs)[0]}", "Deploy for those.", "deployed")
        return self._runner


def _signature(inputs: Inputs) -> tuple[Any, ...]:
    leaves, structure = pytree.tree_flatten(inputs)
    return tuple(_sign(v) for v in leaves), str(structure)


def _sign(value: Any) -> Any:
    """What must be the same for a form to be used; other objects are never the same."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype, value.device
    return repr(value) if isinstance(value, (int, float, bool, str, type(None))) else object()


def _resolved(tensor: torch.Tensor) -> torch.Tensor:
    """Values as they are, not to be negated or conjugated on reading."""
    return tensor.resolve_conj().resolve_neg()


@undisturbed()
def deploy(model: nn.Module, inputs: Any, backend: str = "auto", seconds: float = 3.0) -> Deployed:
    """Try the forms that compute the same thing, check each against the model, and keep the fastest.

    Batch norms are folded, convolutions laid out and fused as the device likes, 2:4 weights packed where that pays.
    ``backend`` limits the forms to one way of running. The model given is not changed.
    """
    if backend != "auto" and (not isinstance(backend, str) or backend not in BACKENDS):
        raise explain(f"auto or one of {', '.join(BACKENDS)}", repr(backend), "Choose how it is run.", "backend")
    require_seconds(seconds)
    model, call = require_plain(model), copied(as_call(inputs))
    device = device_of(model, call)
    plain = own_copy(model)
    try:
        judge = _Judge(own_copy(model), call)
    except Exception as error:
        raise told(error, call) from error
    runners: dict[str, Runner] = {"as given": prepare(own_copy(model), call, "eager")}
    forms: dict[str, Form] = {}
    open_to = [] if judge.changes else available(device) if backend == "auto" else [backend]
    for name, build, way in _forms(plain, call, device, open_to):
        if name.startswith("plain, ") and way != "graph" and any(n.endswith(f", {way}") for n in runners):
            continue  # only where no better form of this backend runs; a graph costs next to nothing to try
        if way == "compile" and _loses(name, runners, device):
            continue
        found = _try(build, way, call, judge)
        if isinstance(found, str):
            forms[name] = Form(name, None, float("inf"), 0.0, reason=found)
        else:
            runners[name], forms[name] = found[0], Form(name, None, found[1], found[0].prepare_seconds, found[0].notes)
    strict = backend not in ("auto", "eager") and not judge.changes
    if strict and len(runners) == 1:
        raise SapwoodError(_nothing_left(backend, list(forms.values())))
    with torch.no_grad():
        times = take_turns({n: r.call for n, r in runners.items()}, seconds, device=device, lead=1)
    notes = (f"its forward changes {judge.changes}: left as it is",) if judge.changes else ()
    forms["as given"] = Form("as given", times["as given"], 0.0, 0.0, notes)
    runners["as given"] = prepare(plain, call, "eager")  # one that has not run yet
    done = [_timed(f, times.get(f.name)) for f in forms.values()]
    open_ = [f for f in done if f.timing is not None and (not strict or f.name != "as given")]
    best = min(open_, key=lambda f: f.timing.median_ms if f.timing else float("inf"))
    return Deployed(plain, call, runners[best.name], best, tuple(done))


def _loses(name: str, runners: Mapping[str, Runner], device: torch.device) -> bool:
    """Whether a graph has shown that it is better with padding, or without: then only that is compiled."""
    known = {family: runners.get(f"{family}, graph") for family in ("padded", "arranged", "folded")}
    rivals, family = {n: r for n, r in known.items() if r is not None}, name.split(", ")[0]
    if family not in rivals or "padded" not in rivals or len(rivals) < 2:
        return False
    with torch.no_grad():
        times = take_turns({n: r.call for n, r in rivals.items()}, 0.1, device=device, lead=1)
    return min(times, key=lambda n: times[n].median_ms) != family


def _timed(form: Form, timing: Timing | None) -> Form:
    return Form(form.name, timing, form.error, form.prepare_seconds, form.notes, form.reason)


def _forms(
    model: nn.Module, inputs: Inputs, device: torch.device, backends: Sequence[str]
) -> Iterator[tuple[str, Callable[[], tuple[nn.Module, tuple[str, ...]]], str]]:
    """Names, how to make the model of each, and what runs it."""
    made: dict[str, tuple[nn.Module, tuple[str, ...]]] = {}
    failed: dict[str, Exception] = {}

    def once(name: str, make: Callable[[], tuple[nn.Module, tuple[str, ...]]]) -> Any:
        def build() -> tuple[nn.Module, tuple[str, ...]]:
            if name in failed:
                raise failed[name]
            if name not in made:
                try:
                    made[name] = make()
                except Exception as error:
                    failed[name] = error
                    raise
            return made[name]

        return build

    folded = once("folded", lambda: _folded(model, inputs, device))
    wide = once("channels_last", lambda: _channels_last(folded()))
    images = any(isinstance(m, nn.Conv2d) for m in model.modules())
    if device.type == "cuda":
        arranged = once("arranged", lambda: _arranged(wide(), inputs)) if images else folded
        padded = once("padded", lambda: _arranged(wide() if images else folded(), inputs, pad=True))
        pads = worth_while(model)
        for backend in backends:
            if pads:
                yield f"padded, {backend}", padded, backend
            yield f"arranged, {backend}" if images else f"folded, {backend}", arranged, backend
        packed = pack_two_of_four(model, inputs) if "graph" in backends else None
        if packed is not None:
            yield "2:4, graph", lambda: packed, "graph"
    sparse = pack_zeros(model, inputs) if set(backends) & set(SPARSE) else None
    if sparse is not None:
        for backend in (b for b in backends if b in SPARSE and (b != "eager" or device.type != "cuda")):
            yield f"packed, {backend}", lambda: sparse, backend
    for backend in backends:
        if device.type != "cuda":
            yield f"folded, {backend}", folded, backend
            if images and backend in ("eager", "compile"):
                yield f"channels_last, {backend}", wide, backend
        yield f"plain, {backend}", lambda: (own_copy(model), ()), backend


def _folded(model: nn.Module, inputs: Inputs, device: torch.device) -> tuple[nn.Module, tuple[str, ...]]:
    model, lean = without_copies(model) if device.type == "cuda" else (model, 0)
    told = (f"{lean} attention modules without copies",) if lean else ()
    try:
        folded, names = fold_batch_norms(model, inputs)
    except Exception as error:
        why = " ".join(str(error).split())[:120]
        return own_copy(model), (*told, f"batch norms not folded: {type(error).__name__}: {why}")
    return folded, (*told, f"{len(names)} batch norms folded") if names else told


def _channels_last(made: tuple[nn.Module, tuple[str, ...]]) -> tuple[nn.Module, tuple[str, ...]]:
    model = rebuild(made[0], lambda _, tensor: tensor.detach().clone()).eval()
    moved: nn.Module = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return moved, (*made[1], "channels_last")


def _arranged(
    made: tuple[nn.Module, tuple[str, ...]], inputs: Inputs, pad: bool = False
) -> tuple[nn.Module, tuple[str, ...]]:
    try:
        model, used = rewrite(made[0], inputs, pad)
    except Exception as error:
        if pad:
            raise
        why = " ".join(str(error).split())[:120]
        return made[0], (*made[1], f"convolutions left as they are: the export raised {type(error).__name__}: {why}")
    products = used.pop(PRODUCTS, 0)
    told = ", ".join(f"{n} {way}" for way, n in used.items())
    notes = [f"convolutions: {told}"] * bool(told) + [f"{products} {PRODUCTS}"] * bool(products)
    return model, (*made[1], *notes)


def _try(
    build: Callable[[], tuple[nn.Module, tuple[str, ...]]], backend: str, inputs: Inputs, judge: _Judge
) -> tuple[Runner, float] | str:
    """A runner whose output was found to be right and how far it is off, or why there is none."""
    try:
        model, notes = build()
        runner = prepare(model, inputs, backend)
        if runner.backend != backend:
            return runner.notes[0].removesuffix("; run eagerly instead")
        runner.notes = (*notes, *runner.notes)
        runner.run = judge.in_shape(runner.run)
        args, kwargs = copied(inputs)
        off = judge.error(runner.run(*args, **kwargs))
    except Exception as error:
        why = " ".join(str(error).split())[:200]
        return why if isinstance(error, SapwoodError) else f"{type(error).__name__}: {why}"
    return (runner, off) if off <= judge.allowed else f"its output is off by {off:.1e}; {judge.allowed:.1e} is allowed"


class _Judge:
    """Compares outputs with the model's; in half precision a float32 copy says how far the model itself is off."""

    def __init__(self, model: nn.Module, inputs: Inputs) -> None:
        half = any(t.dtype in HALF for t in model.parameters())
        with torch.no_grad():
            args, kwargs = copied(inputs)
            before = {name: tensor.clone() for name, tensor in model.named_buffers()}
            outputs = model(*args, **kwargs)
            self.changes = ", ".join(n for n, t in model.named_buffers() if not torch.equal(t, before.get(n, t)))
            self.leaves, self.structure = pytree.tree_flatten(outputs)
            plain = list(tensors_in(outputs))
            self.wanted, self.allowed = plain, SAME.get(plain[0].device.type if plain else "cpu", 1e-4)
            if half:
                wide = rebuild(model, lambda _, t: t.detach().float() if t.dtype in HALF else t.detach().clone())
                args, kwargs = pytree.tree_map_only(torch.Tensor, _widen, copied(inputs))
                with full_precision():
                    self.wanted = list(tensors_in(wide.eval()(*args, **kwargs)))
                self.allowed = max(3 * self.error(plain), 1e-2)

    def in_shape(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Outputs in the model's own structure, where a backend gives a list of tensors."""

        def shaped(*args: Any, **kwargs: Any) -> Any:
            outputs = run(*args, **kwargs)
            leaves, structure = pytree.tree_flatten(outputs)
            if structure == self.structure:
                return outputs
            if not all(isinstance(v, torch.Tensor) for v in self.leaves) or len(leaves) != len(self.leaves):
                raise explain("outputs that are tensors only", "others", "Use another backend.", "deploy")
            return pytree.tree_unflatten(leaves, self.structure)

        return shaped

    def error(self, outputs: Any) -> float:
        got = list(tensors_in(outputs))
        if [t.shape for t in got] != [t.shape for t in self.wanted]:
            return float("inf")
        return max((relative_error(a, b.to(a.device)) for a, b in zip(self.wanted, got, strict=True)), default=0.0)


def _widen(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in HALF else tensor


def _nothing_left(backend: str, forms: Sequence[Form]) -> str:
    why = "; ".join(f"{f.name}: {f.reason}" for f in forms) or "no form of it runs there"
    return f"deploy: expected a form that runs by {backend!r}; got none ({why}). Use backend='auto'."
