"""Measurement: what a model costs, counted and clocked."""

from sapwood.measurement.clock import Timing, take_turns
from sapwood.measurement.counts import count
from sapwood.measurement.measure import Comparison, Measurement, compare, measure

__all__ = ["Comparison", "Measurement", "Timing", "compare", "count", "measure", "take_turns"]
