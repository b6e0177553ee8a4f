"""Packed weights, and layers that skip their zeros."""

from sapwood.sparse.linear import SparseLinear, pack, unpack

__all__ = ["SparseLinear", "pack", "unpack"]
