"""``SparseLinear``, and whole models of them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from sapwood.errors import explain
from sapwood.sparse.format import CHUNK, DTYPES, MOST_COLUMNS, TILE, Packed, columns_of, pack_weight, tiles_of
from sapwood.sparse.operator import dense, sparse_linear
from sapwood.sparse.switch import most_rows

WORTH = 0.4
"""Layers with fewer zeros than this stay dense: packed they would be as large."""
_PARTS = ("values", "places", "starts")


class SparseLinear(nn.Module):
    """A linear layer whose zeros take neither memory nor time.

    Up to ``most`` rows of inputs the nonzeros are read as they are packed; for more the weight is unpacked for the
    call, unless ``keep_dense`` holds a dense copy.
    """

    values: torch.Tensor
    places: torch.Tensor
    starts: torch.Tensor
    most: torch.Tensor

    def __init__(self, packed: Packed, bias: torch.Tensor | None, most: int, keep_dense: bool = False) -> None:
        super().__init__()
        self.out_features, self.in_features = packed.shape
        for name in _PARTS:
            self.register_buffer(name, getattr(packed, name))
        self.register_buffer("most", torch.tensor(most))
        self.bias = None if bias is None else nn.Parameter(bias)
        self._most = most
        self.keep_dense = keep_dense
        self._dense: torch.Tensor | None = None

    @classmethod
    def of(cls, layer: nn.Linear, most: int | None = None, keep_dense: bool = False) -> SparseLinear:
        """A packed copy of a layer. ``most`` is measured where it is not given."""
        packed = pack_weight(layer.weight)
        bias = None if layer.bias is None else layer.bias.detach().clone()
        made = cls(packed, bias, most_rows(packed, keep_dense) if most is None else most, keep_dense)
        return made.train(layer.training)

    @property
    def packed(self) -> Packed:
        return Packed(self.values, self.places, self.starts, (self.out_features, self.in_features))

    @property
    def weight(self) -> torch.Tensor:
        """Unpacked, a new tensor at each call; for code that looks at it."""
        return dense(self.packed)

    def sapwood_zeros(self) -> tuple[int, int]:
        """How many of how many weights are zero; what ``sparsity`` reads."""
        weights = self.in_features * self.out_features
        return 0 if self.values.is_meta else weights - int(self.values.count_nonzero()), weights

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.keep_dense and x.numel() // max(self.in_features, 1) > self._most:
            return nn.functional.linear(x, self._copy(), self.bias)
        made: torch.Tensor = sparse_linear(
            x, self.values, self.places, self.starts, self.bias, self.in_features, self._most
        )
        return made

    def _copy(self) -> torch.Tensor:
        if self._dense is None or self._dense.device != self.values.device:
            self._dense = self.weight
        return self._dense

    def extra_repr(self) -> str:
        zeros, weights = self.sapwood_zeros()
        kept = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return f"{kept}, zeros={zeros / max(1, weights):.0%}, most={self._most}"

    def _apply(self, fn: Any, recurse: bool = True) -> SparseLinear:
        """Values and bias change their dtype together; another device has another order and switch point."""
        before = self.values.device.type
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._dense = None
        if self.values.device.type not in (before, "meta"):
            self._order()
            self._set_most(most_rows(self.packed, self.keep_dense))
        return self

    def _order(self) -> None:
        """As the device likes it."""
        if not self.values.is_meta and self.packed.by_kind != self.values.is_cuda:
            packed = pack_weight(self.weight)
            self.values, self.places, self.starts = packed.values, packed.places, packed.starts

    def _set_most(self, most: int) -> None:
        self._most = most
        self.most = torch.tensor(most, device=self.values.device)

    def _load_from_state_dict(self, state: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        """The number of nonzeros may be another than here."""
        found = {n: state[prefix + n] for n in _PARTS if prefix + n in state}
        if len(found) == len(_PARTS):
            self._require(found, prefix)
            for name, tensor in found.items():
                own = getattr(self, name)
                if own.shape != tensor.shape:
                    setattr(self, name, own.new_empty(tensor.shape))
        super()._load_from_state_dict(state, prefix, *rest)
        self._order()
        self._most, self._dense = int(self.most), None

    def _require(self, found: Mapping[str, torch.Tensor], prefix: str) -> None:
        """A kernel reads where these point: nothing may point outside."""
        values, places, starts = (found[n] for n in _PARTS)
        rows, count = self.out_features * tiles_of(self.in_features), len(places)
        fits = values.shape == (count, CHUNK) and places.shape == (count,) and starts.shape == (rows + 1,)
        fits = fits and places.dtype is torch.int64 and starts.dtype is torch.int32
        if not fits:
            got = ", ".join(f"{n} {tuple(t.shape)} {t.dtype}" for n, t in found.items())
            raise explain(
                f"packed weights of {self.out_features} x {self.in_features}",
                got,
                "Load the file of this model.",
                prefix,
            )
        require_places(Packed(values, places, starts, (self.out_features, self.in_features)), prefix)


def require_places(packed: Packed, where: str) -> None:
    """Every chunk within its row's tile, every row's chunks after those of the row before."""
    rows, columns = packed.shape
    tiles, starts = tiles_of(columns), packed.starts.long()
    good = bool((starts.diff() >= 0).all()) and int(starts[0]) == 0 and int(starts[-1]) == len(packed.places)
    if good:
        tile = torch.repeat_interleave(torch.arange(rows * tiles, device=starts.device) % tiles, starts.diff())
        within = columns_of(packed.places)
        first, last = within[:, 0], within[:, -1]
        good = bool(((first >= tile * TILE) & (last < ((tile + 1) * TILE).clamp(max=columns))).all())
    if not good:
        raise explain("places within the matrix", "some outside", "The file is damaged: pack the model again.", where)


def packable(model: nn.Module, zeros: float = WORTH) -> Iterator[tuple[str, nn.Linear]]:
    """Linear layers with enough zeros whose weight is their own and used by nothing else."""
    owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    for name, module in model.named_modules():
        hooked = "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks
        if type(module) is not nn.Linear or type(module.weight) is not nn.Parameter or hooked:
            continue  # something else happens with its weight
        weight = module.weight
        if owners[id(weight)] > 1 or weight.dtype not in DTYPES or weight.shape[1] > MOST_COLUMNS or weight.is_meta:
            continue
        if weight.numel() and 1 - int((weight != 0).sum()) / weight.numel() >= zeros:
            yield name, module


def pack(model: nn.Module, zeros: float = WORTH, keep_dense: bool = False) -> nn.Module:
    """A copy of the model in which linear layers with at least this share of zeros are packed."""
    if not 0 <= zeros <= 1:
        raise explain("a share of zeros between 0 and 1", repr(zeros), f"For example {WORTH}.", "pack")
    layers = {name: SparseLinear.of(layer, keep_dense=keep_dense) for name, layer in packable(model, zeros)}
    return with_layers(model, layers)


def pack_(model: nn.Module, layers: Mapping[str, int]) -> nn.Module:
    """Pack these layers of the model itself; for each up to how many rows of inputs the kernel is used."""
    for name, most in layers.items():
        try:
            layer = model.get_submodule(name)
        except AttributeError:
            layer = model
        if type(layer) is not nn.Linear:
            raise explain(f"a linear layer {name!r} to pack", type(layer).__name__, "Check the model.", "pack")
        made = SparseLinear.of(layer, most)
        if not name:
            return made
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, made)
    return model


def packed_layers(model: nn.Module) -> dict[str, int]:
    """Layers that are packed, and up to how many rows of inputs their kernel is used."""
    return {name: m._most for name, m in model.named_modules() if isinstance(m, SparseLinear)}


def unpack(model: nn.Module) -> nn.Module:
    """A copy of the model in which every packed layer is an ordinary one again, exactly as it was."""
    return with_layers(model, {n: _plain(m) for n, m in model.named_modules() if isinstance(m, SparseLinear)})


def _plain(layer: SparseLinear) -> nn.Linear:
    with torch.device("meta"):
        made = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
    made.weight = nn.Parameter(layer.weight)
    if layer.bias is not None:
        made.bias = nn.Parameter(layer.bias.detach().clone())
    return made.train(layer.training)


def with_layers(model: nn.Module, layers: Mapping[str, nn.Module]) -> nn.Module:
    """A copy with other layers; what they stand in for is not copied."""
    memo: dict[int, Any] = {id(model.get_submodule(name)): layer for name, layer in layers.items()}
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise explain(
            "a model that can be copied",
            f"{type(error).__name__}: {error}",
            "Remove what cannot be copied from the modules' attributes.",
            type(model).__name__,
        ) from error
