"""Where a browser is that prints the book and tries its pages."""

from __future__ import annotations

import shutil

NAMES = ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable"]
MISSING = "no browser was found: install Chromium (Debian, Ubuntu: apt install chromium)"


def find() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)
