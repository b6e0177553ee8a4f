import pytest
import torch

import sapwood.capture.tracker as tracker


@pytest.fixture(autouse=True)
def seeded_and_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Same weights in every run; a rule that raises is a bug here, not a frozen group."""
    torch.manual_seed(0)
    monkeypatch.setattr(tracker, "STRICT", True)
