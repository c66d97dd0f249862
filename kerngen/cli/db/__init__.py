"""`kerngen db`: what was tuned, looked into, moved about, kept in order, trusted and installed."""

from __future__ import annotations

import click

from kerngen.cli.db import care, install, look, move, rebuild, report, studies, trust, verify


@click.group()
def db() -> None:
    """Look into the tuning database: what won, with what resources, and why.

    \b
    Example:
      kerngen db ls --arch sm90
    """


for command in (
    look.ls, look.show, look.explain, report.report, studies.studies,
    move.export, move.import_, move.merge, move.dump, move.build,
    verify.verify, care.diff, care.stats, care.revoke, care.rm, care.gc, rebuild.rebuild,
    install.install, install.uninstall, trust.keygen, trust.sign, trust.trust,
):  # fmt: skip
    db.add_command(command)
