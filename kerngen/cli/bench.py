"""`kerngen bench`: times against this GPU's own limits, measured in the same run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click


@click.group()
def bench() -> None:
    """Time kernels, or a model's decode step, against this GPU's measured limits."""


@bench.command()
@click.argument("names", nargs=-1)
@click.option("--case", "case_filter", default="", help="Only cases whose name contains this.")
@click.option("--db", "db_url", default=None, help="Tuning database whose winners to time. Default: the user's.")
@click.option("--untuned", is_flag=True, help="Time the default configurations.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def kernel(names: tuple[str, ...], case_filter: str, db_url: str | None, untuned: bool, as_json: bool) -> None:
    """Time kernels' bench cases, with their baselines. All kernels if none is named.

    Example: kerngen bench kernel attn_decode w4a16_gemm
    """
    from kerngen.errors import UsageError
    from kerngen.measure import bench_rows, ceilings
    from kerngen.runtime.launcher import Launcher
    from kerngen.templates import find_kernel, kernel_names
    from kerngen.tuning_db import Store, default_stores

    kernels = [find_kernel(n) for n in names or kernel_names()]
    stores = [] if untuned else [Store.open(db_url, read_only=True)] if db_url else list(default_stores())
    launcher = Launcher(stores)
    rows: list[dict[str, Any]] = []
    for k in kernels:
        cases = [c for c in k.bench.BENCH_CASES if case_filter in c.name]
        for case in cases:
            function = launcher.function(k, case.problem)
            rows += [r | {"source": function.source} for r in bench_rows(k, [case], {case.name: function.config})]
    if not rows:
        raise UsageError(f"no bench case contains {case_filter!r}")
    limit = ceilings()
    if as_json:
        click.echo(json.dumps({"environment": limit.environment, "read_gbps": limit.read_gbps,
                               "copy_gbps": limit.copy_gbps, "matmul_tflops": limit.matmul_tflops,
                               "rows": rows}))  # fmt: skip
        return
    _print_header(limit)
    click.echo(f"{'kernel':15} {'case':34} {'us':>9} {'p10-p90':>17} {'GB/s':>6} {'read%':>5} {'TF/s':>6} "
               f"{'mm%':>5}  baselines (us)")  # fmt: skip
    for r in rows:
        if "error" in r:
            click.echo(f"{r['kernel']:15} {r['case']:34} {r['error']}")
            continue
        base = "  ".join(
            f"{k[9:-3]} {v:.1f}" if isinstance(v, float) else f"{k[9:-3]} -"
            for k, v in r.items()
            if k.startswith("baseline_")
        )
        click.echo(f"{r['kernel']:15} {r['case']:34} {r['p50_us']:9.2f} {r['p10_us']:8.2f}-{r['p90_us']:8.2f} "
                   f"{r['gbps']:6.0f} {100 * r['share_read']:5.1f} {r['tflops']:6.1f} "
                   f"{100 * r['share_matmul']:5.1f}  {base}")  # fmt: skip


def _print_header(limit: Any) -> None:
    env = limit.environment
    click.echo(f"{env['gpu']}, driver {env['driver']}, torch {env['torch']}; measured limits of this run: read "
               f"{limit.read_gbps:.0f} GB/s, copy {limit.copy_gbps:.0f} GB/s, matmul {limit.matmul_tflops:.0f} TFLOP/s")  # fmt: skip
