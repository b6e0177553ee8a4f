from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState

import sapwood.capture.tracker as tracker


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Times measured by tests are kept from the user's own cache, and from one another."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("SAPWOOD_CACHE", str(folder))
    monkeypatch.setenv("SAPWOOD_RUNS", str(folder / "runs"))
    return folder


@pytest.fixture(autouse=True)
def seeded_and_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Same weights in every run; a rule that raises is a bug here, not a frozen group."""
    torch.manual_seed(0)
    monkeypatch.setattr(tracker, "STRICT", True)


@pytest.fixture(scope="module")
def on_the_cpu() -> Iterator[None]:
    """Also where there is a GPU, which tests/test_gpu_training.py is for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        AcceleratorState._reset_state(reset_partial_state=True)
        yield
    AcceleratorState._reset_state(reset_partial_state=True)
