"""`--report` and `--against` of the benches: a page of what was measured, beside another run of the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click


def page_options(command: Callable[..., Any]) -> Callable[..., Any]:
    path = click.Path(path_type=Path, dir_okay=False)
    last = "With --report: another run of the same, its page or what its --json printed."
    command = click.option("--against", type=path, default=None, metavar="FILE", help=last)(command)
    drawn = "Draw what was measured as a page, one HTML file that asks for nothing else."
    return click.option("--report", "page", type=path, default=None, metavar="FILE", help=drawn)(command)


class RunPage:
    """What `page_options` gave; made before the bench begins, for what is wrong with them is said then.

    alike: what the run that this one is held against must have in common with it, as --json has it. Raises UsageError,
    KerngenError, OSError.
    """

    def __init__(
        self, bench: str, page: Path | None, against: Path | None, alike: Mapping[str, Any] | None = None
    ) -> None:
        self._bench, self._page, self._last = bench, page, None
        if page is not None or against is not None:
            from kerngen.report.bench.page import prepared

            self._last = prepared(page, against, bench, alike or {})

    def of(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """What the bench found, with what it is of and when: what --json prints."""
        from kerngen.report.bench.runs import run_of

        return run_of(self._bench, found)

    def draw(self, run: dict[str, Any]) -> None:
        """If that was asked for; to be called last, for what was measured is not to be lost with a page."""
        if self._page is not None:
            from kerngen.report.bench.page import write_page

            click.echo(write_page(self._page, run, self._last), err=True)
