"""`kerngen db verify`: what a database is, level by level, and on a GPU what it does there."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from kerngen.cli.db.common import echo_json
from kerngen.cli.duration import Duration
from kerngen.cli.keeping_options import keeping_options
from kerngen.cli.model_options import draft_option
from kerngen.cli.tables import echo
from kerngen.errors import DeviceError, UsageError
from kerngen.runtime.config import AS_STORED, KEEPING_OPTIONS, Keeping
from kerngen.system.cores import usable_cores
from kerngen.system.urls import without_password

if TYPE_CHECKING:
    from kerngen.arch import Target
    from kerngen.tuning_db.dist.verify import Verdict

_LISTED = 20  # faults that are told one by one


@click.command()
@click.argument("file", metavar="FILE|URL")
@click.option("--model", default=None, help="Prove too that nothing has to be compiled to run this model.")
@draft_option
@keeping_options
@click.option("--arch", "arch_names", default=None, help="With --model: on these arches. Default: the file's own.")
@click.option("--device", "device_names", default=None, help="With --model: on these boards. Default: the file's own.")
@click.option("--kernel", "kernels", multiple=True, help="With --model: only this kernel; may be given several times.")
@click.option("--rebuild", is_flag=True, help="Prove too that its sources, compiled here, give its machine code.")
@click.option("--jobs", type=click.IntRange(1), default=None, help="Compiler processes. Default: one a core.")
@click.option(
    "--run",
    "deepest",
    type=click.Choice(["loads", "correct", "fast"]),
    default=None,
    help="Prove too, on this machine's GPU, that its machine code loads; that its winners agree with the "
    "reference; that they take what it says. Each with those before it.",
)
@click.option(
    "--tolerance",
    type=click.FloatRange(0.0),
    default=5.0,
    show_default=True,
    metavar="PERCENT",
    help="With --run fast: how much longer a winner may take, beside its noise.",
)
@click.option(
    "--time-budget", type=Duration(), default=None, help="With --run: stop after this long: seconds, or 90s, 5m, 1h."
)
@click.option("--allow-unsigned", is_flag=True, help="Take it although nobody signed it who is trusted here.")
@click.option("--json", "as_json", is_flag=True, help="Print the verdicts as JSON.")
def verify(
    file: str, model: str | None, draft: str | None, kept: Keeping, arch_names: str | None,
    device_names: str | None, kernels: tuple[str, ...], rebuild: bool, jobs: int | None, deepest: str | None,
    tolerance: float, time_budget: float | None, allow_unsigned: bool, as_json: bool,
) -> None:  # fmt: skip
    """Prove what a database is: its structure, the digest of each row, and who signed it. Exit 1 if a level fails.

    With --model, that it is complete for that; with --rebuild, that its machine code is that of its sources; with
    --run, what it does on this machine's GPU. What was asked for and could not be done is not proved, and says why.

    Example: kerngen db verify sm90.kgdb
    """
    from kerngen.tuning_db.dist.verify import LEVELS
    from kerngen.tuning_db.dist.verify import verify as examine
    from kerngen.tuning_db.read.sealed import Sealed, is_sealed_file

    began = time.monotonic()
    if time_budget is not None and deepest is None:
        raise UsageError("--time-budget goes with --run", hint="kerngen db verify FILE --run fast --time-budget 5m")
    if model is None and (arch_names or device_names or draft or kernels or kept != AS_STORED):
        names = ("--arch", "--device", "--draft", *KEEPING_OPTIONS, "--kernel")
        raise UsageError(f"{', '.join(names)} go with a --model", hint="--model gemma-4-31b")
    verdicts = examine(file, LEVELS[:2] if allow_unsigned else LEVELS[:3])
    if (model or rebuild) and all(v.ok is not False for v in verdicts):
        where = arch_names, device_names
        drafter = draft, kept
        verdicts += _prove(file, model, drafter, where, kernels, rebuild, jobs, allow_unsigned, quiet=as_json)
    if deepest is not None:
        left = _left(began, time_budget)
        verdicts += _run(file, verdicts, deepest, tolerance / 100, left, allow_unsigned, quiet=as_json)
    sealed = Sealed.open(file) if verdicts[0].ok and "://" not in file and is_sealed_file(file) else None
    failed = any(v.ok is False for v in verdicts)
    if as_json:
        about = {"digest": sealed.digest, "header": sealed.header} if sealed is not None else {}
        echo_json({"file": without_password(file), "ok": not failed, "verdicts": [asdict(v) for v in verdicts]} | about)
    else:
        for v in verdicts:
            echo(f"{'--' if v.ok is None else 'ok' if v.ok else 'NO'}  {v.level:10} {v.text}")
            for fault in v.faults[:_LISTED]:
                echo(f"      {fault}")
            if len(v.faults) > _LISTED:
                click.echo(f"      and {len(v.faults) - _LISTED:,} more (--json names all)")
        if sealed is not None:
            echo(f"digest {sealed.digest}")
    if failed:
        raise click.exceptions.Exit(1)


def _prove(
    file: str, model: str | None, drafter: tuple[str | None, Keeping], where: tuple[str | None, str | None],
    kernels: tuple[str, ...], rebuild: bool, jobs: int | None, allow_unsigned: bool, *, quiet: bool,
) -> list[Verdict]:  # fmt: skip
    from kerngen.bundles import verify_cpu
    from kerngen.bundles.bundle import Bundle
    from kerngen.system.progress import Reporter

    bundle = Bundle.open(file, allow_unsigned=allow_unsigned)
    found: list[Verdict] = []
    if model is not None:
        names = [n for k in kernels for n in k.split(",")]
        found.append(verify_cpu.complete(bundle, model, *drafter, _boards(bundle.targets, *where), names))
    if rebuild:
        with Reporter("rebuild", quiet=quiet) as bar:
            found.append(verify_cpu.rebuilt(bundle, jobs or usable_cores(), bar))
    return found


def _left(began: float, budget: float | None) -> Callable[[], float]:
    """Seconds that are left of the command's time."""
    return lambda: float("inf") if budget is None else budget - (time.monotonic() - began)


def _run(
    file: str, before: Sequence[Verdict], deepest: str, tolerance: float, left: Callable[[], float],
    allow_unsigned: bool, *, quiet: bool,
) -> list[Verdict]:  # fmt: skip
    """The levels that need a GPU, down to `deepest`. Nothing of a file that failed a level before is run."""
    from kerngen.bundles import verify_gpu
    from kerngen.system.progress import Reporter
    from kerngen.timing.gpu import GpuLock
    from kerngen.tuning.worker import GpuWorker, present_arch
    from kerngen.tuning_db import open_source
    from kerngen.tuning_db.store.bundles import open_any

    levels = verify_gpu.LEVELS[: verify_gpu.LEVELS.index(deepest) + 1]
    if (failed := next((v for v in before if v.ok is False), None)) is not None:
        return verify_gpu.not_done(levels, f"{failed.level} failed, and what is not proved is not run")
    arch = present_arch()
    if arch is None:
        return verify_gpu.not_done(levels, "this machine has no GPU")
    open_source(file, allow_unsigned=allow_unsigned).close()  # a run's own question: may this be run here?
    with open_any(file, allow_unsigned=allow_unsigned) as store, Reporter("verify", quiet=quiet) as bar:
        if (why := verify_gpu.why_not_here(store, arch)) is not None:
            return verify_gpu.not_done(levels, why)
        with GpuWorker() as worker:
            try:
                lock = GpuLock(worker.uuid())
            except DeviceError as e:  # the driver has a GPU that torch does not take
                return verify_gpu.not_done(levels, e.message)
            try:
                return verify_gpu.on_gpu(store, levels, worker, lock, tolerance=tolerance, left=left, bar=bar)
            finally:
                lock.release()


def _boards(own: Sequence[tuple[str, str]], arch_names: str | None, device_names: str | None) -> list[Target]:
    from kerngen.arch import Target, find_device
    from kerngen.cli.compile import targets_of

    if arch_names or device_names:
        return targets_of(arch_names, device_names)
    return [Target.of(find_device(board)) for _, board in own]
