"""`kerngen worker`: take tuning jobs from a queue."""

from __future__ import annotations

import click

from kerngen.cli.tables import echo
from kerngen.system.cores import usable_cores

KINDS = {"measure": "measured", "predict": "predicted", "compile": "compile"}


@click.command()
@click.option("--db", "url", default=None, metavar="URL",
              help="The tuning database: postgresql+psycopg://USER@HOST/NAME. Default: $KERNGEN_DB.")  # fmt: skip
@click.option("--kind", "kinds", multiple=True, type=click.Choice(list(KINDS)),
              help="Jobs that it takes; may be given several times. Default: measure where there is a GPU, elsewhere "
              "predict and compile.")  # fmt: skip
@click.option("--arch", "arch_names", default=None, help="Predict and compile for these alone: sm70,sm90.")
@click.option("--jobs", type=click.IntRange(1), default=None, help="Compiler processes. Default: one a core.")
@click.option("--until-empty", is_flag=True, help="End when its queues have nothing more to do.")
@click.option("--heartbeat", type=click.FloatRange(0.1), default=10.0, show_default=True, metavar="SECONDS",
              help="How often it says that it lives; after six without a word others do its job.")  # fmt: skip
def worker(
    url: str | None, kinds: tuple[str, ...], arch_names: str | None, jobs: int | None, until_empty: bool,
    heartbeat: float,
) -> None:  # fmt: skip
    """Take jobs that `kerngen tune --submit` put into a database's queue, one after another, until told to stop.

    One worker a GPU measures; others, on machines without, predict and compile ahead. SIGTERM and Ctrl-C end it within
    seconds, and what it was at goes back into the queue. A worker takes jobs of the very code that it has itself.

    \b
    Example:
      kerngen worker --db postgresql+psycopg://kerngen@db.cluster/kerngen
    """
    from kerngen.job_queue.worker import Options, able_arches, work
    from kerngen.tuning.worker import present_arch
    from kerngen.tuning_db.read.places import default_path

    chosen = kinds or (("measure",) if present_arch() is not None else ("predict", "compile"))
    arches = able_arches(None if arch_names is None else arch_names.split(","))

    def say(line: str) -> None:
        echo(line, err=True)  # in one write: several workers may share a log

    options = Options(url or default_path(), tuple(KINDS[k] for k in chosen), arches, jobs or usable_cores(),
                      until_empty, heartbeat, say)  # fmt: skip
    count = work(options)
    echo(f"{count} jobs done")
