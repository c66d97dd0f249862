"""`kerngen db report`: the databases as one page to look at."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import click


@click.command()
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, dir_okay=False), required=True, help="The page: an HTML file."
)
@click.option("--kernel", "kernels", multiple=True, help="Only this kernel; may be given several times.")
@click.option("--arch", "arch_names", default=None, help="Only these arches: sm70,sm90.")
@click.option("--device", default=None, help="Only this device.")
@click.option("--model", "models", multiple=True, metavar="NAME|FOLDER",
              help="Whose steps are shown; may be given several times. Default: the one that fits best.")  # fmt: skip
@click.option("--title", default="kerngen tuning report", show_default=True)
@click.option("--db", "url", default=None, metavar="FILE|URL",
              help="The database to draw. Default: all that a run looks in (override, user's, prebuilt).")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print what the page has, as JSON.")
def report(
    output: Path, kernels: tuple[str, ...], arch_names: str | None, device: str | None, models: tuple[str, ...],
    title: str, url: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Draw the tuning database as one page: every configuration, every search, every winner and where it comes from.

    The page is one file that asks for nothing else: it opens in any browser, from a disk or an attachment.

    Example: kerngen db report -o report.html
    """
    from kerngen.arch import find_device, parse_arches
    from kerngen.errors import UnknownName
    from kerngen.report.facts import Wanted
    from kerngen.report.page import write_report
    from kerngen.templates import kernel_names
    from kerngen.tuning_db import stores_for

    arches = None if arch_names is None else frozenset(a.name for a in parse_arches(arch_names))
    if device is not None:
        device = find_device(device).name
    wanted = Wanted(frozenset(kernels) or None, arches, device)
    with ExitStack() as stack:
        stores = [stack.enter_context(store) for store in stores_for(url)]
        known = {w.kernel for store in stores for w in store.winners()} | set(kernel_names())
        for kernel in kernels:
            if kernel not in known:
                raise UnknownName("kernel", kernel, sorted(known))
        made = write_report(output, stores, wanted, models=models, title=title)
    if as_json:
        click.echo(json.dumps(made.summary()))
    else:
        click.echo(made.sentence())
