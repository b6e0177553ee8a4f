"""Storage: bundles without pickle, and exports."""

from sapwood.storage.bundle import Bundle, load, save

__all__ = ["Bundle", "load", "save"]
