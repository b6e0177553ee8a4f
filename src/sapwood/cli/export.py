"""``sapwood export``: a bundle as ONNX, torch.export or plain safetensors."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from sapwood.cli.common import parse_shape, show, size_of
from sapwood.errors import explain
from sapwood.pipeline.models import named_model
from sapwood.storage.bundle import Bundle
from sapwood.storage.examples import make_inputs
from sapwood.storage.export import export as export_model
from sapwood.storage.export import require_kind
from sapwood.storage.loading import load


def export(
    bundle: Annotated[Path, typer.Argument(help="The bundle: a folder or a .safetensors file.")],
    to: Annotated[str, typer.Option(help="onnx, pt2 or safetensors.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Where to write.")] = None,
    model: Annotated[str | None, typer.Option(help="torchvision:NAME, timm:NAME or package.module:factory.")] = None,
    inputs: Annotated[list[str] | None, typer.Option("--input", help="A shape, 1x3x224x224 or 1x16:int64.")] = None,
    fold: Annotated[bool, typer.Option(help="Fold batch norms into the layers before them.")] = False,
    fixed_batch: Annotated[bool, typer.Option(help="Fix the batch size of the example inputs.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Write a pruned model in another format, reload it and compare its output."""
    require_kind(to)  # before anything is loaded
    opened = Bundle(bundle)
    with Console(stderr=True).status(f"Exporting {bundle} to {to} ..."):
        small = load(bundle, named_model(model) if model else None)
        target = out or _beside(bundle, to)
        done = export_model(
            small,
            _inputs(opened, inputs),
            target,
            to,
            fold=fold,
            dynamic_batch=not fixed_batch,
            about={"achieved": dict(opened.record.achieved), "budget": dict(opened.record.budget)},
        )
    result = {
        "path": str(target),
        "bytes": size_of(target),
        "max_error": done.max_error,
        "dynamic_batch": done.dynamic_batch,
        "folded": list(done.folded),
        "notes": list(done.notes),
    }
    words = [f"Wrote {target}: {result['bytes']:,} bytes, output equal to the eager model's ({done.max_error:.0e})."]
    words += [f"{len(done.folded)} batch norms folded."] if done.folded else []
    words += [f"Note: {note}." for note in done.notes]
    show(result, as_json, "\n".join(words))


def _beside(bundle: Path, to: str) -> Path:
    name = "dense.safetensors" if to == "safetensors" else f"model.{to}"
    return bundle / name if bundle.is_dir() else bundle.with_suffix(f".export.{to}")


def _inputs(opened: Bundle, shapes: list[str] | None) -> Any:
    if shapes:
        return tuple(parse_shape(s) for s in shapes)
    if opened.record.inputs is None:
        raise explain(
            "example inputs",
            "a bundle that remembers none",
            "Pass --input 1x3x224x224, or save with example_inputs=...",
            "export",
        )
    return make_inputs(opened.record.inputs)
