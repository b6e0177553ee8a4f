"""Example inputs as data: enough to make others of the same kind."""

from __future__ import annotations

import math
from typing import Any

import torch

from sapwood.capture.run import as_call
from sapwood.errors import SapwoodError, explain


def describe_inputs(example_inputs: Any) -> Any:
    """Shapes and dtypes of a call, enough to make inputs of the same kind."""
    args, kwargs = as_call(example_inputs)
    return {"args": [_spec(a) for a in args], "kwargs": {k: _spec(v) for k, v in kwargs.items()}}


def _spec(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        spec = {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
        whole = not value.is_floating_point() and value.numel() and value.dtype != torch.bool
        return {"tensor": spec | ({"high": int(value.max()) + 1} if whole else {})}
    if isinstance(value, (bool, int, float, str)) or value is None:
        return {"value": value}
    if type(value) in (list, tuple):
        return {type(value).__name__: [_spec(v) for v in value]}
    if isinstance(value, dict) and all(isinstance(k, str) for k in value):
        return {"dict": {k: _spec(v) for k, v in value.items()}}
    raise SapwoodError(
        f"example_inputs: expected tensors and plain values to remember; got {type(value).__name__}. "
        "Leave example_inputs out and give them at export."
    )


def make_inputs(specs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Random inputs of the remembered shapes and dtypes."""

    def make(spec: Any) -> Any:
        if "list" in spec or "tuple" in spec:
            return [make(v) for v in spec["list"]] if "list" in spec else tuple(make(v) for v in spec["tuple"])
        if "dict" in spec:
            return {str(k): make(v) for k, v in spec["dict"].items()}
        if "tensor" not in spec:
            return spec["value"]
        about = spec["tensor"]
        dtype, shape = getattr(torch, about["dtype"]), [int(n) for n in about["shape"]]
        if not isinstance(dtype, torch.dtype) or math.prod(shape) > 2**28:
            raise ValueError(f"{about['dtype']} {shape}")
        if dtype.is_floating_point:
            return torch.randn(shape, dtype=dtype)
        return torch.randint(0, max(1, int(about.get("high", 2))), shape).to(dtype)

    try:
        return tuple(make(a) for a in specs["args"]), {str(k): make(v) for k, v in specs["kwargs"].items()}
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        got = f"{type(error).__name__} ({str(error)[:80]})"
        raise explain("shapes and dtypes of inputs", got, "Pass --input 1x3x224x224.", "the bundle") from None
