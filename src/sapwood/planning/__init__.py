"""Plans: decide what to keep, as data; nothing is changed here."""

from sapwood.planning.draft import draft_plan

__all__ = ["draft_plan"]
