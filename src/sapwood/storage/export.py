"""Exports: ONNX, torch.export and plain safetensors, each reloaded and compared with the eager model."""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from sapwood.capture.isolation import full_precision
from sapwood.capture.run import Inputs, as_call, results_in, tensors_in
from sapwood.capture.skeleton import unwrap
from sapwood.errors import SapwoodError, explain
from sapwood.storage.atomic import replacing
from sapwood.storage.fold import fold_batch_norms
from sapwood.storage.tensors import write
from sapwood.surgery.check import evaluating, relative_error

KINDS = ("onnx", "pt2", "safetensors")
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Exported:
    """What was written, and how far its output is from the eager model's."""

    path: Path
    kind: str
    max_error: float
    dynamic_batch: bool
    folded: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def require_kind(to: str) -> None:
    if to not in KINDS:
        raise explain(f"one of {', '.join(KINDS)}", repr(to), "Choose the format to export to.", "export")


def export(
    model: nn.Module,
    example_inputs: Any,
    path: str | Path,
    to: str,
    *,
    fold: bool = False,
    dynamic_batch: bool = True,
    about: Mapping[str, Any] | None = None,
) -> Exported:
    """Write the model in another format. The batch size stays free where the model allows it."""
    require_kind(to)
    path, model, inputs = Path(path), unwrap(model), as_call(example_inputs)
    with evaluating(model):
        plain, folded = (model, []) if not fold else fold_batch_norms(model, inputs)
        wanted = _run(model, inputs)
        if fold:
            _compare(wanted, _run(plain, inputs), "folding batch norms")
        text = json.dumps(dict(about or {}))
        if to == "safetensors":
            state = {n: t.detach().cpu().contiguous() for n, t in _state(plain).items()}
            write(path, state, {"format": "pt", "pruned": text})
            return Exported(path, to, 0.0, True, tuple(folded))
        with evaluating(plain):
            error, dynamic, notes = _export_program(plain, inputs, path, to, dynamic_batch, text, wanted)
    return Exported(path, to, error, dynamic, tuple(folded), notes)


def _export_program(
    model: nn.Module, inputs: Inputs, path: Path, to: str, dynamic: bool, text: str, wanted: list[torch.Tensor]
) -> tuple[float, bool, tuple[str, ...]]:
    notes: list[str] = []
    for free in (True, False) if dynamic else (False,):
        try:
            shapes = _free_batch(inputs) if free else None
            with tempfile.TemporaryDirectory() as folder:
                made = Path(folder) / f"model.{to}"
                program = _trace(model, _wider(inputs) if free else inputs, shapes)
                write_one = _write_onnx if to == "onnx" else _write_pt2
                write_one(program, made, text, shapes)
                run = _run_onnx if to == "onnx" else _run_pt2
                error = _compare(wanted, run(made, inputs), f"the {to} export")
                if free:
                    more = _wider(inputs)
                    error = max(error, _compare(_run(model, more), run(made, more), f"the {to} export, larger batch"))
                with replacing(path) as temporary:
                    temporary.write_bytes(made.read_bytes())
            return error, free, tuple(notes)
        except Exception as raised:
            if not free:
                if isinstance(raised, SapwoodError):
                    raise
                raise SapwoodError(
                    f"{path}: expected {type(model).__name__} to export to {to}; torch raised "
                    f"{type(raised).__name__}: {str(raised)[:300]}. The file was not written."
                ) from raised
            notes.append(f"the batch size is fixed: with a free one torch raised {type(raised).__name__}")
    raise AssertionError("unreachable")


def _state(model: nn.Module) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            found[name] = tensor
    return found


def _batch(inputs: Inputs) -> int:
    first = next(tensors_in(inputs), None)
    if first is None or first.dim() == 0:
        raise explain("a tensor with a batch axis among the inputs", "none", "Export with a fixed batch.", "export")
    return int(first.shape[0])


def _free_batch(inputs: Inputs) -> Any:
    """Every tensor whose first axis is the batch has it free."""
    size = _batch(inputs)

    def spec(value: Any) -> Any:
        follows = isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape[0] == size
        return {0: torch.export.Dim.DYNAMIC} if follows else None

    return tuple(pytree.tree_map(spec, inputs[0])), pytree.tree_map(spec, inputs[1])


def _wider(inputs: Inputs) -> Inputs:
    """The same inputs with a larger batch, never 1 (which exporters take for a constant)."""
    size = _batch(inputs)

    def widen(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape[0] == size:
            return torch.cat([value, value.flip(0), value])[: size + 2].contiguous()
        return value

    return pytree.tree_map(widen, inputs)  # type: ignore[no-any-return]


def _trace(model: nn.Module, inputs: Inputs, shapes: Any) -> torch.export.ExportedProgram:
    args, kwargs = inputs
    dynamic = None
    if shapes is not None:
        names = list(_signature(model, args, kwargs))
        dynamic = dict(zip(names, [*shapes[0], *shapes[1].values()], strict=True)) if names else None
    with quiet(), torch.no_grad():
        return torch.export.export(model, args, kwargs, dynamic_shapes=dynamic, strict=False)


def _signature(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:

    bound = inspect.signature(model.forward).bind(*args, **kwargs)
    return (
        list(bound.arguments)
        if not any(p.kind == p.VAR_POSITIONAL for p in bound.signature.parameters.values())
        else []
    )


def _write_pt2(program: torch.export.ExportedProgram, path: Path, text: str, shapes: Any) -> None:
    torch.export.save(program, path, extra_files={"sapwood.json": text})


def _run_pt2(path: Path, inputs: Inputs) -> list[torch.Tensor]:
    with quiet(), torch.no_grad():
        return list(tensors_in(torch.export.load(path).module()(*inputs[0], **inputs[1])))


def _write_onnx(program: torch.export.ExportedProgram, path: Path, text: str, shapes: Any) -> None:
    with quiet():
        made = torch.onnx.export(program, dynamo=True, verbose=False)
    assert made is not None
    made.model.metadata_props["sapwood"] = text
    made.save(str(path))


def to_onnx(model: nn.Module, inputs: Inputs, path: Path) -> None:
    """An ONNX file for exactly these shapes, not yet compared with anything."""
    with evaluating(model):
        _write_onnx(_trace(model, inputs, None), path, "", None)


def _run_onnx(path: Path, inputs: Inputs) -> list[torch.Tensor]:
    try:
        import onnxruntime
    except ImportError:
        raise explain("onnxruntime", "none installed", "pip install onnxruntime onnxscript", "export") from None
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    given = [t.detach().cpu().numpy() for t in tensors_in(inputs)]
    names = [i.name for i in session.get_inputs()]
    return [torch.from_numpy(a) for a in session.run(None, dict(zip(names, given, strict=True)))]


def _run(model: nn.Module, inputs: Inputs) -> list[torch.Tensor]:
    with torch.no_grad(), full_precision():
        return list(results_in(model, model(*inputs[0], **inputs[1])))


def _compare(wanted: list[torch.Tensor], got: list[torch.Tensor], what: str) -> float:
    shapes = [tuple(t.shape) for t in wanted], [tuple(t.shape) for t in got]
    if shapes[0] != shapes[1]:
        raise SapwoodError(f"{what}: expected outputs of shapes {shapes[0]}; got {shapes[1]}. Nothing was written.")
    error = max((relative_error(a.cpu(), b.cpu()) for a, b in zip(wanted, got, strict=True)), default=0.0)
    if not error <= TOLERANCE:
        raise SapwoodError(f"{what}: expected the eager model's output; it is off by {error:.1e}. Nothing was written.")
    return error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Exporters talk a lot; only errors are for our users."""
    loggers = [
        logging.getLogger(name)
        for name in ("torch.onnx", "onnxscript", "torch.export", "torch._subclasses.fake_tensor")
    ]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
