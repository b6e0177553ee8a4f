"""Surgery: make the cut on a copy, and prove it right."""

from sapwood.surgery.check import check
from sapwood.surgery.cut import cut
from sapwood.surgery.optimizer import cut_optimizer
from sapwood.surgery.reference import masked_reference

__all__ = ["check", "cut", "cut_optimizer", "masked_reference"]
