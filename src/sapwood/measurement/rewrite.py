"""A model's graph with each convolution computed in the fastest way, with its bias, sum and activation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from sapwood.capture.run import Inputs
from sapwood.errors import SapwoodError
from sapwood.measurement.convolutions import AFTER, Arranged, Conv, fastest_way
from sapwood.measurement.graphs import ARRANGED, changed, constant, conv_arguments, free_name, held
from sapwood.measurement.padding import widen, widen_products
from sapwood.storage.export import quiet

_aten: Any = torch.ops.aten
_ACTIVATIONS = {getattr(_aten, name + end).default: name for name in AFTER if name for end in ("", "_")}
_BOUNDED = (_aten.hardtanh.default, _aten.hardtanh_.default)
_ADD = (_aten.add.Tensor, _aten.add_.Tensor)
PADDED, PRODUCTS = "padded to eights", "products padded to eights"


@dataclass
class _Site:
    """A convolution node, and the nodes after it that can be done with it."""

    node: fx.Node
    last: fx.Node
    other: fx.Node | None
    conv: Conv


def rewrite(model: nn.Module, inputs: Inputs, pad: bool = False) -> tuple[nn.Module, dict[str, int]]:
    """The exported graph of a model in evaluation mode, and how many convolutions run in which way.

    ``pad``: with channels added where widths are no multiples of eight, also to products, which count by themselves.
    """
    with quiet(), torch.no_grad():
        made: Any = torch.export.export(model, *inputs, strict=False).module()
    nodes: fx.Graph = made.graph
    used: dict[str, int] = {}
    if pad:
        found = {PADDED: widen(made), PRODUCTS: widen_products(made)}
        used = {name: many for name, many in found.items() if many}
        if not used:
            raise SapwoodError("nothing could be widened")
    _join_biases(made)
    for node in list(nodes.nodes):
        if node.op == "call_function" and node.target is _aten.conv2d.default and _plain(node):
            name = _replace(made, _site(node))
            used[name] = used.get(name, 0) + 1
    _drop_unused(made)
    nodes.lint()
    made.recompile()
    return made, used


def _drop_unused(made: Any) -> None:
    """Weights that were replaced by others are not kept."""
    for node in [n for n in made.graph.nodes if n.op == "get_attr" and not n.users]:
        made.graph.erase_node(node)
    used = {str(n.target) for n in made.graph.nodes if n.op == "get_attr"}
    whole = tuple(f"{n.target}." for n in made.graph.nodes if n.op == "call_module")
    for name in [name for name, _ in (*made.named_parameters(), *made.named_buffers())]:
        if name not in used and not name.startswith(whole):
            path, _, own = name.rpartition(".")
            delattr(made.get_submodule(path), own)


def _plain(node: fx.Node) -> bool:
    """A convolution of images on a GPU whose weight and bias are constants."""
    x, weight, bias, *_ = conv_arguments(node)
    known = weight.op == "get_attr" and (bias is None or bias.op == "get_attr")
    return known and _on_gpu(weight) and _value(x).dim() == 4 and _value(x).dtype == _value(weight).dtype


def _on_gpu(weight: fx.Node) -> bool:
    return _value(weight).is_cuda


def _value(node: Any) -> torch.Tensor:
    found: torch.Tensor = node.meta["val"]
    return found


def _site(node: fx.Node) -> _Site:
    """Look ahead: an activation, or a sum with something that is there already, and perhaps an activation."""
    _, weight, bias, stride, padding, dilation, groups = conv_arguments(node)
    last, other = node, None
    after = _only_user(node)
    if after is not None and after.target in _ADD and len(after.args) == 2 and not after.kwargs:
        left, right = after.args
        other_node = right if left is node else left
        then = _only_user(after)
        if (
            isinstance(other_node, fx.Node)
            and other_node is not node
            and _same_form(_value(node), other_node)
            and _value(after).stride() == _value(node).stride()
            and other_node < node
        ):
            other, last = other_node, then if then is not None and _activation(then) else after
    elif after is not None and _activation(after):
        last = after
    window = _pair(_value(weight).shape[2:])
    if _disturbed(node, last):
        last, other = node, None
    done = _activation(last) if last is not node else ""
    places = _pair(stride), _pair(padding), _pair(dilation)
    conv = Conv(window, *places, groups, done, other is not None, bias is not None)
    return _Site(node, last, other, conv)


def _activation(node: fx.Node) -> str:
    """Its name, where it is one that a convolution can do."""
    if node.target in _BOUNDED:
        return "relu6" if tuple(node.args[1:]) == (0.0, 6.0) and not node.kwargs else ""
    return _ACTIVATIONS.get(node.target, "") if len(node.args) == 1 and not node.kwargs else ""


def _disturbed(node: fx.Node, last: fx.Node) -> bool:
    """Whether something between the two changes values in place, so that the first may not be done later.

    A sum into the other operand's memory is such a change, too.
    """
    between, step = [], node.next
    while step is not last and node is not last:
        between.append(step)
        step = step.next
    own = {node, last, *node.users}
    for other in (*between, last):
        if other not in own and any(True for _ in changed(other)):
            return True
        if other in own and other.target is _aten.add_.Tensor and other.args[0] is not node:
            return True
    return False


def _pair(values: Any) -> tuple[int, int]:
    first, *rest = values
    return int(first), int(rest[0] if rest else first)


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _same_form(value: torch.Tensor, other: fx.Node) -> bool:
    there = other.meta.get("val")
    return isinstance(there, torch.Tensor) and there.shape == value.shape and there.dtype == value.dtype


def _join_biases(made: Any) -> None:
    """Where two convolutions are added, one bias does for both."""
    for node in list(made.graph.nodes):
        if node.target not in _ADD or len(node.args) != 2 or node.kwargs:
            continue
        pair = [n for n in node.args if isinstance(n, fx.Node) and n.target is _aten.conv2d.default]
        biases = [conv_arguments(n)[2] for n in pair]
        alone = all(len(n.users) == 1 for n in pair) and len(set(pair)) == 2
        if not alone or not all(isinstance(b, fx.Node) and b.op == "get_attr" for b in biases):
            continue
        if _value(pair[0]).shape != _value(pair[1]).shape:
            continue
        first, second = sorted(pair)
        total = held(made, biases[0]).float() + held(made, biases[1]).float()
        joined = constant(made, total.to(held(made, biases[0]).dtype), second)
        second.update_arg(2, joined)
        first.update_arg(2, None)


def _replace(made: Any, site: _Site) -> str:
    """Put the fastest way in place of the nodes of a site."""
    x, weight, bias, *_ = conv_arguments(site.node)
    kernel = held(made, weight)
    value = held(made, bias) if bias is not None else None
    way = fastest_way(_value(x), kernel, site.conv)
    if way.name == "separate":
        return way.name
    name = free_name(made, ARRANGED)
    made.add_module(name, Arranged(way, kernel, value, site.conv))
    with made.graph.inserting_before(site.last):
        done = made.graph.call_module(name, (x,) if site.other is None else (x, site.other))
    done.meta["val"] = _value(site.node)
    gone = [site.last]
    while gone[-1] is not site.node:  # back along the chain: activation, sum, convolution
        gone.append(next(n for n in gone[-1].all_input_nodes if n is not site.other))
    site.last.replace_all_uses_with(done)
    for node in gone:
        made.graph.erase_node(node)
    return way.name
