"""The one exception users see: what was expected, what came, where, and what to do."""

from __future__ import annotations


class SapwoodError(Exception):
    """Raised for anything a user can mend; the message names the remedy."""


def explain(expected: str, got: str, remedy: str, where: str = "") -> SapwoodError:
    """Build an error in the fixed order: where, expected, got, remedy."""
    place = f"{where}: " if where else ""
    return SapwoodError(f"{place}expected {expected}; got {got}. {remedy}")
