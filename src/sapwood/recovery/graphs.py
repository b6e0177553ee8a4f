"""A whole training step as one CUDA graph: nothing is launched from Python any more, the same kernels run.

The first steps on a model run as they are, on the stream that is captured later; they are ordinary training steps, and
cuDNN chooses its kernels in them. Then one step is captured: forward, the teacher's forward, backward, clipping, the
optimizer and the zeros put back. From there on a batch is copied to where the graph reads it and the graph replayed.
Learning rates are tensors that the graph reads. Batches of another shape (the last one of an epoch) run as they are.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from sapwood.capture.run import tensors_in
from sapwood.errors import explain

WARM_UP = 4
"""Steps before the capture: compilers and optimizers set themselves up in the first ones."""

Step = Callable[[Any], torch.Tensor]
"""Trains on a batch and gives its loss."""


class GraphedStep:
    """Calls a step, and after a few calls replays it; ``reset`` when the model or its zeros have changed."""

    def __init__(self, step: Step, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self.step, self.optimizer, self.device = step, optimizer, device
        self.stream = torch.cuda.Stream(device)
        self.refused = ""
        self.reset()

    def reset(self) -> None:
        self._graph: torch.cuda.CUDAGraph | None = None
        self._kind: Any = None
        self._calls = 0
        self._inputs: Any = None
        self._loss: torch.Tensor | None = None

    @property
    def captured(self) -> bool:
        return self._graph is not None

    def __call__(self, batch: Any) -> torch.Tensor:
        kind = _kind(batch)
        if self._kind is None:
            self._kind = kind
        if self.refused or kind != self._kind:
            return self._eager(batch)
        self._calls += 1
        if self._graph is None and (self._calls <= WARM_UP or not self._capture(batch)):
            return self._eager(batch)
        assert self._graph is not None and self._loss is not None
        for own, given in zip(tensors_in(self._inputs), tensors_in(batch), strict=True):
            own.copy_(given, non_blocking=True)
        self._graph.replay()
        return self._loss.clone()

    def _eager(self, batch: Any) -> torch.Tensor:
        """On the stream of the capture, so that nothing of autograd belongs to another one."""
        outer = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(outer)
        with torch.cuda.stream(self.stream), choosing_kernels():
            loss = self.step(batch)
        outer.wait_stream(self.stream)
        return loss

    def _capture(self, batch: Any) -> bool:
        """True when it worked. A capture runs nothing: weights are as before, whatever happens."""
        inputs = _copied(batch)
        graph = torch.cuda.CUDAGraph()
        self.optimizer.zero_grad(set_to_none=True)
        try:
            with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
                loss = self.step(inputs)
        except RuntimeError as error:
            self.refused = " ".join(str(error).split())[:200]
            warnings.warn(
                f"graph=True: this step cannot be captured ({self.refused}); training goes on without. Losses and "
                "models that look at values (.item(), if x > 0) are the usual reason.",
                stacklevel=2,
            )
            torch.cuda.synchronize(self.device)
            _free_generator(self.device)
            self.optimizer.zero_grad(set_to_none=True)
            return False
        self._graph, self._inputs, self._loss = graph, inputs, loss
        return True


def graphed(step: Step, optimizer: torch.optim.Optimizer, device: torch.device, processes: int) -> GraphedStep | None:
    """The step as a graph where that is possible; None, with a warning, where it is not."""
    if device.type != "cuda" or processes > 1:
        why = f"a device of type {device.type}" if device.type != "cuda" else f"{processes} processes"
        warnings.warn(f"graph=True needs one CUDA device; got {why}. Training goes on without.", stacklevel=2)
        return None
    for group in optimizer.param_groups:
        if not group.get("capturable", group.get("fused")):
            got, remedy = type(optimizer).__name__, "Make it with fused=True or capturable=True, or leave graph out."
            raise explain("an optimizer that can be captured", got, remedy, "graph")
    return GraphedStep(step, optimizer, device)


def set_rates(optimizer: Any, rate: float, device: torch.device | None) -> None:
    """The learning rate of every group; for a graph, which reads it where it lies, as a tensor on its device."""
    for group in optimizer.param_groups:
        value, lies = rate * group.get("lr_scale", 1.0), group["lr"]
        if isinstance(lies, torch.Tensor) and (device is None or lies.device.type == device.type):
            lies.fill_(value)
        else:
            group["lr"] = value if device is None else torch.full((1,), value, device=device)


@contextlib.contextmanager
def choosing_kernels() -> Iterator[None]:
    """cuDNN tries its kernels on shapes that stay, unless a fixed order of sums is asked for."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = before or not torch.are_deterministic_algorithms_enabled()
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def _free_generator(device: torch.device) -> None:
    """A capture that failed may leave the generator of random numbers waiting for its end: go on with a copy."""
    generator = torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    with contextlib.suppress(AttributeError, RuntimeError):
        generator.graphsafe_set_state(generator.clone_state())


def _kind(batch: Any) -> Any:
    """Two batches of one kind fit the same graph."""
    if isinstance(batch, torch.Tensor):
        return tuple(batch.shape), batch.stride(), batch.dtype, batch.device
    if isinstance(batch, Mapping):
        return tuple((k, _kind(v)) for k, v in batch.items())
    if isinstance(batch, (tuple, list)):
        return tuple(_kind(b) for b in batch)
    return object() if any(True for _ in tensors_in(batch)) else repr(batch)  # of objects nothing is known: no graph


def _copied(batch: Any) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.clone(memory_format=torch.preserve_format)
    if isinstance(batch, Mapping):
        return {k: _copied(v) for k, v in batch.items()}
    if isinstance(batch, (tuple, list)):
        parts = [_copied(b) for b in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch
