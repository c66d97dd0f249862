"""Times the configurations of one body of a kernel on its bench cases: how a body that is new is tried on a GPU.

    python -m kerngen.tuning.sweep attn_prefill --body wgmma.cu.jinja --case d256 --most 24
    python -m kerngen.tuning.sweep w4a16_gemm --body wgmma_ws.cu.jinja --problem n=43008,k=5376,num_tokens=32
    python -m kerngen.tuning.sweep attn_decode --case window --config body=wgmma_ws,num_splits=8
    python -m kerngen.tuning.sweep --plan data/sweeps/h200/attn_decode-warpgroups.txt

For each case the default configuration first, then of the body's valid ones those that the cost model expects most of,
or those that are written out, of whichever body. What the board reads and multiplies at is told first.
Each is compared with the fp32 reference before it is timed, in a process of its own: one that is wrong, that faults or
that waits for ever (--timeout) is a line that says so, and the next goes on. Nothing is written to a database.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import groupby
from math import inf
from pathlib import Path
from typing import Any

import click

from kerngen.arch import Target
from kerngen.compiler.cache import CachedCompiler
from kerngen.compiler.compile import Cubin
from kerngen.compiler.render import render
from kerngen.errors import CompileError, KerngenError, UsageError
from kerngen.templates import find_kernel
from kerngen.templates.kernel import Body, Case, Kernel, describe, parse_over
from kerngen.timing.measure import Ceilings
from kerngen.tuning.plan import rank
from kerngen.tuning.space import valid_of
from kerngen.tuning.worker import GpuWorker, Observed


@dataclass(slots=True, eq=False)
class Planned:
    """A problem, its configurations as they are written out, and what is to be tried on it."""

    kernel: Kernel
    case: Case
    texts: list[str]
    configs: list[Any] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Tried:
    """A configuration of what was planned, when it was expected to end (us), and what came of it."""

    planned: Planned
    config: Any
    expected_us: float
    seen: Observed


def body_of(kernel: Kernel, template: str) -> Body:
    """Raises UsageError where there is none, or several."""
    found = [b for b in kernel.spec.BODIES if b.template == template]
    if len(found) != 1:
        known = ", ".join(dict.fromkeys(b.template for b in kernel.spec.BODIES))
        raise UsageError(f"{kernel.name} has {len(found)} bodies {template!r}", hint=f"--body takes one of: {known}")
    return found[0]


def cases_of(kernel: Kernel, wanted: str, problems: Sequence[str]) -> list[Case]:
    """The bench cases whose name contains `wanted`, or the problems that are written out. Raises UsageError."""
    if not (found := kernel.bench_cases(wanted, problems)):
        raise UsageError(f"no bench case of {kernel.name} contains {wanted!r}",
                         hint=f"there are: {', '.join(c.name for c in kernel.bench.BENCH_CASES)}")  # fmt: skip
    return found


def of_body(kernel: Kernel, body: Body, problem: Any, target: Target, most: int) -> list[Any]:
    """The body's configurations of which the cost model expects most, best first."""
    return [config for _, config in rank(kernel, problem, target, valid_of(kernel, body, problem, target))[:most]]


def written_out(kernel: Kernel, problem: Any, target: Target, texts: Sequence[str]) -> list[Any]:
    """FIELD=VALUE,... each, unnamed fields as the default's. Raises as parse_fields and require_valid do."""
    default = kernel.default_config(problem, target)
    configs = [parse_over(default, text) for text in texts]
    for config in configs:
        kernel.require_valid(problem, config, target)
    return configs


def read_plan(path: Path) -> list[Planned]:
    """What a plan holds: lines of `KERNEL PROBLEM`, and below each, indented, its configurations. # begins a comment.

    Raises UsageError, and as find_kernel and parse_fields do, with the line.
    """
    found: list[Planned] = []
    for number, whole in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        line = whole.partition("#")[0]
        if not (text := line.strip()):
            continue
        try:
            if line[0].isspace():
                if not found:
                    raise UsageError("a configuration stands before the first problem")
                found[-1].texts.append(text)
            else:
                name, _, problem = text.partition(" ")
                kernel = find_kernel(name)
                found += [Planned(kernel, case, []) for case in cases_of(kernel, "", [problem.strip()])]
        except KerngenError as e:
            raise UsageError(f"{path}, line {number}: {e.message}", hint=e.hint) from e
    if not found:
        raise UsageError(f"{path} plans nothing", hint="a line KERNEL PROBLEM, and below it, indented, configurations")
    return found


def sweep(planned: Sequence[Planned], target: Target, gpu: GpuWorker, compiler: CachedCompiler) -> Iterator[Tried]:
    """Of each problem the default, then its configurations, as each is done. All are compiled meanwhile."""
    wanted: list[tuple[Planned, float, Any, Future[Cubin]]] = []
    for p in planned:
        kernel, problem = p.kernel, p.case.problem
        for config in dict.fromkeys((kernel.default_config(problem, target), *p.configs)):
            us = rank(kernel, problem, target, [config])[0][0]
            made = compiler.submit(render(kernel, problem, config, target), target.arch)
            wanted.append((p, us, config, made))
    for p, us, config, made in wanted:
        try:
            image = made.result().image
        except CompileError as e:
            yield Tried(p, config, us, Observed("compile_failed", e.message))
            continue
        yield Tried(p, config, us, gpu.measure(p.kernel, p.case.problem, config, image))


def _line(limits: Ceilings, tried: Tried) -> str:
    cost, us = tried.planned.kernel.cost(tried.planned.case.problem), tried.seen.p50_us
    told = f"expected {tried.expected_us:9.1f} us  {describe(tried.config)}"
    if us is None:
        return f"  {tried.seen.in_a_line}  {told}"
    gbps, tflops = cost.bytes / us / 1e3, cost.flops / us / 1e6
    shares = (
        f"{gbps:6.0f} GB/s {gbps / limits.read_gbps:5.3f} {tflops:7.1f} TFLOP/s {tflops / limits.matmul_tflops:5.3f}"
    )
    return f"  {us:9.2f} us {shares}  {told}"


def _conclude(done: Sequence[Tried]) -> str | None:
    """The best of a problem beside its default, which is the first; None where either has no time."""
    best = min(done, key=lambda t: t.seen.p50_us or inf)
    if best.seen.p50_us is None or done[0].seen.p50_us is None:
        return None
    return f"  best: {best.seen.p50_us / done[0].seen.p50_us:.3f} of the default, {describe(best.config)}"


@click.command()
@click.argument("name", metavar="[KERNEL]", required=False)
@click.option("--body", "template", default=None, help="The template of the body to try.")
@click.option("--config", "configs", multiple=True, help="FIELD=VALUE,...: this in place of a body's; repeatable.")
@click.option(
    "--plan",
    "plans",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="What to try, in place of all that: see kerngen.tuning.sweep.read_plan.",
)
@click.option("--case", "wanted", default="", help="Only bench cases whose name contains this.")
@click.option("--problem", "problems", multiple=True, help="FIELD=VALUE,...: this in place of the bench cases.")
@click.option("--most", type=click.IntRange(1), default=24, show_default=True, help="Configurations a case.")
@click.option("--timeout", "timeout_s", type=click.FloatRange(0, min_open=True), default=20.0, show_default=True,
              help="Seconds a configuration.")  # fmt: skip
@click.option("--jobs", type=click.IntRange(1), default=None, help="Compiler processes. Default: one a core.")
def main(
    name: str | None,
    template: str | None,
    configs: tuple[str, ...],
    plans: tuple[Path, ...],
    wanted: str,
    problems: tuple[str, ...],
    most: int,
    timeout_s: float,
    jobs: int | None,
) -> None:
    """Time configurations of KERNEL on this GPU. Exit code 1 if one is wrong or fails."""
    if [template is not None, bool(configs), bool(plans)].count(True) != 1 or (name is None) != bool(plans):
        raise UsageError("what to try is not clear",
                         hint="name KERNEL with --body, or with each --config; or give a --plan alone")  # fmt: skip
    planned, body = [p for path in plans for p in read_plan(path)], None
    if name is not None:
        kernel = find_kernel(name)
        body = body_of(kernel, template) if template else None
        planned = [Planned(kernel, case, list(configs)) for case in cases_of(kernel, wanted, problems)]
    failed = 0
    with GpuWorker(timeout_s) as gpu, CachedCompiler(jobs or os.cpu_count() or 1) as compiler:
        target = Target.of(gpu.device())
        if body and not body.serves(target.arch):
            raise UsageError(f"{template} does not serve {target.arch}")
        for p in planned:
            problem = p.case.problem
            p.configs = (
                of_body(p.kernel, body, problem, target, most) if body
                else written_out(p.kernel, problem, target, p.texts)
            )  # fmt: skip
        limits = gpu.ceilings()
        click.echo(f"{target.device}: reads {limits.read_gbps:.0f} GB/s, multiplies {limits.matmul_tflops:.0f} TFLOP/s")
        for p, tried in groupby(sweep(planned, target, gpu, compiler), key=lambda t: t.planned):
            click.echo(f"{p.kernel.name} {describe(p.case.problem)}")
            done = []
            for t in tried:
                click.echo(_line(limits, t))
                done.append(t)
            failed += sum(t.seen.p50_us is None for t in done)
            if (best := _conclude(done)) is not None:
                click.echo(best)
    if failed:
        click.echo(f"{failed} configurations are wrong or failed", err=True)
        raise click.exceptions.Exit(1)


if __name__ == "__main__":
    from kerngen.cli import run_command

    sys.exit(run_command(main, "python -m kerngen.tuning.sweep"))
