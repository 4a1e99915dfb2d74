"""Where a browser is that prints the book and tries its pages."""

from __future__ import annotations

import shutil

# The first is Chromium without windows, which loads a page in two thirds of the time.
NAMES = ["chromium-headless-shell", "chromium", "chromium-browser"]
NAMES += ["google-chrome", "google-chrome-stable"]
MISSING = "no browser was found: install Chromium (Debian, Ubuntu: apt install chromium)"


def find() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)
