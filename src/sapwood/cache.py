"""Where kernels and measured times are kept."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """$SAPWOOD_CACHE, or a folder of the user's cache."""
    own, common = os.environ.get("SAPWOOD_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if own:
        return Path(own)
    return (Path(common) if common else Path("~/.cache").expanduser()) / "sapwood"
