"""A browser for the tests: Debian's Chromium, driven by Playwright.

``python tests/browser.py`` installs Chromium where that is possible (root and apt-get) and is silent where not; the
tests skip with the reason then. It needs nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
LIMIT_S = 240


def find() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def install() -> str:
    """Chromium's path; empty where it is not there and cannot be installed."""
    found = find()
    if found or os.name != "posix" or os.geteuid() != 0 or shutil.which("apt-get") is None:
        return found or ""
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for arguments in (["update", "-qq"], ["install", "-y", "-qq", "--no-install-recommends", "chromium"]):
        with contextlib.suppress(subprocess.SubprocessError, OSError):
            subprocess.run(["apt-get", *arguments], env=environment, capture_output=True, timeout=LIMIT_S)
    return find() or ""


@contextlib.contextmanager
def launched() -> Iterator[Any]:
    """A headless browser; the test is skipped, with the reason, where there is none."""
    import pytest

    playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    path = find()
    if path is None:
        pytest.skip("no Chromium: apt-get install chromium, or python tests/browser.py as root")
    with playwright.sync_playwright() as driver:
        try:
            browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        except Exception as error:
            pytest.skip(f"{path} does not start: {str(error).splitlines()[0]}")
        yield browser
        browser.close()


if __name__ == "__main__":
    print(install() or "no Chromium: tests of the page will be skipped")
