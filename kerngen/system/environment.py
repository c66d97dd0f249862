"""Environment variables that switch something on."""

from __future__ import annotations

import os


def is_set(variable: str) -> bool:
    """True where it is set to anything but "" or "0"."""
    return os.environ.get(variable, "") not in ("", "0")
