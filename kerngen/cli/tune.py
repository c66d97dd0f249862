"""`kerngen tune`: find the best configuration of every kernel that a model needs."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kerngen.arch import Arch, Target, find_arch, find_device
from kerngen.cli.duration import Duration
from kerngen.cli.keeping_options import keeping_options
from kerngen.cli.model_options import draft_option, engine_option, tensor_parallel_option
from kerngen.cli.tables import Table, new_console, say
from kerngen.cli.tune_cluster import Needed, kind_for, show, submitted
from kerngen.cli.tune_objective import objective_for, worker_for
from kerngen.errors import UsageError
from kerngen.runtime.config import Keeping
from kerngen.system.cores import usable_cores

if TYPE_CHECKING:
    from kerngen.tuning.objective import Objective
    from kerngen.tuning.plan import DryRun
    from kerngen.tuning.report import Report, Result
    from kerngen.workload.workload import Model, Workload


BEGUN_S = 10.0  # that it takes to record a model and to start the process that measures


@click.command()
@click.option("--arch", "arch_name", default=None,
              help="What to tune for, e.g. sm70. Default: that of --device, or of this machine's GPU.")  # fmt: skip
@click.option("--model", cls=Needed, help="A model's name, or a folder in Hugging Face format; several with commas, or "
              "all released ones: all. They are tuned one after the other, and share the time budget.")  # fmt: skip
@draft_option
@keeping_options
@tensor_parallel_option
@engine_option
@click.option("--kernel", "kernels", multiple=True, help="Only this kernel; may be given several times.")
@click.option(
    "--objective",
    type=click.Choice(["auto", "predicted", "measured", "step"]),
    default="auto",
    show_default=True,
    help="step measures, and has the model's steps choose: auto is that for a whole model, where this machine's GPU is "
    "of the arch; measured with --kernel; predicted elsewhere.",
)
@click.option(
    "--device",
    "device_name",
    default=None,
    help="The board to predict for: of kerngen arch ls, or a file that describes it, BOARD.toml.",
)
@click.option("--trials", type=click.IntRange(1), default=None, help="Configurations a problem, at most.")
@click.option("--jobs", type=click.IntRange(1), default=None, help="Compiler processes. Default: one a core.")
@click.option("--time-budget", type=Duration(), default=None, help="Stop after this long: seconds, or 90s, 5m, 1h.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--db", "db_url", default=None, help="Tuning database to write. Default: $KERNGEN_DB or the user's.")
@click.option("--dry-run", is_flag=True, help="Say what would be tried, and how long it would take. Writes nothing.")
@click.option("--report", "page", type=click.Path(path_type=Path, dir_okay=False), default=None,
              help="Draw what the database then has for this device, as a page: see kerngen db report.")  # fmt: skip
@click.option("--results", type=click.Path(path_type=Path, file_okay=False), default=None, metavar="FOLDER",
              help="Write what the database then has for this device as text, as kerngen db dump does.")  # fmt: skip
@click.option("--submit", is_flag=True, help="Have the workers of --db do it (kerngen worker), and wait for them.")
@click.option("--status", is_flag=True, is_eager=True, help="Show the queue of --db, and its workers. Tunes nothing.")
@click.option("--cancel", is_flag=True, is_eager=True, help="Take out of the queue of --db what is not over yet.")
@click.option("-v", "--verbose", is_flag=True, help="Say first what each group of problems chose, and what failed.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def tune(
    arch_name: str | None,
    model: str,
    draft: str | None,
    kept: Keeping,
    tensor_parallel: int,
    engine: str,
    kernels: tuple[str, ...],
    objective: str,
    device_name: str | None,
    trials: int | None,
    jobs: int | None,
    time_budget: float | None,
    seed: int,
    db_url: str | None,
    dry_run: bool,
    page: Path | None,
    results: Path | None,
    submit: bool,
    status: bool,
    cancel: bool,
    verbose: bool,
    as_json: bool,
) -> None:
    """Find the best configuration of every kernel that a model, or several, need, and remember it.

    Works without a GPU: configurations are then ranked by the cost model for the arch's device profile, and every
    record says that it was predicted. A run that was stopped continues where it was. Exit code 1 if a problem has no
    winner although its configurations were tried: none compiled, or none gave the right result.

    \b
    Example:
      kerngen tune --arch sm70 --model gemma-4-31b --time-budget 5m
    """
    from kerngen.compiler.compile import require_target
    from kerngen.report.document import require_page_place
    from kerngen.system.files import require_place
    from kerngen.templates import find_kernel
    from kerngen.tuning.worker import present_arch
    from kerngen.workload.workload import MODELS, find_model

    if status or cancel:
        show(db_url, arch_name, model, cancel=cancel, as_json=as_json)
        return
    began = time.monotonic()  # recording a model takes seconds, which are the user's too
    arch = _arch(arch_name, device_name)
    names = [name for k in kernels for name in k.split(",")]
    for name in names:
        find_kernel(name)  # one that does not exist is said before the model is recorded, which takes seconds
    asked = MODELS if model == "all" else [model] if Path(model).exists() else model.split(",")
    if "" in asked:
        raise UsageError(f"--model {model} names no model before or after a comma",
                         hint=f"known: {', '.join(MODELS)}, all, or a model folder")  # fmt: skip
    if engine != "kerngen" and objective == "step":
        raise UsageError(f"--objective step times steps of kerngen's own engine, not of {engine}",
                         hint="--objective measured times each kernel alone")  # fmt: skip
    models = [
        rank.on(engine)
        for name in dict.fromkeys(asked)
        for rank in find_model(name, draft, kept).ranks(tensor_parallel)
    ]
    if page is not None:
        require_page_place(page)
    if results is not None:
        require_place(results / "BOARD", "--results")
    device = find_device(device_name) if device_name else None
    if submit:
        if dry_run or time_budget is not None or jobs is not None:
            raise UsageError("--submit takes no --time-budget, --jobs or --dry-run: those are of one machine",
                             hint="the same without them, or without --submit")  # fmt: skip
        if device is not None and device.arch != arch.name:
            raise UsageError(f"device {device} is {device.arch}, not {arch}", hint=f"--arch {device.arch}")
    else:
        require_target(arch)
    reports: list[Report] = []
    for found, since, seconds in _shares(models, began, time_budget):
        with ExitStack() as stack:
            if submit:
                kind = kind_for(objective, device is None and present_arch() == arch)
                load = _workload(found, arch, names)
                report, where = submitted(load, Target.of(device or arch), kind, trials, seed, db_url, as_json)
            else:
                worker = worker_for(stack, objective, arch, device_name)  # it starts while the model is recorded
                load = _workload(found, arch, names)
                chosen, why = objective_for(stack, worker, objective, arch, device_name, found, load, whole=not names)
                if objective == "auto":
                    click.echo(f"--objective {chosen.name}: {why}", err=True)
                if dry_run:
                    _dry_run(load, chosen, trials, jobs or usable_cores(), as_json)
                    continue
                report, where = _run(stack, load, chosen, trials, jobs, seconds, since, seed, db_url, as_json)
        reports.append(report)
        if as_json:
            click.echo(json.dumps(_as_json(report, load, where)))
        else:
            _print(report, load, where, whole=not names, verbose=verbose)
        if report.interrupted:
            break
    if reports:
        _end(reports, page, results, db_url, [m.name for m in models])


def _shares(
    models: Sequence[Model], began: float, time_budget: float | None
) -> Iterator[tuple[Model, float, float | None]]:
    """Of each model when it begins and how many seconds it has: an even share of what the others have left. One that
    there is no time to begin is named, and left out.
    """
    ends = None if time_budget is None else began + time_budget
    for number, model in enumerate(models):
        since = time.monotonic() if number else began
        left = inf if ends is None else ends - since
        if number and left < BEGUN_S:
            click.echo(f"{model.name}: not begun, since the time budget is over", err=True)
            continue
        yield model, since, None if ends is None else max(left, 0.0) / (len(models) - number)


def _arch(name: str | None, device_name: str | None) -> Arch:
    """Raises UsageError where neither is given and this machine has no GPU that kerngen knows."""
    from kerngen.tuning.worker import present_arch

    if name is not None:
        return find_arch(name)
    if device_name is not None:
        return find_arch(find_device(device_name).arch)
    if (here := present_arch()) is None:
        raise UsageError("what to tune for is not given, and this machine has no GPU that kerngen knows",
                         hint="name it: kerngen tune --arch sm70 --model NAME; kerngen arch ls lists them")  # fmt: skip
    return here


def _end(
    reports: Sequence[Report], page: Path | None, results: Path | None, db_url: str | None, models: list[str]
) -> None:
    """Write what was asked for. Raises Exit where something failed, KeyboardInterrupt where it was stopped."""
    if page is not None:
        _draw(page, reports, db_url, models)
    if results is not None:
        _write_results(results, reports[0].target, db_url)
    if any(report.interrupted for report in reports):
        raise KeyboardInterrupt
    if any(r.winner is None and r.num_tried for report in reports for r in report.results):
        raise click.exceptions.Exit(1)


def _write_results(folder: Path, target: Target, db_url: str | None) -> None:
    from kerngen.system.files import publish_texts
    from kerngen.tuning_db import Store
    from kerngen.tuning_db.dist.export import Selection
    from kerngen.tuning_db.dist.results_folder import dump

    with Store.open(db_url, read_only=True) as store:
        files = dump([store], Selection(arches=[target.arch.name], devices=[target.device.name]))
    publish_texts({folder / name: text for name, text in files.items()})
    click.echo(f"{len(files)} results files in {folder}", err=True)


def _workload(model: Model, arch: Arch, kernels: list[str]) -> Workload:
    """The part that concerns `kernels`, or all of it. Raises UsageError as Workload.only."""
    from kerngen.workload.workload import workload

    load = workload(model, arch)
    return load.only(kernels) if kernels else load


def _run(
    stack: ExitStack,
    load: Workload,
    objective: Objective,
    trials: int | None,
    jobs: int | None,
    time_budget: float | None,
    began: float,
    seed: int,
    db_url: str | None,
    as_json: bool,
) -> tuple[Report, str]:
    from kerngen.compiler.cache import CachedCompiler
    from kerngen.system.progress import Reporter
    from kerngen.tuning.tuner import Tuner
    from kerngen.tuning_db import Store, sources_for

    store = stack.enter_context(Store.open(db_url))
    compiler = stack.enter_context(CachedCompiler(jobs or usable_cores()))
    progress = stack.enter_context(Reporter(f"tune {objective.target.arch}", quiet=as_json))
    tuner = Tuner(
        objective, store, compiler,
        trials=trials, seed=seed, time_budget_s=time_budget, progress=progress, began=began,
        sources=partial(sources_for, db_url), tell=lambda gain: progress.note(str(gain)),
    )  # fmt: skip
    progress.most_left = tuner.whole_left
    return tuner.run(load.items), store.where


def _draw(page: Path, reports: Sequence[Report], db_url: str | None, models: list[str]) -> None:
    """The page of what was tuned here: this device's part of the database that was written to."""
    from kerngen.report.data import Wanted
    from kerngen.report.page import write_report
    from kerngen.tuning_db import Store

    kernels, target = frozenset(r.item.kernel for report in reports for r in report.results), reports[0].target
    wanted = Wanted(kernels, frozenset([target.arch.name]), target.device.name)
    with Store.open(db_url, read_only=True) as store:
        made = write_report(page, [store], wanted, models=models, title=f"{', '.join(models)} on {target}")
    click.echo(made.sentence(), err=True)


def _dry_run(load: Workload, objective: Objective, trials: int | None, jobs: int, as_json: bool) -> None:
    from kerngen.system.progress import Reporter
    from kerngen.tuning.plan import dry_run

    target = objective.target
    with Reporter(f"plan {target.arch}", quiet=as_json) as progress:
        plan = dry_run(load.items, target, trials or objective.trials, jobs, progress.update)
    if as_json:
        where = {"model": load.model, "arch": target.arch.name, "device": target.device.name}
        click.echo(json.dumps(where | {"objective": objective.name, "missing": load.missing} | asdict(plan)))
        return
    _print_plan(plan, f"{load.model} on {target}, {objective.how}; nothing is written")


def _print_plan(plan: DryRun, title: str) -> None:
    names = ("problems", "spaces", "points", "valid", "refused", "at most", "compiles", "seconds")
    table = Table(title, "kernel", *(f">{name}" for name in names))
    for row in plan.kernels:
        sorted_out = [f"{n:,}" if row.complete else f"~{_rounded(n):,}" for n in (row.num_valid, row.num_refused)]
        table.add_row(row.kernel, str(row.num_problems), str(row.num_spaces), f"{row.space_size:,}", *sorted_out,
                      f"{row.num_trials:,}", f"{row.num_compiles:,}", f"{row.seconds:.0f}")  # fmt: skip
    new_console().print(table)
    say(
        f"{plan.num_problems} problems, at most {plan.num_trials:,} configurations, about {plan.num_compiles:,} "
        f"compiles: {plan.seconds:.0f} s with {plan.jobs} jobs, at most {plan.db_bytes / 1e6:.0f} MB of database"
    )
    say("problems that agree in what decides validity share a space; a search ends early where the cost model shows "
        "that nothing left can win; measuring takes longer")  # fmt: skip
    if not all(row.complete for row in plan.kernels):
        say("~: an estimate, by a sample of large spaces; kerngen kernel show NAME counts one whole")
    for kernel, reason in plan.unsupported:
        say(f"not tuned: {kernel}: {reason}")


def _rounded(count: int) -> int:
    """To three digits, as good as a sample knows it."""
    return round(count, 3 - len(str(count)))


def _print(report: Report, load: Workload, where: str, *, whole: bool, verbose: bool) -> None:
    """whole: the model's whole workload was tuned, so that its steps' sums are those of the model."""
    from kerngen.cli.tune_table import tune_table
    from kerngen.tuning_db.read.values import PROVENANCES

    if verbose:
        _print_details(report, load)
    say(f"{load.model} on {report.target}, {report.how}")
    how = ", ".join(f"{n} {p}" for p in PROVENANCES if (n := report.num_of(p)))
    say(
        f"{len(report.results) - report.num_of('')} of {len(report.results)} problems have a winner"
        f"{f' ({how})' if how else ''}; {report.num_trials:,} configurations tried in {report.seconds:.0f} s "
        f"({report.num_compiled:,} compiles, {report.num_from_database:,} answers from the database), "
        f"{sum(r.num_failed for r in report.results):,} failed"
    )
    for remark in report.remarks:
        say(remark)
    if not verbose:
        _print_notes("no winner", [r for r in report.results if r.winner is None])
    if report.out_of_time:
        say("the time budget ended the search; the same command continues it")
    if report.interrupted:
        say("stopped before the search was over; what was tried is kept, and the same command continues it")
    more = "" if verbose else "; -v lists what was chosen, noted and left out"
    say(f"database: {where} (kerngen db explain says why a configuration won{more})")
    table, steps = tune_table(report, load, whole=whole)
    new_console().print(table)
    if steps:
        say("; ".join(steps), 0)


def _print_notes(what: str, results: list[Result]) -> None:
    from kerngen.tuning.report import notes

    for note, kernels in notes(results).items():
        names = ", ".join(f"{kernel} ({count})" for kernel, count in kernels.items())
        say(f"{what}: {names}: {note}", fg="yellow")


def _print_details(report: Report, load: Workload) -> None:
    """One line a group of problems, and all that is to be known of the search."""
    from kerngen.runtime.fallbacks import FALLBACKS
    from kerngen.tuning.report import groups

    table = Table("One of each group of problems:", "kernel", "where", "point", ">us", ">gain",
                  "differs from the default in", ">tuned", ">changed")  # fmt: skip
    for g in groups(report, load):
        r = g.shown
        us = "" if r.winner is None or r.winner.latency_us is None else f"{r.winner.latency_us:.1f}"
        gain = "" if r.speedup is None else f"{r.speedup:.2f}x"
        changes = " ".join(f"{k}={v}" for k, v in r.changes.items()) if r.winner is not None else "no winner"
        tuned = f"{g.num_won}" if g.num_won == len(g.results) else f"{g.num_won} of {len(g.results)}"
        table.add_row(g.kernel, g.where, g.point, us, gain, changes or "-", tuned, str(g.num_changed))
    new_console().print(table)
    say(f"{report.num_refused:,} points of {report.num_spaces} spaces refused before any compile")
    _print_notes("note", report.results)
    for kernel, config, reason in report.failures:
        say(f"failed: {kernel} {config}: {reason}", fg="red")
    for name in load.missing:
        say(f"left to torch, and not tuned: {name} ({FALLBACKS[name]})")


def _as_json(report: Report, load: Workload, where: str) -> dict[str, Any]:
    from kerngen.templates.kernel import fields_of
    from kerngen.tuning.report import step_us
    from kerngen.tuning_db.read.values import PROVENANCES

    steps = {
        str(batch): {kernel: us / 1e3 for kernel, us in (parts | {"total": sum(parts.values())}).items()}
        for batch, parts in step_us(report, load).items()
    }
    rows = []
    for r in report.results:
        w = r.winner
        rows.append({
            "kernel": r.item.kernel, "where": r.item.where, "problem": fields_of(r.item.problem), "note": r.note,
            "config": None if w is None else w.config, "latency_us": None if w is None else w.latency_us,
            "provenance": None if w is None else w.provenance, "reason": None if w is None else w.reason,
            "default": r.default, "default_us": r.default_us, "explanation": r.explanation, "registers": r.registers,
            "smem_bytes": r.smem_bytes, "spill_bytes": r.spill_bytes, "num_valid": r.num_valid,
            "num_refused": r.num_refused, "num_tried": r.num_tried, "num_failed": r.num_failed,
        })  # fmt: skip
    return {
        "model": load.model, "arch": report.target.arch.name, "device": report.target.device.name,
        "objective": report.objective, "run": report.run, "seconds": report.seconds, "out_of_time": report.out_of_time,
        "interrupted": report.interrupted,
        **{f"num_{how}": report.num_of(how) for how in PROVENANCES},
        "num_trials": report.num_trials, "num_compiled": report.num_compiled,
        "num_from_database": report.num_from_database, "num_spaces": report.num_spaces,
        "num_refused": report.num_refused, "failures": report.failures, "missing": list(load.missing),
        "remarks": report.remarks, "gains": [asdict(gain) for gain in report.gains],
        "step_ms": steps, "results": rows, "database": where,
    }  # fmt: skip
