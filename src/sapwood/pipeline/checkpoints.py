"""Where a run stands, in one safetensors file that is replaced whole: weights, optimizer, plan, figures so far."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sapwood.errors import SapwoodError, explain
from sapwood.masking.hold import note_masks, noted_masks
from sapwood.storage.bundle import describe
from sapwood.storage.record import read_record
from sapwood.storage.tensors import open_file, write
from sapwood.types import Plan

_MODEL, _OPTIMIZER, _HIDDEN = "model.", "optimizer.", "hidden."


@dataclass
class Checkpoint:
    """``recipe`` is a digest of what the run does, ``stage`` what was being done, ``position`` where in it,
    ``figures`` what is known so far, ``hidden`` what zeros would be that may come back."""

    recipe: str
    stage: str
    plan: Plan
    weights: Mapping[str, torch.Tensor]
    optimizer: Mapping[str, torch.Tensor] = field(default_factory=dict)
    masks: Mapping[str, str] = field(default_factory=dict)
    position: Mapping[str, Any] | None = None
    figures: Mapping[str, Any] = field(default_factory=dict)
    hidden: Mapping[str, torch.Tensor] = field(default_factory=dict)


def write_checkpoint(
    path: Path,
    recipe: str,
    stage: str,
    model: nn.Module,
    plan: Plan,
    figures: Mapping[str, Any],
    optimizer: torch.optim.Optimizer | None = None,
    position: Mapping[str, Any] | None = None,
    hidden: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Replace the checkpoint; killed at any moment, the old one or the new one is there."""
    tensors = {_MODEL + n: t for n, t in model.state_dict().items()}
    if optimizer is not None:
        tensors |= {_OPTIMIZER + n: t for n, t in optimizer_tensors(model, optimizer).items()}
    tensors |= {_HIDDEN + n: t for n, t in (hidden or {}).items()}
    state = {"recipe": recipe, "stage": stage, "position": position, "figures": figures, "masks": noted_masks(model)}
    record = describe(model, plan).to_json()
    write(path, {n: t.detach().cpu() for n, t in tensors.items()}, {"state": json.dumps(state), "plan": record})


def read_checkpoint(path: Path) -> Checkpoint | None:
    """None when there is none yet."""
    if not path.exists():
        return None
    reader = open_file(path)
    try:
        state = json.loads(reader.metadata["state"])
        plan = read_record(reader.metadata["plan"], str(path)).plan()
        tensors = {n: reader.get(n).clone() for n in reader.shapes}
        return Checkpoint(
            recipe=str(state["recipe"]),
            stage=str(state["stage"]),
            plan=plan,
            weights=_below(_MODEL, tensors),
            optimizer=_below(_OPTIMIZER, tensors),
            hidden=_below(_HIDDEN, tensors),
            masks=state["masks"],
            position=state["position"],
            figures=state["figures"],
        )
    except (KeyError, ValueError, TypeError) as error:
        raise SapwoodError(f"{path}: expected a checkpoint of a run; {error!r}. Start the run anew.") from None


def _below(prefix: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}


def fill(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Give a model, cut as the checkpoint's was, its weights and the note of its masks."""
    try:
        model.load_state_dict(dict(checkpoint.weights))
    except RuntimeError as error:
        got = " ".join(str(error).split())[:200]
        raise explain("the model of this run", got, "Was the model's code changed? Start anew.", "resume") from None
    note_masks(model, checkpoint.masks)


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The optimizer's state by name of parameter."""
    found = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                found[f"{name}|{key}"] = value
    return found


def fill_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, torch.Tensor]) -> None:
    """The other way round; a step count stays on the CPU, all else goes to its parameter's device."""
    parameters = dict(model.named_parameters())
    for name, value in tensors.items():
        owner, _, key = name.rpartition("|")
        parameter = parameters[owner]
        optimizer.state[parameter][key] = value.to(parameter.device) if value.shape == parameter.shape else value
