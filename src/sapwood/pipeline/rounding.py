"""``round_to="auto"``: the step that the model's device and dtype like."""

from __future__ import annotations

import torch
from torch import nn

from sapwood.capture.run import Inputs
from sapwood.measurement.backends import available, device_of
from sapwood.measurement.steps import preferred_steps
from sapwood.measurement.tables import OperatorTimes
from sapwood.planning.counts import Steps


def preferred(model: nn.Module, inputs: Inputs, backend: str = "auto") -> Steps:
    """Measured once for a device, a dtype and a kind of layer, and kept on disk."""
    weights = [p for p in model.parameters() if p.dim() > 1]
    device = device_of(model, inputs)
    if not weights or device.type == "meta":
        return Steps(8, 8)
    dtype = max((p.dtype for p in weights), key=lambda d: sum(p.numel() for p in weights if p.dtype is d))
    images = sum(p.numel() for p in weights if p.dim() == 4) > sum(p.numel() for p in weights) / 2
    images = images or any(isinstance(m, nn.Conv2d) and m.kernel_size[0] > 1 and m.groups > 1 for m in model.modules())
    times = OperatorTimes(device, _backend(device, backend), channels_last=images, seconds=0.15)
    with torch.no_grad():
        wide, least = preferred_steps(times, "convolution" if images else "product", dtype)
    times.save()
    return Steps(wide, least)


def _backend(device: torch.device, wanted: str) -> str:
    """What will run the layers: on a CPU onnxruntime where it is there, since it minds widths the most."""
    if device.type == "cuda":
        return "graph"
    ready = available(device)
    if wanted == "auto":
        return "onnxruntime" if "onnxruntime" in ready else "eager"
    return wanted if wanted in ready else "eager"
