"""What this process logs, where nobody configured logging: warnings, on standard error."""

from __future__ import annotations

import logging

from kerngen.errors import printable


class _Printable(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def settle_logging() -> None:
    """Escape in log lines what a terminal might obey: they quote names that a file gave."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_Printable())
