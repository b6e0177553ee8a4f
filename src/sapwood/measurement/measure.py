"""``measure`` one model, ``compare`` several: latency with how sure it is, memory, and what was counted."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from sapwood.capture.isolation import undisturbed
from sapwood.capture.run import Inputs, as_call, tensors_in
from sapwood.capture.skeleton import named_tensors, rebuild
from sapwood.errors import SapwoodError, explain
from sapwood.measurement.backends import Runner, device_of, prepare
from sapwood.measurement.clock import Timing, settle, take_turns
from sapwood.measurement.counts import batch_of
from sapwood.measurement.machine import describe

LARGE = 2**31  # bytes of weights above which they are not copied
NOISY = 0.10  # a ratio whose 95% interval is wider than this decides nothing


@dataclass(frozen=True)
class Measurement:
    """How long one forward takes, and where, how and in what form it was measured."""

    name: str
    timing: Timing
    backend: str
    batch: int
    dtype: str
    layout: str
    peak_bytes: int | None
    """The most memory held at one time while it ran, weights and inputs included; on a CPU where it can be read."""
    prepare_seconds: float
    """Compilation, capture or export: not part of the latency."""
    machine: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def median_ms(self) -> float:
        return self.timing.median_ms

    @property
    def speed(self) -> float:
        """Against the first of those measured together."""
        return self.timing.speed

    @property
    def examples_per_s(self) -> float:
        return 1000 * self.batch / self.median_ms

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Comparison:
    """Variants measured in turns in one run; the first is what the others are compared with."""

    rows: tuple[Measurement, ...]
    skipped: Mapping[str, str] = field(default_factory=dict)
    """Variants without a result, and why."""

    def __getitem__(self, name: str) -> Measurement:
        for row in self.rows:
            if row.name == name:
                return row
        known = ", ".join([*(r.name for r in self.rows), *self.skipped])
        raise explain(f"one of {known}", repr(name), "Choose a variant that was measured.", "compare")

    def verdict(self, name: str) -> str:
        """What the clock says about a variant, in words."""
        if name in self.skipped:
            return f"no result: {self.skipped[name]}"
        return verdict(self[name].timing, self.rows[0].name)

    def to_dict(self) -> dict[str, Any]:
        rows = [{**r.to_dict(), "verdict": self.verdict(r.name)} for r in self.rows]
        return {"rows": rows, "skipped": dict(self.skipped)}


def verdict(timing: Timing, against: str = "dense") -> str:
    """Faster, slower, no different, or too noisy to tell."""
    low, high, ratio = timing.speed_low, timing.speed_high, timing.speed
    if low == high == 1.0:
        return "what the others are compared with"
    if (high - low) / 2 > NOISY * ratio and not (low > 1.5 or high < 0.67):
        return f"too noisy to decide: between {low:.2f} and {high:.2f} times the speed of {against}"
    if low > 1.02:
        return f"{ratio:.2f} times as fast as {against}"
    if high < 0.98:
        return f"{1 / ratio:.2f} times slower than {against}"
    return f"no faster than {against}"


@undisturbed()
def measure(model: nn.Module, inputs: Any, backend: str = "eager", seconds: float = 5.0) -> Measurement:
    """The latency of one forward: after warm-up, until its median has settled or ``seconds`` are up."""
    found = compare(model, {}, inputs, backend, seconds)
    return found.rows[0]


@undisturbed()
def compare(
    dense: nn.Module, variants: Mapping[str, nn.Module], inputs: Any, backend: str = "eager", seconds: float = 10.0
) -> Comparison:
    """Measure a model and variants of it, taking turns in one run. A variant that does not run is left out, and why.

    ``inputs`` are an example batch: a tensor, a tuple of arguments or a dict of keywords.
    """
    if not isinstance(variants, Mapping) or "dense" in variants:
        got = "'dense'" if isinstance(variants, Mapping) else type(variants).__name__
        raise explain("variants by names other than 'dense', as a dict", got, "Name them anew.", "compare")
    require_seconds(seconds)
    call = as_call(inputs)
    models = {"dense": dense, **variants}
    runners: dict[str, Runner] = {}
    peaks: dict[str, int | None] = {}
    skipped: dict[str, str] = {}
    for name, model in models.items():
        try:
            runners[name], peaks[name] = ready(own_copy(model), call, backend)
        except Exception as error:
            if name == "dense":
                raise told(error, call) from error
            skipped[name] = str(told(error, call))
    device = runners["dense"].device
    with torch.no_grad():
        times = take_turns({n: r.call for n, r in runners.items()}, seconds, device=device, lead=1)
    rows = []
    for name, runner in runners.items():
        dtype, layout = _form(models[name], call)
        about = describe(device)
        notes = runner.notes if times[name].settled else (*runner.notes, _unsettled(times[name]))
        rows.append(
            Measurement(
                name,
                times[name],
                runner.backend,
                batch_of(call),
                dtype,
                layout,
                peaks[name],
                runner.prepare_seconds,
                about,
                notes,
            )
        )
    return Comparison(tuple(rows), skipped)


def own_copy(model: Any) -> nn.Module:
    """A copy in evaluation mode, so that nothing a forward changes is the user's; large weights are shared."""
    if not isinstance(model, nn.Module):
        raise explain("a torch.nn.Module", type(model).__name__, "Pass the model itself.", "measure")
    if hasattr(model, "runner_for"):
        return model
    if any(t.is_meta for t in named_tensors(model).values()):
        raise explain("weights with values", "a model on the meta device", "Fill it first.", "measure")
    large = sum(t.numel() * t.element_size() for t in model.parameters()) > LARGE
    return rebuild(model, lambda _, t: t if large and isinstance(t, nn.Parameter) else t.detach().clone()).eval()


def require_seconds(seconds: Any) -> None:
    """A time to measure for."""
    number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not number or not 0 < seconds < math.inf:
        raise explain("a number of seconds above 0", repr(seconds), "For example seconds=2.0.", "seconds")


def ready(model: nn.Module, inputs: Inputs, backend: str) -> tuple[Runner, int | None]:
    """A runner that has run once, and the most memory that took. A deployed model brings its own runner."""
    own = getattr(model, "runner_for", None)
    with peak_memory(device_of(model, inputs)) as peak:
        runner: Runner = own(inputs) if own is not None else prepare(model, inputs, backend)
        runner.call()
        settle(runner.device)
    return runner, peak[0]


@contextlib.contextmanager
def peak_memory(device: torch.device) -> Iterator[list[int | None]]:
    """The most bytes held on the device while the block ran."""
    found: list[int | None] = [None]
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        yield found
        torch.cuda.synchronize(device)
        found[0] = torch.cuda.max_memory_allocated(device)
        return
    resettable = _reset_peak()
    yield found
    found[0] = _resident("VmHWM") if resettable else None


def _reset_peak() -> bool:
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        return False
    return True


def _resident(key: str) -> int | None:
    with contextlib.suppress(OSError, StopIteration), open("/proc/self/status") as lines:
        return 1024 * int(next(line for line in lines if line.startswith(key)).split()[1])
    return None


def _form(model: nn.Module, inputs: Inputs) -> tuple[str, str]:
    """The dtype of most weights, or of the inputs where there are none, and the layout of inputs or kernels."""
    weights, given = [p for p in model.parameters() if p.is_floating_point()], list(tensors_in(inputs))
    if not weights and not given:
        return "none", "none"
    sizes: Counter[torch.dtype] = Counter()
    for weight in weights:
        sizes[weight.dtype] += weight.numel()
    dtype = sizes.most_common(1)[0][0] if sizes else given[0].dtype
    last = any(_channels_last(t) for t in (*given[:1], *weights))
    return str(dtype).removeprefix("torch."), "channels_last" if last else "contiguous"


def _channels_last(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 4 and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=torch.channels_last)


def _unsettled(timing: Timing) -> str:
    width = (timing.high_ms - timing.low_ms) / timing.median_ms
    return f"noisy: the 95% interval of the median is {width:.0%} wide when the time was up"


def out_of_memory(error: BaseException) -> bool:
    """On a GPU, or in the words that torch has for it on a CPU."""
    words = ("not enough memory", "can't allocate memory")
    return isinstance(error, (torch.cuda.OutOfMemoryError, MemoryError)) or any(w in str(error) for w in words)


def told(error: Exception, inputs: Inputs) -> SapwoodError:
    if isinstance(error, SapwoodError):
        return error
    shapes = [tuple(t.shape) for t in tensors_in(inputs)]
    if out_of_memory(error):
        return explain("enough memory", f"too little for inputs of shapes {shapes}", "Use a smaller batch.", "measure")
    why = " ".join(str(error).split())[:200]
    return SapwoodError(
        f"measure: expected a forward on inputs of shapes {shapes}; it raised {type(error).__name__}: {why}. "
        "Check that model(*inputs) runs by itself."
    )
