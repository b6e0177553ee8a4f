"""Single operators for backends that take whole models: as an ONNX graph of one node, or with packed weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def onnx_operator(name: str, args: dict[str, Any]) -> tuple[bytes, torch.Tensor] | None:
    """A convolution or product with constant weights as an ONNX model, and its input; None for others."""
    import onnx
    from onnx import helper, numpy_helper

    if name == "aten::convolution" and not args["transposed"]:
        x, weight = args["input"], args["weight"]
        padding = [int(n) for n in args["padding"]]
        settings: dict[str, Any] = {
            "strides": [int(n) for n in args["stride"]],
            "dilations": [int(n) for n in args["dilation"]],
            "pads": padding + padding,
            "group": int(args["groups"]),
        }
        node = helper.make_node("Conv", ["x", "w"], ["y"], **settings)
    elif name in ("aten::addmm", "aten::mm", "aten::linear"):
        x = args.get("mat1", args.get("self", args.get("input")))
        weight = args["weight"].t() if name == "aten::linear" else args["mat2"]
        node = helper.make_node("MatMul", ["x", "w"], ["y"])
    else:
        return None
    if x.dtype is not torch.float32:
        return None
    x = x.contiguous()
    graph = helper.make_graph(
        [node],
        "operator",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, list(x.shape))],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)],
        [numpy_helper.from_array(weight.contiguous().numpy(), "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    return model.SerializeToString(), x


def packed_convolution(args: dict[str, Any]) -> Callable[[], Any] | None:
    """A two-dimensional float32 convolution whose weight is packed once, as compiled models have it."""
    x, weight = args["input"], args["weight"]
    if x.dim() != 4 or args["transposed"] or x.dtype is not torch.float32:
        return None
    places = [[int(n) for n in args[name]] for name in ("padding", "stride", "dilation")]
    own: Any = torch.ops.mkldnn
    try:
        packed = own._reorder_convolution_weight(weight.contiguous(), *places, args["groups"], list(x.shape))
        own._convolution_pointwise(x, packed, None, *places, args["groups"], "relu", [], "")
    except (RuntimeError, AttributeError):  # built without oneDNN
        return None
    return lambda: own._convolution_pointwise(x, packed, None, *places, args["groups"], "relu", [], "")
