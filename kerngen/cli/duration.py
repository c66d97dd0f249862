"""A time that an option takes."""

from __future__ import annotations

from typing import Any

import click


class Duration(click.ParamType):
    """Seconds, or a number with s, m or h behind it."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, (int, float)):
            return float(value)
        unit = {"s": 1, "m": 60, "h": 3600}.get(value[-1:].lower())
        try:
            seconds = float(value[:-1] if unit else value) * (unit or 1)
        except ValueError:
            seconds = -1.0
        if not 0 < seconds < float("inf"):
            self.fail(f"{value!r} is no duration: give seconds, or 90s, 5m, 1h", param, ctx)
        return seconds
