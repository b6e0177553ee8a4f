"""The README's examples run as they are written."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.zoo.torchvision_models import import_torchvision

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
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


@pytest.mark.parametrize("name", ["training.md", "speed.md", "rules.md", "report.md"])
def test_examples_of_the_docs_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    space: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / name).read_text(), flags=re.DOTALL)
    assert blocks
    for block in blocks:
        exec(block, space)


def test_the_walk_through_works_as_written(tmp_path: Path) -> None:
    """Every ``sapwood`` line of the walk-through, in its order, on a shorter training."""
    text = (ROOT / "docs" / "walkthrough.md").read_text().replace("\\\n", " ")
    lines = [line.partition("#")[0].strip() for line in re.findall(r"^sapwood .*$", text, flags=re.MULTILINE)]
    assert len(lines) >= 8
    for line in lines:
        words = line.split()[1:]
        if words[0] == "run":
            words += ["--set", "train.epochs=2", "--set", "seeds=1"]
        command = [sys.executable, "-m", "sapwood.cli.main", *words]
        path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
        env = {**os.environ, "PYTHONPATH": path}
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{line}: {done.stderr[-1000:]}"


PAGES = ["README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]


@pytest.mark.parametrize("page", PAGES)
def test_linked_files_and_headings_exist(page: str) -> None:
    for target, heading in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", (ROOT / page).read_text()):
        path = (ROOT / page).parent / target if target else ROOT / page
        assert path.exists(), target
        if heading:
            found = re.findall(r"^#+ (.*)$", path.read_text(), flags=re.MULTILINE)
            assert heading in {re.sub(r"[^a-z0-9 -]", "", h.lower()).replace(" ", "-") for h in found}, heading
