"""`kerngen tune`: find the best configuration of every kernel that a model needs."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from kerngen.arch import Arch, Target, find_arch, find_device
from kerngen.errors import DeviceError, UsageError

if TYPE_CHECKING:
    from kerngen.tuning.objective import Objective
    from kerngen.tuning.plan import DryRun
    from kerngen.tuning.report import Report, Result
    from kerngen.workload import Workload


class Duration(click.ParamType):
    """Seconds, or a number with s, m or h behind it."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, (int, float)):
            return float(value)
        unit = {"s": 1, "m": 60, "h": 3600}.get(value[-1:].lower())
        try:
            seconds = float(value[:-1] if unit else value) * (unit or 1)
        except ValueError:
            seconds = -1.0
        if not 0 < seconds < float("inf"):
            self.fail(f"{value!r} is no duration: give seconds, or 90s, 5m, 1h", param, ctx)
        return seconds


@click.command()
@click.option("--arch", "arch_name", required=True, help="What to tune for, e.g. sm70.")
@click.option("--model", required=True, help="A model's name, or a folder in Hugging Face format.")
@click.option("--draft", default=None, help="Folder of the assistant, where --model is a folder.")
@click.option("--kernel", "kernels", multiple=True, help="Only this kernel; may be given several times.")
@click.option(
    "--objective",
    type=click.Choice(["auto", "predicted", "measured"]),
    default="auto",
    show_default=True,
    help="auto measures where this machine's GPU is of the arch.",
)
@click.option("--device", "device_name", default=None, help="The device profile to predict for (kerngen arch ls).")
@click.option("--trials", type=click.IntRange(1), default=None, help="Configurations a problem, at most.")
@click.option("--jobs", type=click.IntRange(1), default=None, help="Compiler processes. Default: one a core.")
@click.option("--time-budget", type=Duration(), default=None, help="Stop after this long: seconds, or 90s, 5m, 1h.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--db", "db_url", default=None, help="Tuning database to write. Default: $KERNGEN_DB or the user's.")
@click.option("--dry-run", is_flag=True, help="Say what would be tried, and how long it would take. Writes nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def tune(
    arch_name: str,
    model: str,
    draft: str | None,
    kernels: tuple[str, ...],
    objective: str,
    device_name: str | None,
    trials: int | None,
    jobs: int | None,
    time_budget: float | None,
    seed: int,
    db_url: str | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Find the best configuration of every kernel a model needs, and remember it.

    Works without a GPU: configurations are then ranked by the cost model for the arch's device profile, and every
    record says that it was predicted. A run that was stopped continues where it was.

    \b
    Example:
      kerngen tune --arch sm70 --model gemma-4-31b --time-budget 5m
    """
    from kerngen.compile import require_target
    from kerngen.workload import find_model, workload

    arch = find_arch(arch_name)
    load = workload(find_model(model, draft), arch)
    if kernels:
        load = load.only(name for k in kernels for name in k.split(","))
    require_target(arch)
    with ExitStack() as stack:
        chosen = _objective(stack, objective, arch, device_name)
        if dry_run:
            _dry_run(load, chosen, trials, jobs or os.cpu_count() or 1, seed, as_json)
            return
        report, where = _run(stack, load, chosen, trials, jobs, time_budget, seed, db_url, as_json)
    for process in multiprocessing.active_children():  # compiles that nobody waits for any more
        process.terminate()
    if as_json:
        click.echo(json.dumps(_as_json(report, load, where)))
    else:
        _print(report, load, where)
    if report.interrupted:
        raise KeyboardInterrupt


def _objective(stack: ExitStack, wanted: str, arch: Arch, device_name: str | None) -> Objective:
    """The objective that --objective, --device and this machine's GPU call for; its worker ends with `stack`.

    Raises DeviceError or UsageError where `measured` cannot be had.
    """
    from kerngen.tuning.objective import Measured, Predicted
    from kerngen.tuning.worker import GpuWorker, present_arch

    device = find_device(device_name) if device_name else None
    if wanted == "measured":
        if device is not None:
            raise UsageError("--device names a profile to predict for; a measurement is of the GPU that is here")
        here = present_arch()
        if here is None:
            raise DeviceError("this machine has no GPU to measure on", hint="predict instead: --objective predicted")
        if here != arch:
            raise DeviceError(
                f"this machine's GPU is {here}, not {arch}", hint="predict instead: --objective predicted"
            )
    elif device is not None and device.arch != arch.name:
        raise UsageError(f"device {device} is {device.arch}, not {arch}")
    elif wanted == "predicted" or device is not None or present_arch() != arch:
        return Predicted(Target.of(device or arch))
    return Measured(stack.enter_context(GpuWorker()))


def _run(
    stack: ExitStack,
    load: Workload,
    objective: Objective,
    trials: int | None,
    jobs: int | None,
    time_budget: float | None,
    seed: int,
    db_url: str | None,
    as_json: bool,
) -> tuple[Report, str]:
    from kerngen.cache import CachedCompiler
    from kerngen.progress import Reporter
    from kerngen.tuning.tuner import Tuner
    from kerngen.tuning_db import Store

    store = stack.enter_context(Store.open(db_url))
    compiler = stack.enter_context(CachedCompiler(jobs or os.cpu_count() or 1))
    progress = stack.enter_context(Reporter(f"tune {objective.target.arch}", quiet=as_json))
    tuner = Tuner(objective, store, compiler, trials=trials, seed=seed, time_budget_s=time_budget, progress=progress)
    return tuner.run(load.items), store.where


def _dry_run(load: Workload, objective: Objective, trials: int | None, jobs: int, seed: int, as_json: bool) -> None:
    from kerngen.tuning.plan import dry_run

    target = objective.target
    plan = dry_run(load.items, target, trials or objective.trials, jobs, seed)
    if as_json:
        where = {"model": load.model, "arch": target.arch.name, "device": target.device.name}
        click.echo(json.dumps(where | {"objective": objective.name, "missing": load.missing} | asdict(plan)))
        return
    _print_plan(plan, f"{load.model} on {target}, {objective.how}; nothing is written")


def _print_plan(plan: DryRun, title: str) -> None:
    names = ("problems", "spaces", "points", "valid", "refused", "at most", "compiles", "seconds")
    click.echo(title)
    click.echo(f"{'kernel':16}" + "".join(f"{n:>10}" for n in names))
    for row in plan.kernels:
        counts = (row.num_problems, row.num_spaces, row.space_size, row.num_valid, row.num_refused, row.num_trials,
                  row.num_compiles, round(row.seconds))  # fmt: skip
        click.echo(f"{row.kernel:16}" + "".join(f"{n:>10,}" for n in counts))
    click.echo(
        f"{plan.num_problems} problems, at most {plan.num_trials:,} configurations, about {plan.num_compiles:,} "
        f"compiles: {plan.seconds:.0f} s with {plan.jobs} jobs, at most {plan.db_bytes / 1e6:.0f} MB of database.\n"
        "Problems that agree in what decides validity share a space. A search ends early where the cost model shows\n"
        "that nothing left can win; measuring takes longer."
    )
    for kernel, reason in plan.unsupported:
        click.echo(f"not tuned: {kernel}: {reason}")


def _print(report: Report, load: Workload, where: str) -> None:
    from rich.console import Console

    console = Console(soft_wrap=True, highlight=False)
    console.print(f"{load.model} on {report.target}, {report.how}. One point of each group:")
    usual = {(i.kernel, i.problem) for i, _ in load.step("decode", 1, 8192)}
    for rows in _by_place(report.results):
        won = [r for r in rows if r.winner is not None]
        r = next((r for r in won if (r.item.kernel, r.item.problem) in usual), won[0] if won else None)
        if r is not None and r.winner is not None:
            _print_winner(console, r, len(rows))
    _print_steps(console, report, load)
    winners = [r for r in report.results if r.winner is not None]
    console.print(
        f"{len(winners)} of {len(report.results)} problems have a winner; {report.num_trials:,} configurations tried "
        f"in {report.seconds:.0f} s ({report.num_compiled:,} compiles, {report.num_from_database:,} answers from the "
        f"database); {report.num_refused:,} points of {report.num_spaces} spaces refused before any compile, "
        f"{sum(r.num_failed for r in report.results):,} failed"
    )
    for note, names in _notes(report.results).items():
        console.print(f"note: {names}: {note}", markup=False, style="yellow")
    for kernel, config, reason in report.failures[:5]:
        console.print(f"failed: {kernel} {config}: {reason}", markup=False, style="red")
    if load.missing:
        console.print(f"no kernel yet for: {', '.join(load.missing)}")
    if report.out_of_time:
        console.print("the time budget ended the search; the same command continues it")
    console.print(f"database: {where}   (kerngen db explain says why a configuration won)", markup=False)


def _print_winner(console: Any, r: Result, num_points: int) -> None:
    """Two lines: what won at this point, and why."""
    from kerngen.templates.kernel import fields_of

    w = r.winner
    if w is None:
        return
    runtime = " ".join(f"{k}={v}" for k, v in fields_of(r.item.problem).items() if k in r.item.problem.RUNTIME)
    config = " ".join(f"{k}={v}" for k, v in w.config.items())
    gain = "" if r.speedup is None else f", {r.speedup:.2f}x the default"
    console.print(f"  [bold]{r.item.kernel}[/bold] {r.item.where}, {runtime} ({num_points} points): "
                  f"{w.latency_us:.1f} us {w.provenance}{gain}")  # fmt: skip
    console.print(f"      {config}", markup=False)
    console.print(f"      {w.reason}; {r.explanation}", markup=False)


def _by_place(results: Iterable[Result]) -> list[list[Result]]:
    """Results that share a kernel and compiled-in fields, in the order of the workload."""
    from kerngen.templates.kernel import static_fields

    groups: dict[str, list[Result]] = {}
    for r in results:
        groups.setdefault(f"{r.item.kernel} {static_fields(r.item.problem)}", []).append(r)
    return sorted(groups.values(), key=lambda rows: rows[0].item.kernel)


def _notes(results: Iterable[Result]) -> dict[str, str]:
    """Each note once, with the kernels and how many problems it concerns."""
    where: dict[str, dict[str, int]] = {}
    for r in results:
        if r.note:
            kernels = where.setdefault(r.note, {})
            kernels[r.item.kernel] = kernels.get(r.item.kernel, 0) + 1
    return {note: ", ".join(f"{k} ({n})" for k, n in kernels.items()) for note, kernels in where.items()}


def _steps(report: Report, load: Workload) -> dict[str, dict[str, float]]:
    """Milliseconds of our kernels in one decode step, by batch and kernel, where all of them have a winner."""
    latency = {(r.item.kernel, r.item.problem): r.winner.latency_us for r in report.results if r.winner is not None}
    found = {}
    for batch in (1, 32):
        parts: dict[str, float] = {}
        for item, count in load.step("decode", batch, 512):
            us = latency.get((item.kernel, item.problem), float("nan"))
            parts[item.kernel] = parts.get(item.kernel, 0.0) + count * us / 1e3
        total = sum(parts.values())
        if parts and total == total:
            found[str(batch)] = parts | {"total": total}
    return found


def _print_steps(console: Any, report: Report, load: Workload) -> None:
    for batch, parts in _steps(report, load).items():
        top = sorted(((ms, k) for k, ms in parts.items() if k != "total"), reverse=True)[:3]
        share = ", ".join(f"{k} {ms:.2f}" for ms, k in top)
        console.print(f"decode step, batch {batch}, context 512, these kernels: {parts['total']:.2f} ms "
                      f"{report.objective} ({share})")  # fmt: skip


def _as_json(report: Report, load: Workload, where: str) -> dict[str, Any]:
    from kerngen.templates.kernel import fields_of

    rows = []
    for r in report.results:
        w = r.winner
        rows.append({
            "kernel": r.item.kernel, "where": r.item.where, "problem": fields_of(r.item.problem), "note": r.note,
            "config": None if w is None else w.config, "latency_us": None if w is None else w.latency_us,
            "provenance": None if w is None else w.provenance, "reason": None if w is None else w.reason,
            "default_us": r.default_us, "explanation": r.explanation, "registers": r.registers,
            "smem_bytes": r.smem_bytes, "spill_bytes": r.spill_bytes, "num_valid": r.num_valid,
            "num_refused": r.num_refused, "num_tried": r.num_tried, "num_failed": r.num_failed,
        })  # fmt: skip
    return {
        "model": load.model, "arch": report.target.arch.name, "device": report.target.device.name,
        "objective": report.objective, "run": report.run, "seconds": report.seconds, "out_of_time": report.out_of_time,
        "num_trials": report.num_trials, "num_compiled": report.num_compiled,
        "num_from_database": report.num_from_database, "num_spaces": report.num_spaces,
        "num_refused": report.num_refused, "failures": report.failures, "missing": list(load.missing),
        "step_ms": _steps(report, load), "results": rows, "database": where,
    }  # fmt: skip
