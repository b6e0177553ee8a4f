"""Models built by name, from libraries that are installed; never from code in a file."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from sapwood.errors import SapwoodError, explain

LIBRARIES = ("torchvision", "timm", "transformers")


def describe(model: nn.Module, factory: str | None, arguments: Mapping[str, Any] | None) -> dict[str, Any]:
    """What a bundle says about where its model came from."""
    kind = type(model)
    about: dict[str, Any] = {"class": f"{kind.__module__}.{kind.__qualname__}"}
    if factory is not None:
        split_name(factory)
        about |= {"factory": factory, "arguments": dict(arguments or {})}
    elif kind.__module__.startswith("transformers.") and hasattr(model, "config"):
        held: Any = model.config
        config = {k: v for k, v in held.to_dict().items() if k != "sapwood"}
        about |= {"factory": f"transformers:{kind.__name__}", "arguments": config}
    return about


def split_name(factory: str) -> tuple[str, str]:
    library, _, name = factory.partition(":")
    library = "transformers" if library == "hf" else library
    if library not in LIBRARIES or not name.replace("_", "").replace(".", "").isalnum():
        raise explain(
            f"a factory such as 'torchvision:resnet50', from {', '.join(LIBRARIES)}",
            repr(factory)[:80],
            "Build the model yourself and pass it: sw.load(path, model).",
            "factory",
        )
    return library, name


def build(about: Mapping[str, Any]) -> nn.Module:
    """The dense model that a bundle names, with fresh weights."""
    factory = about.get("factory")
    if not isinstance(factory, str):
        raise explain(
            "a bundle that names its factory",
            f"one of {str(about.get('class', 'an unknown class'))[:80]}",
            "Build the dense model yourself and pass it: sw.load(path, model).",
            "load",
        )
    library, name = split_name(factory)
    arguments = about.get("arguments") or {}
    if not isinstance(arguments, dict) or not all(isinstance(k, str) and k.isidentifier() for k in arguments):
        raise explain("named arguments", repr(arguments)[:80], "The bundle is damaged.", "factory")
    try:
        module = importlib.import_module(library)
    except ImportError as error:
        raise explain(f"{library} to be installed", str(error), f"pip install {library}", "factory") from None
    try:
        return _construct(library, module, name, arguments)
    except SapwoodError:
        raise
    except Exception as error:
        raise SapwoodError(
            f"factory: expected {factory} to build a model; it raised {type(error).__name__}: {error}. "
            "Build the dense model yourself and pass it: sw.load(path, model)."
        ) from error


def _construct(library: str, module: Any, name: str, arguments: dict[str, Any]) -> nn.Module:
    if library == "torchvision":
        plain = {k: v for k, v in arguments.items() if not k.startswith("weights")}
        known = inspect.signature(module.models.get_model_builder(name)).parameters
        backbone = {"weights_backbone": None} if "weights_backbone" in known else {}  # else it would be downloaded
        return module.models.get_model(name, weights=None, **backbone, **plain)  # type: ignore[no-any-return]
    if library == "timm":
        plain = {k: v for k, v in arguments.items() if not k.startswith(("pretrained", "checkpoint"))}
        return module.create_model(name, pretrained=False, **plain)  # type: ignore[no-any-return]
    kind: Any = getattr(module, name, None)
    if not (isinstance(kind, type) and issubclass(kind, module.PreTrainedModel)):
        raise explain("a model class of transformers", repr(name), "The bundle is damaged.", "factory")
    maker: Any = kind
    made: nn.Module = maker(maker.config_class.from_dict(arguments))
    return made
