"""How long single operators take on this device, by their shapes; kept on disk between runs."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from sapwood.cache import cache_folder
from sapwood.capture.forms import Form
from sapwood.capture.operators import OpCall, Sized
from sapwood.measurement.backends import Runner, capture, session
from sapwood.measurement.clock import alone, take_turns
from sapwood.measurement.convolutions import (
    AFTER,
    FEW,
    FUSED,
    Arranged,
    Conv,
    Way,
    fastest_way,
    one_pass_ways,
    triton_works,
)
from sapwood.measurement.machine import describe
from sapwood.measurement.single import onnx_operator, packed_convolution
from sapwood.storage.atomic import write_text

TIMED = (
    "aten::convolution",
    "aten::linear",
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::baddbmm",
    "scaled_dot_product_attention",
)
"""Operators whose time does not follow from the bytes they move."""

FORMAT = 1


@dataclass
class OperatorTimes:
    """Milliseconds of operators by shape, for one device, backend and layout. ``measured`` counts those not known."""

    device: torch.device
    backend: str
    channels_last: bool = False
    after: str = "relu"  # what follows a convolution and is done with it
    use_disk: bool = True
    seconds: float = 0.03
    measured: int = 0
    _known: dict[str, float] = field(default_factory=dict)
    _unsaved: int = 0

    def __post_init__(self) -> None:
        about = {**describe(self.device), "backend": self.backend, "format": FORMAT}
        if self.backend in ("onnxruntime", "openvino"):
            with contextlib.suppress(PackageNotFoundError):
                about["onnxruntime"] = version("onnxruntime")  # which times the operators of both
        if self.device.type == "cuda":
            about["backend"] = "graph"  # compiled or not, single operators are timed in graphs
            if not triton_works(self.device):
                about["triton"] = False
        self._about = about
        digest = hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()[:16]
        try:
            self.path = cache_folder() / f"operators-{digest}.json"
        except RuntimeError:  # nobody's home
            self.path, self.use_disk = Path(), False
        if self.use_disk:
            self._known = self._kept()

    def _kept(self) -> dict[str, float]:
        """What the file has."""
        with contextlib.suppress(Exception):  # a damaged file is worth no more than none
            found = json.loads(self.path.read_text())
            if found["about"] == json.loads(json.dumps(self._about, default=str)):
                times = {str(k): float(v) for k, v in found["times_ms"].items()}
                return {k: v for k, v in times.items() if math.isfinite(v) and v > 0}
        return {}

    def time_of(self, call: OpCall, kept: Sequence[int]) -> float:
        """Milliseconds of one call when the groups keep so many channels."""
        key = self.key(call, kept)
        if key not in self._known:
            self.together([call], kept)
            if self._unsaved >= 200:
                self.save()
        return self._known[key]

    def together(self, calls: Iterable[OpCall], kept: Sequence[int] = ()) -> None:
        """Measure those that are not known in turns, since they are to be compared with each other."""
        new = {self.key(call, kept): call for call in calls}
        new = {key: call for key, call in new.items() if key not in self._known}
        if not new:
            return
        with torch.no_grad(), alone(self.device):
            runs = {key: self._ready(call, kept) for key, call in new.items()}
            calls_of = {key: run.call for key, run in runs.items()}
            seconds = self.seconds * len(runs)
            times = take_turns(calls_of, seconds=seconds, least=5, warm_up=2, device=self.device)
        self._known |= {key: times[key].low_ms for key in new}
        self.measured += len(new)
        self._unsaved += len(new)

    def save(self) -> None:
        """Keep what was measured; a folder that cannot be written to only costs time next run."""
        if self.use_disk and self._unsaved:
            self._known = self._kept() | self._known  # another process may have added to it
            with contextlib.suppress(Exception):
                self.path.parent.mkdir(parents=True, exist_ok=True)
                write_text(self.path, json.dumps({"about": self._about, "times_ms": self._known}, default=str))
            self._unsaved = 0

    def key(self, call: OpCall, kept: Sequence[int]) -> str:
        def plain(value: Any) -> str:
            if isinstance(value, Sized):
                order = "" if value.order == tuple(range(len(value.order))) else str(value.order)
                return f"{'x'.join(map(str, value.shape(kept)))}{order}:{str(value.dtype).removeprefix('torch.')}"
            return f"({','.join(map(plain, value))})" if isinstance(value, (list, tuple)) else repr(value)

        parts = [f"{name}={plain(value)}" for name, value in call.args if value is not None]
        layout = "channels_last|" if self.channels_last else ""
        return f"{call.name}|{layout}{self._with(call)}{'|'.join(parts)}"

    def _with(self, call: OpCall) -> str:
        """What is done with a convolution, or that each channel has its own kernel: both change how it is run."""
        if self.device.type != "cuda" or not self.channels_last or call.name != "aten::convolution":
            return ""
        if self.after != "relu":
            return f"{self.after}|"
        weight: Sized = dict(call.args)["weight"]
        return "one pass|" if weight.dims[1] == Form(1) else ""

    def _ready(self, call: OpCall, kept: Sequence[int]) -> Runner:
        args = {name: pytree.tree_map_only(Sized, lambda s: self._make(s, kept), v) for name, v in call.args}
        return self._runner(call, args)

    def _make(self, sized: Sized, kept: Sequence[int]) -> torch.Tensor:
        """Random values in the order of memory that the model has."""
        shape = sized.shape(kept)
        if not sized.dtype.is_floating_point:
            return torch.zeros(shape, dtype=sized.dtype, device=self.device)
        back = [sized.order.index(d) for d in range(len(shape))]
        values = torch.randn([shape[d] for d in sized.order], device=self.device).to(sized.dtype)
        return values.permute(back)

    def _runner(self, call: OpCall, args: dict[str, Any]) -> Runner:
        if call.name == "aten::convolution":
            args = _fitting(args)
            if self.channels_last and args["input"].dim() == 4:
                for name in ("input", "weight"):
                    args[name] = args[name].contiguous(memory_format=torch.channels_last)
            if (
                self.device.type == "cuda"
                and self.channels_last
                and args["input"].dim() == 4
                and not args["transposed"]
            ):
                return self._fastest(args)
        if self.backend in ("onnxruntime", "openvino") and find_spec("onnxruntime") is not None:
            made = onnx_operator(call.name, args)
            if made is not None:
                return session(made[0], ((made[1],), {}))
        if self.device.type == "cpu" and call.name == "aten::convolution":
            packed = packed_convolution(args)
            if packed is not None:
                return Runner("eager", packed, packed, self.device)
        return self._captured(lambda: call.op(**args), ())

    def _fastest(self, args: dict[str, Any]) -> Runner:
        """A convolution as ``deploy`` runs it: in the way that is likely to win, or after a race."""
        conv, bias = _conv(args, self.after)
        guess = _guess(args, conv)
        if guess is not None:
            with contextlib.suppress(Exception):  # not for these shapes
                return self._captured(Arranged(guess, args["weight"], bias, conv), (args["input"],))
        way = fastest_way(args["input"], args["weight"], conv)
        return self._captured(Arranged(way, args["weight"], bias, conv), (args["input"],))

    def _captured(self, function: Callable[..., Any], inputs: tuple[Any, ...]) -> Runner:
        if self.device.type == "cuda":
            return capture(function, (inputs, {}), self.device)
        return Runner("eager", lambda: function(*inputs), function, self.device)


def _fitting(args: dict[str, Any]) -> dict[str, Any]:
    """The number of groups follows from the sizes: depthwise convolutions have as many as channels."""
    inputs, per_group = args["input"].shape[1], args["weight"].shape[0 if args["transposed"] else 1]
    groups = 1 if args["transposed"] and args["groups"] == 1 else max(1, inputs // per_group)
    return {**args, "groups": groups if not args["transposed"] else args["groups"]}


def usual_activation(calls: Iterable[OpCall]) -> str:
    """The one that a model has most of."""
    found = Counter(_activation(call) for call in calls)
    del found[""]
    return found.most_common(1)[0][0] if found else "relu"


def _activation(call: OpCall) -> str:
    name = call.name.removeprefix("aten::").removesuffix("_")
    if name == "hardtanh" and [dict(call.args).get(at) for at in ("min_val", "max_val")] == [0, 6]:
        return "relu6"
    return name if name in AFTER else ""


def _conv(args: dict[str, Any], after: str) -> tuple[Conv, torch.Tensor]:
    """The convolution with a bias and an activation, and the bias."""
    weight = args["weight"]
    bias = torch.randn(len(weight), device=weight.device).to(weight.dtype)
    pairs = (tuple(int(n) for n in args[name]) for name in ("stride", "padding", "dilation"))
    stride, padding, dilation = ((p[0], p[-1]) for p in pairs)
    window = (int(weight.shape[2]), int(weight.shape[3]))
    return Conv(window, stride, padding, dilation, args["groups"], after, False), bias


def _guess(args: dict[str, Any], conv: Conv) -> Way | None:
    """The way that will win, where that is clear without a race."""
    weight = args["weight"]
    ours = one_pass_ways(args["input"], weight, conv)
    if ours and (conv.own_kernels(weight) or conv.window == (1, 1) or weight.shape[1] < FEW):
        return ours[0]
    return FUSED if conv.after == "relu" and weight.shape[1] >= FEW and conv.groups == 1 else None
