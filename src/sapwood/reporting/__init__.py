"""Reports: tables for the terminal."""

from sapwood.reporting.terminal import frozen_table, groups_table, result_table

__all__ = ["frozen_table", "groups_table", "result_table"]
