"""The README's examples run as they are written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.zoo.torchvision_models import import_torchvision

README = (Path(__file__).parent.parent / "README.md").read_text()
pytest.importorskip("PIL", reason="torchvision needs Pillow")


def test_python_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    import_torchvision()
    space: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(blocks) >= 3
    for block in blocks:
        exec(block, space)
    assert space["done"].check.passed and space["result"].passed
    assert type(space["again"]).__name__ == "ResNet"


def test_linked_files_exist() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (Path(__file__).parent.parent / target).exists(), target
