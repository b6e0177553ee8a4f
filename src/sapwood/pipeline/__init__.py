"""What joins the stages: plans that are tried before they are handed out, and ``prune``."""

from sapwood.pipeline.prune import Pruned, make_plan, prune

__all__ = ["Pruned", "make_plan", "prune"]
