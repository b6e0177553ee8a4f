"""Models by name, and the small network of the demo."""

from __future__ import annotations

import difflib
import importlib
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from sapwood.errors import SapwoodError, explain
from sapwood.storage import factories

FORMS = "torchvision:NAME, timm:NAME, hf:CLASS or package.module:factory"


class SmallCNN(nn.Module):
    """Three convolutions with batch norm and a classifier, for 8 x 8 digits: about 100,000 parameters."""

    def __init__(self, width: int = 64, classes: int = 10) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *_block(1, width // 2), *_block(width // 2, width), nn.MaxPool2d(2), *_block(width, 2 * width)
        )
        self.head = nn.Linear(2 * width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x).mean((2, 3)))  # type: ignore[no-any-return]


def _block(inputs: int, outputs: int) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]


def named_model(
    name: str, where: str = "--model", empty: bool = False, arguments: Mapping[str, Any] | None = None
) -> nn.Module:
    """``torchvision:resnet50``, ``timm:...``, ``hf:BertModel``, or ``package.module:factory`` of the user's own."""
    package, _, short = name.partition(":")
    if not package or not short:
        raise explain(FORMS, repr(name), f"For example torchvision:{name or 'resnet18'}; or check the path.", where)
    known = package in (*factories.LIBRARIES, "hf")
    given = dict(arguments or {})
    return _library_model(name, where, empty, given) if known else _own_model(package, short, where, given)


def _library_model(name: str, where: str, empty: bool, arguments: dict[str, Any]) -> nn.Module:
    package, _, short = name.partition(":")
    library = "transformers" if package == "hf" else package
    try:
        module: Any = importlib.import_module(library)
        found, names = _look_up(library, module, short)
    except Exception as error:  # a library that does not fit the installed torch raises anything
        raise explain(
            f"{library} to be importable",
            told(error),
            f"Install a {library} that fits torch {torch.__version__}.",
            where,
        ) from None
    if not found:
        wanted = "a model of " + library + (", by its class" if library == "transformers" else "")
        raise explain(wanted, repr(short), nearest(short, names, package + ":"), where)
    try:
        about = {"factory": name, "arguments": arguments}
        if empty and library == "transformers":
            with torch.device("meta"):
                return factories.build(about)
        return factories.build(about)
    except SapwoodError as error:
        why = told(error.__cause__ or error)
        default = "its default configuration" if library == "transformers" else "its name alone"
        default = f"the arguments {arguments}" if arguments else default
        raise SapwoodError(
            f"{where}: expected {name} to be built from {default}; it raised {why}. "
            "Write a factory of your own and pass package.module:factory."
        ) from None


def _look_up(library: str, module: Any, short: str) -> tuple[bool, list[str]]:
    """Whether a library has a model of this name, and the names it has."""
    if library == "torchvision":
        names = module.models.list_models()
        return short.lower() in names, names
    if library == "timm":
        names = module.list_models()
        return short.partition(".")[0] in names, names
    names = [n for n in dir(module) if re.search(r"Model$|For[A-Z]", n) and not n.startswith("Auto")]
    kind: Any = getattr(module, short, None) if short in names else None
    return isinstance(kind, type) and issubclass(kind, module.PreTrainedModel), names


def _own_model(package: str, short: str, where: str, arguments: dict[str, Any]) -> nn.Module:
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        module = importlib.import_module(package)
    except Exception as error:  # the user's code may raise anything
        raise explain(f"a module {package!r}", told(error), f"Check the spelling: {FORMS}.", where) from None
    maker: Any = getattr(module, short, None)
    if maker is None:
        names = [n for n in dir(module) if not n.startswith("_") and callable(getattr(module, n))]
        raise explain(f"a factory in {package}", repr(short), nearest(short, names, package + ":"), where)
    try:
        made = maker if isinstance(maker, nn.Module) else maker(**arguments)
    except Exception as error:
        how = f"with {arguments}" if arguments else "without arguments"
        expected = f"{package}:{short} to build a model when called {how}"
        raise explain(expected, told(error), "Check the factory.", where) from None
    if not isinstance(made, nn.Module):
        raise explain("a factory that returns an nn.Module", type(made).__name__, "Check the factory.", where)
    return made


def nearest(text: str, names: Iterable[str], prefix: str = "") -> str:
    """The remedy for a name that is not there: those that look like it."""
    near = difflib.get_close_matches(text, list(names), n=3, cutoff=0.5)
    return f"Did you mean {', '.join(prefix + n for n in near)}?" if near else "Check the spelling."


def told(error: BaseException) -> str:
    """An error of somebody else's code on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}".rstrip(" .:")
