"""`kerngen db report`: the databases as one page to look at."""

from __future__ import annotations

from pathlib import Path

import click

from kerngen.cli.db.common import drawing, drawing_options, echo_json


@click.command()
@click.option("--model", "models", multiple=True, metavar="NAME|FOLDER",
              help="Whose steps are shown; may be given several times. Default: the one that fits best.")  # fmt: skip
@click.option("--title", default="kerngen tuning report", show_default=True)
@drawing_options("The page: an HTML file.")
def report(
    output: Path, kernels: tuple[str, ...], arch_names: str | None, device_name: str | None, models: tuple[str, ...],
    title: str, url: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Draw the tuning database as one page: every configuration, every search, every winner and where it comes from.

    The page is one file that asks for nothing else: it opens in any browser, from a disk or an attachment.

    Example: kerngen db report -o report.html
    """
    from kerngen.report.page import write_report

    with drawing(url, kernels, arch_names, device_name) as (stores, wanted):
        made = write_report(output, stores, wanted, models=models, title=title)
    if as_json:
        echo_json(made.summary())
    else:
        click.echo(made.sentence())
