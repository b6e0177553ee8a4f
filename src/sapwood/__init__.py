"""Sapwood prunes PyTorch models and proves what was gained."""

from sapwood.capture.trace import Trace, trace
from sapwood.errors import SapwoodError
from sapwood.pipeline import Pruned, make_plan, prune
from sapwood.surgery import check, cut, cut_optimizer, masked_reference
from sapwood.types import Budget, CheckResult, Frozen, Group, Plan

__version__ = "0.1.0"

__all__ = [
    "Budget",
    "CheckResult",
    "Frozen",
    "Group",
    "Plan",
    "Pruned",
    "SapwoodError",
    "Trace",
    "check",
    "cut",
    "cut_optimizer",
    "make_plan",
    "masked_reference",
    "prune",
    "trace",
]
