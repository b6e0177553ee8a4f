"""The forms a matrix product can take once weights are gone, and what each must compute and move at least.

A weight of shape [rows, cols] times an input of shape [batch, cols]:

dense           all weights
zeros           the share of zeros, stored like any other number
CSR             the same zeros left out; each other value has a 32-bit column number
BSR             whole blocks of 16 x 16 left out, as many as make the same share
packed          the same zeros left out, by the kernels of sapwood.sparse; each other value has 8 bits of place
2:4 (...)       two of every four neighbours left out, in the form that GPUs multiply by; half zeros by construction
cut             the share of the rows removed: a smaller dense weight
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear, pad

from sapwood.errors import SapwoodError
from sapwood.masking.patterns import parse, zero_blocks, zero_nm
from sapwood.masking.select import smallest, zero_below
from sapwood.measurement.points import Candidate, Cost, told
from sapwood.sparse.format import pack_weight, tiles_of
from sapwood.sparse.operator import most_of, sparse_linear, unready

BLOCK = 16
CUTLASS, CUSPARSELT = "2:4 (CUTLASS)", "2:4 (cuSPARSELt)"
SEMI_STRUCTURED = (CUTLASS, CUSPARSELT)
FORMS = ("dense", "zeros", "CSR", "BSR", CUTLASS, CUSPARSELT, "packed", "cut")
HALF_ONLY = "2:4 is half zeros by construction: ask for sparsity 0.5"

Multiply = Callable[[torch.Tensor, Any], torch.Tensor]
"""(inputs, a weight in some form) -> outputs."""


@dataclass(frozen=True)
class Product:
    """The matrix product in question: weights of [rows, cols]."""

    rows: int
    cols: int
    device: torch.device
    dtype: torch.dtype

    @property
    def value_bytes(self) -> int:
        return self.dtype.itemsize


def cost(form: str, product: Product, batch: int, nonzeros: int) -> Cost:
    """FLOPs and bytes of one product; ``nonzeros`` counts the weights that the form keeps."""
    rows, cols, size = product.rows, product.cols, product.value_bytes
    flops, outputs = 2.0 * batch * nonzeros, rows
    weights = float(rows * cols * size)
    if form == "CSR":
        weights = nonzeros * (size + 4) + (rows + 1) * 4
    elif form == "packed":
        weights = nonzeros * (size + 1) + rows * tiles_of(cols) * 4
    elif form == "BSR":
        blocks = nonzeros // BLOCK**2
        weights = nonzeros * size + blocks * 8 + (rows // BLOCK + 1) * 8
    elif form in SEMI_STRUCTURED:
        weights = nonzeros * size + nonzeros / 4  # two bits say where each value goes
    elif form == "cut":
        outputs = nonzeros // cols
        weights = nonzeros * size
    else:
        flops = 2.0 * batch * rows * cols
    return Cost(flops, float(weights), float(batch * (cols + outputs) * size))


def by_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return linear(x, weight)


def by_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The sparse operand on the left, where libraries expect it; a single example is a vector."""
    if len(x) == 1:
        return (weight @ x[0])[None]
    return (weight @ x.t()).t()


def by_triton(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The block kernel of torch.sparse, which wants multiples of 16 examples."""
    from torch.sparse import _triton_ops

    padded = pad(x, (0, 0, 0, -len(x) % 16))
    return _triton_ops.bsr_dense_mm(weight, padded.t())[:, : len(x)].t()  # type: ignore[no-any-return]


def to_csr(weight: torch.Tensor) -> torch.Tensor:
    """CSR with 32-bit numbers: libraries convert others at every call."""
    made = weight.to_sparse_csr()
    indices = made.crow_indices().int(), made.col_indices().int()
    return torch.sparse_csr_tensor(*indices, made.values(), made.shape, check_invariants=False)


def by_kernel(x: torch.Tensor, weight: Any) -> torch.Tensor:
    """The kernels of sapwood.sparse; for more rows than they take, the weight is unpacked."""
    parts, columns = (weight.values, weight.places, weight.starts, None), weight.shape[1]
    return sparse_linear(x, *parts, columns, most_of(x.device))  # type: ignore[no-any-return]


def to_packed(weight: torch.Tensor) -> Any:
    if why := unready(weight.device, weight.dtype):
        raise SapwoodError(why)
    return pack_weight(weight)


def to_bsr(weight: torch.Tensor) -> torch.Tensor:
    return weight.to_sparse_bsr((BLOCK, BLOCK))


def to_semi_structured(form: str, weight: torch.Tensor) -> torch.Tensor:
    """The 2:4 tensor of torch by one of the two libraries; raises where that does not fit."""
    if why := refusal(weight.device, weight.dtype):
        raise SapwoodError(why)
    kinds: Any = torch.sparse
    name = "SparseSemiStructuredTensorCUTLASS" if form == CUTLASS else "SparseSemiStructuredTensorCUSPARSELT"
    kind = getattr(kinds, name, None)
    if kind is None:
        raise SapwoodError(f"torch {torch.__version__} has no {name}")
    return kind.from_dense(weight.contiguous())  # type: ignore[no-any-return]


def refusal(device: torch.device, dtype: torch.dtype, sparsity: float = 0.5) -> str:
    """Why there is no 2:4 here, whatever the weights; empty when there may be."""
    if device.type != "cuda":
        return "2:4 needs a CUDA device"
    if dtype not in (torch.float16, torch.bfloat16):
        return "2:4 needs float16 or bfloat16"
    return HALF_ONLY if abs(sparsity - 0.5) > 1e-9 else ""


class Rotating(nn.Module):
    """One product after another, each with weights of its own; the last is the output."""

    def __init__(self, weights: list[Any], multiply: Multiply) -> None:
        super().__init__()
        self.weights, self.multiply = weights, multiply  # plain attributes: not every form can be a parameter

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = x
        for weight in self.weights:
            out = self.multiply(x, weight)
        return out


@dataclass
class Packed:
    """A form of one weight: how it is packed, the dense weight that it stands for, how it can be multiplied by."""

    form: str
    reference: torch.Tensor
    nonzeros: int
    pack: Callable[[], Any]
    ways: dict[str, Multiply]
    notes: tuple[str, ...] = ()
    weights: list[Any] = field(default_factory=list)

    def at_least(self, copies: int) -> None:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says at the first sparse tensor that they are new
            while len(self.weights) < copies:
                self.weights.append(self.pack())

    def candidate(self, product: Product, x: torch.Tensor, copies: int, passes: int = 1) -> Candidate:
        """The form at one batch; the output wanted is computed in float32."""

        def expected() -> list[torch.Tensor]:
            with torch.no_grad():
                return [linear(x.float(), self.reference.float())]

        models = {name: Rotating(self.weights[:copies] * passes, multiply) for name, multiply in self.ways.items()}
        needed = cost(self.form, product, len(x), self.nonzeros)
        return Candidate(self.form, models, expected, needed, copies, passes, self.notes)


def make_weight(product: Product) -> torch.Tensor:
    """Random weights of the size that keeps outputs near 1; the same in every run."""
    dice = torch.Generator(product.device).manual_seed(0)
    made = torch.randn(product.rows, product.cols, device=product.device, generator=dice)
    return made.div_(product.cols**0.5).to(product.dtype)


def make_input(product: Product, batch: int) -> torch.Tensor:
    dice = torch.Generator(product.device).manual_seed(1)
    return torch.randn(batch, product.cols, device=product.device, generator=dice).to(product.dtype)


@torch.no_grad()
def pack_forms(
    product: Product, sparsity: float, with_half: bool = True, wanted: Sequence[str] = FORMS
) -> tuple[list[Packed], dict[str, str]]:
    """All forms of one weight at a sparsity, and why others have none. 2:4 is left out in silence at other
    sparsities than 0.5 when ``with_half`` says that it is measured there."""
    weight = make_weight(product)
    forms = [Packed("dense", weight, weight.numel(), weight.clone, {"linear": by_linear})]
    skipped: dict[str, str] = {}
    for form in (f for f in FORMS[1:] if f in wanted):
        if form in SEMI_STRUCTURED and (why := refusal(product.device, product.dtype, sparsity)):
            skipped |= {} if why == HALF_ONLY and with_half else {form: why}
            continue
        try:
            made = _pack(form, product, weight, sparsity)
            made.at_least(1)
            forms.append(made)
        except Exception as error:
            skipped[form] = told(error)
    return forms, skipped


def _pack(form: str, product: Product, weight: torch.Tensor, sparsity: float) -> Packed:
    plain: dict[str, Multiply] = {"linear": by_linear}
    sparse: dict[str, Multiply] = {"product": by_product, "linear": by_linear}
    if form == "cut":
        left = product.rows - round(sparsity * product.rows)
        if not left:
            raise SapwoodError(f"no row would be left of {product.rows}")
        kept = weight[:left].clone()  # rows of random weights are alike
        return Packed(form, kept, kept.numel(), kept.clone, plain)
    masked = weight.clone()
    if form in SEMI_STRUCTURED:
        if product.cols % 4:
            raise SapwoodError("2:4 needs columns in multiples of 4")
        zero_nm(masked, weight.abs(), 2, 4, 1)
        return Packed(form, masked, weight.numel() // 2, lambda: to_semi_structured(form, masked), plain)
    if form == "BSR":
        return _pack_blocks(product, weight, masked, sparsity)
    count = round(sparsity * weight.numel())
    if count >= weight.numel():
        raise SapwoodError("no weight would be left")
    if count:
        flat = masked.view(-1)
        zero_below(flat, flat, smallest([flat], count, absolute=True), 0, absolute=True)
    nonzeros = int(masked.count_nonzero())
    if form == "zeros":
        return Packed(form, masked, nonzeros, masked.clone, plain)
    if form == "packed":
        made = to_packed(masked)
        return Packed(form, masked, nonzeros, made.clone, {"kernel": by_kernel})
    return Packed(form, masked, nonzeros, lambda: to_csr(masked), sparse)


def _pack_blocks(product: Product, weight: torch.Tensor, masked: torch.Tensor, sparsity: float) -> Packed:
    if product.rows % BLOCK or product.cols % BLOCK:
        raise SapwoodError(f"blocks of {BLOCK}x{BLOCK} need rows and columns in multiples of {BLOCK}")
    blocks = weight.numel() // BLOCK**2
    gone = round(sparsity * blocks)
    if gone in (0, blocks):
        raise SapwoodError(f"{sparsity:g} of {blocks} blocks is {'none' if not gone else 'all'} of them")
    zero_blocks({"": masked}, lambda _: weight.abs(), gone * BLOCK**2, parse(f"block:{BLOCK}x{BLOCK}"))
    ways: dict[str, Multiply] = {"product": by_product, "linear": by_linear}
    if product.device.type == "cuda":
        ways["triton"] = by_triton
    notes = (f"the zeros lie in whole blocks of {BLOCK}x{BLOCK}",)
    return Packed("BSR", masked, (blocks - gone) * BLOCK**2, lambda: to_bsr(masked), ways, notes)
