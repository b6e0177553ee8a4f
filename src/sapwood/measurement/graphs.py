"""Exported graphs: their constants, the arguments of a convolution, and what a node changes in place."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

ARRANGED = "_arranged"
_HARMLESS = (ARRANGED, "_guards_fn")
"""What modules that change nothing are called: those put in here, and the export's own check of the inputs."""


def held(made: Any, node: fx.Node) -> torch.Tensor:
    """The constant that a node stands for."""
    found: Any = made
    for part in str(node.target).split("."):
        found = getattr(found, part)
    return found.detach()  # type: ignore[no-any-return]


def constant(made: Any, value: torch.Tensor, before: fx.Node) -> fx.Node:
    name = free_name(made, "_constant")
    made.register_buffer(name, value)
    with made.graph.inserting_before(before):
        node: fx.Node = made.graph.get_attr(name)
    node.meta["val"] = value
    return node


def free_name(made: Any, stem: str) -> str:
    return next(name for number in range(10**6) if not hasattr(made, name := f"{stem}_{number}"))


def conv_arguments(node: fx.Node) -> tuple[Any, ...]:
    """x, weight, bias, stride, padding, dilation and groups."""
    given = (*node.args, *[None] * (7 - len(node.args)))
    x, weight, bias, stride, padding, dilation, groups = given
    return x, weight, bias, stride or [1, 1], padding or [0, 0], dilation or [1, 1], groups or 1


def changed(node: fx.Node) -> Iterator[fx.Node]:
    """Nodes whose values a node changes; all that an unknown one is given."""
    if node.op == "call_module":
        yield from () if str(node.target).startswith(_HARMLESS) else node.all_input_nodes
    elif node.op == "call_function" and node.target is not operator.getitem:
        schema = getattr(node.target, "_schema", None)
        if schema is None:
            yield from node.all_input_nodes
        elif schema.is_mutable:
            given = {**dict(zip((a.name for a in schema.arguments), node.args, strict=False)), **node.kwargs}
            written = [given.get(a.name) for a in schema.arguments if a.alias_info and a.alias_info.is_write]
            yield from (n for n in pytree.tree_leaves(written) if isinstance(n, fx.Node))
