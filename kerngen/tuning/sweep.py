"""Times the configurations of one body of a kernel on its bench cases: how a body that is new is tried on a GPU.

    python -m kerngen.tuning.sweep attn_prefill --body wgmma.cu.jinja --case d256 --most 24
    python -m kerngen.tuning.sweep w4a16_gemm --body warpgroups.cu.jinja --problem n=43008,k=5376,num_tokens=32
    python -m kerngen.tuning.sweep attn_decode --case window --config warpgroups=true,num_splits=8

For each case the default configuration first, then of the body's valid ones those that the cost model expects most of,
or those of --config, of whichever body. What the board reads and multiplies at comes first: a share is a share of that.
Each is compared with the fp32 reference before it is timed, in a process of its own: one that is wrong, that faults or
that waits for ever (--timeout) is a line that says so, and the next goes on. Nothing is written to a database.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from math import inf
from typing import Any

import click

from kerngen.arch import Target
from kerngen.cache import CachedCompiler
from kerngen.compile import Cubin
from kerngen.errors import CompileError, UsageError
from kerngen.render import render
from kerngen.templates import find_kernel
from kerngen.templates.kernel import Body, Case, Kernel, describe, parse_over
from kerngen.tuning.plan import rank
from kerngen.tuning.space import valid_of
from kerngen.tuning.worker import GpuWorker, Observed


@dataclass(frozen=True, slots=True)
class Tried:
    """A configuration, when it was expected to end (us), and what came of it."""

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


def sweep(
    kernel: Kernel, case: Case, configs: Sequence[Any], target: Target, gpu: GpuWorker, compiler: CachedCompiler
) -> Iterator[Tried]:
    """The default of `case`, then `configs`, as each is done."""
    problem = case.problem
    default = kernel.default_config(problem, target)
    wanted = [(rank(kernel, problem, target, [config])[0][0], config) for config in (default, *configs)]
    compiles: list[Future[Cubin]] = [
        compiler.submit(render(kernel, problem, config, target), target.arch) for _, config in wanted
    ]
    for (us, config), made in zip(wanted, compiles, strict=True):
        try:
            image = made.result().image
        except CompileError as e:
            yield Tried(config, us, Observed("compile_failed", e.message))
            continue
        yield Tried(config, us, gpu.measure(kernel, problem, config, image))


def _line(kernel: Kernel, case: Case, tried: Tried) -> str:
    cost, us = kernel.cost(case.problem), tried.seen.p50_us
    told = f"expected {tried.expected_us:9.1f} us  {describe(tried.config)}"
    if us is None:
        return f"  {tried.seen.outcome}: {tried.seen.reason.splitlines()[0] if tried.seen.reason else ''}  {told}"
    return f"  {us:9.1f} us {cost.flops / us / 1e6:7.1f} TFLOP/s {cost.bytes / us / 1e3:7.0f} GB/s  {told}"


@click.command()
@click.argument("name", metavar="KERNEL")
@click.option("--body", "template", default=None, help="The template of the body to try.")
@click.option(
    "--config",
    "configs",
    multiple=True,
    help="FIELD=VALUE,...: this, unnamed fields as the default's, in place of a body's; may be given several times.",
)
@click.option("--case", "wanted", default="", help="Only bench cases whose name contains this.")
@click.option("--problem", "problems", multiple=True, help="FIELD=VALUE,...: this in place of the bench cases.")
@click.option("--most", type=click.IntRange(1), default=24, show_default=True, help="Configurations a case.")
@click.option("--timeout", "timeout_s", type=float, default=20.0, show_default=True, help="Seconds a configuration.")
@click.option("--jobs", type=click.IntRange(1), default=None, help="Compiler processes. Default: one a core.")
def main(
    name: str,
    template: str | None,
    configs: tuple[str, ...],
    wanted: str,
    problems: tuple[str, ...],
    most: int,
    timeout_s: float,
    jobs: int | None,
) -> None:
    """Time configurations of KERNEL on this GPU. Exit code 1 if one is wrong or fails."""
    if (template is None) == (not configs):
        raise UsageError("what to try is not clear", hint="name either --body, or each configuration by --config")
    kernel = find_kernel(name)
    body, cases = template and body_of(kernel, template), cases_of(kernel, wanted, problems)
    failed = 0
    with GpuWorker(timeout_s) as gpu, CachedCompiler(jobs or os.cpu_count() or 1) as compiler:
        target = Target.of(gpu.device())
        if body and not body.serves(target.arch):
            raise UsageError(f"{template} does not serve {target.arch}")
        limits = gpu.ceilings()
        click.echo(f"{target.device}: reads {limits.read_gbps:.0f} GB/s, multiplies {limits.matmul_tflops:.0f} TFLOP/s")
        for case in cases:
            click.echo(f"{case.name} {describe(case.problem)}")
            done = []
            if body:
                chosen = of_body(kernel, body, case.problem, target, most)
            else:
                chosen = written_out(kernel, case.problem, target, configs)
            for tried in sweep(kernel, case, chosen, target, gpu, compiler):
                click.echo(_line(kernel, case, tried))
                done.append(tried)
            failed += sum(t.seen.p50_us is None for t in done)
            best = min(done, key=lambda t: t.seen.p50_us or inf)
            if best.seen.p50_us is not None and done[0].seen.p50_us is not None:
                share = best.seen.p50_us / done[0].seen.p50_us
                click.echo(f"  best: {share:.3f} of the default, {describe(best.config)}")
    if failed:
        click.echo(f"{failed} configurations are wrong or failed", err=True)
        raise click.exceptions.Exit(1)


if __name__ == "__main__":
    from kerngen.cli import run_command

    sys.exit(run_command(main, "python -m kerngen.tuning.sweep"))
