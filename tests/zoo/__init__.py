"""The zoo: models that people use, in three sections."""

from __future__ import annotations

import functools
import importlib
from typing import Any

SECTIONS = ("torchvision", "timm", "transformers")


@functools.cache
def _entries(section: str) -> dict[str, Any]:
    module = importlib.import_module(f"tests.zoo.{section}_models")
    return {e.name: e for e in module.everything()}


def names(section: str) -> list[str]:
    return list(_entries(section))


def entry(section: str, name: str) -> Any:
    return _entries(section)[name]
