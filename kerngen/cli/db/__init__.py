"""`kerngen db`: what was tuned, looked into, moved about, kept in order, trusted and installed."""

from __future__ import annotations

import click

from kerngen.cli.db import inspect, install, maintain, rebuild, report, studies, transfer, trust, verify


@click.group()
def db() -> None:
    """Look into the tuning database: what won, with what resources, and why.

    \b
    Example:
      kerngen db ls --arch sm90
    """


for command in (
    inspect.ls, inspect.show, inspect.explain, report.report, studies.studies,
    transfer.export, transfer.import_, transfer.merge, transfer.dump, transfer.build,
    verify.verify, maintain.diff, maintain.stats, maintain.revoke, maintain.rm, maintain.gc, rebuild.rebuild,
    install.install, install.uninstall, trust.keygen, trust.sign, trust.trust,
):  # fmt: skip
    db.add_command(command)
