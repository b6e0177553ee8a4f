"""What joins the stages: plans that are tried before they are handed out, pruning on a schedule, runs."""

from sapwood.pipeline.prune import Pruned, make_plan, prune
from sapwood.pipeline.shrink import Shrunk, prune_and_recover

__all__ = ["Pruned", "Shrunk", "make_plan", "prune", "prune_and_recover"]
