"""`kerngen db studies`: the searches of a database, for Optuna's tools."""

from __future__ import annotations

from pathlib import Path

import click

from kerngen.cli.db.common import drawing, drawing_options, echo_json


@click.command()
@drawing_options("Optuna's journal.")
def studies(
    output: Path, kernels: tuple[str, ...], arch_names: str | None, device_name: str | None, url: str | None,
    as_json: bool,
) -> None:  # fmt: skip
    """Write every search as the Optuna study that it was: `optuna-dashboard FILE` shows them as they are.

    Example: kerngen db studies -o studies.journal --kernel rmsnorm
    """
    from kerngen.report.data import gather
    from kerngen.report.studies import write_studies
    from kerngen.system.files import require_place

    require_place(output)
    with drawing(url, kernels, arch_names, device_name) as (stores, wanted):
        facts = gather(stores, wanted)
    count = write_studies(output, facts)
    if as_json:
        echo_json({"file": str(output), "studies": count, "trials": len(facts.trials)})
    else:
        click.echo(f"{output}: {count} studies; look at them with: optuna-dashboard {output}")
