"""Masks: weights that become zero and stay zero."""

from sapwood.masking.hold import Hold, hold
from sapwood.masking.mask import mask, mask_
from sapwood.masking.report import Sparsity, sparsity

__all__ = ["Hold", "Sparsity", "hold", "mask", "mask_", "sparsity"]
