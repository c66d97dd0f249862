"""Times variants of a kernel's text beside the text as it is: what a change of device code gains, before it is made.

    python -m kerngen.tuning.variants decode_layers variants.toml --case h2816

A variant replaces parts of the rendered source, or of the configuration, or both:

    [[variant]]
    name = "router rows by twos"
    config = "tiles_together=3"
    right = true
    [[variant.replace]]
    this = "DenseRows<NUM_EXPERTS, 2 * HIDDEN, 4>"
    by = "DenseRows<NUM_EXPERTS, 2 * HIDDEN, 2>"

`this` must stand in the text exactly once. `right = false` is for a variant that leaves something out, so that its
results are known to be wrong: what it takes less is what that costs. All others are compared with the fp32 reference
first. Then all are replayed in turn, so that they meet the same clocks, the text as it is twice: what those two differ
by is noise. Nothing is written to a database. A variant that waits for ever ends the process (--timeout), behind a line
that names it.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch

from kerngen.arch import Target
from kerngen.compiler.cache import CachedCompiler
from kerngen.compiler.compile import Cubin
from kerngen.compiler.render import render
from kerngen.errors import CompileError, UsageError
from kerngen.system.files import read_toml
from kerngen.templates import find_kernel
from kerngen.templates.kernel import Case, Kernel, describe
from kerngen.timing.measure import (
    Captured,
    Timing,
    calls_of,
    captured,
    ceilings,
    compare,
    fresh,
    load,
    target_here,
    time_in_turn,
    timing_sets,
)
from kerngen.tuning.sweep import cases_of, written_out

AS_IT_IS = "as it is"
MAX_BYTES = 1 << 20  # of a file
_HINT = "[[variant]], each with a name, and a config or [[variant.replace]]"


@dataclass(frozen=True, slots=True)
class Variant:
    name: str
    config: str = ""  # FIELD=VALUE,... over the default
    right: bool = True  # whether its results are to be those of the reference
    replace: tuple[tuple[str, str], ...] = ()  # this, by


def read_variants(path: Path) -> list[Variant]:
    """Raises UsageError, with the variant, where the file says anything else than the module's docstring has."""
    told = read_toml(path, MAX_BYTES, _HINT)
    if unknown := told.keys() - {"variant"}:
        raise UsageError(f"{path}: {sorted(unknown)[0]!r} is nothing that it may say", hint=_HINT)
    if not isinstance(told.get("variant"), list):
        raise UsageError(f"{path} has no variants", hint=_HINT)
    found = []
    for number, given in enumerate(told["variant"], 1):
        where = f"{path}, variant {number}"
        _require(where, given, {"name": str, "config": str, "right": bool, "replace": list}, needed=("name",))
        parts = given.get("replace", [])
        for part in parts:
            _require(f"{where} ({given['name']}), replace", part, {"this": str, "by": str}, needed=("this", "by"))
        replaced = tuple((part["this"], part["by"]) for part in parts)
        found.append(Variant(given["name"], given.get("config", ""), given.get("right", True), replaced))
    return found


def _require(where: str, given: Any, fields: dict[str, type], needed: Sequence[str]) -> None:
    if not isinstance(given, dict):
        raise UsageError(f"{where}: {given!r} is no table")
    for name in needed:
        if name not in given:
            raise UsageError(f"{where}: it has no {name!r}")
    for name, value in given.items():
        if name not in fields:
            raise UsageError(f"{where}: {name!r} is not one of: {', '.join(fields)}")
        if not isinstance(value, fields[name]):
            raise UsageError(f"{where}: {name} is {value!r}, no {fields[name].__name__}")


def changed(text: str, variant: Variant) -> str:
    """`text` with what the variant replaces. Raises UsageError where one of them does not stand there exactly once."""
    for this, by in variant.replace:
        if (count := text.count(this)) != 1:
            raise UsageError(f"{variant.name}: the text has {count} times {this[:60]!r}, which it replaces",
                             hint="once is what is meant; kerngen kernel show prints the text")  # fmt: skip
        text = text.replace(this, by)
    return text


@dataclass(frozen=True, slots=True)
class Made:
    variant: Variant
    config: Any
    text: str


def made_of(kernel: Kernel, problem: Any, target: Target, variants: Sequence[Variant]) -> list[Made]:
    """The text as it is, and each variant's. Raises UsageError, and as written_out does."""
    found = (Variant(AS_IT_IS), *variants, Variant(f"{AS_IT_IS}, again"))
    configs = written_out(kernel, problem, target, [variant.config for variant in found])
    return [
        Made(variant, config, changed(str(render(kernel, problem, config, target)), variant))
        for variant, config in zip(found, configs, strict=True)
    ]


def times_of(
    kernel: Kernel, case: Case, made: Sequence[Made], images: Sequence[Future[Cubin]], timeout_s: float
) -> Iterator[tuple[Variant, Timing | str]]:
    """What each takes, or why it has no time. On this GPU."""
    inputs = kernel.cases.inputs(case, torch.device("cuda"))
    expected, sets = kernel.reference.expected(case.problem, inputs), timing_sets(inputs)
    ready: list[tuple[Variant, Captured]] = []
    for one, image in zip(made, images, strict=True):
        try:
            image.result()  # it is in the cache then
        except CompileError as e:
            yield one.variant, e.message.splitlines()[0]
            continue
        function = load(kernel, case.problem, one.config, source=one.text)
        with _ended_after(timeout_s, one.variant.name):
            outputs = fresh(inputs)
            function(case.problem, **outputs)
            torch.cuda.synchronize()
            found = compare(kernel, case, outputs, expected)
            if is_as_meant := found.ok or not one.variant.right:
                ready.append((one.variant, captured(calls_of(function, case, sets))))
        if not is_as_meant:
            yield one.variant, f"wrong: {found.message}"
    for (variant, _), timing in zip(ready, time_in_turn([graph for _, graph in ready]), strict=True):
        yield variant, timing


@contextmanager
def _ended_after(seconds: float, name: str) -> Iterator[None]:
    """The process ends where the block takes longer: what waits for a kernel that never ends cannot be interrupted."""
    click.echo(f"  {name}: checking", err=True)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)


def table(found: Sequence[tuple[Variant, Timing | str]]) -> list[str]:
    """A line each, the fastest first, beside the text as it is; behind them what has no time."""
    timed = sorted(((v, t) for v, t in found if isinstance(t, Timing)), key=lambda vt: vt[1].p50_us)
    base = next((t.p50_us for v, t in timed if v.name == AS_IT_IS), None)
    lines = []
    for variant, t in timed:
        beside = "" if base is None else f" {100 * (t.p50_us / base - 1):+6.2f} %"
        known = "" if variant.right else "  (wrong by intent)"
        lines.append(f"  {t.p50_us:10.3f} us{beside}  {t.p10_us:.3f}-{t.p90_us:.3f}  {variant.name}{known}")
    return lines + [f"  no time: {variant.name}: {why}" for variant, why in found if isinstance(why, str)]


@click.command()
@click.argument("name", metavar="KERNEL")
@click.argument("path", metavar="VARIANTS.toml", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--case", "wanted", default="", help="Only bench cases whose name contains this.")
@click.option("--problem", "problems", multiple=True, help="FIELD=VALUE,...: this in place of the bench cases.")
@click.option("--timeout", "timeout_s", type=click.FloatRange(0, min_open=True), default=60.0, show_default=True,
              help="Seconds to check one.")  # fmt: skip
@click.option("--jobs", type=click.IntRange(1), default=None, help="Compiler processes. Default: one a core.")
def main(name: str, path: Path, wanted: str, problems: tuple[str, ...], timeout_s: float, jobs: int | None) -> None:
    """Time the variants of KERNEL that the file has on this GPU. Exit code 1 if one has no time."""
    kernel, variants = find_kernel(name), read_variants(path)
    cases = cases_of(kernel, wanted, problems)
    target, failed = target_here(), 0
    planned = [(case, made_of(kernel, case.problem, target, variants)) for case in cases]
    with CachedCompiler(jobs or os.cpu_count() or 1) as compiler:
        images = [[compiler.submit(one.text, target.arch) for one in made] for _, made in planned]
        click.echo(f"{target.device}: reads {ceilings().read_gbps:.0f} GB/s")
        for (case, made), of_case in zip(planned, images, strict=True):
            click.echo(f"{kernel.name} {describe(case.problem)}")
            found = list(times_of(kernel, case, made, of_case, timeout_s))
            for line in table(found):
                click.echo(line)
            failed += sum(isinstance(what, str) for _, what in found)
    if failed:
        click.echo(f"{failed} variants are wrong or failed", err=True)
        raise click.exceptions.Exit(1)


if __name__ == "__main__":
    from kerngen.cli import run_command

    sys.exit(run_command(main, "python -m kerngen.tuning.variants"))
