"""`kerngen db studies`: the searches of a database, for Optuna's tools."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import click


@click.command()
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, dir_okay=False), required=True, help="Optuna's journal."
)
@click.option("--kernel", "kernels", multiple=True, help="Only this kernel; may be given several times.")
@click.option("--arch", "arch_names", default=None, help="Only these arches: sm70,sm90.")
@click.option("--device", default=None, help="Only this device.")
@click.option("--db", "url", default=None, metavar="FILE|URL",
              help="The database to read. Default: all that a run looks in (override, user's, prebuilt).")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print what was written, as JSON.")
def studies(
    output: Path, kernels: tuple[str, ...], arch_names: str | None, device: str | None, url: str | None, as_json: bool
) -> None:
    """Write every search as the Optuna study that it was: `optuna-dashboard FILE` shows them as they are.

    Example: kerngen db studies -o studies.journal --kernel rmsnorm
    """
    from kerngen.arch import find_device, parse_arches
    from kerngen.report.facts import Wanted, gather
    from kerngen.report.studies import write_studies
    from kerngen.tuning_db import stores_for

    arches = None if arch_names is None else frozenset(a.name for a in parse_arches(arch_names))
    wanted = Wanted(frozenset(kernels) or None, arches, None if device is None else find_device(device).name)
    with ExitStack() as stack:
        facts = gather([stack.enter_context(store) for store in stores_for(url)], wanted)
    count = write_studies(output, facts)
    if as_json:
        click.echo(json.dumps({"file": str(output), "studies": count, "trials": len(facts.trials)}))
    else:
        click.echo(f"{output}: {count} studies; look at them with: optuna-dashboard {output}")
