"""Sapwood prunes PyTorch models and proves what was gained."""

from sapwood.capture.registry import rule
from sapwood.capture.trace import Trace, trace
from sapwood.errors import SapwoodError
from sapwood.masking import hold, mask, mask_, sparsity
from sapwood.measurement import Comparison, Deployed, Measurement, compare, deploy, measure
from sapwood.pipeline import Pruned, Shrunk, make_plan, prune, prune_and_recover
from sapwood.recovery import Recovered, recover
from sapwood.sparse import pack, unpack
from sapwood.storage import load, load_, save
from sapwood.surgery import check, cut, cut_optimizer, masked_reference
from sapwood.types import Budget, CheckResult, Frozen, Group, Plan
from sapwood.version import __version__

__all__ = [
    "Budget",
    "CheckResult",
    "Comparison",
    "Deployed",
    "Frozen",
    "Group",
    "Measurement",
    "Plan",
    "Pruned",
    "Recovered",
    "SapwoodError",
    "Shrunk",
    "Trace",
    "__version__",
    "check",
    "compare",
    "cut",
    "cut_optimizer",
    "deploy",
    "hold",
    "load",
    "load_",
    "make_plan",
    "mask",
    "mask_",
    "masked_reference",
    "measure",
    "pack",
    "prune",
    "prune_and_recover",
    "recover",
    "rule",
    "save",
    "sparsity",
    "trace",
    "unpack",
]
