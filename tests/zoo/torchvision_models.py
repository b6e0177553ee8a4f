"""torchvision's models, built with random weights; importable beside a CPU build of torch.

torchvision's compiled operators may not load next to the installed torch. Its model code does not
need them, but importing it registers fakes for them; those registrations are skipped.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

MAX_PARAMS = 120e6


def import_torchvision() -> Any:
    """Import torchvision, skipping fake registrations of operators that are not there."""
    original = torch.library.register_fake

    def lenient(name: Any, *args: Any, **kwargs: Any) -> Any:
        def decorate(function: Any) -> Any:
            try:
                return original(name, function, **kwargs)
            except RuntimeError:
                return function

        if isinstance(name, str) and name.startswith("torchvision::") and not args:
            return decorate
        return original(name, *args, **kwargs)

    torch.library.register_fake = lenient
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import torchvision
    finally:
        torch.library.register_fake = original
    return torchvision


@dataclass(frozen=True)
class Entry:
    """A model of the zoo: how to build it and what to feed it."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], Any]


def _image(size: int = 224, batch: int = 2) -> Callable[[], torch.Tensor]:
    return lambda: torch.randn(batch, 3, size, size)


def _clip(frames: int, size: int) -> Callable[[], torch.Tensor]:
    return lambda: torch.randn(1, 3, frames, size, size)


def classification() -> Iterator[Entry]:
    models = import_torchvision().models
    for name in models.list_models(module=models):
        sizes = [w.meta["num_params"] for w in models.get_model_weights(name)]
        if sizes and min(sizes) <= MAX_PARAMS:
            size = 299 if name == "inception_v3" else 224
            yield Entry(name, lambda name=name: models.get_model(name, weights=None), _image(size))


def segmentation() -> Iterator[Entry]:
    models = import_torchvision().models
    for name in models.list_models(module=models.segmentation):
        for aux in (False, True) if "lraspp" not in name else (False,):
            extra = {"aux_loss": True} if aux else {}
            yield Entry(
                f"segmentation/{name}{'+aux' if aux else ''}",
                lambda name=name, extra=extra: models.get_model(name, weights=None, weights_backbone=None, **extra),
                _image(128),
            )


def video() -> Iterator[Entry]:
    models = import_torchvision().models
    shapes = {"mvit": (16, 224), "s3d": (16, 224), "swin3d": (8, 112)}
    for name in models.list_models(module=models.video):
        sizes = [w.meta["num_params"] for w in models.get_model_weights(name)]
        frames, size = next((v for k, v in shapes.items() if name.startswith(k)), (8, 112))
        if min(sizes) <= MAX_PARAMS:
            yield Entry(f"video/{name}", lambda name=name: models.get_model(name, weights=None), _clip(frames, size))


def detection() -> Iterator[Entry]:
    models = import_torchvision().models
    for name in models.list_models(module=models.detection):
        yield Entry(
            f"detection/{name}.backbone",
            lambda name=name: models.get_model(name, weights=None, weights_backbone=None).backbone,
            _image(300 if "ssd" in name else 128),
        )


def everything() -> list[Entry]:
    return [*classification(), *segmentation(), *video(), *detection()]


QUICK = (
    "alexnet",
    "convnext_tiny",
    "densenet121",
    "efficientnet_b0",
    "googlenet",
    "inception_v3",
    "maxvit_t",
    "mnasnet0_5",
    "mobilenet_v2",
    "mobilenet_v3_small",
    "regnet_x_400mf",
    "regnet_y_400mf",
    "resnet18",
    "resnet50",
    "resnext50_32x4d",
    "shufflenet_v2_x1_0",
    "squeezenet1_1",
    "swin_t",
    "swin_v2_t",
    "vit_b_32",
    "segmentation/deeplabv3_mobilenet_v3_large",
    "segmentation/fcn_resnet50+aux",
    "segmentation/lraspp_mobilenet_v3_large",
    "video/r3d_18",
    "video/r2plus1d_18",
    "video/mvit_v2_s",
    "video/swin3d_t",
    "detection/fasterrcnn_resnet50_fpn.backbone",
    "detection/ssd300_vgg16.backbone",
)
