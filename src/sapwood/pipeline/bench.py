"""``bench_matmul`` and ``bench_model``: every form at every batch size, in turns with dense."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from sapwood.capture.run import Inputs, as_call, results_in, tensors_in
from sapwood.errors import SapwoodError, explain
from sapwood.masking.mask import mask
from sapwood.measurement.backends import BACKENDS
from sapwood.measurement.forms import (
    FORMS,
    HALF_ONLY,
    SEMI_STRUCTURED,
    Packed,
    Product,
    cost,
    make_input,
    pack_forms,
    refusal,
)
from sapwood.measurement.machine import Ceilings, Others
from sapwood.measurement.measure import out_of_memory
from sapwood.measurement.model_forms import (
    Converted,
    dense_cost,
    placed,
    sparse_cost,
    to_form,
    with_batch,
)
from sapwood.measurement.points import (
    Bench,
    Candidate,
    Point,
    Row,
    about,
    cache_bytes,
    chosen_device,
    chosen_dtype,
    copies_needed,
    free_bytes,
    limits_of,
    measure_point,
    passes_needed,
    release,
    told,
)
from sapwood.pipeline.prune import prune
from sapwood.types import Budget, Tell

Measured = tuple[tuple[Row, ...], dict[str, str]]
SMALLEST = 16


def _quiet(what: str, done: int, total: int) -> None:
    return None


def bench_matmul(
    rows: int,
    cols: int,
    batches: Sequence[int] = (1, 16, 256),
    sparsities: Sequence[float] = (0.5, 0.9),
    device: str | None = None,
    dtype: str | None = None,
    backend: str | None = None,
    seconds: float = 1.0,
    tell: Tell = _quiet,
    forms: Sequence[str] = FORMS,
) -> Bench:
    """The forms of a product with weights of [rows, cols]."""
    _require_numbers(batches, sparsities, seconds)
    if min(rows, cols) < SMALLEST:
        remedy = "Products this small cost nothing but the call."
        raise explain(f"at least {SMALLEST} rows and columns", f"{rows}x{cols}", remedy, "--matmul")
    where, others = chosen_device(device), Others()
    product = Product(rows, cols, where, chosen_dtype(dtype, where))
    _require_room(product)
    how = _chosen_backend(backend, where, ("eager", "graph"))
    tell("what the machine reaches", 0, len(batches) * len(sparsities))
    limits = limits_of(where, product.dtype)
    points: list[Point] = []
    for sparsity in sparsities:
        failed: str | None = None
        packed: list[Packed] = []
        missing: dict[str, str] = {}
        tell(f"packing weights with {sparsity:g} zeros", len(points), len(batches) * len(sparsities))
        try:
            packed, missing = pack_forms(product, sparsity, 0.5 in sparsities, forms)
        except Exception as error:
            failed = told(error)
        room = _room(where)
        for batch in batches:
            tell(f"batch {batch}, sparsity {sparsity:g}", len(points), len(batches) * len(sparsities))

            def measured(packed: list[Packed] = packed, batch: int = batch, room: float = room) -> Measured:
                return _products(product, packed, batch, how, seconds, limits, room)

            points.append(_point(batch, sparsity, missing, measured if failed is None else failed))
        packed.clear()
        release()
    what = {"kind": "matmul", "rows": rows, "cols": cols}
    return _bench(what, where, product.dtype, how, seconds, points, limits, others)


def _products(
    product: Product,
    forms: Sequence[Packed],
    batch: int,
    backend: str,
    seconds: float,
    limits: Ceilings | None,
    room: float,
) -> Measured:
    costs = {f.form: cost(f.form, product, batch, f.nonzeros) for f in forms}
    dense = costs["dense"]
    floor = 0.0 if limits is None else limits.floor_ms(dense.flops, dense.moved_bytes)
    sizes = [c.weight_bytes for c in costs.values()]
    copies = copies_needed(sizes, cache_bytes(product.device), room, floor)
    for form in forms:
        form.at_least(copies)
    x = make_input(product, batch)
    passes = passes_needed(copies, floor)
    candidates = [f.candidate(product, x, copies, passes) for f in forms]
    return measure_point(candidates, as_call(x), product.device, product.dtype, backend, seconds, limits)


def _room(device: torch.device) -> float:
    """Half of the memory that is free."""
    return free_bytes(device) / 2


def _require_room(product: Product) -> None:
    """The weights in float32, and dense, zeros and their references, before the machine comes to a halt."""
    need = product.rows * product.cols * (4 + 5 * product.value_bytes)
    free = free_bytes(product.device)
    if need > free:
        got = f"{product.rows}x{product.cols}, which need about {need / 2**30:.1f} GiB of {free / 2**30:.1f} GiB"
        raise explain("weights that fit into memory", got, "Choose a smaller shape.", "--matmul")


def bench_model(
    model: nn.Module,
    inputs: Any,
    batches: Sequence[int] = (1, 8),
    sparsities: Sequence[float] = (0.5, 0.9),
    channels: float = 0.5,
    device: str | None = None,
    dtype: str | None = None,
    backend: str | None = None,
    seconds: float = 1.0,
    tell: Tell = _quiet,
    name: str = "",
) -> Bench:
    """The forms of a model: zeros by ``mask``, linear layers as CSR and 2:4, and a cut that keeps ``channels``.

    The model given is not changed.
    """
    _require_numbers(batches, sparsities, seconds)
    if not 0 < channels < 1:
        raise explain("a fraction of the channels to keep, above 0 and below 1", f"{channels:g}", "", "--channels")
    where, others = _device_for(device, backend), Others()
    number = chosen_dtype(dtype, where)
    how = _chosen_backend(backend, where, tuple(BACKENDS))
    call, total = as_call(inputs), len(batches) * len(sparsities)
    tell("what the machine reaches", 0, total)
    limits = limits_of(where, number)
    tell("cutting", 0, total)
    dense, gone = placed(model, where, number), {}
    _require_runs(dense, with_batch(call, batches[0], where, number))
    small: nn.Module | None = None
    try:
        small = placed(prune(model, call, Budget(channels=channels)).model, where, number)
    except Exception as error:
        gone["cut"] = told(error)
    points: list[Point] = []
    for sparsity in sparsities:
        tell(f"masking {sparsity:g} of the weights", len(points), total)
        maker = _ModelForms(model, dense, small, sparsity, where, number)
        missing = {**maker.make(with_half=0.5 in sparsities), **gone}
        for batch in batches:
            tell(f"batch {batch}, sparsity {sparsity:g}", len(points), total)

            def measured(maker: _ModelForms = maker, batch: int = batch) -> Measured:
                given = with_batch(call, batch, where, number)
                return measure_point(maker.candidates(given), given, where, number, how, seconds, limits)

            points.append(_point(batch, sparsity, missing, measured))
        del maker
        release()
    shapes = [list(t.shape) for t in tensors_in(call)]
    what = {"kind": "model", "model": name or type(model).__name__, "inputs": shapes, "channels": channels}
    return _bench(what, where, number, how, seconds, points, limits, others)


def _require_runs(model: nn.Module, inputs: Inputs) -> None:
    """Say at once that a model does not take its inputs, not at every point; memory is a matter of each point."""
    try:
        with torch.no_grad():
            model(*inputs[0], **inputs[1])
    except Exception as error:
        if out_of_memory(error):
            release()
            return
        shapes = " and ".join("x".join(map(str, t.shape)) for t in tensors_in(inputs))
        dtype = next((str(t.dtype) for t in tensors_in(inputs)), "").removeprefix("torch.")
        remedy = "Check --input and --dtype: the first size is the batch."
        raise explain(f"a forward on {shapes} of {dtype}", told(error), remedy, "bench") from error


class _ModelForms:
    """The variants of a model at one sparsity."""

    def __init__(
        self,
        model: nn.Module,
        dense: nn.Module,
        small: nn.Module | None,
        sparsity: float,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.model, self.sparsity, self.device, self.dtype = model, sparsity, device, dtype
        self.plain: dict[str, nn.Module] = {"dense": dense}
        self.small = small
        self.sparse: dict[str, tuple[Converted, nn.Module]] = {}

    def make(self, with_half: bool) -> dict[str, str]:
        """Mask and convert; what cannot be, and why."""
        skipped = {"BSR": "zeros of a model lie anywhere; blocks are measured with --matmul"}
        try:
            zeros = self._masked(budget=Budget(sparsity=self.sparsity))
            self.plain["zeros"] = zeros
        except Exception as error:
            skipped |= dict.fromkeys(("zeros", "CSR", "packed"), told(error))
        for form in ("CSR", "packed") if "zeros" in self.plain else ():
            try:
                self.sparse[form] = to_form(form, zeros), zeros
            except Exception as error:
                skipped[form] = told(error)
        for form in SEMI_STRUCTURED:
            if why := refusal(self.device, self.dtype, self.sparsity):
                skipped |= {} if why == HALF_ONLY and with_half else {form: why}
                continue
            try:
                half = self._masked(pattern="2:4")
                self.sparse[form] = to_form(form, half), half
            except Exception as error:
                skipped[form] = told(error)
        return skipped

    def _masked(self, budget: Budget | None = None, pattern: str = "unstructured") -> nn.Module:
        """The same share in every layer, so that what is measured does not hang on how the weights were drawn."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a layer that dies is no matter here: only the time is asked for
            return placed(mask(self.model, budget, pattern=pattern, scope="local"), self.device, self.dtype)

    def candidates(self, inputs: Inputs) -> list[Candidate]:
        cost_of_dense = dense_cost(self.plain["dense"], inputs)
        found = [
            Candidate(form, {"as it is": model}, _output(model, inputs), cost_of_dense)
            for form, model in self.plain.items()
        ]
        for form, (converted, masked) in self.sparse.items():
            less = sparse_cost(form, masked, inputs, cost_of_dense, converted.nonzeros)
            found.append(Candidate(form, converted.ways, _output(masked, inputs), less, notes=converted.notes))
        if self.small is not None:
            less = dense_cost(self.small, inputs)
            found.append(Candidate("cut", {"as it is": self.small}, _output(self.small, inputs), less))
        return found


def _output(model: nn.Module, inputs: Inputs) -> Callable[[], list[torch.Tensor]]:
    def expected() -> list[torch.Tensor]:
        with torch.no_grad():
            return list(results_in(model, model(*inputs[0], **inputs[1])))

    return expected


def _point(batch: int, sparsity: float, missing: Mapping[str, str], measured: Callable[[], Measured] | str) -> Point:
    """A point, or the reason why there is none: one that fails does not take the table with it."""
    if isinstance(measured, str):
        return Point(batch, sparsity, (), {"dense": measured})
    try:
        rows, skipped = measured()
        return Point(batch, sparsity, rows, {**missing, **skipped})
    except Exception as error:
        why = told(error)
    release()
    return Point(batch, sparsity, (), {"dense": why})


def _bench(
    what: dict[str, Any],
    device: torch.device,
    dtype: torch.dtype,
    backend: str,
    seconds: float,
    points: list[Point],
    limits: Ceilings | None,
    others: Others,
) -> Bench:
    if not any(p.rows for p in points):
        raise SapwoodError(f"bench: expected dense to run at one point at least; {points[0].skipped['dense']}")
    name = str(dtype).removeprefix("torch.")
    notes = others.note(device)
    if limits is None:
        notes = ("the machine's ceilings could not be measured: no estimates", *notes)
    return Bench(what, str(device), name, backend, seconds, tuple(points), about(device), limits, notes)


def _require_numbers(batches: Sequence[int], sparsities: Sequence[float], seconds: float) -> None:
    for batch in batches or (0,):
        if batch < 1:
            raise explain("positive batch sizes", str(batch), "For example --batch 1,16,256.", "--batch")
    for share in sparsities or (0.0,):
        if not 0 < share < 1:
            remedy = "For example --sparsity 0.5,0.9 for half and 90% zeros."
            raise explain("fractions of zeros above 0 and below 1", f"{share:g}", remedy, "--sparsity")
    if not 0 < seconds <= 3600:
        raise explain("seconds above 0, at most 3600", f"{seconds:g}", "For example --seconds 1.", "--seconds")


def _device_for(device: str | None, backend: str | None) -> torch.device:
    """Where a backend runs, unless it was said."""
    return chosen_device("cpu" if device is None and backend in ("onnxruntime", "openvino") else device)


def _chosen_backend(name: str | None, device: torch.device, known: tuple[str, ...]) -> str:
    if name is None:
        return "graph" if device.type == "cuda" else "eager"
    if name not in known:
        raise explain(f"one of {', '.join(known)}", repr(name), "Choose how it is run.", "--backend")
    if name == "graph" and device.type != "cuda":
        raise explain("a CUDA device for graph", device.type, "Use --backend eager.", "--backend")
    if name in ("onnxruntime", "openvino") and device.type != "cpu":
        raise explain(f"the CPU for {name}", device.type, "Use --device cpu.", "--backend")
    return name
