"""Scores: one number per channel of a group; higher means keep."""

from sapwood.scoring.weights import Score, score_groups

__all__ = ["Score", "score_groups"]
