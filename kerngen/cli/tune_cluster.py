"""What `kerngen tune` does with a queue: --submit, --status, --cancel."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import click

from kerngen.cli.tables import echo
from kerngen.errors import UsageError

if TYPE_CHECKING:
    from kerngen.arch import Target
    from kerngen.job_queue.queue import State, Worker
    from kerngen.tuning.report import Report
    from kerngen.workload.workload import Workload


class Needed(click.Option):
    """An option that is required, unless the queue is asked alone."""

    def process_value(self, ctx: click.Context, value: Any) -> Any:
        value = super().process_value(ctx, value)
        if self.value_is_missing(value) and not (ctx.params.get("status") or ctx.params.get("cancel")):
            raise click.MissingParameter(ctx=ctx, param=self)
        return value


def submitted(
    load: Workload, target: Target, kind: str, trials: int | None, seed: int, url: str | None, as_json: bool
) -> tuple[Report, str]:
    """Tune `load` by the workers of a database's queue, and wait for them.

    Ctrl-C ends the waiting, not the work. Raises UsageError and DatabaseError where there is no such queue.
    """
    from kerngen.job_queue.queue import Queue
    from kerngen.job_queue.submit import Plan, collect, submit, wait
    from kerngen.system.progress import Reporter
    from kerngen.tuning_db import Store
    from kerngen.tuning_db.read.places import default_path

    url = url or default_path()
    plan = Plan(load.items, target, kind, trials, seed, load.model)
    with ExitStack() as stack:
        queue = stack.enter_context(Queue.open(url))
        store = stack.enter_context(Store.open(url))
        ids = submit(queue, plan)
        echo(f"{len(ids)} jobs in the queue; look at them with: kerngen tune --status", err=True)
        try:
            with Reporter(f"tune {target.arch}", quiet=as_json) as progress:
                states = wait(queue, ids, progress)
        except KeyboardInterrupt:
            echo("the jobs go on; the same command waits for them again, kerngen tune --cancel ends them", err=True)
            raise
        return collect(store, plan, states), store.where


def show(url: str | None, arch: str | None, model: str | None, *, cancel: bool, as_json: bool) -> None:
    """Print the queue; with `cancel`, take out of it what is not over, of an arch or a model if they are named."""
    from kerngen.job_queue.queue import Queue
    from kerngen.job_queue.submit import chosen, status_lines
    from kerngen.tuning_db.read.places import default_path

    with Queue.open(url or default_path()) as queue:
        states = chosen(queue.states(), arch, model)
        if cancel:
            count = queue.cancel(s.id for s in states if not s.is_over)
            click.echo(json.dumps({"cancelled": count}) if as_json else f"{count} jobs cancelled")
            return
        workers = queue.workers()
    if as_json:
        click.echo(json.dumps({"jobs": [_state(s) for s in states], "workers": [_worker(w) for w in workers]}))
        return
    for line in status_lines(states, workers):
        echo(line)


def _state(s: State) -> Mapping[str, Any]:
    return {
        "id": s.id, "queue": s.queue, "status": s.status, "attempts": s.attempts, "kernel": s.job.kernel,
        "arch": s.job.arch, "model": s.job.model, "num_problems": len(s.job.problems), "worker": s.worker,
        "num_done": s.num_done, "num_total": s.num_total, "error": (s.result or {}).get("error"),
    }  # fmt: skip


def _worker(w: Worker) -> Mapping[str, Any]:
    return {"name": w.name, "queues": list(w.queues), "about": w.about}


def kind_for(wanted: str, target_is_here: bool) -> str:
    """What --objective means for jobs: `auto` measures where this machine's GPU is of the arch."""
    if wanted == "auto":
        return "measured" if target_is_here else "predicted"
    if wanted not in ("measured", "predicted"):
        raise UsageError(f"--objective {wanted} is not done by a queue's workers", hint="--objective measured")
    return wanted
