"""Storage: bundles without pickle, and exports."""

from sapwood.storage.bundle import Bundle, save
from sapwood.storage.loading import load, load_

__all__ = ["Bundle", "load", "load_", "save"]
