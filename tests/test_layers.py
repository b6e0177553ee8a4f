"""A stage imports only earlier stages, so that data flows one way."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import sapwood

ORDER = (
    "version",
    "errors",
    "cache",
    "types",
    "capture",
    "scoring",
    "planning",
    "surgery",
    "masking",
    "sparse",
    "storage",
    "recovery",
    "measurement",
    "pipeline",
    "reporting",
    "cli",
)
ROOT = Path(sapwood.__file__).parent


def stage_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported_stages(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide which stage is meant"
            names = [node.module or ""]
        found |= {n.split(".")[1] for n in names if n.startswith("sapwood.")}
        assert "sapwood" not in names or path.parent.name == "cli", f"{path}: import the stage, not the package"
    return found


def test_every_file_belongs_to_a_stage() -> None:
    stages = {stage_of(p) for p in ROOT.rglob("*.py")} - {"__init__"}
    assert stages <= set(ORDER)


def test_stages_import_only_earlier_ones() -> None:
    for path in ROOT.rglob("*.py"):
        stage = stage_of(path)
        if stage != "__init__":
            allowed = set(ORDER[: ORDER.index(stage) + 1])
            assert imported_stages(path) <= allowed, f"{path.relative_to(ROOT)} imports a later stage"


def test_files_stay_small() -> None:
    long = {str(p.relative_to(ROOT)): n for p in ROOT.rglob("*.py") if (n := len(p.read_text().splitlines())) > 400}
    assert not long, f"split these: {long}"


def test_compilers_are_imported_by_those_who_compile() -> None:
    """They take longer than everything else together, and every command would wait for them."""
    code = "import sys, sapwood; print([m for m in sys.modules if m in ('torch._dynamo', 'torch._inductor')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
