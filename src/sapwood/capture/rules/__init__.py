"""Operator rules, one file per family. Importing this package fills the registry."""

from sapwood.capture.rules import contraction, elementwise, indexing, norms, pooling, reductions, shapes

__all__ = ["contraction", "elementwise", "indexing", "norms", "pooling", "reductions", "shapes"]
