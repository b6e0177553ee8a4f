"""``sapwood mask``: a checkpoint in which the weights that matter least are zero."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

from sapwood.capture.skeleton import named_tensors, unwrap
from sapwood.cli.common import described, fill, read_tensors, require_apart, show, size_of, working
from sapwood.errors import explain
from sapwood.masking import Sparsity, mask_, sparsity
from sapwood.masking.hold import note_masks, noted_masks
from sapwood.masking.patterns import parse
from sapwood.pipeline.models import FORMS, named_model
from sapwood.reporting.inspection import sparsity_table
from sapwood.storage.bundle import KEY, Bundle, describe, write_bundle
from sapwood.storage.loading import load, load_
from sapwood.storage.record import Record
from sapwood.storage.tensors import open_file
from sapwood.types import Budget, Plan

_EMBEDDING = re.compile(r"embed|(^|\.)(wte|wpe)(\.|$)")
BY_MODEL = "by the model: matrices and kernels of layers, not norms or embeddings"
BY_NAME = (
    "by name and shape, as no model was given: floating point, two dimensions or more, a last name part with "
    "weight, kernel or proj, and no embedding by its name (embed, wte, wpe)"
)
NM_BY_NAME = "; inputs are taken to be the second dimension, pass --model where some layers are transposed"


class Checkpoint(nn.Module):
    """The tensors of a file under their names, in modules that compute nothing."""


class _Table(nn.Embedding):
    """A holder of an embedding, which is not masked unless asked for."""

    def __init__(self) -> None:
        nn.Module.__init__(self)


def mask(
    dense: Annotated[Path, typer.Argument(help="The checkpoint, a .safetensors file or a bundle.")],
    share: Annotated[float | None, typer.Option("--sparsity", help="The fraction of zeros, 0.9.")] = None,
    pattern: Annotated[str, typer.Option(help="unstructured, 2:4 (any N:M) or block:16x16.")] = "unstructured",
    scope: Annotated[str, typer.Option(help="Rank over all weights (global), per tensor (local) or row.")] = "global",
    score: Annotated[str, typer.Option(help="What ranks weights: magnitude, lamp or random.")] = "magnitude",
    model: Annotated[str | None, typer.Option(help=f"The model of the checkpoint: {FORMS}.")] = None,
    ignore: Annotated[list[str] | None, typer.Option(help="A module or parameter to leave, or re:...")] = None,
    include: Annotated[list[str] | None, typer.Option(help="One to mask that would be left, or re:...")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Where to write; a file or a folder.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Zero the weights that matter least; zeros are stored compressed."""
    target = out or dense.with_suffix(".masked.safetensors")
    options: dict[str, Any] = {"pattern": pattern, "scope": scope, "score": score}
    budget = _checked(share, pattern, score)
    require_apart(dense, target)
    with working(f"Masking {dense} ..."):
        held, record, by_name = opened(dense, model)
        before = size_of(dense)
        chosen = BY_MODEL if not by_name else BY_NAME + (NM_BY_NAME if parse(pattern).is_nm else "")
        left = [*(ignore or ()), *(_loose_embeddings(held, include or ()) if by_name else ())]
        mask_(held, budget, **options, include=include or (), ignore=left)
        write_masked(target, held, record)
    zeros = masked_only(held)
    result = summary(target, zeros, before, chosen)
    show(
        result,
        as_json,
        sparsity_table(zeros),
        f"Weights were chosen {chosen}.",
        f"Wrote {target}: {result['bytes_after']:,} bytes, {result['bytes_after'] / before:.1%} of the "
        f"{before:,} bytes of {dense}.",
    )


def _checked(share: float | None, pattern: str, score: str) -> Budget | None:
    if score in ("wanda", "taylor"):
        remedy = "Use sw.mask(model, ..., calibration=batches) in Python."
        raise explain("a score that needs no data: magnitude, lamp or random", repr(score), remedy, "--score")
    if share is None and not parse(pattern).is_nm:
        raise explain("a fraction of zeros", "none", "For example --sparsity 0.9.", "--sparsity")
    return None if share is None else Budget(sparsity=share)


def opened(path: Path, model: str | None) -> tuple[nn.Module, Record, bool]:
    """What holds the weights, what to write about it, and whether only the names say what they are."""
    if path.is_dir() or KEY in open_file(path).metadata:
        bundle = Bundle(path)
        record = replace(bundle.record, check=None)  # which was about other weights
        if model is None and "factory" not in record.model:
            held = bare(bundle.tensors())
            note_masks(held, record.masks)
            return held, record, True
        return load(path) if model is None else load_(path, named_model(model)), record, False
    if model is None:
        held = bare(read_tensors(path))
        return held, describe(held, Plan({}, {}, {}), about={"class": f"the checkpoint {path.name}"}), True
    held = unwrap(fill(named_model(model), path))
    return held, describe(held, Plan({}, {}, {}), about=described(held, model)), False


def bare(tensors: Mapping[str, torch.Tensor]) -> nn.Module:
    """A module that holds these tensors under these names; floating ones as parameters."""
    root = Checkpoint()
    for name, tensor in tensors.items():
        owner: nn.Module = root
        *parents, last = name.split(".")
        try:
            for depth, part in enumerate(parents):
                if part not in owner._modules:
                    table = depth == len(parents) - 1 and _EMBEDDING.search(".".join(parents))
                    owner.add_module(part, _Table() if table else Checkpoint())
                owner = owner.get_submodule(part)
            if tensor.is_floating_point():
                owner.register_parameter(last, nn.Parameter(tensor))
            else:
                owner.register_buffer(last, tensor)
        except (KeyError, AttributeError):
            got, remedy = f"{name!r}, which torch reserves", "Pass --model, the model of this checkpoint."
            raise explain("names that a bare module can hold", got, remedy, "mask") from None
    return root


def _loose_embeddings(held: nn.Module, include: list[str] | tuple[str, ...]) -> list[str]:
    """Embeddings that lie beside other weights: their own name says it, not their module's."""
    return [n for n, _ in held.named_parameters() if _EMBEDDING.search(n.rpartition(".")[2]) and n not in include]


def write_masked(path: Path, held: nn.Module, record: Record) -> None:
    """Write what ``save`` would, with the masks noted."""
    tensors = {n: t for n, t in named_tensors(held).items() if n in record.after and n not in record.buffers}
    record = replace(record, masks={n: p for n, p in noted_masks(held).items() if n in tensors})
    write_bundle(path, record, tensors, compress=True, shard_bytes=5 * 10**9)


def masked_only(held: nn.Module) -> Sparsity:
    """The zeros of the weights that were masked."""
    layers = {n: layer for n, layer in sparsity(held).layers.items() if layer.pattern}
    return Sparsity(sum(s.zeros for s in layers.values()), sum(s.weights for s in layers.values()), layers)


def summary(path: Path, zeros: Sparsity, before: int, chosen: str) -> dict[str, Any]:
    """All that is shown, as plain data."""
    return {
        "path": str(path),
        "sparsity": zeros.total,
        "zeros": zeros.zeros,
        "weights": zeros.weights,
        "layers": {
            n: {"weights": s.weights, "zeros": s.zeros, "sparsity": s.total, "pattern": s.pattern}
            for n, s in zeros.layers.items()
        },
        "chosen": chosen,
        "bytes_before": before,
        "bytes_after": size_of(path),
    }
