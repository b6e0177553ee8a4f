"""Channels added to the convolutions and products of a graph, with zero weights, up to widths that a GPU likes.

A width that is no multiple of eight costs a GPU several times over: rows of 16-bit numbers then do not begin where 16
bytes can be read at once. The channels that are added are read by nobody: the weights that meet them are zero. That
holds as long as they are finite, so float16, which overflows, is left alone.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.utils import _pytree as pytree

from sapwood.measurement.graphs import changed, constant, conv_arguments, held

STEP = 8
_aten: Any = torch.ops.aten
_SAME = """relu relu_ relu6 relu6_ hardtanh hardtanh_ silu silu_ hardswish hardswish_ gelu leaky_relu leaky_relu_
sigmoid sigmoid_ hardsigmoid hardsigmoid_ tanh dropout"""
ELEMENTWISE = {getattr(_aten, name).default for name in _SAME.split()}
ONE_BY_ONE = ELEMENTWISE | {getattr(_aten, f"{name}_pool2d").default for name in ("max", "avg", "adaptive_avg")}
"""What does the same to every channel, whatever the others are."""
ENOUGH = 2**16
"""Weights of a product for which it pays to copy what goes in and comes out."""
PASS_ON = {_aten.dropout, _aten.contiguous, _aten.to, _aten.reshape, _aten.flatten, _aten.type_as}
"""What may hand on what it was given, though an exported graph has it as something new."""
PAIRS = {_aten.add.Tensor, _aten.add_.Tensor, _aten.mul.Tensor, _aten.mul_.Tensor}


def worth_while(model: nn.Module) -> bool:
    """Whether there are convolutions or products in bfloat16 with widths that a GPU does not like."""
    for module in model.modules():
        own = [p for p in module.parameters(recurse=False) if p.dtype == torch.bfloat16]
        if isinstance(module, nn.Conv2d) and own and module.groups in (1, module.out_channels):
            found = bool(module.out_channels % STEP)
        else:
            found = isinstance(module, (nn.Linear, nn.MultiheadAttention)) and any(map(_odd, own))
        if found:
            return True
    return False


def _odd(weight: torch.Tensor) -> bool:
    return weight.dim() == 2 and weight.numel() >= ENOUGH and any(n % STEP for n in weight.shape)


def widen(made: Any) -> int:
    """Widen the convolutions of an exported graph in place; how many were."""
    return _walk(made, _Convolutions)


def widen_products(made: Any) -> int:
    """The same for products with constant weights, along the last axis."""
    return _walk(made, _Products)


def _walk(made: Any, kind: type[_Walker]) -> int:
    if _changes_are_seen(made.graph, kind.touched):
        return 0
    walker = kind(made)
    for node in list(made.graph.nodes):
        walker.visit(node)
    for node in reversed(walker.gone):
        made.graph.erase_node(node)
    made.graph.lint()
    made.recompile()
    return walker.count


def _changes_are_seen(graph: fx.Graph, touched: set[Any]) -> bool:
    """Whether anybody else may see a value that is changed in place: then a copy of a part of it would not do.

    Up to its last change, memory must be passed on from one node to the next, each the only one to know the last. What
    no operator of those that may be ``touched`` knows does not matter.
    """
    order = {node: number for number, node in enumerate(graph.nodes)}
    memories: dict[fx.Node, set[int]] = {}
    owners: dict[int, list[fx.Node]] = {}
    last: dict[int, fx.Node] = {}
    for node in graph.nodes:
        memories[node] = {int(t.untyped_storage()._cdata) for t in _tensors(node)}
        if getattr(node.target, "overloadpacket", None) in PASS_ON:
            memories[node] |= {memory for given in node.all_input_nodes for memory in memories[given]}
        for memory in memories[node]:
            owners.setdefault(memory, []).append(node)
        for other in changed(node):
            last |= dict.fromkeys(memories[other], node)
    return any(
        len(owner.users) > 1
        for memory, change in last.items()
        if any(owner.target in touched for owner in owners[memory])
        for owner in owners[memory]
        if order[owner] < order[change]
    )


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    return [t for t in pytree.tree_leaves(node.meta.get("val")) if isinstance(t, torch.Tensor)]


class _Walker:
    """``wide`` has, for nodes whose channels became more, the node that has them; those are ``gone`` in the end."""

    axis = 1
    touched: ClassVar[set[Any]] = set()
    """Operators that may be replaced by wide ones."""

    def __init__(self, made: Any) -> None:
        self.made, self.graph, self.count = made, made.graph, 0
        self.wide: dict[fx.Node, fx.Node] = {}
        self.narrow: dict[fx.Node, fx.Node] = {}
        self.gone: list[fx.Node] = []

    def visit(self, node: fx.Node) -> None:
        if node.op == "call_function" and self.widened(node):
            return
        inputs = [n for n in node.all_input_nodes if n in self.wide]
        if not inputs:
            return
        if node.op == "call_function" and self.passes(node):
            with self.graph.inserting_before(node):
                self.wide[node] = self.graph.node_copy(node, lambda n: self.wide.get(n, n))
            self.wide[node].meta = {**node.meta, "val": self._more(node.meta["val"])}
            self.gone.append(node)
            return
        for other in inputs:
            node.replace_input_with(other, self._cut_back(other, node))

    def widened(self, node: fx.Node) -> bool:
        """Whether it was replaced by one with more channels."""
        raise NotImplementedError

    def passes(self, node: fx.Node) -> bool:
        """Whether it can be done on the wide ones just as well."""
        raise NotImplementedError

    def put(self, node: fx.Node, arguments: tuple[Any, ...], more: int) -> None:
        """The same operator with these arguments in its place."""
        with self.graph.inserting_before(node):
            done = self.graph.call_function(node.target, arguments)
        done.meta = {**node.meta, "val": self._more(node.meta["val"])}
        self.count += 1
        if more:
            self.wide[node] = done
        else:
            node.replace_all_uses_with(done)
        self.gone.append(node)

    def _cut_back(self, node: fx.Node, before: fx.Node) -> fx.Node:
        """The channels that were there before, by themselves."""
        if node not in self.narrow:
            value = node.meta["val"]
            axis = self.axis % value.dim()
            with self.graph.inserting_before(before):
                part = self.graph.call_function(_aten.slice.Tensor, (self.wide[node], axis, 0, value.shape[axis]))
                how = {"memory_format": _layout(value)}
                self.narrow[node] = self.graph.call_function(_aten.clone.default, (part,), how)
            part.meta = self.narrow[node].meta = dict(node.meta)
        return self.narrow[node]

    def _more(self, value: torch.Tensor) -> torch.Tensor:
        """A value without data of the shape that the wide node has."""
        shape = list(value.shape)
        shape[self.axis] += -shape[self.axis] % STEP
        return torch.empty(shape, dtype=value.dtype, device="meta").to(memory_format=_layout(value))


def _layout(value: torch.Tensor) -> torch.memory_format:
    last = value.dim() == 4 and value.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if last else torch.contiguous_format


class _Convolutions(_Walker):
    """Of one group, or of a kernel for each channel, whose weights are constants."""

    touched: ClassVar[set[Any]] = {_aten.conv2d.default, _aten.mean.dim} | ONE_BY_ONE | PAIRS

    def passes(self, node: fx.Node) -> bool:
        tensors, value = node.all_input_nodes, node.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.dim() != 4 or not all(n in self.wide for n in tensors):
            return False
        if node.target is _aten.mean.dim:
            given: list[Any] = [*node.args[1:], *[None] * 2]
            dims, kept = given[:2]
            return sorted(d % 4 for d in dims or ()) == [2, 3] and bool(kept)
        pair = node.target in PAIRS and len(tensors) == len(set(node.args[:2]))
        return node.target in ONE_BY_ONE or (pair and len({n.meta["val"].shape[1] for n in tensors}) == 1)

    def widened(self, node: fx.Node) -> bool:
        if node.target is not _aten.conv2d.default:
            return False
        x, weight, bias, *places, groups = conv_arguments(node)
        constants = [n for n in (weight, bias) if n is not None]
        if node.kwargs or any(n.op != "get_attr" for n in constants) or x.meta["val"].dim() != 4:
            return False
        kernel = held(self.made, weight)
        made, taken = kernel.shape[:2]
        own = groups == made == x.meta["val"].shape[1] and taken == 1
        if (groups > 1 and not own) or (own and made % STEP and x not in self.wide):
            return False
        if made % STEP == 0 and x not in self.wide:
            return False
        more = -made % STEP
        wide_in = 0 if own or x not in self.wide else -taken % STEP
        values = F.pad(kernel, (0, 0, 0, 0, 0, wide_in, 0, more))
        values = values.contiguous(
            memory_format=torch.contiguous_format if kernel.is_contiguous() else torch.channels_last
        )
        wider: Any = None if bias is None else F.pad(held(self.made, bias), (0, more))
        arguments = (
            self.wide.get(x, x),
            constant(self.made, values, node),
            None if bias is None else constant(self.made, wider, node),
            *places,
            groups + more if own else groups,
        )
        self.put(node, arguments, more)
        return True


class _Products(_Walker):
    """Large ones; what goes in and is not wide yet gets zeros."""

    axis = -1
    touched: ClassVar[set[Any]] = {_aten.linear.default} | ELEMENTWISE | PAIRS

    def passes(self, node: fx.Node) -> bool:
        tensors, value = node.all_input_nodes, node.meta.get("val")
        if not isinstance(value, torch.Tensor) or not all(n in self.wide for n in tensors):
            return False
        pair = node.target in PAIRS and len(tensors) == len(set(node.args[:2]))
        return node.target in ELEMENTWISE or (pair and len({n.meta["val"].shape for n in tensors}) == 1)

    def widened(self, node: fx.Node) -> bool:
        if node.target is not _aten.linear.default or node.kwargs:
            return False
        given: list[Any] = [*node.args, None]
        x, weight, bias = given[:3]
        if any(n.op != "get_attr" for n in (weight, bias) if n is not None) or not _odd(held(self.made, weight)):
            return False
        kernel = held(self.made, weight)
        more, wide_in = (-n % STEP for n in kernel.shape)
        taken = self.wide.get(x, x)
        if wide_in and x not in self.wide:
            with self.graph.inserting_before(node):
                taken = self.graph.call_function(_aten.constant_pad_nd.default, (x, [0, wide_in], 0.0))
            taken.meta = {**x.meta, "val": self._more(x.meta["val"])}
        values = constant(self.made, F.pad(kernel, (0, wide_in, 0, more)), node)
        wider = None if bias is None else constant(self.made, F.pad(held(self.made, bias), (0, more)), node)
        self.put(node, (taken, values, wider), more)
        return True
