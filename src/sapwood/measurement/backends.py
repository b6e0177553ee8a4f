"""Ways to run a model: each takes a model and example inputs and gives a Runner."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from sapwood.capture.isolation import copied
from sapwood.capture.run import Inputs, as_call, tensors_in
from sapwood.errors import SapwoodError, explain
from sapwood.storage.export import to_onnx


@dataclass
class Runner:
    """A model made ready. ``call`` runs it on the example inputs, ``run`` on others of the same shapes."""

    backend: str
    call: Callable[[], Any]
    run: Callable[..., Any]
    device: torch.device
    prepare_seconds: float = 0.0
    notes: tuple[str, ...] = ()


def device_of(model: nn.Module, inputs: Inputs) -> torch.device:
    """Where the model runs: the device of its weights, or of the inputs."""
    first = next((t for t in (*model.parameters(), *model.buffers(), *tensors_in(inputs))), None)
    return torch.device("cpu") if first is None else first.device


def prepare(model: nn.Module, inputs: Any, backend: str = "eager") -> Runner:
    """Make a model ready to run by the backend named; the time that takes is kept apart."""
    if not isinstance(backend, str) or backend not in BACKENDS:
        raise explain(f"one of {', '.join(BACKENDS)}", repr(backend), "Choose how the model is run.", "backend")
    call, start = copied(as_call(inputs)), time.perf_counter()
    runner = BACKENDS[backend](model, call)
    runner.prepare_seconds = time.perf_counter() - start
    return runner


def _eager(model: nn.Module, inputs: Inputs) -> Runner:
    args, kwargs = inputs

    def call() -> Any:
        with torch.no_grad():
            return model(*args, **kwargs)

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return model(*args, **kwargs)

    return Runner("eager", call, run, device_of(model, inputs))


def _graph(model: nn.Module, inputs: Inputs) -> Runner:
    """A CUDA graph: all kernels of one forward, launched at once."""
    device = _require_cuda(model, inputs, "graph")
    try:
        return capture(model, inputs, device)
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:
        return _fall_back("graph", model, inputs, error)


def capture(function: Callable[..., Any], inputs: Inputs, device: torch.device, name: str = "graph") -> Runner:
    """Record one forward on copies of the inputs; ``run`` copies new ones in and gives copies out.

    What waits for the device cannot be recorded, and a recording that fails leaves torch's allocator and random
    numbers in disorder: such a forward is found out before.
    """
    args, kwargs = held = copied(inputs)
    _require_leaves(held, "inputs")
    with torch.no_grad(), torch.cuda.device(device), fastest_convolutions():
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            function(*args, **kwargs)
            with _no_waiting():
                _require_leaves(function(*args, **kwargs), "outputs")
        torch.cuda.current_stream(device).wait_stream(side)
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            out = function(*args, **kwargs)
    places = [t for t in pytree.tree_leaves(held) if isinstance(t, torch.Tensor)]

    def run(*args: Any, **kwargs: Any) -> Any:
        given = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        with torch.no_grad():
            for place, value in zip(places, given, strict=True):
                place.copy_(value)
            graph.replay()
            return pytree.tree_map_only(torch.Tensor, torch.clone, out)

    used = (function, held, out)  # a graph keeps none of the memory that it reads

    def call(used: Any = used) -> Any:
        graph.replay()
        return out

    return Runner(name, call, run, device)


@contextlib.contextmanager
def _no_waiting() -> Iterator[None]:
    """What waits for the device raises."""
    saved = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(saved)


def _require_leaves(value: Any, what: str) -> None:
    """Tensors in objects that pytree does not know could be neither refreshed nor copied."""
    seen = [t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]
    if len(seen) != len(list(tensors_in(value))):
        raise SapwoodError(f"{what}: expected tensors in tuples, lists and dicts; some are in other objects")


def _compile(model: nn.Module, inputs: Inputs) -> Runner:
    """torch.compile, on a CUDA device within a graph of our own."""
    failed: Exception | None = None
    for freeze in (True, False):
        try:
            return _compiled(model, inputs, freeze)
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:
            failed = failed or error
    assert failed is not None
    return _fall_back("compile", model, inputs, failed)


def _compiled(model: nn.Module, inputs: Inputs, freeze: bool) -> Runner:
    device = device_of(model, inputs)
    with _compiling(freeze):
        compiled: Any = torch.compile(model, dynamic=False)
        if device.type == "cuda":
            return capture(compiled, inputs, device, "compile")
        runner = _eager(compiled, inputs)
        runner.call()
    runner.backend = "compile"
    return runner


@contextlib.contextmanager
def _compiling(freeze: bool) -> Iterator[None]:
    """Variants share their forward's code: how often that may be compiled is no reason to stop."""
    import torch._inductor.config  # a second of importing, for those who compile

    frozen = torch._inductor.config.patch(freezing=freeze)  # weights are constants: packed once
    patient = torch._dynamo.config.patch(
        suppress_errors=False, recompile_limit=10**4, accumulated_recompile_limit=10**6
    )
    with patient, frozen, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def fastest_convolutions() -> Iterator[None]:
    """Let cuDNN try its algorithms while a form is made ready; nobody else's setting changes."""
    saved = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = saved


def _fall_back(backend: str, model: nn.Module, inputs: Inputs, error: Exception) -> Runner:
    why = " ".join(str(error).split())[:200]
    runner = _eager(model, inputs)
    runner.notes = (f"{backend} failed ({type(error).__name__}: {why}); run eagerly instead",)
    return runner


def _onnxruntime(model: nn.Module, inputs: Inputs) -> Runner:
    _require_cpu(model, inputs, "onnxruntime")
    with _exported(model, inputs, "onnxruntime") as path:
        return session(path, inputs)


def session(path: Path | bytes, inputs: Inputs) -> Runner:
    """An onnxruntime session on as many threads as torch uses."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    # threads that spin while they wait take the cores from the variant whose turn it is
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    made = onnxruntime.InferenceSession(
        path if isinstance(path, bytes) else str(path), options, providers=["CPUExecutionProvider"]
    )
    names = [i.name for i in made.get_inputs()]

    def feed(inputs: Inputs) -> dict[str, Any]:
        return dict(zip(names, (t.detach().numpy() for t in tensors_in(inputs)), strict=True))

    fed = feed(inputs)
    return Runner(
        "onnxruntime",
        lambda: made.run(None, fed),
        lambda *args, **kwargs: [torch.from_numpy(a) for a in made.run(None, feed((args, kwargs)))],
        torch.device("cpu"),
    )


def _openvino(model: nn.Module, inputs: Inputs) -> Runner:
    _require_cpu(model, inputs, "openvino")
    try:
        import openvino
    except ImportError:
        raise explain(
            "the package openvino", "none", "Install it: pip install sapwood[openvino].", "backend='openvino'"
        ) from None
    settings = {
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "f32",
    }
    with _exported(model, inputs, "openvino") as path:
        made = openvino.Core().compile_model(str(path), "CPU", settings)

    def feed(inputs: Inputs) -> list[Any]:
        return [t.detach().numpy() for t in tensors_in(inputs)]

    fed = feed(inputs)
    return Runner(
        "openvino",
        lambda: made(fed),
        lambda *args, **kwargs: [torch.from_numpy(a.copy()) for a in made(feed((args, kwargs))).to_tuple()],
        torch.device("cpu"),
    )


@contextlib.contextmanager
def _exported(model: nn.Module, inputs: Inputs, backend: str) -> Iterator[Path]:
    """The model as an ONNX file that is gone afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        try:
            to_onnx(model, inputs, path)
        except ImportError as error:
            raise explain(
                "the packages onnx, onnxscript and onnxruntime",
                str(error),
                "Install them: pip install sapwood[onnx].",
                f"backend={backend!r}",
            ) from None
        except Exception as error:
            why = " ".join(str(error).split())[:200]
            raise SapwoodError(
                f"backend={backend!r}: expected {type(model).__name__} to export to ONNX; torch raised "
                f"{type(error).__name__}: {why}. Use backend='compile' or 'eager'."
            ) from error
        yield path


def _require_cuda(model: nn.Module, inputs: Inputs, backend: str) -> torch.device:
    device = device_of(model, inputs)
    if device.type != "cuda":
        remedy = "Move model and inputs there: .to('cuda')." if torch.cuda.is_available() else "There is none here."
        raise explain("a model on a CUDA device", f"one on {device.type}", remedy, f"backend={backend!r}")
    return device


def _require_cpu(model: nn.Module, inputs: Inputs, backend: str) -> None:
    device = device_of(model, inputs)
    if device.type != "cpu":
        raise explain("a model on the CPU", f"one on {device.type}", "Move it: .to('cpu').", f"backend={backend!r}")


BACKENDS: dict[str, Callable[[nn.Module, Inputs], Runner]] = {
    "eager": _eager,
    "graph": _graph,
    "compile": _compile,
    "onnxruntime": _onnxruntime,
    "openvino": _openvino,
}


def available(device: torch.device) -> list[str]:
    """The backends that can be tried on a device, by what is installed."""
    if device.type == "cuda":
        return ["eager", "graph", "compile"]
    found = ["eager", *(["compile"] if _has_compiler() else [])]
    for name, packages in {
        "onnxruntime": ("onnxruntime", "onnxscript"),
        "openvino": ("openvino", "onnxscript"),
    }.items():
        if all(_installed(p) for p in packages):
            found.append(name)
    return found


def _has_compiler() -> bool:
    return any(shutil.which(c) for c in (os.environ.get("CXX", "g++"), "clang++"))


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
