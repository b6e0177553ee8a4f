"""Measurement: what a model costs, counted and clocked."""

from sapwood.measurement.clock import Timing, take_turns
from sapwood.measurement.counts import count
from sapwood.measurement.deployment import Deployed, deploy
from sapwood.measurement.measure import Comparison, Measurement, compare, measure

__all__ = ["Comparison", "Deployed", "Measurement", "Timing", "compare", "count", "deploy", "measure", "take_turns"]
