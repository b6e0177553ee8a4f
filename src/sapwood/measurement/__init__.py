"""Measurement: what a model costs, counted and clocked."""

from sapwood.measurement.clock import Timing, take_turns
from sapwood.measurement.counts import count

__all__ = ["Timing", "count", "take_turns"]
